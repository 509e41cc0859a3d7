"""The matrices of the decoder, each with how it starts.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Projection(nn.Linear):
    """A linear map, initially Gaussian with the model's standard deviation; its bias, where it has one, starts at zero."""

    def __init__(self, inputs: int, outputs: int, std: float, bias: bool = False) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 0.0, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

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
        nn.init.normal_(self.weight, 0.0, self.std)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.normal_(0.0, self.std, generator=generator)
