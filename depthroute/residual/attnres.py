"""Attention Residuals: softmax attention over depth in place of the residual sum.

One module for the whole family, because its members are choices of the same read: Full and Block (Attention Residuals, Eqs. 1-6), its
ablations (Table 4), low-rank keys with slice or full-width RMS (Low-Rank AttnRes, Eqs. 8-13), projected keys (Eqs. 25-27), separate
routes for query-key and value (Role-Decoupled AttnRes, Eqs. 3-5) and the three controls of that paper. They combine freely. Their rows in
the table of methods are in attnres_methods.py.

Shapes: ... leading dimensions, D width, S sources, R key rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.ops import DepthRead, depth_attention, hold
from depthroute.residual.attnres_decoding import AttnResInPlace
from depthroute.residual.bank import Bank, BankConfig, SourceBank
from depthroute.residual.norm import fusible, normalised
from depthroute.residual.protocol import NO_TRACE, Body, Inputs, Norm, RoleInputs, Routing, Trace
from depthroute.residual.stream import rms

READ_AHEAD_FROM = 3  # closed sources: fewer are read again at every site faster than they are merged there

Roles = Literal["shared", "decoupled", "separate", "tied", "average", "frozen_value"]


@dataclass(frozen=True, kw_only=True)
class AttnResConfig(BankConfig):
    """Attention Residuals, its low-rank and role-decoupled refinements, and its ablations.

    `rank`: how many coordinates the keys have; None is the width. `keys`: "slice" takes the last `rank` coordinates of a source,
    "projected" learns a projection beside every output projection. `key_norm`: "slice" or "full", the RMS a sliced key is divided by, or
    "none". `key_gain`: whether a site's key norm has a learned gain (Attention Residuals and the role-decoupled paper: yes; low-rank:
    no).

    `heads`: groups of channels that are mixed apart (Multi-Head Attention Residuals). `weighting`: "softmax", or "sigmoid" of every score
    by itself. `scaled`: divide scores by sqrt(R). `values`: "raw" sources, or "normed", divided by their RMS (the inkling2 models).
    `count_prior`: beta, by which the logarithm of the number of outputs in a source is multiplied and added to its score; None is no
    prior. `learned_count_prior`: a beta a site that starts there.

    `roles`: "shared", one route for query, key and value; "decoupled", a second one for the value; "separate", one each; and the controls
    "tied" (both roles read by the same route), "average" (two routes, their mixtures averaged) and "frozen_value" (the value's query stays
    zero).

    `first_read`: give the first site parameters although it can only read the embedding, as the role-decoupled paper counts them. They
    change nothing and their gradient is zero.

    `sum_reads`: multiply every read by the number of its sources. With zero queries it is then their sum, the plain residual stream itself,
    where it is otherwise their mean, on which the epsilon of the norm behind it weighs more: a network that was trained without routing is
    the same function with it, to the last bits (`depthroute adopt`).

    `phases`: read the closed sources once for all sites of the open block, where there are three or more, and merge the open partial sum at
    each site (Attention Residuals, Algorithm 1). It changes speed, memory and rounding, nothing else.
    """

    name: ClassVar[str] = "attnres"

    rank: int | None = None
    keys: Literal["slice", "projected"] = "slice"
    key_norm: Literal["slice", "full", "none"] = "slice"
    key_gain: bool = True
    heads: int = 1
    weighting: Literal["softmax", "sigmoid"] = "softmax"
    scaled: bool = False
    values: Literal["raw", "normed"] = "raw"
    count_prior: float | None = None
    learned_count_prior: bool = False
    roles: Roles = "shared"
    first_read: bool = False
    sum_reads: bool = False
    phases: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.rank < 1:
            raise RequestError(f"residual.rank = {self.rank} is not allowed; it takes 1 or more, or none for the width.")
        if self.keys == "projected" and self.rank is None:
            raise RequestError("residual.keys = 'projected' needs residual.rank, the width of the projected keys.")
        if self.keys == "projected" and self.key_norm == "full":
            raise RequestError("residual.key_norm = 'full' is for sliced keys; projected keys are divided by their own RMS.")
        if self.heads < 1:
            raise RequestError(f"residual.heads = {self.heads} is not allowed; it takes 1 or more.")
        if self.learned_count_prior and self.count_prior is None:
            raise RequestError("residual.learned_count_prior needs residual.count_prior, the value that it starts from.")

    def module(self, body: Body) -> AttnRes:
        return AttnRes(self, body)


class Ahead(NamedTuple):
    """Phase 1 of a site: its queries [1 to 3, R], gain folded in, and what they read from the closed sources."""

    queries: Tensor
    reads: tuple[DepthRead, ...]


class Site(nn.Module):
    """The parameters of one read: route queries, the key norm's gain and the count prior's strength, where there are such."""

    counts: Tensor

    def __init__(self, config: AttnResConfig, rank: int, roles: bool, counts: tuple[int, ...]) -> None:
        """`roles`: attention reads by role here. `counts`: how many outputs each source is made of."""
        super().__init__()
        even = len(set(counts)) == 1  # then a count prior moves nothing
        if config.count_prior is not None:
            self.register_buffer("counts", torch.tensor(counts, dtype=torch.float32), persistent=False)  # whole: no dtype loses them
        self.prior, self._outputs = config.count_prior, counts
        separate, gain = roles and config.roles == "separate", config.key_gain
        self.query = nn.Parameter(torch.zeros(rank))
        self.key_query = nn.Parameter(torch.zeros(rank)) if separate else None
        self.value_query = nn.Parameter(torch.zeros(rank)) if separate or (roles and config.roles in ("decoupled", "average")) else None
        self.key_gain = nn.Parameter(torch.ones(rank)) if gain else None
        self.count_prior = nn.Parameter(torch.zeros(1)) if config.learned_count_prior and not even else None

    def reset_buffers(self) -> None:
        """Fill the counts, in place: for a module that was made without memory."""
        if self.prior is not None and not self.counts.is_meta:
            self.counts.copy_(torch.tensor(self._outputs))

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        """Queries zero, so that training starts from the mean of the sources; gains one."""
        parameter.fill_({"key_gain": 1.0, "count_prior": self.prior or 0.0}.get(name, 0.0))


class KeyProjection(nn.Linear):
    """A projected key: [..., activation width] to [..., R]."""

    def __init__(self, activation: int, rank: int) -> None:
        super().__init__(activation, rank, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))  # a body in bfloat16 keeps what the method adds in float32

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.normal_(0.0, 0.02, generator=generator)


class AttnRes(SourceBank):
    """Sites are numbered like sub-layers; site 2L is the read before the head."""

    def __init__(self, config: AttnResConfig, body: Body) -> None:
        super().__init__(config, body)
        rank = body.width if config.rank is None else config.rank
        if rank > body.width:
            raise RequestError(f"residual.rank = {rank} is larger than the width {body.width}; it takes 1 to {body.width}.")
        if rank % config.heads or body.width % config.heads:
            raise RequestError(f"residual.heads = {config.heads} does not divide the width {body.width} and the key rank {rank}.")
        self.config = config
        self.rank = rank
        first = 0 if config.first_read else 1
        self.sites = nn.ModuleDict(
            {
                str(site): Site(config, rank, self._has_roles(site), self.counts(site))
                for site in range(first, body.sublayers + 1)
            }
        )
        self.embedding_key: KeyProjection | None = None
        self.key_projections = nn.ModuleDict()
        if config.keys == "projected":
            self.embedding_key = KeyProjection(body.width, rank)
            for site in range(body.sublayers):
                self.key_projections[str(site)] = KeyProjection(body.activation(site), rank)
        self.options: dict[str, Any] = {
            "key_norm": config.key_norm, "eps": config.eps, "heads": config.heads, "weighting": config.weighting
        }  # fmt: skip

    @property
    def looks_inside(self) -> bool:
        return super().looks_inside or self.embedding_key is not None  # projected keys are of the activation

    def _has_roles(self, site: int) -> bool:
        return self.config.roles != "shared" and site % 2 == 0 and site < self.body.sublayers

    def open(self, embedding: Tensor) -> Bank:
        bank = super().open(self._source(embedding))
        if self.embedding_key is None:
            return bank
        return bank._replace(closed_keys=(hold(self.embedding_key(embedding).to(embedding.dtype)),))

    def read(self, memory: Bank, site: int, norm: Norm | None = None) -> Inputs:
        times = self.times(memory)
        fused, options = self.norm_options(site, norm, times)
        reads = self._mixtures(memory, site, options)
        if not fused and times > 1:
            reads = tuple(read * times for read in reads)
        inputs = self.by_role(reads, site)
        return inputs if fused else normalised(inputs, norm)

    def norm_options(self, site: int, norm: Norm | None, times: int) -> tuple[bool, dict[str, Any]]:
        """Whether a read can apply the norm in its own pass, and how; what its input is multiplied by is then the norm's to take away."""
        average = self._has_roles(site) and self.config.roles == "average"  # the norm comes after the average of two reads
        fused = None if average else fusible(norm, self.body.width)
        if fused is None:
            return False, {}
        return True, {"output_gain": fused.weight, "output_eps": cast(float, fused.eps) / times**2}

    def by_role(self, reads: tuple[Tensor, ...], site: int) -> Inputs:
        """What the reads of a site's queries are for."""
        if not self._has_roles(site):
            return reads[0]
        if self.config.roles == "average":
            return (reads[0] + reads[1]) / 2 if len(reads) > 1 else reads[0]
        return RoleInputs(reads[0], reads[len(reads) // 3], reads[-1])

    def decoding(self, embedding: Tensor) -> Routing:
        return AttnResInPlace(self, embedding) if AttnResInPlace.serves(self, embedding) else self

    def write(self, memory: Bank, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Bank:
        """A site that merges what was prepared for it has used it up."""
        if memory.partial is not None:
            memory = memory._replace(ahead=memory.ahead[1:])
        return super().write(memory, site, output, trace)

    def hand_over(self, memory: Bank) -> Bank:
        return memory._replace(ahead=())

    def take_over(self, memory: Bank, site: int) -> Bank:
        return memory._replace(ahead=self._prepare(memory, site))

    def _key(self, site: int, trace: Trace) -> Tensor | None:
        if self.embedding_key is None:
            return None
        if trace.activation is None:
            raise RequestError("projected keys need write(..., Trace(activation=...)): what the sub-layer feeds its output projection.")
        key: Tensor = self.key_projections[str(site)](trace.activation)
        return key

    def _source(self, summary: Tensor) -> Tensor:
        return summary if self.config.values == "raw" else rms(summary, self.config.eps).to(summary.dtype)

    def _prepare(self, bank: Bank, start: int) -> tuple[Ahead, ...]:
        """Phase 1 of the block that holds sub-layer `start`, for its sites from there on that will have a partial sum to merge."""
        sites = self.sites_read_ahead(start, len(bank.closed))
        if not sites:
            return ()
        closed, keys = self.within(bank.closed, room_for=1), self.within(bank.closed_keys, room_for=1)
        queries, biases = self.queries_ahead(sites)
        softmax = self.config.weighting == "softmax"  # the reads of a sigmoid add up as they are
        found = depth_attention(closed, torch.cat(queries), keys=keys or None, bias=biases, return_statistics=softmax, **self.options)
        assert isinstance(found, tuple)
        reads = iter([read if isinstance(read, DepthRead) else DepthRead(cast(Tensor, read)) for read in found])
        return tuple(Ahead(of_site, tuple(islice(reads, len(of_site)))) for of_site in queries)

    def times(self, memory: Bank) -> int:
        """What a read is multiplied by."""
        return len(self.within(memory.sources())) if self.config.sum_reads else 1

    def sites_read_ahead(self, site: int, closed: int) -> range:
        """The sites from `site` on that will find its block open, with so many closed sources, and have these read for them together."""
        begins = site in (0, *self.ends)
        sites = self.sites_of_block(site)[1 if begins else 0 :]
        sites = range(sites.start, min(sites.stop, self.reads.stop))
        enough = len(self.within((None,) * closed, room_for=1)) >= READ_AHEAD_FROM
        return sites if self.config.phases and enough else sites[:0]

    def queries_ahead(self, sites: range) -> tuple[list[Tensor], Tensor | None]:
        """The queries of each of these sites, and the biases [M, S] of all of them for the closed sources."""
        queries = [self.route_queries(site) for site in sites]
        biases = [self.bias(site) for site, of_site in zip(sites, queries, strict=True) for _ in of_site]
        return queries, torch.stack([bias[:-1] for bias in biases if bias is not None]) if biases[0] is not None else None

    def _mixtures(self, memory: Bank, site: int, options: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the site's queries read from all sources."""
        if self.lacks(site):  # one source, which any query returns as it is
            return (cast(Tensor, depth_attention(memory.closed, memory.closed[0].new_zeros(1), **options)),)
        options |= self.options
        bias = self.bias(site)
        if memory.ahead and memory.partial is not None:
            (queries, prior), key = memory.ahead[0], memory.partial_key
            bias = None if bias is None else bias[-1:]
            open_block, keys = self._source(memory.partial), None if key is None else (key,)
            mixed = depth_attention([open_block], queries, keys=keys, bias=bias, prior=prior, **options)
        else:
            keys = self.within(memory.keys() or ()) or None
            mixed = depth_attention(self.sources(memory), self.route_queries(site), keys=keys, bias=bias, **options)
        assert isinstance(mixed, tuple)
        return mixed

    def sources(self, memory: Bank) -> tuple[Tensor, ...]:
        if memory.partial is not None:
            memory = memory._replace(partial=self._source(memory.partial))
        return super().sources(memory)

    def source_weights(self, memory: Bank, site: int) -> dict[str, Tensor]:
        sources = self.sources(memory)
        if len(sources) == 1:
            return {}
        with torch.no_grad():
            reads = depth_attention(
                sources, self.route_queries(site), keys=self.within(memory.keys() or ()) or None, bias=self.bias(site), return_weights=True,
                **self.options,
            )  # fmt: skip
        weights = [read.weights for read in reads if isinstance(read, DepthRead) and read.weights is not None]
        names = {1: ("shared",), 2: ("query_key", "value"), 3: ("query", "key", "value")}[len(weights)]
        if self.config.heads == 1:
            return dict(zip(names, weights, strict=True))
        return {f"{name}, head {head}": of_head for name, read in zip(names, weights, strict=True) for head, of_head in enumerate(read)}

    def lacks(self, site: int) -> bool:
        """Whether the site has no parameters because it has one source only.

        Raises:
            RequestError: it has none because this module is that of other sites.
        """
        if str(site) in self.sites:
            return False
        if site == 0:
            return True
        raise RequestError(f"this module has no parameters for site {site}; it has those of {', '.join(self.sites) or 'none'}.")

    def _site(self, site: int) -> Site:
        parameters = self.sites[str(site)]
        assert isinstance(parameters, Site)
        return parameters

    def _queries(self, site: int) -> list[Tensor]:
        """The route queries of a site, [R] each: one, or one for each role in the order query, key, value."""
        parameters = self._site(site)
        found: list[Tensor] = [query for query in (parameters.query, parameters.key_query, parameters.value_query) if query is not None]
        if self.config.roles == "frozen_value" and self._has_roles(site):
            found.append(torch.zeros_like(parameters.query))
        return [query * self.rank**-0.5 for query in found] if self.config.scaled else found

    def route_queries(self, site: int) -> Tensor:
        """The queries of a site, [1 to 3, R], the key norm's gain folded in."""
        queries, gain = torch.stack(self._queries(site)), self._site(site).key_gain
        exact = torch.promote_types(queries.dtype, torch.float32)
        return queries.to(exact) if gain is None else queries.to(exact) * gain.to(exact)

    def bias(self, site: int) -> Tensor | None:
        """What the count prior adds to the scores at a site, [S]."""
        if self.config.count_prior is None:
            return None
        parameters = self._site(site)
        strength = self.config.count_prior if parameters.count_prior is None else parameters.count_prior
        return parameters.counts.to(parameters.query.dtype).log() * strength
