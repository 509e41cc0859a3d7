"""A decoder's body as plain functions, for the literal residual methods beside this file.

Shapes: B batch, T tokens, D width, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6

Values = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Network(NamedTuple):
    """The body of a decoder. Inputs of a sub-layer have passed the norm before it."""

    layers: int
    norms: list[Callable[[Tensor], Tensor]]  # the norm before each of the 2L sub-layers, and the final one
    attention: list[Callable[..., Tensor]]  # attention[l](x_q, x_k, x_v, values=None); values(q, k, v) -> v, by head and rotated
    mlp: list[Callable[[Tensor], Tensor]]


def r(x: Tensor, eps: float = EPS) -> Tensor:
    """The gain-free RMS norm of the last axis."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def sublayer(net: Network, site: int, h: Tensor) -> Tensor:
    """f_site of what the norm before it makes of h."""
    return bare_sublayer(net, site, net.norms[site](h))


def bare_sublayer(net: Network, site: int, x: Tensor) -> Tensor:
    """f_site of an input that needs no norm any more."""
    if site % 2 == 0:
        return net.attention[site // 2](x, x, x)
    return net.mlp[site // 2](x)


def layer_of(net: Network, layer: int, h: Tensor) -> Tensor:
    """A whole PreNorm layer, with its own inner residuals."""
    h = h + sublayer(net, 2 * layer, h)
    return h + sublayer(net, 2 * layer + 1, h)


def network(model: Any) -> Network:
    """The body of a depthroute Decoder, from its weights."""
    norms, attentions, mlps = [], [], []
    for layer in model.layers:
        norms.append(identity if layer.attention_norm is None else layer.attention_norm)
        norms.append(identity if layer.mlp_norm is None else layer.mlp_norm)
        attentions.append(attention_of(layer.attention, model.rotary))
        mlps.append(mlp_of(layer.mlp))
    return Network(len(model.layers), [*norms, model.norm], attentions, mlps)


def identity(x: Tensor) -> Tensor:
    return x


def attention_of(attention: Any, rotary: Any) -> Callable[..., Tensor]:
    """Causal softmax attention with grouped queries; the value hook runs at the resolution of the key-value heads."""
    heads, key_value_heads, width = attention.heads, attention.key_value_heads, attention.head_width

    def by_head(x: Tensor, count: int) -> Tensor:
        return torch.stack([x[..., h * width : (h + 1) * width] for h in range(count)], dim=1)

    def apply(x_q: Tensor, x_k: Tensor, x_v: Tensor, values: Values | None = None) -> Tensor:
        q = by_head(x_q @ attention.query.weight.T, heads)
        k = by_head(x_k @ attention.key.weight.T, key_value_heads)
        v = None if attention.value is None else by_head(x_v @ attention.value.weight.T, key_value_heads)
        if attention.query_norm is not None:
            q = attention.query_norm(q)
        if attention.key_norm is not None:
            k = attention.key_norm(k)
        turn = rotary(0, q.shape[-2])
        q, k = turn(q), turn(k)
        if values is not None:
            v = values(q, k, v)
        assert v is not None, "an attention without value projection needs the hook"
        future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        mixed = []
        for h in range(heads):
            group = h // (heads // key_value_heads)
            scores = q[:, h] @ k[:, group].transpose(-1, -2) / width**0.5
            mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, group])
        return torch.cat(mixed, dim=-1) @ attention.output.weight.T

    return apply


def mlp_of(mlp: Any) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        return (F.silu(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T

    return apply
