"""Kimi Delta Attention (Kimi Linear, 2025, Section 3): a delta rule whose state decays by channel.

    q, k = L2norm(silu(conv(W x))) by head, v = silu(conv(W_v x)), beta = sigmoid(W_b x)
    S_t = (I - beta k k') Diag(alpha) S_{t-1} + beta k v' ;  o_t = S_t' q / sqrt(E) ;  y = W_o [ sigmoid(gate) * norm(o) ]

Shapes: B batch, T tokens, D width, H heads, E head width, W tokens of a convolution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.model.config import ModelConfig
from depthroute.model.linear import Projection, project
from depthroute.model.sight import Sight
from depthroute.model.sublayer import SubLayerOutput, Values, by_head, by_role, one_input
from depthroute.ops import delta_rule
from depthroute.residual import Inputs, Kept, Projected, RMSNorm, RoleInputs

L2_EPS = 1e-6
SLOWEST, FASTEST = 1e-3, 1e-1  # of the first time steps


class ShortConvolution(nn.Module):
    """A causal convolution of every channel by itself, over the last W tokens of a document, and SiLU behind it."""

    def __init__(self, channels: int, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, tokens))
        _start(self)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        bound = parameter.shape[1] ** -0.5  # that of torch's own convolutions
        parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor, before: Tensor | None, since: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, T, C] convolved, and its last W - 1 inputs, zero where they are of a document before that of the last token.

        `before`: [B, W - 1, C], the inputs of the passes before; None is none. `since`: int64 [B, T], how many tokens of its document are
        before a token, those of earlier passes not counted below W; None where no document begins in this pass.
        """
        width = self.weight.shape[1]
        tokens = x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0)) if before is None else torch.cat((before.to(x.dtype), x), dim=1)
        weight = self.weight.to(x.dtype)
        found = x * weight[:, -1]
        for back in range(1, width):
            earlier = padded[:, width - 1 - back : width - 1 - back + tokens]
            if since is not None:
                earlier = earlier * (since >= back)[..., None]
            found = torch.addcmul(found, earlier, weight[:, width - 1 - back])
        tail = padded[:, padded.shape[1] - (width - 1) :]
        if since is not None:
            tail = tail * (since[:, -1:] >= torch.arange(width - 2, -1, -1, device=x.device))[..., None]
        return F.silu(found), tail


class Decay(nn.Module):
    """Log decays by channel, in float32, from their projection z: -exp(a) softplus(z + b), or floor sigmoid(exp(a) (z + b))."""

    exact = True

    def __init__(self, heads: int, head_width: int, floor: float | None) -> None:
        super().__init__()
        self.floor = floor
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads * head_width))
        _start(self)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        if name == "log_rate":
            if self.floor is None:
                parameter.uniform_(1.0, 16.0, generator=generator).log_()
            else:
                parameter.zero_()
            return
        steps = torch.empty_like(parameter).uniform_(math.log(SLOWEST), math.log(FASTEST), generator=generator).exp_().clamp_(min=1e-4)
        parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step

    def forward(self, z: Tensor) -> Tensor:
        """[B, H, T, E] at least float32, from [B, T, H*E]."""
        exact = torch.promote_types(self.bias.dtype, torch.float32)
        heads = len(self.log_rate)
        z = by_head(z.to(exact) + self.bias, len(self.bias) // heads)
        rate = self.log_rate.to(exact).exp().view(heads, 1, 1)
        if self.floor is not None:
            return self.floor * torch.sigmoid(rate * z)
        # Softplus; the backward pass of torch's own has other strides than its compiler takes it to have.
        return -rate * torch.logaddexp(z, z.new_zeros(()))


class DeltaAttention(nn.Module):
    """The mixer of Kimi Linear's layers. What it carries from pass to pass does not grow with the text."""

    def __init__(self, config: ModelConfig, number: int, own_values: bool) -> None:
        """`number`: the layer's, from 0. `own_values`: whether it projects values."""
        super().__init__()
        assert config.kda is not None
        kda, width, inner = config.kda, config.width, config.heads * config.resolved_head_width
        self.number, self.head_width = number, config.resolved_head_width

        def projection(name: str, inputs: int, outputs: int, bias: bool = False) -> Projection:
            return Projection(inputs, outputs, config.initial_std(name), bias)

        self.query = projection("query", width, inner)
        self.key = projection("key", width, inner)
        self.value = projection("value", width, inner) if own_values else None
        self.query_convolution = ShortConvolution(inner, kda.convolution)
        self.key_convolution = ShortConvolution(inner, kda.convolution)
        self.value_convolution = ShortConvolution(inner, kda.convolution) if own_values else None
        self.strength = projection("key", width, config.heads)
        self.decay_down = projection("key", width, self.head_width)
        self.decay_up = projection("key", self.head_width, inner)
        self.decay = Decay(config.heads, self.head_width, kda.decay_floor)
        low_rank = kda.output_gate == "low_rank"
        self.gate_down = projection("query", width, self.head_width) if low_rank else None
        self.gate = projection("query", self.head_width, inner, bias=True) if low_rank else projection("query", width, inner)
        self.output_norm = RMSNorm(self.head_width, eps=config.norm_eps)
        self.output = projection("output", inner, width)

    def forward(self, inputs: Inputs, sight: Sight, values: Values | None = None) -> SubLayerOutput:
        roles = by_role(inputs)
        before = None if sight.store is None else sight.store.state(self.number)
        query, key, value, tails = self._projected(roles, before, sight.begins)
        kept: Kept = None
        if values is not None:
            value, kept = values(Projected(query, key, value))
        assert value is not None
        decay = self.decay(self.decay_up(self.decay_down(roles.key)))
        strength = torch.sigmoid(self.strength(roles.key).to(decay.dtype)).transpose(1, 2)
        mixed, state = delta_rule(
            query * self.head_width**-0.5, key, value, decay, strength, state=None if before is None else before[0], begins=sight.begins
        )
        if sight.store is not None:
            sight.store.carry(self.number, (state, *tails))
        mixed = self.output_norm(mixed)
        gate = self.gate(roles.query if self.gate_down is None else self.gate_down(roles.query))
        activation = mixed.transpose(1, 2).flatten(2) * torch.sigmoid(gate.to(mixed.dtype))
        return SubLayerOutput(self.output(activation), activation, kept)

    def _projected(
        self, roles: RoleInputs, before: tuple[Tensor, ...] | None, begins: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Query and key of length 1 and value, [B, H, T, E] each, and what their convolutions saw last."""
        projections: tuple[Projection | None, ...] = (self.query, self.key, self.value)
        convolutions = (self.query_convolution, self.key_convolution, self.value_convolution)
        projected: list[Tensor] = []
        for together in one_input(roles):
            projected += project([projection for projection in projections[together] if projection is not None], roles[together.start])
        since = None if begins is None else _since(begins)
        found, tails = [], []
        for number, (x, convolution) in enumerate(zip(projected, convolutions, strict=False)):
            assert convolution is not None
            x, tail = convolution(x, None if before is None else before[1 + number], since)
            tails.append(tail)
            found.append(by_head(x, self.head_width))
        query, key = (_unit(x) for x in found[:2])
        return query, key, found[2] if len(found) > 2 else None, tails


@torch.no_grad()
def _start(module: ShortConvolution | Decay) -> None:
    """Its first values, unless it is made without memory."""
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            module.initial_values(name, parameter, None)


def _unit(x: Tensor) -> Tensor:
    """[..., E] of length 1, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _since(begins: Tensor) -> Tensor:
    """int64 [B, T]: tokens since the last document began, and very many where none did in this pass."""
    place = torch.arange(begins.shape[1], device=begins.device)
    first = torch.where(begins, place, -(1 << 30)).cummax(1).values
    return place - first
