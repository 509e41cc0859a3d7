"""LAuReL: a learned skip connection beside every output (Menghani, Kumar and Kumar 2025).

x_{i+1} = alpha f(N x_i) + beta (x_i + B A x_i) + sum_j gamma_j x_{i-j}, each part optional. The skip sees the stream itself, not its norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.norm import normalised
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Inputs, Norm, Residual, ResidualConfig, Trace


@dataclass(frozen=True, kw_only=True)
class LaurelConfig(ResidualConfig):
    """The three parts, at every sub-layer.

    `weights` (RW): alpha and beta, 2 softmax of two free numbers, so that they start at (1, 1) and stay bounded; the paper bounds them
    too and gives no map. `rank` (LR): of B A, the width of the low-rank skip. `previous` (PA): over how many states of the stream, the
    present one included, the last sum runs; its weights start at zero, which the paper leaves open.
    """

    name: ClassVar[str] = "laurel"

    weights: bool = False
    rank: int | None = None
    previous: int = 0

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise RequestError(f"residual.rank = {self.rank} is not allowed; it takes 1 or more, or none.")
        if self.previous < 0:
            raise RequestError(f"residual.previous = {self.previous} is not allowed; it takes 0 or more.")
        if not (self.weights or self.rank or self.previous):
            raise RequestError("laurel needs a part: residual.weights = true (RW), residual.rank (LR) or residual.previous (PA).")

    def module(self, body: Body) -> Laurel:
        if self.rank is not None and self.rank > body.width:
            raise RequestError(f"residual.rank = {self.rank} is larger than the width {body.width}; it takes 1 to {body.width}.")
        return Laurel(self, body)


class Skip(nn.Module):
    """The parameters of one skip connection."""

    no_decay = frozenset({"down", "up"})

    def __init__(self, config: LaurelConfig, width: int, states: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2)) if config.weights else None
        self.down = nn.Parameter(torch.zeros(width, config.rank)) if config.rank else None
        self.up = nn.Parameter(torch.zeros(config.rank, width)) if config.rank else None
        self.previous = nn.Parameter(torch.zeros(states)) if states else None

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        """All zero but A: the paper's column-orthogonal matrix, 1 / sqrt(r D) where row and column agree modulo r."""
        parameter.zero_()
        if name == "down":
            width, rank = parameter.shape
            rows = torch.arange(width)
            parameter[rows, rows % rank] = (rank * width) ** -0.5


class Laurel(Residual):
    """The memory is the last states of the stream, the present one last."""

    def __init__(self, config: LaurelConfig, body: Body) -> None:
        super().__init__(body)
        self.keep = max(1, config.previous)
        self.sites = nn.ModuleDict(
            {str(site): Skip(config, body.width, min(config.previous, site + 1)) for site in range(body.sublayers)}
        )

    def open(self, embedding: Tensor) -> tuple[Tensor, ...]:
        return (embedding,)

    def read(self, memory: tuple[Tensor, ...], site: int, norm: Norm | None = None) -> Inputs:
        return normalised(memory[-1], norm)

    def write(self, memory: tuple[Tensor, ...], site: int, output: Tensor, trace: Trace = NO_TRACE) -> tuple[Tensor, ...]:
        skip, stream = self.sites[str(site)], memory[-1]
        assert isinstance(skip, Skip)
        carried = stream
        if skip.down is not None and skip.up is not None:
            carried = stream + ((stream @ skip.down.to(stream.dtype)) @ skip.up.to(stream.dtype)).to(stream.dtype)
        output = output.to(stream.dtype)
        new = output + carried if skip.weights is None else weighted_sum((output, carried), 2 * skip.weights.softmax(0))
        if skip.previous is not None:
            new = new + weighted_sum(memory[: -len(skip.previous) - 1 : -1], skip.previous)
        return (*memory, new)[-self.keep :]


def _row(name: str, label: str, config: LaurelConfig, **facts: str) -> Method:
    return Method(
        name=name,
        label=label,
        configure=lambda base: config,
        dynamic=False,
        paper="Menghani et al. 2025, section 2",
        degenerate=(Degenerate(says="initial values: PreNorm", config=replace(config, rank=config.rank and 4), equals=PreNormConfig()),),
        **facts,
    )


METHODS = (
    _row(
        "laurel-rw", "LAuReL-RW", LaurelConfig(weights=True), equation="h = a f(N h) + b h, (a, b) = 2 softmax(w)",
        reads="the sum so far, scaled", parameters="4L", state="d", cost="2d",
    ),
    _row(
        "laurel-lr", "LAuReL-LR", LaurelConfig(rank=32), equation="h = f(N h) + h + B A h",
        reads="the stream and a low-rank map of it", parameters="4Lrd", state="d", cost="2rd",
    ),
    _row(
        "laurel-pa", "LAuReL-PA", LaurelConfig(previous=3), equation="h_{i+1} = f(N h_i) + h_i + sum_{j<k} g_j h_{i-j}",
        reads="the last k states of the stream", parameters="about 2Lk", state="kd", cost="kd",
    ),
)  # fmt: skip
