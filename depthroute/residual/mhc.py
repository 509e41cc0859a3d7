"""mHC: Hyper-Connections whose stream mixing is doubly stochastic (DeepSeek-AI 2025, arXiv 2512.24880, Eqs. 5-9).

From the n streams of a token, flattened and divided by their RMS, a linear map gives n read weights (a sigmoid), n write weights (twice a
sigmoid) and n x n mixing logits, which Sinkhorn iterations make doubly stochastic. The paper gives the scales (0.01), n (4) and the
iterations (20), but not how the map and its biases start. Here the map is normal with standard deviation 0.02, which keeps streams from
staying equal, and the biases are zero.

Shapes: n streams, ... leading dimensions, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.residual.hyper import SeveralStreams, normalised_linear
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import Body, Residual, ResidualConfig

INITIAL_SCALE = 0.01
INITIAL_STD = 0.02

Numerics = Literal["paper", "released"]


@dataclass(frozen=True, kw_only=True)
class MHCConfig(ResidualConfig):
    """`streams`: n. `iterations`: of Sinkhorn.

    `numerics`: "paper" starts from exp(logits) and divides columns, then rows; "released" is what DeepSeek's code does: a row softmax
    plus eps, columns, then rows and columns in turn, eps in every division and on the read weights, and the mixing matrix transposed.
    `head`: "hyper" reads the streams out with a gate of its own, as the released models do; "mean" takes their mean. `diagonal`: where
    the diagonal of the mixing logits starts. At 0 all streams are averaged at every site, as in most public code; a large value keeps
    them apart.
    """

    name: ClassVar[str] = "mhc"

    streams: int = 4
    iterations: int = 20
    numerics: Numerics = "paper"
    head: Literal["hyper", "mean"] = "hyper"
    diagonal: float = 0.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for field in ("streams", "iterations"):
            if getattr(self, field) < 1:
                raise RequestError(f"residual.{field} = {getattr(self, field)} is not allowed; it takes 1 or more.")
        if not self.eps > 0:
            raise RequestError(f"residual.eps = {self.eps} is not allowed; it must be positive.")

    def module(self, body: Body) -> ManifoldConnections:
        return ManifoldConnections(self, body)


class Map(nn.Module):
    """scale * (r(vec H) W) + bias, for `numbers` outputs in groups with a scale each: [..., n, D] to [..., numbers], in at least
    float32."""

    no_decay = frozenset({"bias", "scale"})

    def __init__(self, inputs: int, groups: tuple[int, ...], eps: float, diagonal: float = 0.0) -> None:
        super().__init__()
        self.groups, self.eps, self.diagonal = groups, eps, diagonal
        self.projection = nn.Parameter(torch.empty(inputs, sum(groups)))
        self.bias = nn.Parameter(torch.empty(sum(groups)))
        self.scale = nn.Parameter(torch.empty(len(groups)))

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        if name == "projection":
            parameter.normal_(0.0, INITIAL_STD, generator=generator)
        elif name == "scale":
            parameter.fill_(INITIAL_SCALE)
        else:
            parameter.zero_()
            if self.diagonal:
                n = self.groups[0]
                parameter[2 * n :].view(n, n).fill_diagonal_(self.diagonal)

    def forward(self, streams: Tensor) -> Tensor:
        found = normalised_linear(streams.flatten(-2), self.projection, self.eps)
        scales = torch.cat([scale.expand(size) for scale, size in zip(self.scale, self.groups, strict=True)])
        return torch.addcmul(self.bias.to(found.dtype), found, scales.to(found.dtype))


class ManifoldConnections(SeveralStreams):
    """The output is a gated sum of the streams, or their mean."""

    def __init__(self, config: MHCConfig, body: Body) -> None:
        super().__init__(config.streams, body)
        n = config.streams
        self.config = config
        self.sites = nn.ModuleDict(
            {str(site): Map(n * body.width, (n, n, n * n), config.eps, config.diagonal) for site in range(body.sublayers)}
        )
        self.head = Map(n * body.width, (n,), config.eps) if config.head == "hyper" else None

    def coefficients(self, streams: Tensor, site: int) -> Tensor | None:
        n, released = self.config.streams, self.config.numerics == "released"
        if site == self.body.sublayers:
            return None if self.head is None else torch.sigmoid(self.head(streams))[..., None] + self.config.eps
        read, write, logits = self.sites[str(site)](streams).split((n, n, n * n), dim=-1)
        read = torch.sigmoid(read) + self.config.eps if released else torch.sigmoid(read)
        mix = sinkhorn(logits.reshape(*logits.shape[:-1], n, n), self.config.iterations, self.config.eps, self.config.numerics)
        if not released:  # the paper's matrix acts on the streams, the released one's transpose does
            mix = mix.transpose(-1, -2)
        return torch.cat((read[..., None], mix, 2 * torch.sigmoid(write)[..., None]), dim=-1)

    def plain(self, streams: Tensor) -> Tensor:
        return streams.mean(-2)


def sinkhorn(logits: Tensor, iterations: int, eps: float, numerics: Numerics) -> Tensor:
    """A doubly stochastic matrix from logits [..., n, n], by dividing columns and rows by their sums in turn (mHC, Eq. 9).

    The matrix axes come first while it runs: sums over n = 4 adjacent numbers would be slow.
    """
    x = logits.movedim((-2, -1), (0, 1)).contiguous()
    if numerics == "paper":
        # The largest is a common factor, which the first division removes. What is 1e-26 of it is kept there: a column of zeros has no sum.
        x = torch.exp((x - x.amax((0, 1))).clamp_min(-60.0))
        for _ in range(iterations):
            x = x / x.sum(0, keepdim=True)
            x = x / x.sum(1, keepdim=True)
    else:
        x = x.softmax(1) + eps
        x = x / (x.sum(0, keepdim=True) + eps)
        for _ in range(iterations - 1):
            x = x / (x.sum(1, keepdim=True) + eps)
            x = x / (x.sum(0, keepdim=True) + eps)
    return x.movedim((0, 1), (-2, -1))


def _static(residual: Residual) -> None:
    """No dependence on the token, and a mixing matrix that is not the mean."""
    assert isinstance(residual, ManifoldConnections)
    for parameters in residual.sites.values():
        parameters.scale.zero_()  # type: ignore[operator]
        bias = parameters.bias
        assert isinstance(bias, Tensor)
        logits = bias[2 * residual.config.streams :]
        logits.copy_(2 * torch.sin(torch.arange(1, len(logits) + 1, dtype=bias.dtype)))
    if residual.head is not None:
        residual.head.scale.zero_()


def _row(name: str, label: str, config: MHCConfig, equation: str) -> Method:
    case = replace(config, eps=1e-30)
    return Method(
        name=name,
        label=label,
        configure=lambda base: config,
        size="streams",
        equation=equation,
        reads="n streams",
        dynamic=True,
        parameters="2L(nd(n^2+2n) + n^2+2n+3) + n(nd+1)+1",
        state="nd",
        cost="nd(n^2+2n) + (n^2+2n)d",
        paper="DeepSeek-AI 2025, Eqs. 5-9",
        degenerate=(Degenerate(says="scales zero, write biases zero: PreNorm", config=case, adjust=_static, equals=PreNormConfig()),),
    )


METHODS = (
    _row(
        "mhc", "mHC", MHCConfig(),
        "h = p H; H = S H + 2 w f(N h); p and w sigmoids, S Sinkhorn, each of a r(vec H) W + b",
    ),
    _row(
        "mhc-released", "mHC, released numerics", MHCConfig(numerics="released"),
        "as mhc; S from a row softmax with eps in every division, transposed; p + eps",
    ),
)  # fmt: skip
