"""LayerScale: a learned gain a channel, small at first, before every output (CaiT, Touvron et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Residual, ResidualConfig, Trace
from depthroute.residual.stream import Filled, Stream


@dataclass(frozen=True, kw_only=True)
class LayerScaleConfig(ResidualConfig):
    """h = h + gain * f(N h), a gain [D] for every sub-layer.

    `initial`: where gains start. None is the paper's: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond.
    """

    name: ClassVar[str] = "layerscale"

    initial: float | None = None

    def __post_init__(self) -> None:
        if self.initial is not None and not self.initial > 0:
            raise RequestError(f"residual.initial = {self.initial} is not allowed; it must be positive, or none for the paper's value.")

    def module(self, body: Body) -> LayerScale:
        by_depth = 0.1 if body.layers <= 18 else 1e-5 if body.layers <= 24 else 1e-6
        return LayerScale(by_depth if self.initial is None else self.initial, body)


class LayerScale(Stream):
    """Gains are parameters of their own, in float32: a step of 1e-6 would be lost in bfloat16."""

    def __init__(self, initial: float, body: Body) -> None:
        super().__init__(body)
        self.gains = Filled({site: (body.width,) for site in range(body.sublayers)}, initial)

    def write(self, memory: Tensor, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        scaled: Tensor = self.gains[str(site)] * output
        return memory + scaled.to(memory.dtype)


def _ones(residual: Residual) -> None:
    assert isinstance(residual, LayerScale)
    for gain in residual.gains.values():
        gain.fill_(1.0)


METHODS = (
    Method(
        name="layerscale",
        label="LayerScale",
        configure=lambda base: LayerScaleConfig(),
        equation="h = h + g_i * f(N h), g_i in R^d",
        reads="the sum so far, scaled by channel",
        dynamic=False,
        parameters="2Ld",
        state="d",
        cost="d",
        paper="Touvron et al. 2021",
        degenerate=(Degenerate(says="g = 1: PreNorm", config=LayerScaleConfig(), adjust=_ones, equals=PreNormConfig()),),
    ),
)
