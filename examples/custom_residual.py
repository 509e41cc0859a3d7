"""A residual method of your own: one class behind the protocol, then everything else works with it.

ReZero (Bachlechner et al., 2020): the stream plus a learned scalar, zero at first, times each output.
Run it: .venv/bin/python examples/custom_residual.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import METHODS, Body, Inputs, Norm, Residual, ResidualConfig, normalised


@dataclass(frozen=True, kw_only=True)
class ReZeroConfig(ResidualConfig):
    name: ClassVar[str] = "rezero"

    def build(self, body: Body) -> Residual:
        return ReZero(body)


class ReZero(Residual):
    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(body.sublayers))

    def open(self, embedding: Tensor) -> Tensor:
        return embedding

    def read(self, memory: Tensor, site: int, norm: Norm | None = None) -> Inputs:
        return normalised(memory, norm)  # the norm before a sub-layer is the body's; the method says where it is applied

    def write(self, memory: Tensor, site: int, output: Tensor, activation: Tensor | None = None) -> Tensor:
        return memory + self.scales[site] * output.to(memory.dtype)


def main() -> None:
    METHODS[ReZeroConfig.name] = ReZeroConfig  # the line that a file in depthroute/residual adds to the registry
    config = ModelConfig(vocabulary=512, width=64, layers=4, heads=4, mlp_width=160, context=64, residual=ReZeroConfig())
    model = Decoder(config)
    tokens = torch.randint(0, 512, (2, 33))
    sums = model.loss(tokens[:, :-1], tokens[:, 1:])
    sums.objective.backward()
    print(f"{model.parameter_counts()['residual']} parameters added, first loss {sums.nll.item() / 64:.3f} nats")


if __name__ == "__main__":
    main()
