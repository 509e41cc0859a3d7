"""Hyper-Connections: n residual streams that every sub-layer reads, mixes and writes (Zhu et al. 2024).

At a site: h = A_m^T H is read, H = A_r^T H + B y is written, for streams H [n, D] and the sub-layer's output y. Static coefficients are
parameters; dynamic ones add s tanh(N(H) W) (Eqs. 11-13). The output is the sum of the streams.

Shapes: n streams, ... leading dimensions, D width.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.norm import normalised
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Adaptation, Body, Inputs, Norm, Residual, ResidualConfig, Trace
from depthroute.residual.stream import exact_linear

EPS = 1e-6
INITIAL_SCALE = 0.01


@dataclass(frozen=True, kw_only=True)
class HyperConnectionsConfig(ResidualConfig):
    """`streams`: n; the paper takes 4, and finds 1 worse than a plain stream. `dynamic`: coefficients that depend on the token.

    `tanh`: bound their dynamic part. `norm_gain`: a learned gain in its norm, which the paper's counts do not have. `scale_outputs`:
    start output projections with sqrt(n) times the standard deviation, as the paper's section 4 does so that the sum of streams keeps
    its.
    """

    name: ClassVar[str] = "hc"

    streams: int = 4
    dynamic: bool = True
    tanh: bool = True
    norm_gain: bool = False
    scale_outputs: bool = False

    def __post_init__(self) -> None:
        if not self.dynamic and (self.norm_gain or not self.tanh):
            raise RequestError("residual.tanh and residual.norm_gain belong to the dynamic part; leave them out without it.")
        if self.streams < 1:
            raise RequestError(f"residual.streams = {self.streams} is not allowed; it takes 1 or more.")

    def module(self, body: Body) -> HyperConnections:
        return HyperConnections(self, body)

    def adaptation(self, body: Body) -> Adaptation:
        return Adaptation(initial_scale=dict.fromkeys(("output", "down"), self.streams**0.5)) if self.scale_outputs else Adaptation()


class Coefficients(nn.Module):
    """A_m, A_r and B of a site as one [..., n, n + 2]: what a stream gives to the read, to each stream, and gets of the output."""

    no_decay = frozenset({"read", "mix", "write"})
    decayed = frozenset({"dynamic_read", "dynamic_write"})  # columns of the authors' map, whose middle is the matrix

    def __init__(self, config: HyperConnectionsConfig, width: int, site: int) -> None:
        super().__init__()
        n = config.streams
        self.config, self.first = config, site % n
        self.read = nn.Parameter(torch.zeros(n))
        self.mix = nn.Parameter(torch.zeros(n, n))
        self.write = nn.Parameter(torch.zeros(n))
        if config.dynamic:
            self.dynamic_read = nn.Parameter(torch.zeros(width))
            self.dynamic_mix = nn.Parameter(torch.zeros(width, n))
            self.dynamic_write = nn.Parameter(torch.zeros(width))
            self.read_scale = nn.Parameter(torch.zeros(1))
            self.write_scale = nn.Parameter(torch.zeros(1))
        self.norm_gain = nn.Parameter(torch.ones(width)) if config.dynamic and config.norm_gain else None

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        """Read one stream, in turn; keep every stream; write to all of them: the plain residual stream."""
        parameter.zero_()
        if name == "read":
            parameter[self.first] = 1.0
        elif name == "mix":
            parameter.fill_diagonal_(1.0)
        elif name in ("write", "norm_gain"):
            parameter.fill_(1.0)
        elif name.endswith("scale"):
            parameter.fill_(INITIAL_SCALE)

    def forward(self, streams: Tensor) -> Tensor:
        """[..., n, D] to [..., n, n + 2], or [n, n + 2] if static; in at least float32."""
        static = torch.cat((self.read[:, None], self.mix, self.write[:, None]), dim=1)
        if not self.config.dynamic:
            return static
        maps = torch.cat((self.dynamic_read[:, None], self.dynamic_mix, self.dynamic_write[:, None]), dim=1)
        if self.norm_gain is not None:
            maps = maps * self.norm_gain[:, None]
        dynamic = normalised_linear(streams, maps, EPS)
        if self.config.tanh:
            dynamic = torch.tanh(dynamic)
        scales = torch.cat((self.read_scale.expand(self.config.streams + 1), self.write_scale))
        return torch.addcmul(static, dynamic, scales)


class Streams(NamedTuple):
    """n streams [..., n, D] and the coefficients of the next site."""

    streams: Tensor
    coefficients: Tensor | None


class SeveralStreams(Residual):
    """n copies of the embedding that sub-layers read, mix and write. Coefficients of a site are computed once, when the one before has
    written."""

    def __init__(self, streams: int, body: Body) -> None:
        super().__init__(body)
        self.streams = streams

    @abc.abstractmethod
    def coefficients(self, streams: Tensor, site: int) -> Tensor | None:
        """[..., n, n + 2] before a sub-layer: what each stream gives to the read, to each stream, and gets of the output.

        Before the head [..., n, 1], or None for `plain`.
        """

    @abc.abstractmethod
    def plain(self, streams: Tensor) -> Tensor:
        """The read-out [..., D] without coefficients."""

    def open(self, embedding: Tensor) -> Streams:
        return self._before(embedding[..., None, :].expand(*embedding.shape[:-1], self.streams, -1), 0)

    def read(self, memory: Streams, site: int, norm: Norm | None = None) -> Inputs:
        if memory.coefficients is None:
            return normalised(self.plain(memory.streams), norm)
        return normalised(of_streams(memory.coefficients[..., 0], memory.streams), norm)

    def write(self, memory: Streams, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Streams:
        assert memory.coefficients is not None
        mix, share = memory.coefficients[..., 1:-1].transpose(-1, -2), memory.coefficients[..., -1]
        with torch.autocast(output.device.type, enabled=False):
            kept = mix @ memory.streams.to(mix.dtype)
            streams = torch.addcmul(kept, share[..., None], output.to(mix.dtype)[..., None, :])
        return self._before(streams.to(memory.streams.dtype), site + 1)

    def _before(self, streams: Tensor, site: int) -> Streams:
        return Streams(streams, self.coefficients(streams, site))


class HyperConnections(SeveralStreams):
    """The output is the sum of the streams."""

    def __init__(self, config: HyperConnectionsConfig, body: Body) -> None:
        super().__init__(config.streams, body)
        self.sites = nn.ModuleDict({str(site): Coefficients(config, body.width, site) for site in range(body.sublayers)})

    def coefficients(self, streams: Tensor, site: int) -> Tensor | None:
        return self.sites[str(site)](streams) if site < self.body.sublayers else None

    def plain(self, streams: Tensor) -> Tensor:
        return streams.sum(-2)


def normalised_linear(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """r(x) @ weight in at least float32; the root mean square is divided out behind the product."""
    exact = x if x.dtype == torch.float64 else x.float()
    return exact_linear(x, weight) * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)


def of_streams(weights: Tensor, streams: Tensor) -> Tensor:
    """sum_n weights[..., n] streams[..., n, :], [..., D] in the streams' dtype."""
    with torch.autocast(streams.device.type, enabled=False):
        return (weights[..., None, :] @ streams.to(weights.dtype)).squeeze(-2).to(streams.dtype)


def _row(name: str, label: str, config: HyperConnectionsConfig, equation: str, **facts: str) -> Method:
    return Method(
        name=name,
        label=label,
        configure=lambda base: config,
        size="streams",
        equation=equation,
        reads="n streams",
        dynamic=config.dynamic,
        state="nd",
        paper="Zhu et al. 2024, section 2",
        degenerate=(Degenerate(says="initial values: PreNorm", config=config, equals=PreNormConfig()),),
        **facts,
    )


METHODS = (
    _row(
        "hc-static", "Hyper-Connections, static", HyperConnectionsConfig(dynamic=False),
        "h = A_m^T H; H = A_r^T H + B f(N h); the sum of streams is read out", parameters="2Ln(n+2)", cost="n(n+2)d",
    ),
    _row(
        "hc", "Hyper-Connections", HyperConnectionsConfig(), "h = A_m^T H; H = A_r^T H + B f(N h), each coefficient plus s tanh(r(H) W)",
        parameters="2L(d(n+2) + n(n+2) + 2)", cost="2n(n+2)d",
    ),
)  # fmt: skip
