"""Keys and values of the tokens so far, and what the tokens of a pass see of them.

Layers that see everything and layers with a window are kept apart. Each part has one buffer a layer, which doubles until it holds twice
what a token can see; from then on it slides: when it is full, what can still be seen moves to its front. So nothing is allocated for a
token, what is seen is always one stretch of memory, and text may go on for ever: a token sees the last `context` tokens at most.

Shapes: B rows, T tokens of a pass, C tokens that they see, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.model import ModelConfig
from depthroute.model.attention import Seen, Sight, band
from depthroute.model.rotary import Rotary, Rotation

SMALLEST = 64  # tokens of a first buffer


class KeyValueCache:
    """The `Store` of a batch of texts. Rows of different length begin with padding, which no other token sees."""

    def __init__(self, config: ModelConfig, rows: int, like: Tensor, *, room: int = SMALLEST) -> None:
        """Of `rows` texts, with the dtype and device of `like` (a weight). `room`: tokens that will come at least."""
        windowed = [config.has_window(layer) for layer in range(config.layers)]
        self._part_of = ["windowed" if has_window else "full" for has_window in windowed]
        self._parts: dict[str, _Part] = {}
        for name, span in (("full", config.context), ("windowed", min(config.attention_window or config.context, config.context))):
            layers = [layer for layer, part in enumerate(self._part_of) if part == name]
            if layers:
                shape = (rows, config.resolved_key_value_heads, config.resolved_head_width)
                self._parts[name] = _Part(layers, span, shape, like, room)
        self.rows, self._device = rows, like.device
        self.tokens = 0  # in every row, padding counted
        self._padding: Tensor | None = None  # int64 [B], where rows have different lengths

    def sight(self, rotary: Rotary, tokens: int, padding: Sequence[int] | None = None) -> Sight:
        """Make room for `tokens` more a row; where they stand and what they see. `padding`: of a first pass, how much each row begins with.

        A pass of more tokens than one can see does not fit: text is read in chunks.
        """
        if padding is not None and any(padding):
            self._padding = torch.tensor(padding, device=self._device)
        rotation = self._enter(rotary, tokens)
        seen = {name: part.seen(tokens, self.tokens, self._padding) for name, part in self._parts.items()}
        one = next(iter(seen.values()))
        return Sight(rotation, seen.get("full", one), seen.get("windowed", one), self)

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
        the newest; and int64 [B], the first slot that is no padding, or None. All stay where they are until `moved`."""
        part = self._parts[self._part_of[layer]]
        number = part.at[layer]
        return part.keys[number], part.values[number], part.slots, part.first

    @property
    def capacity(self) -> int:
        """Tokens of the largest buffer."""
        return max(part.keys[0].shape[2] for part in self._parts.values())

    @property
    def moved(self) -> int:
        """How often buffers were replaced by others."""
        return sum(part.moved for part in self._parts.values())

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As `Store.append`, with the room that `sight` made."""
        return self._parts[self._part_of[layer]].append(layer, key, value)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        self.rows = len(rows)
        for part in self._parts.values():
            part.keep(rows)
        if self._padding is not None:
            self._padding = self._padding[list(rows)]

    def _enter(self, rotary: Rotary, tokens: int) -> Rotation:
        start, self.tokens = self.tokens, self.tokens + tokens
        for part in self._parts.values():
            part.enter(tokens, self.tokens, self._padding)
        if self._padding is None:
            same: Rotation = rotary(start, self.tokens)
            return same
        positions = torch.arange(start, self.tokens, device=self._device) - self._padding[:, None]
        return rotary.at(positions.clamp_min(0))

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        return sum(part.bytes for part in self._parts.values())


class _Part:
    """The buffers of layers that see `span` tokens."""

    def __init__(self, layers: Sequence[int], span: int, shape: tuple[int, int, int], like: Tensor, room: int) -> None:
        rows, heads, width = shape
        self.at = {layer: number for number, layer in enumerate(layers)}
        self._span = span
        capacity = min(max(room, SMALLEST), 2 * span)
        self.keys, self.values = ([like.new_empty(rows, heads, capacity, width) for _ in layers] for _ in range(2))
        self.slots = torch.zeros(2, dtype=torch.int64)
        self.first: Tensor | None = None
        self.moved = 0
        self._slots = self.slots.numpy()  # to write one number is cheaper there
        self._length = self._new = 0

    def enter(self, tokens: int, total: int, padding: Tensor | None) -> None:
        """Make room for `tokens`, the last of `total`."""
        self.make_room(tokens)
        self._length += tokens
        self._new = tokens
        self._from = max(0, self._length - (self._span - 1 + tokens))
        self._slots[:] = self._from, self._length - 1
        if padding is not None:
            slots = padding - (total - self._length)
            self.first = slots if self.first is None else self.first.copy_(slots)

    def seen(self, tokens: int, total: int, padding: Tensor | None) -> Seen:
        """What the tokens that have entered see."""
        seen = self._length - self._from
        first = total - seen  # of the tokens that are seen, counted with padding
        padded = padding is not None and bool((padding > first).any())
        if tokens == 1 and not padded:
            return Seen(None, causal=False)
        if tokens == seen <= self._span and not padded:
            return Seen(None, causal=True)
        device = self.keys[0].device
        allowed = band(tokens, seen, self._span if seen > self._span else None, device)
        if padded:
            assert padding is not None
            real = torch.arange(first, total, device=device) >= padding[:, None]
            itself = band(tokens, seen, 1, device)  # padding sees itself alone: attention to nothing is not a number
            allowed = (allowed & real[:, None, None, :]) | itself
        return Seen(allowed, causal=False)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        number, end = self.at[layer], self._length
        keys, values = self.keys[number], self.values[number]
        keys[:, :, end - self._new : end] = key
        values[:, :, end - self._new : end] = value
        return keys[:, :, self._from : end], values[:, :, self._from : end]

    def keep(self, rows: Sequence[int]) -> None:
        chosen = list(rows)
        self.keys, self.values = ([buffer[chosen] for buffer in buffers] for buffers in (self.keys, self.values))
        self.first = None if self.first is None else self.first[chosen]
        self.moved += 1

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in (*self.keys, *self.values))

    def make_room(self, tokens: int) -> None:
        capacity = self.keys[0].shape[2]
        if self._length + tokens <= capacity:
            return
        kept = min(self._length, self._span - 1)  # what the first of the new tokens sees beside itself
        largest = max(2 * self._span, kept + tokens)
        grown = min(largest, max(2 * capacity, self._length + tokens))
        start = self._length - kept if self._length + tokens > grown else 0
        kept = self._length - start
        for buffers in (self.keys, self.values):
            for number, buffer in enumerate(buffers):
                old = buffer[:, :, start : self._length]
                target = buffer if grown <= capacity else buffer.new_empty(*buffer.shape[:2], grown, buffer.shape[3])
                target[:, :, :kept] = old.clone() if target is buffer else old
                buffers[number] = target
        self.moved += grown > capacity
        self._length = kept
