"""What the tokens so far leave for later ones: keys and values, latent vectors, and states that do not grow.

Layers that see everything and layers with a window are kept apart. Each part has two buffers a layer, which double until they hold twice
what a token can see; from then on they slide: when they are full, what can still be seen moves to their front. So nothing is allocated for
a token, what is seen is always one stretch of memory, and text may go on for ever: a token sees the last `context` tokens at most. States
just go on.

What a row has left behind, its padding or the documents before the one that it is in, is hidden from its tokens: they are counted from the
first one that is seen.

Shapes: B rows, T tokens of a pass, C tokens that they see, K key-value heads, E key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.model import ModelConfig
from depthroute.model.rotary import Rotary, Rotation
from depthroute.model.sight import Seen, Sight, band

SMALLEST = 64  # tokens of a first buffer


class TextCache:
    """The `Store` of a batch of texts. Rows of different length begin with padding, which no other token sees."""

    def __init__(self, config: ModelConfig, rows: int, like: Tensor, *, room: int = SMALLEST) -> None:
        """Of `rows` texts, with the dtype and device of `like` (a weight). `room`: tokens that will come at least."""
        growing = [layer for layer in range(config.layers) if config.mixer(layer) != "kda"]
        self._part_of = {layer: "windowed" if config.has_window(layer) else "full" for layer in growing}
        spans = {"full": config.context, "windowed": min(config.attention_window or config.context, config.context)}
        self._parts = {name: _Part(span, like, room) for name, span in spans.items() if name in self._part_of.values()}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self.rows, self._device = rows, like.device
        self.tokens = 0  # in every row, hidden ones counted
        self._hidden: Tensor | None = None  # int64 [B], tokens of each row that its next ones do not see; None where there are none
        self._last_begin = 0  # the largest of them

    def sight(self, rotary: Rotary, tokens: int, padding: Sequence[int] | None = None) -> Sight:
        """Make room for `tokens` more a row; where they stand and what they see. `padding`: of a first pass, how much each row begins with.

        A pass of more tokens than one can see does not fit: text is read in chunks.
        """
        if padding is not None and any(padding):
            self._hidden, self._last_begin = torch.tensor(padding, device=self._device), max(padding)
        start = self.tokens
        rotation = self._enter(rotary, tokens)
        seen = {name: part.seen(tokens, self.tokens, self._hidden) for name, part in self._parts.items()}
        one = next(iter(seen.values()), Seen(None, causal=True))
        begins = None
        if self._hidden is not None and start <= self._last_begin:
            begins = torch.arange(start, self.tokens, device=self._device) == self._hidden[:, None]
        return Sight(rotation, seen.get("full", one), seen.get("windowed", one), self, begins)

    def hide(self, rows: Tensor) -> None:
        """Let some rows, bool [B], begin anew with their next token: it sees nothing of what is there, and is at position 0."""
        if self._hidden is None:
            self._hidden = torch.zeros(self.rows, dtype=torch.int64, device=self._device)
        self._hidden = torch.where(rows, self.tokens, self._hidden)
        self._last_begin = self.tokens
        for part in self._parts.values():
            part.hide(self._hidden)

    def advance(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Go on by one token a row, whose keys and values come by `place`; its cosines and sines, [1, E/2], or [B, E/2] by row."""
        rotation = self._enter(rotary, 1)
        return rotation.cos.reshape(-1, rotation.cos.shape[-1]), rotation.sin.reshape(-1, rotation.sin.shape[-1])

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more a row."""
        for part in self._parts.values():
            part.make_room(tokens)

    def place(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Where a layer's keys and values are: two buffers [B, K, capacity, E]; int64 [2], the slots of the first token that is seen and of
        the newest; and int64 [B], the first slot that is not hidden, or None. All stay where they are until `moved`."""
        part = self._parts[self._part_of[layer]]
        keys, values = part.buffers[layer]
        return keys, values, part.slots, part.first

    @property
    def capacity(self) -> int:
        """Tokens of the largest buffers."""
        return max(part.capacity for part in self._parts.values())

    @property
    def moved(self) -> int:
        """How often buffers were replaced by others."""
        return sum(part.moved for part in self._parts.values())

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As `Store.append`, with the room that `sight` made."""
        return self._parts[self._part_of[layer]].append(layer, key, value)

    def state(self, layer: int) -> tuple[Tensor, ...] | None:
        """As `Store.state`. It is valid until the pass after."""
        return self._states.get(layer)

    def carry(self, layer: int, state: tuple[Tensor, ...]) -> None:
        """As `Store.carry`: a state has one place, since what a layer hands over may be a view of much more."""
        kept = self._states.get(layer)
        if kept is None:
            self._states[layer] = tuple(part.clone() for part in state)
            return
        for place, part in zip(kept, state, strict=True):
            place.copy_(part)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        self.rows = len(rows)
        for part in self._parts.values():
            part.keep(rows)
        self._states = {layer: tuple(part[list(rows)] for part in state) for layer, state in self._states.items()}
        if self._hidden is not None:
            self._hidden = self._hidden[list(rows)]

    def _enter(self, rotary: Rotary, tokens: int) -> Rotation:
        start, self.tokens = self.tokens, self.tokens + tokens
        for part in self._parts.values():
            part.enter(tokens, self.tokens, self._hidden)
        if self._hidden is None:
            same: Rotation = rotary(start, self.tokens)
            return same
        positions = torch.arange(start, self.tokens, device=self._device) - self._hidden[:, None]
        return rotary.at(positions.clamp_min(0))

    @property
    def bytes(self) -> int:
        """What the buffers and states take."""
        states = (part for state in self._states.values() for part in state)
        return sum(part.bytes for part in self._parts.values()) + sum(part.numel() * part.element_size() for part in states)


class _Part:
    """The buffers of layers that see `span` tokens, two a layer, made when its first tokens come: a layer's own heads and widths."""

    def __init__(self, span: int, like: Tensor, room: int) -> None:
        self._span, self._like = span, like
        self.capacity = min(max(room, SMALLEST), 2 * span)
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: [B, K, capacity, E] and [B, K, capacity, V]
        self.slots = torch.zeros(2, dtype=torch.int64)
        self.first: Tensor | None = None
        self.moved = 0
        self._slots = self.slots.numpy()  # to write one number is cheaper there
        self._length = self._new = 0

    def enter(self, tokens: int, total: int, hidden: Tensor | None) -> None:
        """Make room for `tokens`, the last of `total`."""
        self.make_room(tokens)
        self._length += tokens
        self._new = tokens
        self._from = max(0, self._length - (self._span - 1 + tokens))
        self._slots[:] = self._from, self._length - 1
        if hidden is not None:
            self.hide(hidden)
            assert self.first is not None
            self.first.copy_(hidden - (total - self._length))

    def hide(self, hidden: Tensor) -> None:
        """Have a first slot by row from now on, which `enter` sets."""
        if self.first is None:
            self.first = torch.zeros_like(hidden)
            self.moved += 1

    def seen(self, tokens: int, total: int, hidden: Tensor | None) -> Seen:
        """What the tokens that have entered see."""
        seen = self._length - self._from
        first = total - seen  # of the tokens that are seen, counted with hidden ones
        partly = hidden is not None and bool((hidden > first).any())
        if tokens == 1 and not partly:
            return Seen(None, causal=False)
        if tokens == seen <= self._span and not partly:
            return Seen(None, causal=True)
        device = self._like.device
        allowed = band(tokens, seen, self._span if seen > self._span else None, device)
        if partly:
            assert hidden is not None
            there = torch.arange(first, total, device=device) >= hidden[:, None]
            itself = band(tokens, seen, 1, device)  # padding sees itself alone: attention to nothing is not a number
            allowed = (allowed & there[:, None, None, :]) | itself
        return Seen(allowed, causal=False)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.buffers:
            self.buffers[layer] = self._made(key), self._made(value)
        end = self._length
        keys, values = self.buffers[layer]
        keys[:, :, end - self._new : end] = key
        values[:, :, end - self._new : end] = value
        return keys[:, :, self._from : end], values[:, :, self._from : end]

    def keep(self, rows: Sequence[int]) -> None:
        chosen = list(rows)
        self.buffers = {layer: (keys[chosen], values[chosen]) for layer, (keys, values) in self.buffers.items()}
        self.first = None if self.first is None else self.first[chosen]
        self.moved += 1

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for pair in self.buffers.values() for buffer in pair)

    def make_room(self, tokens: int) -> None:
        if self._length + tokens <= self.capacity:
            return
        kept = min(self._length, self._span - 1)  # what the first of the new tokens sees beside itself
        largest = max(2 * self._span, kept + tokens)
        grown = min(largest, max(2 * self.capacity, self._length + tokens))
        start = self._length - kept if self._length + tokens > grown else 0
        kept = self._length - start
        moves, self.capacity = grown > self.capacity, max(grown, self.capacity)
        for layer, pair in self.buffers.items():
            old = [buffer[:, :, start : self._length] for buffer in pair]
            new = (self._made(pair[0]), self._made(pair[1])) if moves else pair
            for target, part in zip(new, old, strict=True):
                target[:, :, :kept] = part if moves else part.clone()
            self.buffers[layer] = new
        self.moved += moves
        self._length = kept

    def _made(self, x: Tensor) -> Tensor:
        """An empty buffer for what has the rows, heads and width of `x` [B, K, ..., E]."""
        return self._like.new_empty(*x.shape[:2], self.capacity, x.shape[3])
