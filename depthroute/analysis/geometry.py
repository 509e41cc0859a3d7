"""Query geometry: how many directions the route queries of a checkpoint use together, and how many coordinates each of them.

Low-Rank Attention Residuals, Appendix E. A site scores its sources by the query with the key norm's gain folded in (Eq. 28),

    q~_t = gamma_t * w_t .

*Joint rank.* The rank of all q~_t together: low-rank keys of that width can score as they do, exactly (section 4.8). Products of two
numbers stored in float32 or narrower are exact in float64, so this is the rank of the stored model, not of a rounding of it.

*Coordinate effective dimension.* With p_tj = q~_tj^2 / sum_k q~_tk^2 (Eq. 29), D_eff = exp(-sum_j p_tj log p_tj) (Eq. 30): the width where
all coordinates have the same energy, 1 where one coordinate has all. It depends on the basis, and is no recommended key width.

*Exact zeros.* Coordinates of q~_t that equal zero, without a tolerance. Released implementations multiply in float32, where two factors
of 1e-23 give zero; in float64 they do not. What is zero in float32 alone has underflowed.

Shapes: T queries, R key rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from depthroute.analysis.routing_tensors import RouteQuery, Routing
from depthroute.common.errors import FailureError, RequestError


@dataclass(frozen=True, kw_only=True)
class QueryUse:
    """One folded query: its Euclidean norm (from float64 products), and D_eff and exact zeros by the precision of the products."""

    site: str
    kind: str
    layer: int | None
    role: str
    norm: float
    effective_dimension_float32: float
    effective_dimension_float64: float
    zeros_float32: int
    zeros_float64: int


@dataclass(frozen=True, kw_only=True)
class GroupUse:
    """Several queries: their joint rank, the mean of their D_eff, and their exact zeros of `coordinates` in all (queries times R)."""

    queries: int
    rank: int
    coordinates: int
    effective_dimension_float32: float
    effective_dimension_float64: float
    zeros_float32: int
    zeros_float64: int

    @property
    def width_fraction(self) -> float:
        """The mean D_eff, float32 products, as a fraction of R."""
        return self.effective_dimension_float32 * self.queries / self.coordinates

    @property
    def underflows(self) -> int:
        """Coordinates that are zero in float32 and not in float64."""
        return self.zeros_float32 - self.zeros_float64

    @property
    def facts(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "width_fraction": self.width_fraction,
            "zeros_float32_fraction": self.zeros_float32 / self.coordinates,
            "zeros_float64_fraction": self.zeros_float64 / self.coordinates,
            "underflows": self.underflows,
        }


@dataclass(frozen=True, kw_only=True)
class QueryGeometry:
    """The geometry of a checkpoint's route queries.

    `width`: R. `stored_sites`, `active_sites`: places of a read with a query, and those of them that have something to choose.
    `parameters`: numbers in all stored queries and gains. `singular_values`: of the folded queries [T, R] in float64, from the largest.
    `tolerance`: those above it count for the rank (`joint_rank`). `total`, `kinds`, `roles`: all queries, and those of a kind of site or
    of a role. `queries`: every one by depth. `unused`: sites that are stored, never executed, and left out.
    """

    layout: str
    width: int
    stored_sites: int
    active_sites: int
    parameters: int
    singular_values: tuple[float, ...]
    tolerance: float
    total: GroupUse
    kinds: dict[str, GroupUse]
    roles: dict[str, GroupUse]
    queries: tuple[QueryUse, ...]
    unused: tuple[str, ...]

    @property
    def rank(self) -> int:
        """The joint rank of all queries."""
        return self.total.rank

    def directions(self, energy: float) -> int:
        """How many leading singular directions hold this fraction of the sum of squares; 0 where all queries are zero."""
        sums = torch.tensor(self.singular_values, dtype=torch.float64).square().cumsum(0)
        return int((sums < energy * sums[-1]).sum().item()) + 1 if sums[-1] > 0 else 0

    @property
    def facts(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "layout": self.layout,
            "width": self.width,
            "stored_sites": self.stored_sites,
            "active_sites": self.active_sites,
            "parameters": self.parameters,
            "rank": self.rank,
            "tolerance": self.tolerance,
            "directions_90": self.directions(0.9),
            "directions_99": self.directions(0.99),
            "total": self.total.facts,
            "kinds": {name: group.facts for name, group in self.kinds.items()},
            "roles": {name: group.facts for name, group in self.roles.items()},
            "unused": list(self.unused),
            "singular_values": list(self.singular_values),
            "queries": [asdict(query) for query in self.queries],
        }


def query_geometry(routing: Routing, *, unused: bool = False) -> QueryGeometry:
    """Joint rank, singular spectrum, coordinate effective dimension and exact zeros of route queries (Low-Rank AttnRes, Appendix E).

    Args:
        routing: from `read_routing`.
        unused: count queries that are stored and never executed as well.

    Raises:
        RequestError: no query is left.
        FailureError: a product overflows float32, so that the model that has it could not run.
    """
    chosen = [query for query in routing.queries if query.active or unused]
    if not chosen:
        raise RequestError(f"the only query is that of {routing.queries[0].site}, which has one source to read; nothing uses it.")
    exact = torch.stack([_folded(query, torch.float64) for query in chosen])
    released = torch.stack([_folded(query, torch.float32) for query in chosen])
    if not released.isfinite().all():
        row = int((~released.isfinite()).any(1).nonzero()[0].item())
        raise FailureError(f"{chosen[row].query_name!r} times its gain overflows float32, in which the scores of a model are made.")
    rank, singular_values, tolerance = joint_rank(exact)
    dimensions = [effective_dimension(folded).tolist() for folded in (released, exact)]
    zeros = [(folded == 0).sum(1).tolist() for folded in (released, exact)]
    uses = tuple(
        QueryUse(
            site=query.site, kind=query.kind, layer=query.layer, role=query.role, norm=exact[row].norm().item(),
            effective_dimension_float32=dimensions[0][row], effective_dimension_float64=dimensions[1][row],
            zeros_float32=zeros[0][row], zeros_float64=zeros[1][row],
        )
        for row, query in enumerate(chosen)
    )  # fmt: skip
    return QueryGeometry(
        layout=routing.layout,
        width=routing.width,
        stored_sites=len({query.site for query in routing.queries}),
        active_sites=len({query.site for query in routing.queries if query.active}),
        parameters=routing.parameters,
        singular_values=tuple(singular_values.tolist()),
        tolerance=tolerance,
        total=_group(uses, exact, rank),
        kinds=_groups(uses, exact, rank, lambda use: use.kind),
        roles=_groups(uses, exact, rank, lambda use: use.role),
        queries=uses,
        unused=() if unused else tuple(dict.fromkeys(query.site for query in routing.queries if not query.active)),
    )


def effective_dimension(queries: Tensor) -> Tensor:
    """D_eff = exp of the Shannon entropy of the coordinates' energies (Low-Rank AttnRes, Eqs. 29-30): [..., R] to [...] in float64, 1 to R.

    The products keep the precision they come in; energies and entropies are float64. A query that is all zero has 0: it uses no coordinate.
    """
    queries = queries.double()
    scaled = queries / queries.abs().amax(-1, keepdim=True)  # or the squares of small queries would be zero
    energy = scaled.square()
    found: Tensor = torch.special.entr(energy / energy.sum(-1, keepdim=True)).sum(-1).exp()
    return found.where((queries != 0).any(-1), 0.0)


def joint_rank(queries: Tensor) -> tuple[int, Tensor, float]:
    """The numerical rank of queries [T, R], their singular values [min(T, R)] from the largest, and the tolerance.

    In float64. Singular values count above max(T, R) times float64's epsilon times the largest: the error that the decomposition itself
    makes. A query that much smaller than the largest moves no score, and no rank.
    """
    values = torch.linalg.svdvals(queries.double().T)  # tall: a wide matrix takes LAPACK seconds where two threads share busy cores
    tolerance = max(queries.shape) * torch.finfo(torch.float64).eps * values[0].item()
    return int((values > tolerance).sum().item()), values, tolerance


def _folded(query: RouteQuery, dtype: torch.dtype) -> Tensor:
    """q~ = gamma * w (Eq. 28), both factors cast before the product, as released implementations do in float32."""
    return query.query.to(dtype) if query.gain is None else query.gain.to(dtype) * query.query.to(dtype)


def _groups(uses: tuple[QueryUse, ...], exact: Tensor, joint: int, name_of: Callable[[QueryUse], str]) -> dict[str, GroupUse]:
    """`joint`: the rank of all."""
    groups = {}
    for name in dict.fromkeys(name_of(use) for use in uses):
        rows = [row for row, use in enumerate(uses) if name_of(use) == name]
        rank = joint if len(rows) == len(uses) else joint_rank(exact[rows])[0]
        groups[name] = _group(tuple(uses[row] for row in rows), exact[rows], rank)
    return groups


def _group(uses: tuple[QueryUse, ...], exact: Tensor, rank: int) -> GroupUse:
    return GroupUse(
        queries=len(uses),
        rank=rank,
        coordinates=exact.numel(),
        effective_dimension_float32=sum(use.effective_dimension_float32 for use in uses) / len(uses),
        effective_dimension_float64=sum(use.effective_dimension_float64 for use in uses) / len(uses),
        zeros_float32=sum(use.zeros_float32 for use in uses),
        zeros_float64=sum(use.zeros_float64 for use in uses),
    )
