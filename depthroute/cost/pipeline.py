"""What pipeline stages send each other when the depth memory is a bank of blocks: counted event by event, and the paper's formulas.

P physical stages with V virtual stages each hold C = P V chunks of the depth; chunk c runs on stage c mod P. Between two chunks travel the
sources that the receiver needs and, if a block is open there, its partial sum. What is sent depends on what the receiver may keep of a
micro-batch from one of its chunks to the next:

- "none": everything is sent every time;
- "received": a stage keeps the sources that were sent to it, the cache of Attention Residuals, section 4.1 and Figure 3;
- "all": it also keeps those that it made itself, which that section leaves out. Nothing is then sent twice to a stage.

It is what `depthroute.parallel` sends, which finds it from a run and not from these rules; the tests hold one to the other.

Numbers are tensors [width] a token: times width and bytes an element they are bytes a token. The backward pass sends the gradients of the
same tensors the other way, so that a training step moves twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from depthroute.common.errors import RequestError
from depthroute.parallel.layout import Keeps
from depthroute.parallel.layout import Schedule as Order


@dataclass(frozen=True)
class Transfer:
    """One message between two chunks. `blocks` are closed sources beside the embedding, by number from 1."""

    sender: int  # chunk
    blocks: tuple[int, ...]
    embedding: bool
    partial: bool

    @property
    def tensors(self) -> int:
        return len(self.blocks) + self.embedding + self.partial


@dataclass(frozen=True, kw_only=True)
class PipelineTraffic:
    """The transfers of one micro-batch's forward pass."""

    transfers: tuple[Transfer, ...]
    kept: tuple[int, ...]
    """Of every chunk: how many sources its stage keeps of the micro-batch when it has run, the embedding included."""
    fractional: Fraction
    """Blocks as Eqs. 7-8 count them: a block that is open counts by the part of it that is done; no embedding, no partial sum."""

    @property
    def blocks(self) -> int:
        return sum(len(transfer.blocks) for transfer in self.transfers)

    @property
    def embeddings(self) -> int:
        return sum(transfer.embedding for transfer in self.transfers)

    @property
    def partials(self) -> int:
        return sum(transfer.partial for transfer in self.transfers)

    @property
    def total(self) -> int:
        return sum(transfer.tensors for transfer in self.transfers)

    @property
    def largest(self) -> int:
        """Of one transfer."""
        return max((transfer.tensors for transfer in self.transfers), default=0)


def plain_stream(stages: int, virtual: int) -> int:
    """Tensors that a plain residual stream sends: one between two chunks."""
    return stages * virtual - 1


def naive_formula(stages: int, virtual: int, blocks_per_chunk: Fraction | float) -> float:
    """C(C - 1)/2 N_p (Attention Residuals, Eq. 7), in tensors a token; N_p blocks are closed by a chunk on average."""
    chunks = stages * virtual
    return float(chunks * (chunks - 1) * Fraction(blocks_per_chunk) / 2)


def cached_formula(stages: int, virtual: int, blocks_per_chunk: Fraction | float) -> float:
    """P(P - 1)/2 N_p + (V - 1) P^2 N_p (Eq. 8), in tensors a token."""
    return float((stages * (stages - 1) / Fraction(2) + (virtual - 1) * stages**2) * Fraction(blocks_per_chunk))


def cached_with_own_formula(stages: int, virtual: int, blocks_per_chunk: Fraction | float) -> float:
    """Eq. 8 less (V - 1) P N_p, in tensors a token: a stage that keeps its own blocks too is not sent them again."""
    return cached_formula(stages, virtual, blocks_per_chunk) - float((virtual - 1) * stages * Fraction(blocks_per_chunk))


def chunk_ends(sublayers: int, chunks: int) -> tuple[int, ...]:
    """The 1-based last sub-layer of every chunk, as even as they can be in whole layers, or in sub-layers if there are too few layers.

    Raises:
        RequestError: more chunks than sub-layers.
    """
    if not 1 <= chunks <= sublayers:
        raise RequestError(f"{chunks} chunks are not allowed; {sublayers} sub-layers make 1 to {sublayers} (stages x virtual stages).")
    unit = 2 if chunks <= sublayers // 2 and sublayers % 2 == 0 else 1
    return tuple(unit * (sublayers // unit * number // chunks) for number in range(1, chunks + 1))


def pipeline_traffic(block_ends: tuple[int, ...], ends_of_chunks: tuple[int, ...], stages: int, keeps: Keeps) -> PipelineTraffic:
    """Send one micro-batch through all chunks and count what travels.

    Args:
        block_ends: the 1-based last sub-layer of every block; the last entry is the number of sub-layers.
        ends_of_chunks: the same for chunks, as `chunk_ends` gives them.

    Raises:
        RequestError: the two do not end alike, fewer than two stages, or chunks that do not fill whole rounds over them.
    """
    if ends_of_chunks[-1] != block_ends[-1]:
        raise RequestError(f"chunks end with sub-layer {ends_of_chunks[-1]} and blocks with {block_ends[-1]}; both end with the last one.")
    if stages < 2 or len(ends_of_chunks) % stages:
        raise RequestError(f"{len(ends_of_chunks)} chunks on {stages} stages are not allowed; 2 stages or more hold as many each.")
    held: list[set[int]] = [set() for _ in range(stages)]  # sources by number, 0 the embedding: what a stage keeps of the micro-batch
    if keeps != "none":
        held[0].add(0)
    counted = [Fraction(0)] * stages  # how far a stage has been informed, in blocks and fractions
    here: set[int] = {0}  # what the running chunk has
    transfers: list[Transfer] = []
    kept: list[int] = []
    fractional = Fraction(0)
    for chunk, (start, end) in enumerate(pairwise((0, *ends_of_chunks))):
        stage = chunk % stages
        for number, block_end in enumerate(block_ends, start=1):
            if start < block_end <= end:
                here.add(number)
                if keeps == "all":
                    held[stage].add(number)
        kept.append(len(held[stage]))
        if end == ends_of_chunks[-1]:
            break
        receiver = (chunk + 1) % stages
        sent = here - held[receiver]
        transfers.append(Transfer(chunk, tuple(sorted(sent - {0})), 0 in sent, end not in block_ends))
        progress = _progress(block_ends, end)
        if keeps == "all":
            counted[stage] = progress
        fractional += progress - counted[receiver]
        if keeps != "none":
            held[receiver] |= sent
            counted[receiver] = progress
        here = sent | held[receiver]
    return PipelineTraffic(transfers=tuple(transfers), kept=tuple(kept), fractional=fractional)


def _progress(block_ends: tuple[int, ...], sublayer: int) -> Fraction:
    """How many blocks are done behind this sub-layer, the open one by its part."""
    for number, (start, end) in enumerate(pairwise((0, *block_ends))):
        if sublayer < end:
            return number + Fraction(sublayer - start, end - start)
    return Fraction(len(block_ends))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A training step in interleaved 1F1B. Times are in forward passes of one chunk on one micro-batch."""

    time: float
    bubble: float
    """The part of it in which a stage waits, over all stages."""
    sent: int
    """Tensors a token of a micro-batch over all transfers of the step, both directions."""
    most_held: int
    """Sources that a stage has in its cache at most, over all micro-batches in flight; each is a tensor [micro-batch tokens, width]."""


def schedule(
    block_ends: tuple[int, ...], ends_of_chunks: tuple[int, ...], stages: int, microbatches: int, keeps: Keeps = "received"
) -> Schedule:
    """Run every forward and backward of every micro-batch in the order of interleaved 1F1B (a backward takes twice a forward).

    A stage's cache of a micro-batch is filled by transfers and released when the micro-batch has left its first chunk backward.

    Raises:
        RequestError: with virtual stages, micro-batches that are no multiple of the stages.
    """
    traffic = pipeline_traffic(block_ends, ends_of_chunks, stages, keeps)
    held = [0] * stages  # tensors
    most, sent = 0, 0
    passes = timed([1.0] * len(ends_of_chunks), stages, microbatches)
    for event in passes:
        sent += traffic.transfers[event.chunk - 1].tensors if event.chunk else 0
        held[event.stage] += _change(traffic.kept, event.chunk, stages, event.backward)
        most = max(most, held[event.stage])
    return Schedule(time=max(event.end for event in passes), bubble=bubble(passes, stages), sent=sent, most_held=most)


class Event(NamedTuple):
    """A pass of one micro-batch through one chunk: how long it takes and when it is over."""

    stage: int
    backward: bool
    chunk: int
    batch: int
    length: float
    end: float


def timed(lengths: Sequence[float], stages: int, microbatches: int, order: Order = "1f1b") -> list[Event]:
    """A step of a pipeline. The events of a stage come in the order in which it runs them.

    Args:
        lengths: of a forward pass of one micro-batch through every chunk; a backward pass takes twice as long.
        order: "gpipe", all forward passes before the first backward pass; else 1F1B, interleaved where a stage has several chunks.

    Raises:
        RequestError: with virtual stages in 1F1B, micro-batches that are no multiple of the stages.
    """
    chunks = len(lengths)
    virtual = chunks // stages
    if microbatches < 1 or (virtual > 1 and microbatches % stages):
        raise RequestError(
            f"{microbatches} micro-batches are not allowed; with virtual stages they are a multiple of the {stages} stages, else 1 or more."
        )
    orders = [_order(stage, stages, virtual, microbatches, order) for stage in range(stages)]
    done: dict[tuple[bool, int, int], float] = {}  # when (backward, chunk, micro-batch) is ready
    clock, place = [0.0] * stages, [0] * stages
    found: list[Event] = []
    while any(place[stage] < len(orders[stage]) for stage in range(stages)):
        before = len(found)
        for stage, own in enumerate(orders):
            while place[stage] < len(own):
                backward, chunk, batch = own[place[stage]]
                needs = _needs(backward, chunk, batch, chunks)
                if needs is not None and needs not in done:
                    break
                length = lengths[chunk] * (1 + backward)
                clock[stage] = max(clock[stage], 0.0 if needs is None else done[needs]) + length
                done[backward, chunk, batch] = clock[stage]
                found.append(Event(stage, backward, chunk, batch, length, clock[stage]))
                place[stage] += 1
        if len(found) == before:
            raise RequestError("the schedule cannot go on; this is a mistake in the order of the stages.")
    return found


def bubble(events: Sequence[Event], stages: int) -> float:
    """The part of a step in which a stage waits, over all stages."""
    return 1 - sum(event.length for event in events) / (max(event.end for event in events) * stages)


def _change(kept: tuple[int, ...], chunk: int, stages: int, backward: bool) -> int:
    """By how many sources a stage's cache grows with an event. All are released when the stage's first chunk has run backward."""
    if not backward:
        return kept[chunk] - (kept[chunk - stages] if chunk >= stages else 0)
    return -kept[chunk - stages] if chunk < stages else 0  # a negative index: the stage's last chunk


def _needs(backward: bool, chunk: int, batch: int, chunks: int) -> tuple[bool, int, int] | None:
    """The event that must have happened before this one."""
    if not backward:
        return (False, chunk - 1, batch) if chunk else None
    return (True, chunk + 1, batch) if chunk + 1 < chunks else (False, chunk, batch)


def _order(stage: int, stages: int, virtual: int, microbatches: int, order: Order) -> list[tuple[bool, int, int]]:
    """(backward, chunk, micro-batch) of a stage in turn: a warm-up of forwards, one forward and one backward in turn, the rest.

    Micro-batches go through in groups of as many as there are stages: a group passes all virtual stages before the next one starts.
    """
    forwards, backwards = [], []
    group = stages if virtual > 1 else microbatches
    for first in range(0, microbatches, group):
        for level in range(virtual):
            for batch in range(first, first + group):
                forwards.append((False, level * stages + stage, batch))
                backwards.append((True, (virtual - 1 - level) * stages + stage, batch))
    warm_up = stages - 1 - stage if virtual == 1 else 2 * (stages - 1 - stage) + (virtual - 1) * stages
    warm_up = len(forwards) if order == "gpipe" else min(warm_up, len(forwards))
    passes = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        passes += [forward, backward]
    return passes + backwards[len(forwards) - warm_up :]
