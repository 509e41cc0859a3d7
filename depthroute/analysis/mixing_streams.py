"""What streams are made of: the coefficients of mixing_rows.py for every method but those with a bank of sources.

Shapes as there; n streams, r key rank, K ways.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from depthroute.analysis.mixing_rows import Composition, Row, Step, inverse_rms, mixed
from depthroute.residual import Memory, Residual, ResidualConfig
from depthroute.residual.denseformer import DenseFormer, DenseFormerConfig
from depthroute.residual.highway import Highway, HighwayConfig
from depthroute.residual.hyper import SeveralStreams, Streams
from depthroute.residual.laurel import Laurel, LaurelConfig, Skip
from depthroute.residual.layerscale import LayerScale, LayerScaleConfig
from depthroute.residual.linear import LinearDepth, LinearDepthConfig
from depthroute.residual.muddformer import EPS as MUDD_EPS
from depthroute.residual.muddformer import Connection, MUDDFormer, MUDDFormerConfig, Ways
from depthroute.residual.postnorm import PostNorm, PostNormConfig
from depthroute.residual.rezero import ReZero, ReZeroConfig
from depthroute.residual.skips import EPS as SKIP_EPS
from depthroute.residual.skips import SkipMemory, Skips, SkipsConfig
from depthroute.residual.stream import rms

Method = TypeVar("Method", bound=Residual)
Config = TypeVar("Config", bound=ResidualConfig)


class OneStream(Composition[Config, Method]):
    """The plain sum, and the base of what reads one stream."""

    stream: Tensor

    def open(self, memory: Memory, embedding: Tensor | None) -> None:
        self.stream = self.unit(0)

    def write(self, step: Step) -> None:
        self.stream = self.stream + self.unit(step.site + 1)

    def rows(self, memory: Memory, site: int) -> dict[str, Row]:
        return {"shared": Row(self.stream)}


class Plain(OneStream[ResidualConfig, Residual]):
    """PreNorm, and methods that do something inside a sub-layer and leave the sum as it is."""


class ReZeroStream(OneStream[ReZeroConfig, ReZero]):
    def write(self, step: Step) -> None:
        self.stream = self.stream + self.residual.scales[str(step.site // 2)] * self.unit(step.site + 1)


class LayerScaleStream(OneStream[LayerScaleConfig, LayerScale]):
    by_channel = True

    def write(self, step: Step) -> None:
        self.stream = self.stream + self.residual.gains[str(step.site)][:, None] * self.unit(step.site + 1)


class HighwayStream(OneStream[HighwayConfig, Highway]):
    """Coupled gates hand on what they do not take, so that rows sum to one in every channel."""

    @property
    def by_channel(self) -> bool:
        return self.config.gate != "scalar"

    @property
    def sums_to_one(self) -> str | None:
        return "rows" if self.config.coupled else None

    def write(self, step: Step) -> None:
        gate: Tensor = self.residual.gates[str(step.site)](step.inputs)
        carry: Tensor = self.residual.carries[str(step.site)](step.inputs) if self.residual.carries else 1 - gate
        self.stream = carry[..., None] * self.stream
        self.stream[..., step.site + 1] = gate  # where it was zero: a sum would pass over all the others again

    def rows(self, memory: Tensor, site: int) -> dict[str, Row]:
        return {"shared": Row(self.stream, self.stream.sum(-1) if self.config.coupled else None)}


class PostNormStream(OneStream[PostNormConfig, PostNorm]):
    """The norm on the trunk is a number a token times its gain a channel. A read is the trunk before its norm."""

    by_channel = True

    def write(self, step: Step) -> None:
        assert isinstance(step.norm, nn.RMSNorm) and step.norm.eps is not None
        factor = self.residual.alpha * inverse_rms(step.memory, step.norm.eps) * step.norm.weight
        self.stream = factor[..., None] * self.stream + self.unit(step.site + 1)


class LaurelStream(Composition[LaurelConfig, Laurel]):
    @classmethod
    def refusal(cls, config: LaurelConfig) -> str | None:
        return "the low-rank skip maps channels to others, so that no number says how much of an output is left" if config.rank else None

    def present(self, memory: tuple[Tensor, ...]) -> Tensor:
        return memory[-1]

    def open(self, memory: Memory, embedding: Tensor | None) -> None:
        self.states: tuple[Tensor, ...] = (self.unit(0),)

    def write(self, step: Step) -> None:
        skip, stream, output = self.residual.sites[str(step.site)], self.states[-1], self.unit(step.site + 1)
        assert isinstance(skip, Skip)
        of_output, of_stream = (1.0, 1.0) if skip.weights is None else 2 * skip.weights.softmax(0)
        new = of_output * output + of_stream * stream
        if skip.previous is not None:
            new = new + mixed(self.states[: -len(skip.previous) - 1 : -1], skip.previous[:, None])
        self.states = (*self.states, new)[-self.residual.keep :]

    def rows(self, memory: Memory, site: int) -> dict[str, Row]:
        return {"shared": Row(self.states[-1])}


class SkipsStream(OneStream[SkipsConfig, Skips]):
    """The normalised embedding is the embedding by a number a token."""

    needs_embedding = True
    waiting: tuple[Tensor, ...]

    def open(self, memory: SkipMemory, embedding: Tensor | None) -> None:
        assert embedding is not None
        self.stream, self.waiting = self.unit(0), ()
        self.again = None if memory.embedding is None else inverse_rms(embedding, SKIP_EPS)[..., None] * self.unit(0)
        self._enter(0)

    def write(self, step: Step) -> None:
        super().write(step)
        layer = step.site // 2
        if step.site % 2 == 0:
            return
        if self.residual.unet and layer < self.residual.paired:
            self.waiting = (*self.waiting, self.stream)
        self._enter(layer + 1)

    def _enter(self, layer: int) -> None:
        if layer == self.residual.body.layers:
            return
        key = str(layer)
        if key in self.residual.unet:
            self.stream = self.stream + self.residual.unet[key] * self.waiting[-1]
            self.waiting = self.waiting[:-1]
        if self.again is not None:
            self.stream = self.residual.stream[key] * self.stream + self.residual.x0[key] * self.again


class DenseFormerStream(OneStream[DenseFormerConfig, DenseFormer]):
    def open(self, memory: Memory, embedding: Tensor | None) -> None:
        super().open(memory, embedding)
        self.outputs = [self.stream]

    def write(self, step: Step) -> None:
        super().write(step)
        if step.site % 2 == 0:
            return
        self.outputs.append(self.stream)
        layer, dilation = step.site // 2, self.config.dilation
        if str(layer) in self.residual.weights:
            self.stream = mixed(self.outputs[(layer + 1) % dilation :: dilation], self.residual.weights[str(layer)][:, None])


class MUDDFormerStream(OneStream[MUDDFormerConfig, MUDDFormer]):
    """Ways before an attention are roles; `residual` is the stream that the attention's output is added to."""

    @property
    def by_channel(self) -> bool:
        return self.config.prepost

    def open(self, memory: Ways, embedding: Tensor | None) -> None:
        super().open(memory, embedding)
        self.roles: dict[str, Tensor] = {}
        self.outputs = [self._source(self.stream, memory.stream, 0)]

    def write(self, step: Step) -> None:
        super().write(step)
        self.roles = {}
        if step.site % 2 == 0:
            return
        layer, newest = step.site // 2, step.memory.stream + step.output.to(step.memory.stream.dtype)
        connection = self.residual.layers[str(layer)]
        assert isinstance(connection, Connection)
        weights = connection(newest).movedim((-2, -1), (0, 1))[..., None]  # [K, S, ..., 1]
        self.outputs.append(self._source(self.stream, newest, layer + 1))
        ways = [mixed(self.outputs, of_way) for of_way in weights]
        if self.config.prepost:
            sources = (*step.memory.outputs, rms(newest, MUDD_EPS) * self.residual.pre_gains[str(layer + 1)])
            gains = self.residual.post_gains[str(layer)]
            sums = (torch.stack([weight * x for weight, x in zip(of_way, sources, strict=True)]).sum(0) for of_way in weights)
            scales = (inverse_rms(total, MUDD_EPS) * gain for total, gain in zip(sums, gains, strict=True))
            ways = [self.stream + scale[..., None] * way for scale, way in zip(scales, ways, strict=True)]
        self.stream = ways[-1]
        if len(ways) > 1:
            self.roles = dict(zip(("query", "key", "value", "residual"), ways, strict=True))

    def rows(self, memory: Ways, site: int) -> dict[str, Row]:
        return {role: Row(way) for role, way in (self.roles or {"shared": self.stream}).items()}

    def _source(self, made_of: Tensor, output: Tensor, number: int) -> Tensor:
        if not self.config.prepost:
            return made_of
        scale: Tensor = inverse_rms(output, MUDD_EPS) * self.residual.pre_gains[str(number)]
        return scale[..., None] * made_of


class StreamsMixed(Composition[Any, SeveralStreams]):
    """Hyper-Connections and mHC: the products of the tokens' own mixing matrices (Attention Residuals, Eq. 10)."""

    def present(self, memory: Streams) -> Tensor:
        return memory.streams[..., 0, :]

    def open(self, memory: Streams, embedding: Tensor | None) -> None:
        self.streams = self.unit(0).expand(self.residual.streams, -1)  # [..., n, N]

    def write(self, step: Step) -> None:
        coefficients = step.memory.coefficients.to(self.streams.dtype)
        mix, share = coefficients[..., 1:-1].transpose(-1, -2), coefficients[..., -1:]
        self.streams = mix @ self.streams + share * self.unit(step.site + 1)

    def rows(self, memory: Streams, site: int) -> dict[str, Row]:
        if memory.coefficients is None:
            return {"shared": Row(self.residual.plain(self.streams)[..., None, :])}
        return {"shared": Row(memory.coefficients[..., 0][..., None, :].to(self.streams.dtype) @ self.streams)}


class LinearDepthRead(Composition[LinearDepthConfig, LinearDepth]):
    """Every output has the weight 1 + w . k of its own key, whatever the streams are that carry it."""

    def present(self, memory: Tensor) -> Tensor:
        return memory[..., 0, :]

    def open(self, memory: Tensor, embedding: Tensor | None) -> None:
        self.keys = [self._key(memory[..., 0, :])]

    def write(self, step: Step) -> None:
        self.keys.append(self._key(step.output.to(step.memory.dtype)))

    def rows(self, memory: Tensor, site: int) -> dict[str, Row]:
        if site == 0:
            return {"shared": Row(self.unit(0))}
        query = self.residual.sites[str(site)].query
        assert isinstance(query, Tensor)
        weights = torch.stack([1 + (key * query).sum(-1, keepdim=True) for key in self.keys])
        return {"shared": Row(mixed([self.unit(column) for column in range(len(self.keys))], weights))}

    def _key(self, source: Tensor) -> Tensor:
        return rms(source[..., -self.config.rank :], self.config.eps)
