"""The matrices of the decoder, each with how it starts.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from depthroute.ops import linear, linears


def project(projections: Sequence[nn.Module], inputs: Tensor) -> list[Tensor]:
    """What several projections make of one input; plain ones are done together where that is faster."""
    plain = [one for one in projections if type(one) is Projection and not watched_module(one)]
    if torch.is_grad_enabled() or len(plain) < len(projections):
        return [one(inputs) for one in projections]
    return linears(inputs, [one.weight for one in plain], [one.bias for one in plain])


def watched_module(module: nn.Module) -> bool:
    """Whether somebody has hooks on a call of it, or has put another forward pass in its place."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


class Projection(nn.Linear):
    """A linear map, initially Gaussian with the model's standard deviation; its bias, where it has one, starts at zero."""

    def __init__(self, inputs: int, outputs: int, std: float, bias: bool = False) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:  # drawing nothing takes as long as drawing
            return
        nn.init.normal_(self.weight, 0.0, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        if name == "bias":
            parameter.zero_()
        else:
            parameter.normal_(0.0, self.std, generator=generator)


class TokenEmbedding(nn.Embedding):
    """[B, T] token ids to [B, T, D]."""

    def __init__(self, vocabulary: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, 0.0, self.std)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.normal_(0.0, self.std, generator=generator)
