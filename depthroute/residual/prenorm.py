"""The plain residual stream of a PreNorm Transformer: every earlier output with weight one (Low-Rank AttnRes, Eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthroute.residual.method import Method
from depthroute.residual.protocol import NO_TRACE, Body, ResidualConfig, Trace
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
