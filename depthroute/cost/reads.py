"""The reads of a network with Attention Residuals, site by site, in numbers of sources: what arithmetic, traffic and memory follow from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from depthroute.residual import AttnResConfig
from depthroute.residual.attnres import READ_AHEAD_FROM


@dataclass(frozen=True, kw_only=True)
class SiteRead:
    """What is read at one site."""

    queries: int
    """Routes: one, or one for each role of an attention."""
    handed: int
    """Different mixtures that the sub-layer gets."""
    sources: int
    """That the site sees, the open block's partial sum included."""
    partial: bool
    """Whether a partial sum is among them."""
    merged: bool
    """Whether the others were read ahead, so that only the partial sum is read here."""
    ahead: int
    """Routes of later sites that are read when this one's block opens."""
    ahead_sources: int
    """Closed sources that they read."""


def site_reads(method: AttnResConfig, sublayers: int) -> list[SiteRead]:
    """All sites, 0 to `sublayers`."""
    ends = (0, *method.block_ends(sublayers))
    following = dict(pairwise(ends))
    limit = sublayers + 2 if method.window is None else method.window

    def queries(site: int) -> int:
        if site % 2 or site == sublayers or (site == 0 and not method.first_read):
            return 1
        return {"shared": 1, "tied": 1, "separate": 3}.get(method.roles, 2)

    found = []
    for site in range(sublayers + 1):
        start = max(end for end in ends if end <= site)
        closed, partial = ends.index(start) + 1, site > start
        end = following.get(start, start)
        phases = method.phases and end - start > 1 and min(closed, limit) >= READ_AHEAD_FROM
        opens = phases and not partial
        found.append(
            SiteRead(
                queries=queries(site),
                handed=1 if method.roles == "average" else queries(site),
                sources=min(closed + partial, limit + 1),
                partial=partial,
                merged=phases and partial,
                ahead=sum(map(queries, range(start + 1, end))) if opens else 0,
                ahead_sources=min(closed, limit) if opens else 0,
            )
        )
    return found
