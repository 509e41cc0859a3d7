"""The plain residual stream of a PreNorm Transformer: every earlier output with weight one (Low-Rank AttnRes, Eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from depthroute.ops import PreparedRead, can_prepare
from depthroute.residual.in_place import InPlace, SiteRead, Target
from depthroute.residual.method import Method
from depthroute.residual.norm import fusible
from depthroute.residual.protocol import NO_TRACE, Body, Norm, ResidualConfig, Routing, Trace
from depthroute.residual.stream import Stream, added


@dataclass(frozen=True, kw_only=True)
class PreNormConfig(ResidualConfig):
    """h_t = o_0 + sum of o_i for i < t. No parameters."""

    name: ClassVar[str] = "prenorm"

    def module(self, body: Body) -> PreNorm:
        return PreNorm(body)


class PreNorm(Stream):
    """The memory is the stream itself, one tensor [..., D]."""

    def write(self, memory: Tensor, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        return added(memory, output)

    def decoding(self, embedding: Tensor) -> Routing:
        return StreamInPlace(self, embedding) if can_prepare(embedding) else self


class StreamInPlace(InPlace):
    """The stream in one row. A read with its norm is a depth read of one source."""

    def __init__(self, residual: PreNorm, embedding: Tensor) -> None:
        super().__init__(residual)
        self._stream, self._into = (torch.empty_like(embedding, memory_format=torch.contiguous_format) for _ in range(2))

    @property
    def entry(self) -> Tensor:
        return self._stream

    @property
    def bytes(self) -> int:
        return 2 * self._stream.numel() * self._stream.element_size()

    def prepare(self, site: int, norm: Norm | None) -> SiteRead:
        fused = fusible(norm, self.residual.body.width)
        gain, eps = (None, 1.0) if fused is None or fused.eps is None else (fused.weight, fused.eps)
        read = PreparedRead([self._stream], self._stream.new_zeros(1, 1), output_gain=gain, output_eps=eps, into=[self._into])
        return SiteRead(read, self._into, norm if gain is None else None)

    def target(self, site: int) -> Target:
        return Target(self._stream, adds=True)


METHODS = (
    Method(
        name="prenorm",
        label="PreNorm",
        configure=lambda base: PreNormConfig(),
        equation="h = h + f(N h)",
        reads="the sum of everything so far",
        dynamic=False,
        parameters="0",
        state="d",
        cost="0",
        paper="Xiong et al. 2020",
    ),
)
