"""The traffic of methods that keep a bank of sources: Attention Residuals, static mixing, queries of the token, and Delta.

Per token, counted as `depthroute.cost.traffic.least_traffic` says. A bank is followed from sub-layer to sub-layer in numbers of sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from depthroute.cost.reads import site_reads
from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig
from depthroute.residual.bank import BankConfig
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.dynamic import DynamicQueryConfig


@dataclass(frozen=True)
class Traffic:
    """Elements per token."""

    read: float = 0
    written: float = 0

    @property
    def total(self) -> float:
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)


@dataclass
class _Bank:
    """What a bank of sources holds before a read, in numbers of sources."""

    closed: int
    partial: bool = False


def _banked(
    method: BankConfig, model: ModelConfig, read: Callable[[int, _Bank], tuple[float, float]],
    opened: Callable[[int, int], tuple[float, float]], key: int = 0,
) -> Traffic:  # fmt: skip
    """The passes over a bank, in elements. `read(site, bank)`: what the read of a site takes from closed sources and whatever else is not
    the pass's own, and what it writes. `opened(start, closed)`: the same for what is prepared where a block opens."""
    width, sublayers = model.width, 2 * model.layers
    ends = method.block_ends(sublayers)
    cap = sublayers + 2 if method.window is None else method.window + 1
    total, bank = Traffic(*opened(0, 1)) + Traffic(*read(0, _Bank(1))), _Bank(1)
    size = 0
    for site in range(sublayers):
        size += 1
        fresh, ends_here = size == 1, site + 1 in ends
        taken = width * (1 + (not fresh)) + key * (not fresh)  # the output, and the partial sum that it is added to
        put = key + width * (not fresh)
        if method.summary == "rms":
            taken += width * (not fresh)
            put = key + width * (2 if not ends_here and not fresh else 1)
        elif method.summary == "mean" and ends_here:
            put = key + width
        if isinstance(method, AttnResConfig) and method.values == "normed" and ends_here:
            put = key + width
        total += Traffic(taken, put)
        if ends_here:
            bank, size = _Bank(min(bank.closed + 1, cap)), 0
            total += Traffic(*opened(site + 1, bank.closed))
        else:
            bank = _Bank(bank.closed, True)
        total += Traffic(*read(site + 1, bank))
    return total


def _seen(method: BankConfig, bank: _Bank) -> int:
    """Closed sources that a read sees: the window makes room for the partial sum."""
    return bank.closed if method.window is None else min(bank.closed, method.window + 1 - bank.partial)


def attnres(method: AttnResConfig, model: ModelConfig) -> Traffic:
    width, rank = model.width, method.rank or model.width
    key, normed = rank if method.keys == "projected" else 0, method.values == "normed"
    statistics = 2 * method.heads if method.weighting == "softmax" else 0
    reads = site_reads(method, 2 * model.layers)

    def opened(start: int, closed: int) -> tuple[float, float]:
        """The closed sources that the block's later sites read ahead are those that its first site reads in the same pass."""
        if start == 0:
            return (width, key + width * normed) if key or normed else (0, 0)
        return 0, reads[start].ahead * (width + statistics)

    def read(site: int, bank: _Bank) -> tuple[float, float]:
        here = reads[site]
        if site == 0:
            return 0, 0
        if here.merged:
            return here.queries * (width + statistics), here.handed * width
        return (here.sources - 1) * (width + key), here.handed * width  # the newest source or partial sum is the pass's own

    return _banked(method, model, read, opened, key)


def static(method: BankConfig, model: ModelConfig) -> Traffic:
    width = model.width

    def read(site: int, bank: _Bank) -> tuple[float, float]:
        return (0, 0) if site == 0 else ((_seen(method, bank) - (not bank.partial)) * width, width)

    return _banked(method, model, read, lambda start, closed: (0, 0))


def dynamic(method: DynamicQueryConfig, model: ModelConfig) -> Traffic:
    if method.query_from == "latest":
        return static(method, model)
    width, sublayers, rank = model.width, 2 * model.layers, method.rank or model.width
    ends = (0, *method.block_ends(sublayers))
    following = dict(pairwise(ends))

    def opened(start: int, closed: int) -> tuple[float, float]:
        """Queries of the block's sites and their scores with the closed sources; the newest of these is the pass's own."""
        sites = len(range(max(start, 1), following.get(start, start + 1)))
        return (closed - (start > 0)) * width * (sites > 0), sites * (rank + closed)

    def read(site: int, bank: _Bank) -> tuple[float, float]:
        if site == 0:
            return 0, 0
        if not bank.partial:  # everything was prepared in this pass
            return 0, width
        return _seen(method, bank) * width + rank + bank.closed, width

    return _banked(method, model, read, opened)


def delta(method: DeltaConfig, model: ModelConfig) -> Traffic:
    """A plain stream beside the bank. Closed sources alone are read, and the read is added to the stream in the same pass."""
    width, sublayers = model.width, 2 * model.layers

    def read(site: int, bank: _Bank) -> tuple[float, float]:
        if site in (0, sublayers):
            return 0, 0
        newest = not bank.partial  # the pass's own
        return (_seen(method, _Bank(bank.closed)) - newest) * width, width

    # at the second site the stream still is the embedding, which is read as a source already
    return _banked(method, model, read, lambda start, closed: (0, 0)) + Traffic((sublayers - 1) * width, sublayers * width)
