"""Depth-wise linear attention: routing with a memory that does not grow with depth (named as open by Attention Residuals; this form is
ours).

Softmax weights exp(w . k_i) are replaced by their first order, 1 + w . k_i, without a normaliser: the norm behind the read takes the
scale away. Then

    h = sum_i (1 + w . k_i) s_i = H_0 + sum_j w_j H_j,   H_0 = sum_i s_i,   H_j = sum_i k_ij s_i,

so what is carried are r + 1 streams, the plain one and r more that are written with key coordinates, whatever the number of sources. The
key k_i is what Low-Rank AttnRes takes: the last r coordinates of a source divided by their RMS.

Shapes: r key rank, ... leading dimensions, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.residual.hyper import of_streams
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.norm import normalised
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Inputs, Norm, Residual, ResidualConfig, Trace
from depthroute.residual.stream import rms


@dataclass(frozen=True, kw_only=True)
class LinearDepthConfig(ResidualConfig):
    """`rank`: r. `eps`: added to the keys' mean square under the root."""

    name: ClassVar[str] = "linear_depth"

    rank: int = 4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RequestError(f"residual.rank = {self.rank} is not allowed; it takes 1 or more.")
        if not self.eps > 0:
            raise RequestError(f"residual.eps = {self.eps} is not allowed; it must be positive.")

    def module(self, body: Body) -> LinearDepth:
        if self.rank > body.width:
            raise RequestError(f"residual.rank = {self.rank} is larger than the width {body.width}; it takes 1 to {body.width}.")
        return LinearDepth(self, body)


class Route(nn.Module):
    """w [r] of a site, zero at first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(rank))

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.zero_()


class LinearDepth(Residual):
    """The memory is one tensor [..., r + 1, D]. The first site reads the embedding."""

    def __init__(self, config: LinearDepthConfig, body: Body) -> None:
        super().__init__(body)
        self.config = config
        self.sites = nn.ModuleDict({str(site): Route(config.rank) for site in range(1, body.sublayers + 1)})

    def open(self, embedding: Tensor) -> Tensor:
        return (self._features(embedding)[..., None] * embedding[..., None, :]).to(embedding.dtype)

    def read(self, memory: Tensor, site: int, norm: Norm | None = None) -> Inputs:
        if site == 0:
            return normalised(memory[..., 0, :], norm)
        query = self.sites[str(site)].query
        assert isinstance(query, Tensor)
        return normalised(of_streams(torch.cat((torch.ones_like(query[:1]), query)), memory), norm)

    def write(self, memory: Tensor, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        output = output.to(memory.dtype)
        features = self._features(output)
        return torch.addcmul(memory.to(features.dtype), features[..., None], output[..., None, :]).to(memory.dtype)

    def _features(self, source: Tensor) -> Tensor:
        """(1, k), [..., r + 1]."""
        key = rms(source[..., -self.config.rank :], self.config.eps)
        return torch.cat((torch.ones_like(key[..., :1]), key), dim=-1)


METHODS = (
    Method(
        name="linear-depth",
        label="Linear depth attention",
        configure=lambda base: LinearDepthConfig(),
        equation="h = sum_i (1 + w . k_i) s_i, carried as r + 1 streams; k_i the last r coordinates of s_i",
        reads="r + 1 streams",
        dynamic=True,
        parameters="r a site",
        state="(r+1)d",
        cost="2(r+1)d",
        paper="ours; open in Kimi Team 2026",
        degenerate=(Degenerate(says="w = 0: PreNorm", config=LinearDepthConfig(), equals=PreNormConfig()),),
    ),
)
