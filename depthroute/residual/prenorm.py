"""The plain residual stream of a PreNorm Transformer: every earlier output with weight one (Low-Rank AttnRes, Eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthroute.residual.norm import normalised
from depthroute.residual.protocol import Body, Inputs, Norm, Residual, ResidualConfig


@dataclass(frozen=True, kw_only=True)
class PreNormConfig(ResidualConfig):
    """h_t = o_0 + sum of o_i for i < t. No parameters."""

    name: ClassVar[str] = "prenorm"

    def build(self, body: Body) -> PreNorm:
        return PreNorm(body)


class PreNorm(Residual):
    """The memory is the stream itself, one tensor [..., D]."""

    def open(self, embedding: Tensor) -> Tensor:
        return embedding

    def read(self, memory: Tensor, site: int, norm: Norm | None = None) -> Inputs:
        return normalised(memory, norm)

    def write(self, memory: Tensor, site: int, output: Tensor, activation: Tensor | None = None) -> Tensor:
        return memory + output.to(memory.dtype)
