"""AttnRes with queries that depend on the token (Attention Residuals, Table 4), in two forms.

q = W r(x) with W zero at first. "latest": x is the newest source at the site, which the paper calls the current hidden state and does not
define further. "block": x is the newest closed source, so that all queries of a block are known when it opens: their products with the
closed sources are computed together, once a block, as for queries that do not depend on the token. The paper names that as open; this
form is ours.

Shapes: M sites, S sources, R key rank, ... leading dimensions, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.bank import Bank, BankConfig, SourceBank, with_blocks_of
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.norm import normalised
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import Body, Inputs, Norm
from depthroute.residual.stream import rms

INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class DynamicQueryConfig(BankConfig):
    """`query_from`: what a query is projected from, the "latest" source or the one that was newest when the "block" opened.

    `query_rank`: W = U V with V of this many rows; None is a full matrix, 9 % more parameters in shape S. `rank`: how many of the last
    coordinates of a source are its key; None is the width.
    """

    name: ClassVar[str] = "dynamic_query"

    query_from: Literal["latest", "block"] = "latest"
    query_rank: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("query_rank", "rank"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise RequestError(f"residual.{field} = {value} is not allowed; it takes 1 or more, or none for the width.")

    def module(self, body: Body) -> DynamicQuery:
        for field in ("query_rank", "rank"):
            value = getattr(self, field)
            if value is not None and value > body.width:
                raise RequestError(f"residual.{field} = {value} is larger than the width {body.width}; it takes 1 to {body.width}.")
        return DynamicQuery(self, body)


class QueryMap(nn.Module):
    """W [R, D], or U [R, k] V [k, D]; zero at first, so that training starts from the mean of the sources."""

    no_decay = frozenset({"weight", "up", "down"})

    def __init__(self, width: int, rank: int, query_rank: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rank, width)) if query_rank is None else None
        self.down = nn.Parameter(torch.zeros(query_rank, width)) if query_rank is not None else None
        self.up = nn.Parameter(torch.zeros(rank, query_rank)) if query_rank is not None else None

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.zero_()
        if name == "down":
            parameter.normal_(0.0, INITIAL_STD, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Queries [..., R] from normalised rows [..., D]."""
        if self.weight is not None:
            query = F.linear(x, self.weight)
        else:
            assert self.down is not None and self.up is not None
            query = F.linear(F.linear(x, self.down), self.up)
        return query.to(x.dtype)  # the product may be bfloat16 under autocast; what is done with it is not


class Prepared(NamedTuple):
    """What a site of an open block has of the closed sources: its query [..., R] and its scores [S, ...]."""

    query: Tensor
    scores: Tensor


class DynamicQuery(SourceBank):
    """One query a token and site, softmax over the sources' scores."""

    def __init__(self, config: DynamicQueryConfig, body: Body) -> None:
        super().__init__(config, body)
        self.config = config
        self.rank = config.rank or body.width
        self.sites = nn.ModuleDict({str(site): QueryMap(body.width, self.rank, config.query_rank) for site in range(1, body.sublayers + 1)})

    def open(self, embedding: Tensor) -> Bank:
        bank = super().open(embedding)
        return bank._replace(ahead=self._prepare(bank, 0))

    def read(self, memory: Bank, site: int, norm: Norm | None = None) -> Inputs:
        if site == 0:
            return normalised(memory.closed[0], norm)
        return normalised(weighted_sum(self.sources(memory), self._weights(memory, site)), norm)

    def source_weights(self, memory: Bank, site: int) -> dict[str, Tensor]:
        if site == 0:
            return {}
        with torch.no_grad():
            return {"shared": self._weights(memory, site)}

    def _weights(self, memory: Bank, site: int) -> Tensor:
        if self.config.query_from == "latest":
            sources = self.sources(memory)
            scores = self._scores(self.sites[str(site)](rms(sources[-1], self.config.eps)), sources)
        else:
            start = max(start for start in (0, *self.ends) if start <= site)
            query, scores = memory.ahead[site - max(start, 1)]
            if memory.partial is not None:
                if len(self.sources(memory)) < len(memory.sources()):  # the oldest beside the embedding left the window
                    scores = torch.cat((scores[:1], scores[2:]))
                scores = torch.cat((scores, self._scores(query, (memory.partial,))))
        return torch.softmax(scores, dim=0)

    def _prepare(self, bank: Bank, start: int) -> tuple[Prepared, ...]:
        """Queries of the block that begins at sub-layer `start`, and what they score with the closed sources: a matrix product each."""
        if self.config.query_from == "latest":
            return ()
        sites = [site for site in self.sites_of_block(start) if site > 0]
        if not sites:
            return ()
        newest = rms(bank.closed[-1], self.config.eps)
        queries = torch.stack([self.sites[str(site)](newest) for site in sites], dim=-2)  # [..., M, R]
        with torch.autocast(newest.device.type, enabled=False):
            scores = torch.stack([(queries @ self._key_of(source)[..., None]).squeeze(-1) for source in bank.closed])  # [S, ..., M]
        return tuple(Prepared(queries[..., m, :], scores[..., m]) for m in range(len(sites)))

    def _scores(self, query: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        """q . r(k) of every source, [S, ...]."""
        return torch.stack([(query * self._key_of(source)).sum(-1) for source in sources])

    def _key_of(self, source: Tensor) -> Tensor:
        return rms(source[..., -self.rank :], self.config.eps)


def _row(name: str, label: str, config: DynamicQueryConfig, equation: str, paper: str) -> Method:
    return Method(
        name=name,
        label=label,
        configure=lambda base: with_blocks_of(base, config),
        size="block",
        equation=equation,
        reads="the embedding and every output" if not config.has_blocks else "the embedding, block sums and the open partial sum",
        dynamic=True,
        parameters="2Ld^2, or 4Lkd with query_rank = k",
        state="(2L+1)d" if not config.has_blocks else "(N+1)d, and up to Sd of queries",
        cost="d^2 + 2Kd",
        paper=paper,
        degenerate=(Degenerate(says="initial values (W = 0): PreNorm", config=config, equals=PreNormConfig()),),
    )


METHODS = (
    _row(
        "dynamic-query", "AttnRes, query of the token", DynamicQueryConfig(), "h = sum_i softmax_i(W r(s_newest) . r(s_i)) s_i",
        "Kimi Team 2026, Table 4",
    ),
    _row(
        "block-query", "Block AttnRes, query of the block", DynamicQueryConfig(block=4, query_from="block"),
        "h = sum_i softmax_i(W r(s_n) . r(s_i)) s_i, s_n the newest closed source: all queries of a block at once",
        "ours; open in Kimi Team 2026",
    ),
)  # fmt: skip
