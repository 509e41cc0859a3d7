"""Long skips of the speed-run Transformers: the embedding again before every layer, and a U-Net over depth.

(modded-nanogpt, records of November 2024; there is no paper.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Residual, ResidualConfig, Trace
from depthroute.residual.stream import Beside, added, rms, scalars

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class SkipsConfig(ResidualConfig):
    """Before a layer: h = a_l h + b_l x0, with x0 the embedding divided by its RMS, (a, b) = (1, 0) at first (`embedding`).

    `unet`: the first half of the layers push what they put out; each layer of the second half first adds the last one that is left, times a
    scalar that starts at `unet_initial`, 1 as in the record. With an odd number of layers the middle one does neither.
    """

    name: ClassVar[str] = "skips"

    embedding: bool = True
    unet: bool = False
    unet_initial: float = 1.0

    def __post_init__(self) -> None:
        if not (self.embedding or self.unet):
            raise RequestError("skips needs residual.embedding = true or residual.unet = true.")
        if self.unet_initial != 1.0 and not self.unet:
            raise RequestError("residual.unet_initial is where the U-Net's weights start; it needs residual.unet = true.")

    def module(self, body: Body) -> Skips:
        return Skips(self, body)


class SkipMemory(NamedTuple):
    """The stream, the normalised embedding, and what waits for the second half."""

    stream: Tensor
    embedding: Tensor | None
    waiting: tuple[Tensor, ...]


class Skips(Beside):
    """What comes before a layer is done when the layer below has written."""

    def __init__(self, config: SkipsConfig, body: Body) -> None:
        super().__init__(body)
        layers = range(body.layers)
        self.paired = body.layers // 2
        self.stream = scalars(layers if config.embedding else (), 1.0)
        self.x0 = scalars(layers if config.embedding else (), 0.0)
        self.unet = scalars(range(body.layers - self.paired, body.layers) if config.unet else (), config.unet_initial)

    def open(self, embedding: Tensor) -> SkipMemory:
        x0 = rms(embedding, EPS).to(embedding.dtype) if self.x0 else None
        return self._enter(SkipMemory(embedding, x0, ()), 0)

    def write(self, memory: SkipMemory, site: int, output: Tensor, trace: Trace = NO_TRACE) -> SkipMemory:
        memory = memory._replace(stream=added(memory.stream, output))
        layer = site // 2
        if site % 2 == 0:
            return memory
        if self.unet and layer < self.paired:
            memory = memory._replace(waiting=(*memory.waiting, memory.stream))
        return self._enter(memory, layer + 1)

    def _enter(self, memory: SkipMemory, layer: int) -> SkipMemory:
        if layer == self.body.layers:
            return memory
        stream, key = memory.stream, str(layer)
        if key in self.unet:
            stream = stream + (self.unet[key] * memory.waiting[-1]).to(stream.dtype)
            memory = memory._replace(waiting=memory.waiting[:-1])
        if memory.embedding is not None:
            stream = weighted_sum((stream, memory.embedding), (self.stream[key], self.x0[key]))
        return memory._replace(stream=stream)


def _zero(residual: Residual) -> None:
    assert isinstance(residual, Skips)
    for weight in residual.unet.values():
        weight.zero_()


METHODS = (
    Method(
        name="x0",
        label="Embedding skips",
        configure=lambda base: SkipsConfig(),
        equation="before a layer h = a_l h + b_l x0; h = h + f(N h)",
        reads="the stream and the embedding",
        dynamic=False,
        parameters="2L",
        state="2d",
        cost="d",
        paper="modded-nanogpt, 2024-11-06",
        degenerate=(Degenerate(says="initial values (1, 0): PreNorm", config=SkipsConfig(), equals=PreNormConfig()),),
    ),
    Method(
        name="unet",
        label="U-Net skips",
        configure=lambda base: SkipsConfig(embedding=False, unet=True),
        equation="before a layer of the second half h = h + w_l h_{L-1-l}; h = h + f(N h)",
        reads="the stream and the mirrored layer",
        dynamic=False,
        parameters="L/2",
        state="(L/2)d",
        cost="d/4",
        paper="modded-nanogpt, 2024-11-10",
        degenerate=(
            Degenerate(
                says="w = 0: PreNorm", config=SkipsConfig(embedding=False, unet=True), adjust=_zero, equals=PreNormConfig()
            ),
        ),
        notes="starts at w = 1, which is not the plain stream",
    ),
)
