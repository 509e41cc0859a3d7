"""The sub-layers of the decoder, with no knowledge of how they are connected.

A sub-layer takes inputs that have passed the norm before it: the residual method applies it as it reads.

Shapes: B batch, T tokens, D width, H heads, K key-value heads, E head width, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.model.config import ModelConfig
from depthroute.residual import Inputs, Kept, Projected, RMSNorm, RoleInputs

Values = Callable[[Projected], tuple[Tensor, Kept]]  # `Residual.values` at a site


class SubLayerOutput(NamedTuple):
    output: Tensor  # [B, T, D]
    activation: Tensor  # what the output projection was fed: [B, T, H*E] or [B, T, F]
    kept: Kept = None  # what the hook on the values asked to keep


class Projection(nn.Linear):
    """A bias-free linear map, initially Gaussian with the model's standard deviation."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, self.std)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.normal_(0.0, self.std, generator=generator)


class TokenEmbedding(nn.Embedding):
    """[B, T] token ids to [B, T, D]."""

    def __init__(self, vocabulary: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, self.std)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.normal_(0.0, self.std, generator=generator)


class Rotary(nn.Module):
    """Rotary position embedding on the two halves of a head (RoFormer, Eq. 34; the pairing of Llama).

    The tables are computed in float64 and stored in float32; casting the model casts them too. They are no parameters and not saved.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, context: int, base: float) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)  # [context, E/2]
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate [B, H, T, E] by positions 0..T-1, in at least float32."""
        tokens = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal softmax attention, bias-free, with optional grouped queries and QK-norm.

    Query, key and value may be projected from different inputs. A residual method may replace the values that were projected, or do without
    the projection.
    """

    def __init__(self, config: ModelConfig, own_values: bool = True) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.head_width = config.heads, config.resolved_key_value_heads, config.resolved_head_width
        inner, key_value = self.heads * self.head_width, self.key_value_heads * self.head_width
        self.query = Projection(config.width, inner, config.initial_std("query"))
        self.key = Projection(config.width, key_value, config.initial_std("key"))
        self.value = Projection(config.width, key_value, config.initial_std("value")) if own_values else None
        self.output = Projection(inner, config.width, config.initial_std("output"))
        hybrid = config.norms == "hybrid"
        by_head = config.qk_norm or hybrid
        self.query_norm = RMSNorm(self.head_width, eps=config.norm_eps) if by_head else None
        self.key_norm = RMSNorm(self.head_width, eps=config.norm_eps) if by_head else None
        self.value_norm = RMSNorm(self.head_width, eps=config.norm_eps) if hybrid and own_values else None

    def forward(self, inputs: Inputs, rotary: Rotary, values: Values | None = None) -> SubLayerOutput:
        roles = inputs if isinstance(inputs, RoleInputs) else RoleInputs(inputs, inputs, inputs)
        query = self._heads(self.query(roles.query), self.heads)
        key = self._heads(self.key(roles.key), self.key_value_heads)
        value = None if self.value is None else self._heads(self.value(roles.value), self.key_value_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.value_norm is not None and value is not None:
            value = self.value_norm(value)
        query, key = rotary(query), rotary(key)
        kept: Kept = None
        if values is not None:
            value, kept = values(Projected(query, key, value))
        assert value is not None
        grouped = self.key_value_heads != self.heads
        mixed = F.scaled_dot_product_attention(query, key, value.to(query.dtype), is_causal=True, enable_gqa=grouped)
        activation = mixed.transpose(1, 2).flatten(2)
        return SubLayerOutput(self.output(activation), activation, kept)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x), bias-free (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Projection(config.width, config.mlp_width, config.initial_std("gate"))
        self.up = Projection(config.width, config.mlp_width, config.initial_std("up"))
        self.down = Projection(config.mlp_width, config.width, config.initial_std("down"))

    def forward(self, inputs: Tensor) -> SubLayerOutput:
        activation = F.silu(self.gate(inputs)) * self.up(inputs)
        return SubLayerOutput(self.down(activation), activation)


class Layer(nn.Module):
    """One attention and one MLP sub-layer, each with the norms before and behind it that the model has.

    The norms are beside the sub-layers, not in them: they run where the residual method reads, so what gathers or recomputes a sub-layer by
    itself must not own them.
    """

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        adaptation = config.residual.adaptation(config.body)
        before = adaptation.input_norms and config.norms != "post"
        behind = config.norms in ("post", "sandwich")

        def norm(there: bool) -> RMSNorm | None:
            return RMSNorm(config.width, eps=config.norm_eps) if there else None

        self.attention_norm = norm(before and config.norms != "hybrid")
        self.attention = Attention(config, adaptation.value_layers is None or number < adaptation.value_layers)
        self.attention_output_norm = norm(behind)
        self.mlp_norm = norm(before)
        self.mlp = MLP(config)
        self.mlp_output_norm = norm(behind)
