"""A memory that lies in one place, for passes of one shape without gradients: decoding.

Rows stay where they are, so every read of them can be prepared, and repeating one costs a call. A method offers what it reads and where a
sub-layer's output goes; what walks through the sub-layers may run that itself, or put it into a program (`depthroute.infer.program`).

Shapes: ... leading dimensions (batch, tokens), D width.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from depthroute.ops import PreparedRead
from depthroute.residual.norm import normalised
from depthroute.residual.protocol import NO_TRACE, Body, Inputs, Kept, Norm, Projected, Trace


class SiteRead(NamedTuple):
    """The read of a site: a call of `read` fills the tensors `inputs`. `left`: a norm that is still to be applied to them."""

    read: PreparedRead
    inputs: Inputs
    left: Norm | None = None


class Target(NamedTuple):
    """Where a sub-layer's output goes, [..., D]: added to what is there, or put in its place."""

    row: Tensor
    adds: bool


class Served(Protocol):
    """What is needed of the method itself."""

    body: Body

    def values(self, memory: Any, site: int, projected: Projected) -> tuple[Tensor, Kept]: ...


class InPlace(abc.ABC):
    """A `Routing` whose memory is itself. What it reads is valid until its next read."""

    def __init__(self, residual: Served) -> None:
        self.residual = residual
        self._reads: dict[int, tuple[Norm | None, SiteRead]] = {}

    @property
    @abc.abstractmethod
    def entry(self) -> Tensor:
        """Where the embedding goes, [..., D]."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """What the memory takes."""

    @abc.abstractmethod
    def prepare(self, site: int, norm: Norm | None) -> SiteRead:
        """The read of a site, through its norm."""

    @abc.abstractmethod
    def target(self, site: int) -> Target:
        """Where the output of the sub-layer at `site` goes."""

    def behind(self, site: int) -> PreparedRead | None:
        """What is read once the sub-layer at `site` has written."""
        return None

    def site_read(self, site: int, norm: Norm | None) -> SiteRead:
        """`prepare`, done once."""
        if site not in self._reads or self._reads[site][0] is not norm:
            self._reads[site] = (norm, self.prepare(site, norm))
        return self._reads[site][1]

    def open(self, embedding: Tensor) -> InPlace:
        self.entry.copy_(embedding)
        return self

    def read(self, memory: InPlace, site: int, norm: Norm | None = None) -> Inputs:
        read, inputs, left = self.site_read(site, norm)
        read()
        return inputs if left is None else normalised(inputs, left)

    def values(self, memory: InPlace, site: int, projected: Projected) -> tuple[Tensor, Kept]:
        return self.residual.values(memory, site, projected)

    def write(self, memory: InPlace, site: int, output: Tensor, trace: Trace = NO_TRACE) -> InPlace:
        row, adds = self.target(site)
        if adds:
            row.add_(output)
        else:
            row.copy_(output)
        behind = self.behind(site)
        if behind is not None:
            behind()
        return self

    def close(self, memory: InPlace, norm: Norm | None = None) -> Tensor:
        inputs = self.read(memory, self.residual.body.sublayers, norm)
        assert isinstance(inputs, Tensor)
        return inputs
