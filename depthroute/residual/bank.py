"""The depth memory as a bank of sources: the embedding, the summaries of closed blocks, and the open block's partial sum.

Shapes: ... leading dimensions, D width, S sources, R key rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import hold
from depthroute.residual.protocol import NO_TRACE, Body, Residual, ResidualConfig, Trace
from depthroute.residual.schedule import block_ends
from depthroute.residual.stream import rms

BLOCK_FIELDS = frozenset({"block", "layers_per_block", "num_blocks", "ends"})

Summary = Literal["sum", "mean", "rms"]


@dataclass(frozen=True, kw_only=True)
class BankConfig(ResidualConfig):
    """Which sources there are.

    At most one of `block` (sub-layers a block), `layers_per_block`, `num_blocks` (ceil boundaries) and `ends` (the 1-based last sub-layer
    of every block); none of them: every sub-layer is a source by itself.

    `summary`: what a closed block becomes: the "sum" of its outputs; their "mean"; or "rms", the sum of outputs each divided by its RMS.
    The open partial sum and the embedding are never changed.

    `window`: how many sources a site sees beside the embedding, the newest ones; the others are forgotten. None is all.

    `eps`: added to mean squares under a root.
    """

    block: int | None = None
    layers_per_block: int | None = None
    num_blocks: int | None = None
    ends: tuple[int, ...] | None = None
    summary: Summary = "sum"
    window: int | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise RequestError(f"residual.window = {self.window} is not allowed; it takes 1 or more, or none for all sources.")
        if not self.eps > 0:
            raise RequestError(f"residual.eps = {self.eps} is not allowed; it must be positive.")

    @property
    def has_blocks(self) -> bool:
        """Whether outputs are summed into blocks, rather than kept one by one."""
        return any(getattr(self, name) is not None for name in BLOCK_FIELDS)

    def block_ends(self, sublayers: int) -> tuple[int, ...]:
        """The 1-based last sub-layer of every block."""
        return block_ends(sublayers, **{name: getattr(self, name) for name in BLOCK_FIELDS})


Banked = TypeVar("Banked", bound=BankConfig)


def without_blocks(config: Banked) -> Banked:
    """The same, with every sub-layer's output a source."""
    none: dict[str, Any] = dict.fromkeys(BLOCK_FIELDS)
    return replace(config, **none)


def with_blocks_of(base: BankConfig, config: Banked) -> Banked:
    """A method that has blocks with those of `base`, if it has some: arms of a study share them."""
    if not (config.has_blocks and base.has_blocks):
        return config
    blocks: dict[str, Any] = {name: getattr(base, name) for name in BLOCK_FIELDS}
    return replace(config, **blocks)


class Bank(NamedTuple):
    """Closed sources (the embedding first) and the open block's partial sum, None when it is empty.

    `summary`: what the open block is to become, where that is not its partial sum. With projected keys each source has its key [..., R]
    beside it; the key of a block is the sum of its sub-layers' keys, since output and key come from one widened projection.

    `ahead`: what sites of the open block have had prepared when it was opened, the next site first. `stream`: the plain stream, for a
    method that adds to it.
    """

    closed: tuple[Tensor, ...]
    partial: Tensor | None = None
    summary: Tensor | None = None
    closed_keys: tuple[Tensor, ...] = ()
    partial_key: Tensor | None = None
    ahead: tuple[Any, ...] = ()
    stream: Tensor | None = None

    def sources(self) -> tuple[Tensor, ...]:
        return self.closed if self.partial is None else (*self.closed, self.partial)

    def keys(self) -> tuple[Tensor, ...] | None:
        keys = self.closed_keys if self.partial_key is None else (*self.closed_keys, self.partial_key)
        return keys or None


class SourceBank(Residual):
    """Keeps the bank: sums outputs into the open block, closes it where it ends, forgets what is out of the window."""

    def __init__(self, config: BankConfig, body: Body) -> None:
        super().__init__(body)
        self.bank = config
        self.ends = config.block_ends(body.sublayers)
        self._starts = {start: end for start, end in pairwise((0, *self.ends))}

    def open(self, embedding: Tensor) -> Bank:
        return Bank((hold(embedding),))

    def write(self, memory: Bank, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Bank:
        output = output.to(memory.closed[0].dtype)
        partial = output if memory.partial is None else memory.partial + output
        summary = self._summary(memory.summary, output)
        key = self._key(site, trace)
        key = None if key is None else key.to(output.dtype)
        partial_key = key if key is None or memory.partial_key is None else memory.partial_key + key
        if site + 1 not in self.ends:
            return memory._replace(partial=partial, summary=summary, partial_key=partial_key)
        if self.bank.summary == "mean":
            summary = partial / self.size(site + 1)
        source = hold(self._source(partial if summary is None else summary))
        bank = Bank(
            closed=self.within((*memory.closed, source)),
            closed_keys=() if partial_key is None else self.within((*memory.closed_keys, hold(partial_key))),
        )
        return bank._replace(ahead=self._prepare(bank, site + 1))

    def size(self, end: int) -> int:
        """How many sub-layers the block that ends with sub-layer `end` has."""
        return next(end - start for start, last in self._starts.items() if last == end)

    def sites_of_block(self, site: int) -> range:
        """The sites from `site` on of the block that it lies in; the last read is by itself."""
        return range(site, next((end for end in self.ends if end > site), site + 1))

    def counts(self, site: int) -> tuple[int, ...]:
        """How many outputs each source at this site is made of, the embedding counted as one."""
        found = [1]
        for start, end in self._starts.items():
            if start < site:
                found.append(min(end, site) - start)
        return self.within(tuple(found))

    def source_names(self, site: int) -> tuple[str, ...]:
        names = ["embedding"]
        for number, (start, end) in enumerate(self._starts.items(), start=1):
            if start >= site:
                break
            if end - start == 1:
                names.append(f"{'attention' if start % 2 == 0 else 'mlp'} {start // 2}")
            else:
                names.append(f"block {number}" if end <= site else f"block {number} so far")
        return self.within(tuple(names))

    def sources(self, memory: Bank) -> tuple[Tensor, ...]:
        """What the next site reads."""
        return self.within(memory.sources())

    def newest(self, memory: Bank) -> Tensor:
        """The last of the sources, or the stream where it is kept beside them."""
        return memory.sources()[-1] if memory.stream is None else memory.stream

    def within(self, sources: tuple[Any, ...], room_for: int = 0) -> tuple[Any, ...]:
        """The embedding and the newest sources of the window, with room for some that are yet to come."""
        if self.bank.window is None or len(sources) <= (kept := self.bank.window - room_for) + 1:
            return sources
        return (sources[0], *sources[len(sources) - kept :])

    def _summary(self, summary: Tensor | None, output: Tensor) -> Tensor | None:
        if self.bank.summary != "rms":
            return None
        normalised = rms(output, self.bank.eps).to(output.dtype)
        return normalised if summary is None else summary + normalised

    def _source(self, summary: Tensor) -> Tensor:
        """What is kept of a block that closes."""
        return summary

    def _key(self, site: int, trace: Trace) -> Tensor | None:
        """The projected key of the output at this site."""
        return None

    def _prepare(self, bank: Bank, start: int) -> tuple[Any, ...]:
        """What the sites of the block that begins at sub-layer `start` can have before it is written to."""
        return ()
