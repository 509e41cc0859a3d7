"""Causal softmax attention over tokens, and what the tokens of a pass see.

Shapes: B batch, T tokens of a pass, C tokens that they can see, D width, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.model.config import ModelConfig
from depthroute.model.linear import Projection, project
from depthroute.model.rotary import Rotation
from depthroute.residual import Inputs, Kept, Projected, RMSNorm, RoleInputs

Values = Callable[[Projected], tuple[Tensor, Kept]]  # `Residual.values` at a site


class Store(Protocol):
    """What keeps the keys and values of earlier passes."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of this pass [B, K, T, E], and return all that a layer may see [B, K, C, E], the oldest first."""


class Seen(NamedTuple):
    """Which tokens those of a pass attend to. `allowed`: bool [B or 1, 1, T, C]; None is all of them, or with `causal` itself and those
    before."""

    allowed: Tensor | None
    causal: bool


class Sight(NamedTuple):
    """Where the tokens of a pass stand, and what they see: in layers that see everything before, and in those with a window."""

    rotation: Rotation
    full: Seen
    windowed: Seen
    store: Store | None = None


def whole_sequence(rotation: Rotation, tokens: int, window: int | None) -> Sight:
    """Of sequences that begin with this pass and have no padding."""
    full = Seen(None, causal=True)
    if window is None or tokens <= window:
        return Sight(rotation, full, full)
    return Sight(rotation, full, Seen(band(tokens, tokens, window, rotation.cos.device), causal=False))


def band(tokens: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """bool [1, 1, T, C] of T tokens that are the last of C: each sees itself and those before, `window` of them in all."""
    ahead = torch.arange(seen, device=device) - torch.arange(seen - tokens, seen, device=device)[:, None]
    allowed = ahead <= 0
    return (allowed if window is None else allowed & (ahead > -window))[None, None]


def one_input(roles: Sequence[Tensor]) -> list[slice]:
    """Runs of neighbouring roles that read the same object."""
    begins = [role for role in range(len(roles)) if role == 0 or roles[role] is not roles[role - 1]]
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(roles)], strict=True)]


class SubLayerOutput(NamedTuple):
    output: Tensor  # [B, T, D]
    activation: Tensor  # what the output projection was fed: [B, T, H*E], or an MLP's [B, T, F]
    kept: Kept = None  # what the hook on the values asked to keep


class Attention(nn.Module):
    """Causal softmax attention with optional grouped queries, QK-norm, biases and a window.

    Query, key and value may be projected from different inputs. A residual method may replace the values that were projected, or do without
    the projection.
    """

    def __init__(self, config: ModelConfig, number: int = 0, own_values: bool = True) -> None:
        """`number`: the layer's, from 0. `own_values`: whether it projects values."""
        super().__init__()
        self.number, self.windowed = number, config.has_window(number)
        self.heads, self.key_value_heads, self.head_width = config.heads, config.resolved_key_value_heads, config.resolved_head_width
        inner, key_value = self.heads * self.head_width, self.key_value_heads * self.head_width

        def projection(name: str, inputs: int, outputs: int) -> Projection:
            return Projection(inputs, outputs, config.initial_std(name), name in config.biases)

        self.query = projection("query", config.width, inner)
        self.key = projection("key", config.width, key_value)
        self.value = projection("value", config.width, key_value) if own_values else None
        self.output = projection("output", inner, config.width)
        hybrid = config.norms == "hybrid"
        by_head = config.qk_norm or hybrid
        self.query_norm = RMSNorm(self.head_width, eps=config.norm_eps) if by_head else None
        self.key_norm = RMSNorm(self.head_width, eps=config.norm_eps) if by_head else None
        self.value_norm = RMSNorm(self.head_width, eps=config.norm_eps) if hybrid and own_values else None

    def forward(self, inputs: Inputs, sight: Sight, values: Values | None = None) -> SubLayerOutput:
        roles = inputs if isinstance(inputs, RoleInputs) else RoleInputs(inputs, inputs, inputs)
        query, key, value = self._projected(roles)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.value_norm is not None and value is not None:
            value = self.value_norm(value)
        query, key = sight.rotation(query), sight.rotation(key)
        kept: Kept = None
        if values is not None:
            value, kept = values(Projected(query, key, value))
        assert value is not None
        value = value.to(query.dtype)
        if sight.store is not None:
            key, value = sight.store.append(self.number, key, value)
        seen = sight.windowed if self.windowed else sight.full
        grouped = key.shape[1] != query.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, seen.allowed, is_causal=seen.causal, enable_gqa=grouped)
        activation = mixed.transpose(1, 2).flatten(2)
        return SubLayerOutput(self.output(activation), activation, kept)

    def _projected(self, roles: RoleInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """[B, H, T, E], and [B, K, T, E] twice; neighbours that share an input are projected together."""
        projections: tuple[Projection | None, ...] = (self.query, self.key, self.value)
        found: list[Tensor] = []
        for together in one_input(roles):
            found += project([projection for projection in projections[together] if projection is not None], roles[together.start])
        query, key, *value = [self._heads(one) for one in found]
        return query, key, value[0] if value else None

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H*E] to [B, H, T, E], of as many heads as are there: a process may have a part of them."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)
