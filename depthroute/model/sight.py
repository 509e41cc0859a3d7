"""What the tokens of a pass see of others, and the one function by which they attend to them.

Shapes: B batch, T tokens of a pass, C tokens that they can see, H heads, K key-value heads, E head width, N documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from depthroute.model.rotary import Rotary, Rotation

Masking = Literal["sdpa", "flex", "varlen"]


class Store(Protocol):
    """What keeps for later passes what their tokens see of earlier ones."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of this pass [B, K, T, E], and return all that a layer may see [B, K, C, E], the oldest first."""

    def state(self, layer: int) -> tuple[Tensor, ...] | None:
        """What the passes before have left for a layer whose state does not grow; None in the first."""

    def carry(self, layer: int, state: tuple[Tensor, ...]) -> None:
        """Keep such a state for the next pass, in place of the one before."""


class Seen(NamedTuple):
    """Which tokens those of a pass attend to, in the form that an implementation takes.

    `allowed`: bool [B or 1, 1, T, C]; None is all of them, or with `causal` itself and those before. `blocks` and `lengths` stand for
    documents in the same sequence on CUDA: FlexAttention's mask, or where the documents begin in all B T tokens, int32 [N + 1].
    """

    allowed: Tensor | None
    causal: bool
    blocks: BlockMask | None = None
    lengths: Tensor | None = None


class Sight(NamedTuple):
    """Where the tokens of a pass stand, and what they see: in layers that see everything before, and in those with a window.

    `begins`: bool [B, T], the tokens with which a document begins, so that a state is empty before them. None: none, or with an empty store
    the first alone.
    """

    rotation: Rotation
    full: Seen
    windowed: Seen
    store: Store | None = None
    begins: Tensor | None = None


def whole_sequence(rotation: Rotation, tokens: int, window: int | None) -> Sight:
    """Of sequences that begin with this pass and have no padding, each one document."""
    full = Seen(None, causal=True)
    if window is None or tokens <= window:
        return Sight(rotation, full, full)
    return Sight(rotation, full, Seen(band(tokens, tokens, window, rotation.cos.device), causal=False))


def packed_documents(rotary: Rotary, begins: Tensor, window: int | None, masking: Masking | None = None) -> Sight:
    """Of sequences that begin with this pass and hold documents one behind the other: each sees itself alone, and counts from 0.

    `begins`: bool [B, T], of tokens that are the first of a document; the first of a sequence always is. `masking`: the implementation of
    attention; None is "sdpa" on a CPU, where the others have no backward pass, and on a GPU "varlen", or "flex" for what that cannot do
    (a window, float32, or a graph of one shape).
    """
    place = torch.arange(begins.shape[1], device=begins.device)
    begins = begins | (place == 0)
    first = torch.where(begins, place, 0).cummax(1).values  # of the document of every token
    rotation = rotary.at(place - first, begins.shape[1])
    if masking is None:
        half = torch.is_autocast_enabled(begins.device.type) or rotary.cos.dtype in (torch.float16, torch.bfloat16)
        fits = half and window is None and not torch.compiler.is_compiling()  # how many documents there are is no shape
        masking = "sdpa" if begins.device.type == "cpu" else "varlen" if fits else "flex"
    full = _documents(begins, first, None, masking)
    windowed = full if window is None or window >= begins.shape[1] else _documents(begins, first, window, masking)
    return Sight(rotation, full, windowed, begins=begins)


def band(tokens: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """bool [1, 1, T, C] of T tokens that are the last of C: each sees itself and those before, `window` of them in all."""
    ahead = torch.arange(seen, device=device) - torch.arange(seen - tokens, seen, device=device)[:, None]
    allowed = ahead <= 0
    return (allowed if window is None else allowed & (ahead > -window))[None, None]


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Tensor:
    """softmax(query key' / sqrt(E)) value over what is seen: [B, H, T, E], from [B, H, T, E] and [B, K, C, E] twice.

    Values may have another width than queries and keys; H is a multiple of K.
    """
    grouped = key.shape[1] != query.shape[1]
    if seen.lengths is not None:
        return _attend_packed(query, key, value, seen.lengths, grouped)
    if seen.blocks is not None:
        # by itself it holds all scores; only compiled does it leave out what is not seen
        plain = query.device.type == "cpu" or torch.compiler.is_compiling()
        query, key, value = _as_autocast(query, key, value)
        attention: Any = flex_attention if plain else _compiled_flex()
        mixed = attention(query, key, value, block_mask=seen.blocks, enable_gqa=grouped)
        assert isinstance(mixed, Tensor)
        return mixed
    own, width = value.shape[-1], query.shape[-1]
    pads = own < width and query.shape[2] > 1 and query.device.type == "cpu"  # else the CPU's attention holds all scores, [B, H, T, C]
    mixed = F.scaled_dot_product_attention(
        query, key, F.pad(value, (0, width - own)) if pads else value, seen.allowed, is_causal=seen.causal, enable_gqa=grouped
    )
    return mixed[..., :own] if pads else mixed


def _documents(begins: Tensor, first: Tensor, window: int | None, masking: Masking) -> Seen:
    """`first`: int64 [B, T], the place of the first token of every token's document."""
    rows, tokens = begins.shape
    if masking == "sdpa":
        allowed = band(tokens, tokens, window, begins.device) & (first[:, None, :, None] == first[:, None, None, :])
        return Seen(allowed, causal=False)
    if masking == "flex":
        span = tokens if window is None else window

        def visible(row: Tensor, head: Tensor, to: Tensor, of: Tensor) -> Tensor:
            return (of <= to) & (to - of < span) & (first[row, of] == first[row, to])

        return Seen(None, False, blocks=create_block_mask(visible, rows, None, tokens, tokens, device=begins.device))
    if window is not None:
        raise ValueError("variable lengths have no window here")
    ends = torch.tensor([rows * tokens], dtype=torch.int32, device=begins.device)
    return Seen(None, False, lengths=torch.cat((begins.flatten().nonzero()[:, 0].int(), ends)))


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _as_autocast(*given: Tensor) -> list[Tensor]:
    """In the dtype of autocast, which neither of the two casts to by itself, as `scaled_dot_product_attention` does."""
    kind = given[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given[0].dtype
    return [x.to(dtype) for x in given]


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, grouped: bool) -> Tensor:
    """All rows as one run of documents."""
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, tokens, width = query.shape
    own = value.shape[-1]
    if grouped:
        key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
    if own < width:  # the kernel takes one width
        value = F.pad(value, (0, width - own))
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in _as_autocast(query, key, value))
    mixed = varlen_attn(query, key, value, lengths, lengths, tokens, tokens, window_size=(-1, 0))
    assert isinstance(mixed, Tensor)
    return mixed.view(rows, tokens, heads, -1).transpose(1, 2)[..., :own]
