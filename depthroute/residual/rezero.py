"""ReZero: a learned scalar, zero at first, before every output (Bachlechner et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Adaptation, Body, Residual, ResidualConfig, Trace
from depthroute.residual.stream import Stream, scalars


@dataclass(frozen=True, kw_only=True)
class ReZeroConfig(ResidualConfig):
    """h = h + a_l f(h), one scalar a layer, shared by its attention and its MLP as in the authors' code.

    `prenorm`: keep the norms before sub-layers, as later users of the idea do. The paper has none; the final norm stays either way.
    """

    name: ClassVar[str] = "rezero"

    prenorm: bool = False

    def module(self, body: Body) -> ReZero:
        return ReZero(body)

    def adaptation(self, body: Body) -> Adaptation:
        return Adaptation(input_norms=self.prenorm)


class ReZero(Stream):
    """While a scalar is zero its branch gets no gradient: at the first step only the scalars learn."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.scales = scalars(range(body.layers), 0.0)

    def write(self, memory: Tensor, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        scaled: Tensor = self.scales[str(site // 2)] * output
        return memory + scaled.to(memory.dtype)


def _ones(residual: Residual) -> None:
    assert isinstance(residual, ReZero)
    for scale in residual.scales.values():
        scale.fill_(1.0)


METHODS = (
    Method(
        name="rezero",
        label="ReZero",
        configure=lambda base: ReZeroConfig(),
        equation="h = h + a_l f(h), without norms; rezero,prenorm=true keeps them",
        reads="the sum so far, scaled",
        dynamic=False,
        parameters="L, less the 2Ld gains of the norms",
        state="d",
        cost="d",
        paper="Bachlechner et al. 2020",
        degenerate=(
            Degenerate(says="a = 1 with norms: PreNorm", config=ReZeroConfig(prenorm=True), adjust=_ones, equals=PreNormConfig()),
        ),
        notes="at step 0 the network is its embedding",
    ),
)
