"""DenseFormer: after a layer, a learned sum of what this and earlier layers put out (Pagliardini et al. 2024).

Layers are counted from 1 as in the paper; X_0 is the embedding, X_i what layer i puts out, Y_i what the next layer gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, ResidualConfig, Trace
from depthroute.residual.stream import Beside, added


@dataclass(frozen=True, kw_only=True)
class DenseFormerConfig(ResidualConfig):
    """Y_i = sum of alpha_ij X_j over j <= i with j = i modulo `dilation`, if `period` divides i; else Y_i = X_i (section 3).

    alpha starts at one for j = i and at zero elsewhere. Dilation and period alike leave layers unconnected; the paper takes 4 and 5.
    """

    name: ClassVar[str] = "denseformer"

    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        for field in ("dilation", "period"):
            if getattr(self, field) < 1:
                raise RequestError(f"residual.{field} = {getattr(self, field)} is not allowed; it takes 1 or more.")

    def module(self, body: Body) -> DenseFormer:
        if self.period > body.layers:
            raise RequestError(f"residual.period = {self.period} is more than the {body.layers} layers; it takes 1 to {body.layers}.")
        return DenseFormer(self, body)


class LastOne(nn.ParameterDict):
    """Weights of a sum by layer, one for the newest source and zero for the others at first. Never decayed: one is where they belong."""

    def __init__(self, shapes: dict[int, tuple[int, ...]]) -> None:
        super().__init__({str(layer): nn.Parameter(torch.zeros(shape)) for layer, shape in shapes.items()})
        self.no_decay = frozenset(self.keys())

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.zero_()
        parameter[..., -1] = 1.0


class History(NamedTuple):
    """The stream, and X_0, X_1, ... up to now; None for those that no later layer sums."""

    stream: Tensor
    outputs: tuple[Tensor | None, ...]


class DenseFormer(Beside):
    """A whole layer is a block of its own residual stream."""

    def __init__(self, config: DenseFormerConfig, body: Body) -> None:
        super().__init__(body)
        self.dilation = config.dilation
        self.sums = range(config.period, body.layers + 1, config.period)
        self.weights = LastOne({i - 1: (i // config.dilation + 1,) for i in self.sums})

    def open(self, embedding: Tensor) -> History:
        return History(embedding, (embedding if self._needed(0, 0) else None,))

    def write(self, memory: History, site: int, output: Tensor, trace: Trace = NO_TRACE) -> History:
        stream = added(memory.stream, output)
        if site % 2 == 0:
            return memory._replace(stream=stream)
        i = site // 2 + 1
        outputs = (*memory.outputs, stream)
        if str(i - 1) in self.weights:
            sources = [source for source in outputs[i % self.dilation :: self.dilation] if source is not None]
            stream = weighted_sum(sources, self.weights[str(i - 1)])
        return History(stream, tuple(source if self._needed(j, i) else None for j, source in enumerate(outputs)))

    def _needed(self, j: int, after: int) -> bool:
        """Whether a layer behind `after` sums X_j."""
        return any(i > after and (i - j) % self.dilation == 0 for i in self.sums)


def _row(name: str, dilation: int, period: int) -> Method:
    config = DenseFormerConfig(dilation=dilation, period=period)
    return Method(
        name=name,
        label=f"DenseFormer {dilation}x{period}",
        configure=lambda base: config,
        equation="after layer i, h = sum_j a_ij X_j over j = i modulo dilation, if period divides i",
        reads="the outputs of earlier layers",
        dynamic=False,
        parameters="L(L+3)/2" if dilation == period == 1 else "sum of i/dilation + 1 over i = period, 2 period, ...",
        state="(L+1)d" if dilation == 1 else "up to Ld, what a later sum needs",
        cost="Ld/4" if dilation == period == 1 else "about Ld / (4 dilation period)",
        paper="Pagliardini et al. 2024, section 3",
        degenerate=(Degenerate(says="initial values (the last with weight one): PreNorm", config=config, equals=PreNormConfig()),),
    )


METHODS = (_row("denseformer", 1, 1), _row("denseformer-4x5", 4, 5))
