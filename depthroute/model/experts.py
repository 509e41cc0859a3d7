"""A mixture of experts in place of a layer's MLP: each token goes through a few of many small MLPs, and through shared ones.

The form of DeepSeek-V3 and Kimi Linear, with the latent experts of Kimi K3.

Shapes: ... leading dimensions (T tokens in all), D width, L width of the experts' inputs (D, or the latent one), X experts, K chosen for a
token, F width of an expert, N = T K rows sorted by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.model.config import ModelConfig
from depthroute.model.gated import gated
from depthroute.model.linear import Projection
from depthroute.model.sublayer import SubLayerOutput
from depthroute.ops import collect, into_experts, out_of_experts, routes, weighed
from depthroute.residual import RMSNorm


class Router(nn.Module):
    """Which experts a token goes to, and their weights in the sum.

    The experts are the K largest of sigmoid(W x) + bias; the weights are the sigmoids alone, divided by their sum, times a factor
    (DeepSeek-V3, section 2.1.2). The bias is moved by the balancing rule, never by an optimiser.
    """

    exact = True  # its parameters stay in float32 whatever the others are cast to: near ties, rounding would choose

    def __init__(self, width: int, number: int, chosen: int, scaling: float, std: float) -> None:
        super().__init__()
        self.chosen, self.scaling, self.std = chosen, scaling, std
        self.weight = nn.Parameter(torch.empty(number, width))
        self.bias = nn.Parameter(torch.zeros(number), requires_grad=False)
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, 0.0, std)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] to the experts [T, K] (int64) and their weights [T, K] (float32 or wider)."""
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(tokens.to(exact), self.weight.to(exact)))
        chosen = (scores.detach() + self.bias).topk(self.chosen, dim=-1).indices
        of_chosen = scores.gather(-1, chosen)
        return chosen, of_chosen / (of_chosen.sum(-1, keepdim=True) + 1e-20) * self.scaling

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        if name == "bias":
            parameter.zero_()
        else:
            parameter.normal_(0.0, self.std, generator=generator)


class ExpertMatrices(nn.Module):
    """One matrix of every expert, `weight` [X, outputs, inputs], initially Gaussian."""

    def __init__(self, number: int, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(number, outputs, inputs))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, 0.0, std)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.normal_(0.0, self.std, generator=generator)


class Experts(nn.Module):
    """shared(x) + sum_i p_i E_i(x) over the chosen experts i, or with latent ones shared(x) + up RMSNorm(sum_i p_i E_i(down x)).

    `load` [X] counts the tokens of each expert over the training passes since it was last set to zero; those that are recomputed count
    again. `traces`: whether the activation is put out, for residual methods that look inside.
    """

    load: Tensor

    def __init__(self, config: ModelConfig, shared: nn.Module | None) -> None:
        """`shared`: the MLP that every token goes through."""
        super().__init__()
        assert config.experts is not None
        experts, self.kind, self.traces = config.experts, config.activation, False
        self.number, self.chosen, self.rate = experts.number, experts.chosen, experts.balance_rate
        inner = experts.latent if experts.latent is not None else config.width
        self.router = Router(config.width, experts.number, experts.chosen, experts.scaling, config.init_std)

        def matrices(name: str, inputs: int, outputs: int) -> ExpertMatrices:
            return ExpertMatrices(experts.number, inputs, outputs, config.initial_std(name))

        self.gate = matrices("gate", inner, experts.width)
        self.up = matrices("up", inner, experts.width)
        self.down = matrices("down", experts.width, inner)
        self.shared = shared
        latent = experts.latent is not None
        self.latent_down = Projection(config.width, inner, config.init_std) if latent else None
        self.latent_norm = RMSNorm(inner, eps=config.norm_eps) if latent else None
        self.latent_up = Projection(inner, config.width, config.initial_std("down")) if latent else None
        self.register_buffer("load", torch.zeros(experts.number), persistent=False)

    def reset_buffers(self) -> None:
        """Forget the load: for a module that was made without memory."""
        if not self.load.is_meta:
            self.load.zero_()

    def forward(self, inputs: Tensor) -> SubLayerOutput:
        tokens = inputs.flatten(0, -2)
        chosen, shares = self.router(tokens)
        ways = routes(chosen, self._counts(chosen))
        fed = tokens if self.latent_down is None else self.latent_down(tokens)
        activation = gated(*into_experts(fed, self.gate.weight, self.up.weight, ways), self.kind)
        routed = out_of_experts(activation, shares, self.down.weight, ways)
        if self.latent_norm is not None and self.latent_up is not None:
            routed = self.latent_up(self.latent_norm(routed))
        output = routed.view(inputs.shape)

        traces: list[Tensor] = []
        if self.traces:
            traces.append(collect(weighed(activation, shares, ways), ways.order, ways.places).view(*inputs.shape[:-1], -1))
        if self.shared is not None:
            shared: SubLayerOutput = self.shared(inputs)
            output = shared.output + output
            if self.traces and shared.activation is not None:
                traces.insert(0, shared.activation)
        return SubLayerOutput(output, torch.cat(traces, -1) if traces else None)

    def moves(self, load: Tensor) -> Tensor:
        """What a step adds to the router's bias, [X], after it saw `load` [X]: up where fewer tokens went than on average (DeepSeek-V3)."""
        return self.rate * torch.sign(load.mean() - load)

    def _counts(self, chosen: Tensor) -> Tensor:
        """How many tokens went to each expert, int64 [X]."""
        flat = chosen.flatten()
        counts = torch.zeros(self.number, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
        if self.training and torch.is_grad_enabled():
            self.load.add_(counts)
        return counts
