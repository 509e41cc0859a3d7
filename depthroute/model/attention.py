"""Causal softmax attention over tokens.

Shapes: B batch, T tokens of a pass, C tokens that they can see, D width, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from torch import Tensor, nn

from depthroute.model.config import ModelConfig
from depthroute.model.linear import Projection, project
from depthroute.model.sight import Sight, attend
from depthroute.model.sublayer import SubLayerOutput, Values, by_head, by_role, one_input
from depthroute.residual import Inputs, Kept, Projected, RMSNorm, RoleInputs


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
        normed = config.qk_norm or hybrid
        self.query_norm = RMSNorm(self.head_width, eps=config.norm_eps) if normed else None
        self.key_norm = RMSNorm(self.head_width, eps=config.norm_eps) if normed else None
        self.value_norm = RMSNorm(self.head_width, eps=config.norm_eps) if hybrid and own_values else None

    def forward(self, inputs: Inputs, sight: Sight, values: Values | None = None) -> SubLayerOutput:
        query, key, value = self._projected(by_role(inputs))
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
        mixed = attend(query, key, value, sight.windowed if self.windowed else sight.full)
        activation = mixed.transpose(1, 2).flatten(2)
        return SubLayerOutput(self.output(activation), activation, kept)

    def _projected(self, roles: RoleInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """[B, H, T, E], and [B, K, T, E] twice; neighbours that share an input are projected together."""
        projections: tuple[Projection | None, ...] = (self.query, self.key, self.value)
        found: list[Tensor] = []
        for together in one_input(roles):
            found += project([projection for projection in projections[together] if projection is not None], roles[together.start])
        query, key, *value = [by_head(one, self.head_width) for one in found]
        return query, key, value[0] if value else None
