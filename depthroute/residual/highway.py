"""Highway connections: learned gates between carrying the stream on and taking the output (Srivastava et al. 2015).

The form over depth that Attention Residuals compares with (Table 5): h = (1 - g) * h + g * f(N h), the gate from the normalised stream N h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Residual, ResidualConfig, Trace
from depthroute.residual.stream import Stream, read_inputs

Shape = Literal["full", "diagonal", "scalar"]


@dataclass(frozen=True, kw_only=True)
class HighwayConfig(ResidualConfig):
    """Gates g = sigmoid(W N(h) + b), one a sub-layer.

    `gate`: W is a matrix ("full": 9 % more parameters in shape S, so no matched baseline), a gain a channel ("diagonal"), or a vector
    that gives one gate a token ("scalar"). `coupled`: the stream is carried with 1 - g; otherwise with a gate of its own. `bias`: where b
    starts. Negative, so that the network starts near carrying everything; the carry gate of the uncoupled form starts at -bias.
    """

    name: ClassVar[str] = "highway"

    gate: Shape = "diagonal"
    coupled: bool = True
    bias: float = -2.0

    def module(self, body: Body) -> Highway:
        return Highway(self, body)


class Gate(nn.Module):
    """sigmoid(W x + b): [..., D] to [..., D], or to [..., 1] for a scalar gate."""

    def __init__(self, shape: Shape, width: int, bias: float) -> None:
        super().__init__()
        self.shape, self.initial_bias = shape, bias
        self.weight = nn.Parameter(torch.zeros(width, width) if shape == "full" else torch.zeros(width))
        self.bias = nn.Parameter(torch.full((1 if shape == "scalar" else width,), bias))
        self.no_decay = frozenset({"weight"})

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        """Matrices normal with standard deviation 0.02, vectors zero: a vector's gradient needs no broken symmetry."""
        if name == "weight" and self.shape == "full":
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(self.initial_bias if name == "bias" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.shape == "full":
            product = F.linear(x, self.weight).to(self.bias.dtype)
        elif self.shape == "diagonal":
            product = x * self.weight
        else:
            product = (x * self.weight).sum(-1, keepdim=True)
        return torch.sigmoid(product + self.bias)  # in the parameters' dtype: a gate in bfloat16 would lose the stream a little everywhere


class Highway(Stream):
    """With coupled gates the stream shrinks: the embedding's share in it is the product of all 1 - g."""

    def __init__(self, config: HighwayConfig, body: Body) -> None:
        super().__init__(body)
        sites = range(body.sublayers)
        self.gates = nn.ModuleDict({str(site): Gate(config.gate, body.width, config.bias) for site in sites})
        self.carries = nn.ModuleDict({} if config.coupled else {str(site): Gate(config.gate, body.width, -config.bias) for site in sites})

    def write(self, memory: Tensor, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        inputs = read_inputs(trace, "highway")
        gate: Tensor = self.gates[str(site)](inputs)
        carry: Tensor = self.carries[str(site)](inputs) if self.carries else 1 - gate
        return torch.addcmul(carry * memory, gate, output.to(gate.dtype)).to(memory.dtype)


def _open(residual: Residual) -> None:
    """Biases at which a sigmoid is one to the last bit of float64."""
    assert isinstance(residual, Highway)
    for gate in (*residual.gates.values(), *residual.carries.values()):
        gate.weight.zero_()  # type: ignore[operator]
        gate.bias.fill_(40.0)  # type: ignore[operator]


METHODS = (
    Method(
        name="highway",
        label="Highway",
        configure=lambda base: HighwayConfig(),
        equation="h = (1 - g) * h + g * f(N h), g = sigmoid(W N(h) + b); gate=diagonal, full or scalar",
        reads="the gated stream",
        dynamic=True,
        parameters="4Ld diagonal, 2L(d+1) scalar, 2L(d^2+d) full",
        state="d",
        cost="3d diagonal, d^2 + 2d full",
        paper="Srivastava et al. 2015",
        degenerate=(
            Degenerate(
                says="both gates open, uncoupled: PreNorm", config=HighwayConfig(coupled=False), adjust=_open, equals=PreNormConfig()
            ),
        ),
        notes="coupled gates can never be the plain stream",
    ),
)
