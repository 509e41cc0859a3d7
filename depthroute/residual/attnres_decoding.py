"""AttnRes in one place: a block's sum grows in the row where the closed block is then found.

The arithmetic is that of `AttnRes.read` and `write`, in the same order.

Shapes: ... leading dimensions (batch, tokens), D width, S sources, R key rank.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from depthroute.ops import DepthRead, PreparedRead, can_prepare
from depthroute.residual.in_place import InPlace, Served, SiteRead, Target
from depthroute.residual.protocol import Inputs, Norm


class SiteReads(Served, Protocol):
    """What `AttnRes` says of its reads: which sources and queries, with which options, and what they are for."""

    config: Any
    ends: tuple[int, ...]
    options: dict[str, Any]

    def within(self, sources: tuple[Any, ...], room_for: int = 0) -> tuple[Any, ...]: ...
    def norm_options(self, site: int, norm: Norm | None, times: int) -> tuple[bool, dict[str, Any]]: ...
    def lacks(self, site: int) -> bool: ...
    def bias(self, site: int) -> Tensor | None: ...
    def route_queries(self, site: int) -> Tensor: ...
    def by_role(self, reads: tuple[Tensor, ...], site: int) -> Inputs: ...
    def sites_read_ahead(self, start: int, closed: int) -> range: ...
    def queries_ahead(self, sites: range) -> tuple[list[Tensor], Tensor | None]: ...


class AttnResInPlace(InPlace):
    """Where the sources are what sub-layers put out, with slices of them for keys. The queries are those of when it was made."""

    residual: SiteReads

    @staticmethod
    def serves(residual: SiteReads, embedding: Tensor) -> bool:
        """Whether it can stand in."""
        config = residual.config
        as_they_are = config.values == "raw" and config.summary == "sum" and config.keys == "slice"
        return as_they_are and config.roles != "average" and can_prepare(embedding)  # an average would have to be made at every read

    def __init__(self, residual: SiteReads, embedding: Tensor) -> None:
        """For passes of the shape of `embedding` [..., D]."""
        super().__init__(residual)
        self._rows = [torch.empty_like(embedding, memory_format=torch.contiguous_format) for _ in range(len(residual.ends) + 1)]
        self._into = [torch.empty_like(self._rows[0]) for _ in range(3)]  # what a site reads, by role
        self._ahead: dict[int, tuple[DepthRead, ...]] = {}  # by site, what its block's first pass reads for it
        self._first_passes: dict[int, PreparedRead] = {}  # by the sub-layer that a block begins with
        for start in residual.ends[:-1]:
            self._prepare_first_pass(start)

    @property
    def entry(self) -> Tensor:
        return self._rows[0]

    @property
    def bytes(self) -> int:
        """Of the sources, what was read ahead, and what a site reads."""
        ahead = [part for reads in self._ahead.values() for read in reads for part in (read.output, read.max, read.sum)]
        return sum(part.numel() * part.element_size() for part in (*self._rows, *self._into, *ahead) if part is not None)

    def target(self, site: int) -> Target:
        return Target(self._rows[self._block(site) + 1], adds=not self._begins(site))

    def behind(self, site: int) -> PreparedRead | None:
        return self._first_passes.get(site + 1)

    def prepare(self, site: int, norm: Norm | None) -> SiteRead:
        residual = self.residual
        sources = residual.within(tuple(self._rows[: self._block(site) + (1 if self._begins(site) else 2)]))
        times = len(sources) if residual.config.sum_reads else 1
        fused, options = residual.norm_options(site, norm, times)
        if residual.lacks(site):
            read = PreparedRead(sources, sources[0].new_zeros(1, 1), into=self._into[:1], **options)
        else:
            bias, queries = residual.bias(site), residual.route_queries(site)
            options |= {**residual.options, "into": self._into[: len(queries)], "bias": bias}
            if site in self._ahead:
                sources = sources[-1:]
                options |= {"prior": self._ahead[site], "bias": None if bias is None else bias[-1:]}
            read = PreparedRead(sources, queries, **options)
        found = tuple(one.output for one in read.reads)
        if fused:
            return SiteRead(read, residual.by_role(found, site))

        def left(inputs: Tensor) -> Tensor:
            return inputs * times if norm is None else norm(inputs * times)

        return SiteRead(read, residual.by_role(found, site), left)

    def _begins(self, site: int) -> bool:
        """Whether the sub-layer at `site` is the first of its block; the last read is behind a closed block too."""
        return site in (0, *self.residual.ends)

    def _block(self, site: int) -> int:
        """The block, from 0, that the sub-layer at `site` writes to."""
        return sum(end <= site for end in self.residual.ends)

    def _prepare_first_pass(self, start: int) -> None:
        """Of the block that begins at sub-layer `start`, if its sites have the closed sources read for them together."""
        residual = self.residual
        closed = self._rows[: self._block(start) + 1]
        sites = residual.sites_read_ahead(start, len(closed))
        if not sites:
            return
        queries, biases = residual.queries_ahead(sites)
        first = PreparedRead(residual.within(tuple(closed), room_for=1), torch.cat(queries), bias=biases, **residual.options)
        self._first_passes[start] = first
        reads = iter(first.reads)
        for site, of_site in zip(sites, queries, strict=True):
            self._ahead[site] = tuple(next(reads) for _ in of_site)
