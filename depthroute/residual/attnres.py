"""Attention Residuals: softmax attention over depth in place of the residual sum.

One file for the whole family, because its members are choices of the same read: Full and Block (Attention Residuals, Eqs. 1-6),
low-rank keys with slice or full-width RMS (Low-Rank AttnRes, Eqs. 8-13), projected keys (Eqs. 25-27), separate routes for query-key and
value (Role-Decoupled AttnRes, Eqs. 3-5) and the three controls of that paper. Roles, ranks and blocks combine freely.

Shapes: ... leading dimensions, D width, S sources, R key rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.ops import DepthRead, depth_attention, hold
from depthroute.residual.norm import fusible, normalised
from depthroute.residual.protocol import Body, Inputs, Norm, Residual, ResidualConfig, RoleInputs
from depthroute.residual.schedule import block_ends

READ_AHEAD_FROM = 3  # closed sources: fewer are read again at every site faster than they are merged there
BLOCK_FIELDS = frozenset({"block", "layers_per_block", "num_blocks"})

Roles = Literal["shared", "decoupled", "tied", "average", "frozen_value"]


@dataclass(frozen=True, kw_only=True)
class AttnResConfig(ResidualConfig):
    """Attention Residuals and its low-rank and role-decoupled refinements.

    At most one of `block` (sub-layers a block), `layers_per_block` and `num_blocks` (ceil boundaries); none of them is Full AttnRes.

    `rank`: how many coordinates the keys have; None is the width. `keys`: "slice" takes the last `rank` coordinates of a source,
    "projected" learns a projection beside every output projection. `key_norm`: "slice" or "full", the RMS a sliced key is divided by.
    `key_gain`: whether a site's key norm has a learned gain (Attention Residuals and the role-decoupled paper: yes; low-rank: no).

    `roles`: "shared", one route for query, key and value; "decoupled", a second one for the value; and the controls "tied" (both roles
    read by the same route), "average" (two routes, their mixtures averaged) and "frozen_value" (the value route stays uniform).

    `first_read`: give the first site parameters although it can only read the embedding, as the role-decoupled paper counts them. They
    change nothing and their gradient is zero.

    `phases`: read the closed sources once for all sites of the open block, where there are three or more, and merge the open partial sum at
    each site (Attention Residuals, Algorithm 1). It changes speed, memory and rounding, nothing else.
    """

    name: ClassVar[str] = "attnres"

    block: int | None = None
    layers_per_block: int | None = None
    num_blocks: int | None = None
    rank: int | None = None
    keys: Literal["slice", "projected"] = "slice"
    key_norm: Literal["slice", "full"] = "slice"
    key_gain: bool = True
    roles: Roles = "shared"
    first_read: bool = False
    phases: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise RequestError(f"residual.rank = {self.rank} is not allowed; it takes 1 or more, or none for the width.")
        if self.keys == "projected" and self.rank is None:
            raise RequestError("residual.keys = 'projected' needs residual.rank, the width of the projected keys.")
        if self.keys == "projected" and self.key_norm == "full":
            raise RequestError("residual.key_norm = 'full' is for sliced keys; projected keys are divided by their own RMS.")
        if not self.eps > 0:
            raise RequestError(f"residual.eps = {self.eps} is not allowed; it must be positive.")

    @property
    def has_blocks(self) -> bool:
        """Block AttnRes, not Full."""
        return any(getattr(self, name) is not None for name in BLOCK_FIELDS)

    def build(self, body: Body) -> AttnRes:
        return AttnRes(self, body)


class Ahead(NamedTuple):
    """Phase 1 of a site: its queries [1 or 2, R], gain folded in, and what they read from the closed sources."""

    queries: Tensor
    reads: tuple[DepthRead, ...]


class Bank(NamedTuple):
    """The depth memory: closed sources (the embedding first) and the open block's partial sum, None when it is empty.

    `ahead` holds phase 1 for the sites of the open block that have yet to merge its partial sum, the next one first; it is empty where
    sites read everything by themselves.

    With projected keys each source has its key [..., R] beside it; the key of a block is the sum of its sub-layers' keys, since
    output and key come from one widened projection.
    """

    closed: tuple[Tensor, ...]
    partial: Tensor | None
    closed_keys: tuple[Tensor, ...]
    partial_key: Tensor | None
    ahead: tuple[Ahead, ...] = ()

    def sources(self) -> tuple[Tensor, ...]:
        return self.closed if self.partial is None else (*self.closed, self.partial)

    def keys(self) -> tuple[Tensor, ...] | None:
        keys = self.closed_keys if self.partial_key is None else (*self.closed_keys, self.partial_key)
        return keys or None


class Site(nn.Module):
    """The parameters of one read: a route query, one more for the value where roles are separate, and the key norm's gain."""

    def __init__(self, rank: int, value_query: bool, key_gain: bool) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(rank))
        self.value_query = nn.Parameter(torch.zeros(rank)) if value_query else None
        self.key_gain = nn.Parameter(torch.ones(rank)) if key_gain else None

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Queries zero, so that training starts from the mean of the sources; gains one."""
        parameter.fill_(1.0 if name == "key_gain" else 0.0)


class KeyProjection(nn.Linear):
    """A projected key: [..., activation width] to [..., R]."""

    def __init__(self, activation: int, rank: int) -> None:
        super().__init__(activation, rank, bias=False)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(0.0, 0.02, generator=generator)


class AttnRes(Residual):
    """Sites are numbered like sub-layers; site 2L is the read before the head."""

    def __init__(self, config: AttnResConfig, body: Body) -> None:
        super().__init__(body)
        rank = body.width if config.rank is None else config.rank
        if rank > body.width:
            raise RequestError(f"residual.rank = {rank} is larger than the width {body.width}; it takes 1 to {body.width}.")
        self.config = config
        self.rank = rank
        self.ends = block_ends(
            body.sublayers, block=config.block, layers_per_block=config.layers_per_block, num_blocks=config.num_blocks
        )
        self._block = dict(zip((0, *self.ends[:-1]), self.ends, strict=True))  # where a block begins: where it ends
        first = 0 if config.first_read else 1
        self.sites = nn.ModuleDict(
            {
                str(site): Site(rank, config.roles in ("decoupled", "average") and self._has_roles(site), config.key_gain)
                for site in range(first, body.sublayers + 1)
            }
        )
        self.embedding_key: KeyProjection | None = None
        self.key_projections = nn.ModuleDict()
        if config.keys == "projected":
            self.embedding_key = KeyProjection(body.width, rank)
            for site in range(body.sublayers):
                self.key_projections[str(site)] = KeyProjection(body.activation(site), rank)

    def _has_roles(self, site: int) -> bool:
        return self.config.roles != "shared" and site % 2 == 0 and site < self.body.sublayers

    def open(self, embedding: Tensor) -> Bank:
        keys = () if self.embedding_key is None else (hold(self.embedding_key(embedding).to(embedding.dtype)),)
        return Bank((hold(embedding),), None, keys, None)

    def read(self, memory: Bank, site: int, norm: Norm | None = None) -> Inputs:
        roles = self._has_roles(site)
        average = roles and self.config.roles == "average"  # the norm comes after the average of two reads
        fused = None if average else fusible(norm, self.body.width)
        options: dict[str, Any] = {} if fused is None else {"output_gain": fused.weight, "output_eps": fused.eps}
        if str(site) in self.sites:
            reads = self._mixtures(memory, site, options)
        else:  # the first read: one source, which any query returns as it is
            first = memory.closed[0]
            reads = (cast(Tensor, depth_attention([first], first.new_zeros(1), **options)),)
        mixed = (reads[0] + reads[1]) / 2 if len(reads) > 1 and average else reads[0]
        inputs = RoleInputs(mixed, mixed, reads[-1]) if roles and not average else mixed
        return inputs if fused is not None else normalised(inputs, norm)

    def write(self, memory: Bank, site: int, output: Tensor, activation: Tensor | None = None) -> Bank:
        dtype = memory.closed[0].dtype
        partial = output.to(dtype) if memory.partial is None else memory.partial + output.to(dtype)
        partial_key: Tensor | None = None
        if self.embedding_key is not None:
            if activation is None:
                raise RequestError("projected keys need write(..., activation): what the sub-layer feeds its output projection.")
            key = self.key_projections[str(site)](activation).to(dtype)
            partial_key = key if memory.partial_key is None else memory.partial_key + key
        if site + 1 not in self.ends:
            ahead = memory.ahead if memory.partial is None else memory.ahead[1:]
            return memory._replace(partial=partial, partial_key=partial_key, ahead=ahead)
        keys = () if partial_key is None else (*memory.closed_keys, hold(partial_key))
        bank = Bank((*memory.closed, hold(partial)), None, keys, None)
        return bank._replace(ahead=self._read_ahead(bank, site + 1)) if self.config.phases else bank

    def _read_ahead(self, memory: Bank, start: int) -> tuple[Ahead, ...]:
        """Phase 1 of the block that begins at sub-layer `start`, for the sites that will have a partial sum to merge."""
        sites = range(start + 1, self._block.get(start, start))
        if not sites or len(memory.closed) < READ_AHEAD_FROM:
            return ()
        queries = [query for site in sites for query in self._queries(site)]
        if self.config.key_gain:
            gains = [self._site(site).key_gain for site in sites for _ in self._queries(site)]
            folded = torch.stack(queries) * torch.stack([gain for gain in gains if gain is not None])
        else:
            folded = torch.stack(queries)
        found = depth_attention(
            memory.closed, folded, keys=memory.keys(), key_norm=self.config.key_norm, eps=self.config.eps, return_statistics=True
        )
        reads = iter(cast("tuple[DepthRead, ...]", found))
        numbers = [len(self._queries(site)) for site in sites]
        return tuple(
            Ahead(of_site, tuple(islice(reads, number))) for of_site, number in zip(torch.split(folded, numbers), numbers, strict=True)
        )

    def _mixtures(self, memory: Bank, site: int, options: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the site's one or two queries read from all sources."""
        options |= {"key_norm": self.config.key_norm, "eps": self.config.eps}
        if memory.ahead and memory.partial is not None:
            (queries, prior), key = memory.ahead[0], memory.partial_key
            mixed = depth_attention([memory.partial], queries, keys=None if key is None else [key], prior=prior, **options)
        else:
            gain = self._site(site).key_gain
            mixed = depth_attention(memory.sources(), torch.stack(self._queries(site)), keys=memory.keys(), key_gain=gain, **options)
        assert isinstance(mixed, tuple)
        return mixed

    def source_names(self, site: int) -> tuple[str, ...]:
        names = ["embedding"]
        start = 0
        for number, end in enumerate(self.ends, start=1):
            written = min(end, site) - start
            if written <= 0:
                break
            if end - start == 1:
                names.append(f"{'attention' if start % 2 == 0 else 'mlp'} {start // 2}")
            else:
                names.append(f"block {number}" if written == end - start else f"block {number} so far")
            start = end
        return tuple(names)

    def source_weights(self, memory: Bank, site: int) -> dict[str, Tensor]:
        if len(memory.sources()) == 1:
            return {}
        with torch.no_grad():
            reads = depth_attention(
                memory.sources(), torch.stack(self._queries(site)), keys=memory.keys(), key_norm=self.config.key_norm,
                key_gain=self._site(site).key_gain, eps=self.config.eps, return_weights=True,
            )  # fmt: skip
        weights = [read.weights for read in reads if isinstance(read, DepthRead) and read.weights is not None]
        return {"shared": weights[0]} if len(weights) == 1 else {"query_key": weights[0], "value": weights[1]}

    def _site(self, site: int) -> Site:
        parameters = self.sites[str(site)]
        assert isinstance(parameters, Site)
        return parameters

    def _queries(self, site: int) -> list[Tensor]:
        """The route query of a site [R], or one for query-key and one for value."""
        parameters = self._site(site)
        if parameters.value_query is not None:
            return [parameters.query, parameters.value_query]
        if self.config.roles == "frozen_value" and self._has_roles(site):
            return [parameters.query, torch.zeros_like(parameters.query)]
        return [parameters.query]

