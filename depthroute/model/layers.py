"""The sub-layers of the decoder, with no knowledge of how they are connected.

A sub-layer takes inputs that have passed the norm before it: the residual method applies it as it reads.

Shapes: B batch, T tokens, D width, H heads, K key-value heads, E head width, F MLP width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.model.config import ModelConfig
from depthroute.residual import Inputs, RMSNorm, RoleInputs


class SubLayerOutput(NamedTuple):
    output: Tensor  # [B, T, D]
    activation: Tensor  # what the output projection was fed: [B, T, H*E] or [B, T, F]


class Projection(nn.Linear):
    """A bias-free linear map, initially Gaussian with the model's standard deviation."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, self.std)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(0.0, self.std, generator=generator)


class TokenEmbedding(nn.Embedding):
    """[B, T] token ids to [B, T, D]."""

    def __init__(self, vocabulary: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, self.std)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
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

    Query, key and value may be projected from different inputs; inputs that are the same object are normalised once.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.head_width = config.heads, config.resolved_key_value_heads, config.resolved_head_width
        inner, key_value = self.heads * self.head_width, self.key_value_heads * self.head_width
        self.query = Projection(config.width, inner, config.init_std)
        self.key = Projection(config.width, key_value, config.init_std)
        self.value = Projection(config.width, key_value, config.init_std)
        self.output = Projection(inner, config.width, config.init_std)
        self.query_norm = RMSNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, inputs: Inputs, rotary: Rotary) -> SubLayerOutput:
        roles = inputs if isinstance(inputs, RoleInputs) else RoleInputs(inputs, inputs, inputs)
        query = self._heads(self.query(roles.query), self.heads)
        key = self._heads(self.key(roles.key), self.key_value_heads)
        value = self._heads(self.value(roles.value), self.key_value_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotary(query), rotary(key)
        grouped = self.key_value_heads != self.heads
        mixed = F.scaled_dot_product_attention(query, key, value.to(query.dtype), is_causal=True, enable_gqa=grouped)
        activation = mixed.transpose(1, 2).flatten(2)
        return SubLayerOutput(self.output(activation), activation)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x), bias-free (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Projection(config.width, config.mlp_width, config.init_std)
        self.up = Projection(config.width, config.mlp_width, config.init_std)
        self.down = Projection(config.mlp_width, config.width, config.init_std)

    def forward(self, inputs: Tensor) -> SubLayerOutput:
        activation = F.silu(self.gate(inputs)) * self.up(inputs)
        return SubLayerOutput(self.down(activation), activation)


class Layer(nn.Module):
    """One attention and one MLP sub-layer, each with the norm before it.

    The norms are beside the sub-layers, not in them: they run where the residual method reads, so what gathers or recomputes a sub-layer by
    itself must not own them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)
