"""Pipeline traffic: the count against the paper's formulas, its figure, and what must hold for any pipeline."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthroute.common.errors import RequestError
from depthroute.cost.pipeline import (
    PipelineTraffic,
    bubble,
    cached_formula,
    cached_with_own_formula,
    chunk_ends,
    naive_formula,
    pipeline_traffic,
    plain_stream,
    schedule,
    timed,
)
from depthroute.model import ModelConfig
from depthroute.parallel.cut import cut, layers_of_chunks, passages
from depthroute.parallel.layout import Keeps
from depthroute.residual import block_ends, parse_residual

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "attention_residuals.json").read_text(encoding="utf-8"))["pipeline"]
STAGES, VIRTUAL = st.integers(2, 6), st.integers(1, 5)


def even(stages: int, virtual: int, per_chunk: Fraction, keeps: Keeps) -> PipelineTraffic:
    """Chunks of as many sub-layers as make whole blocks."""
    chunks = stages * virtual
    sublayers = chunks * per_chunk.numerator * per_chunk.denominator
    ends = block_ends(sublayers, block=per_chunk.denominator**2)
    return pipeline_traffic(ends, tuple(range(sublayers // chunks, sublayers + 1, sublayers // chunks)), stages, keeps)


@pytest.mark.parametrize("check", GOLDEN["checks"], ids=lambda check: f"{check['P']}x{check['V']}")
def test_the_formulas_and_the_count_give_the_check_values(check: dict) -> None:
    stages, virtual, per_chunk = check["P"], check["V"], Fraction(check["Np"])
    assert naive_formula(stages, virtual, per_chunk) == check["naive"]
    assert cached_formula(stages, virtual, per_chunk) == check["cached"]
    assert even(stages, virtual, per_chunk, "none").fractional == check["naive"]
    assert even(stages, virtual, per_chunk, "received").fractional == check["cached"]


@given(STAGES, VIRTUAL, st.integers(1, 3))
def test_whole_blocks_in_every_chunk_are_the_formulas_to_the_last_tensor(stages: int, virtual: int, per_chunk: int) -> None:
    naive, cached = (even(stages, virtual, Fraction(per_chunk), keeps) for keeps in ("none", "received"))
    assert naive.blocks == naive_formula(stages, virtual, per_chunk)
    assert cached.blocks == cached_formula(stages, virtual, per_chunk)
    assert naive.partials == cached.partials == 0 and naive.embeddings == stages * virtual - 1


def test_the_example_of_figure_3() -> None:
    naive, cached = (even(4, 2, Fraction(1, 2), keeps) for keeps in ("none", "received"))
    first, second = cached.transfers[:3], cached.transfers[3:]
    assert [(t.embedding, t.blocks) for t in first] == [(True, ()), (True, (1,)), (True, (1,))]
    assert [t.blocks for t in second] == [(1, 2), (1, 2), (2, 3), (2, 3)]
    assert naive.blocks + naive.embeddings - cached.blocks - cached.embeddings == 6


@given(STAGES, VIRTUAL, st.integers(1, 3))
def test_a_stage_that_keeps_its_own_blocks_saves_what_the_paper_sends_again(stages: int, virtual: int, per_chunk: int) -> None:
    received, everything = (even(stages, virtual, Fraction(per_chunk), keeps) for keeps in ("received", "all"))
    assert received.blocks - everything.blocks == (virtual - 1) * stages * per_chunk


@given(STAGES, VIRTUAL, st.integers(1, 3))
def test_and_the_formula_for_that_is_exact(stages: int, virtual: int, per_chunk: int) -> None:
    assert even(stages, virtual, Fraction(per_chunk), "all").blocks == cached_with_own_formula(stages, virtual, per_chunk)


@pytest.mark.parametrize("block", [None, 2, 4, 3, 5])
def test_the_transport_sends_what_is_counted(block: int | None) -> None:
    """The one is found from a run of the model on tensors without memory, the other from where blocks and chunks end."""
    method = "full" if block is None else f"block:{block}"
    config = ModelConfig(vocabulary=17, width=12, layers=8, heads=2, mlp_width=20, context=8, residual=parse_residual(method))
    for stages, virtual in ((2, 1), (2, 2), (4, 1), (4, 2)):
        chunks = stages * virtual
        plan = cut(config, layers_of_chunks(config, chunks), rows=2, tokens=8, kind="cpu", dtype=torch.float32, precision=None)
        for keeps, formula in (("none", naive_formula), ("received", cached_formula), ("all", cached_with_own_formula)):
            sent = [len(numbers) for numbers in passages(plan, stages, keeps).sent]
            counted = pipeline_traffic(block_ends(16, block=block), chunk_ends(16, chunks), stages, keeps)
            assert sent == [transfer.tensors for transfer in counted.transfers]
            per_chunk = Fraction(16, chunks * (block or 1))
            if per_chunk.denominator == 1:  # every chunk closes whole blocks: no partial sum, and the embedding
                embeddings = chunks - 1 if keeps == "none" else stages - 1
                assert sum(sent) == formula(stages, virtual, per_chunk) + embeddings


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Blocks and chunks that end where they like."""
    stages = draw(STAGES)
    chunks, sublayers = stages * draw(VIRTUAL), 60
    inner = st.integers(1, sublayers - 1)
    ends = draw(st.sets(inner, max_size=12))
    cuts = draw(st.sets(inner, min_size=chunks - 1, max_size=chunks - 1))
    return (*sorted(ends), sublayers), (*sorted(cuts), sublayers), stages


@given(pipelines(), st.sampled_from(["none", "received", "all"]))
def test_every_chunk_has_all_closed_blocks_and_nothing_comes_twice(
    pipeline: tuple[tuple[int, ...], tuple[int, ...], int], keeps: Keeps
) -> None:
    ends, cuts, stages = pipeline
    found = pipeline_traffic(ends, cuts, stages, keeps)
    assert len(found.transfers) == len(cuts) - 1
    cache: list[set[int]] = [set() for _ in range(stages)]
    cache[0] = {0} if keeps != "none" else set()
    for chunk, behind in enumerate(cuts):
        here = cache[chunk % stages]
        if chunk:
            transfer = found.transfers[chunk - 1]
            sent = {*transfer.blocks, *([0] if transfer.embedding else [])}
            assert keeps == "none" or not sent & here
            assert transfer.partial == (cuts[chunk - 1] not in ends)
            here = sent if keeps == "none" else here | sent
            closed = {number for number, end in enumerate(ends, start=1) if end <= cuts[chunk - 1]}
            assert here == {0} | closed
        if keeps == "all":
            here |= {number for number, end in enumerate(ends, start=1) if (cuts[chunk - 1] if chunk else 0) < end <= behind}
        cache[chunk % stages] = here if keeps != "none" else set()
        assert found.kept[chunk] == len(cache[chunk % stages])


@given(pipelines())
def test_keeping_more_never_sends_more(pipeline: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    ends, cuts, stages = pipeline
    totals = [pipeline_traffic(ends, cuts, stages, keeps).total for keeps in ("none", "received", "all")]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] >= plain_stream(stages, len(cuts) // stages)  # a closed block or a partial sum is new to every receiver


def test_a_transfer_grows_with_the_depth_only_where_nothing_is_kept() -> None:
    assert even(4, 4, Fraction(1), "none").largest == 16
    assert even(4, 4, Fraction(1), "received").largest == 4


@pytest.mark.parametrize(("stages", "virtual", "batches"), [(2, 1, 1), (4, 1, 8), (4, 1, 3), (4, 2, 8), (3, 4, 6), (8, 2, 16)])
def test_the_schedule_has_the_known_bubble_and_sends_each_transfer_both_ways(stages: int, virtual: int, batches: int) -> None:
    chunks = stages * virtual
    ends, cuts = tuple(range(1, 2 * chunks + 1)), tuple(range(2, 2 * chunks + 1, 2))
    found = schedule(ends, cuts, stages, batches)
    assert found.time == 3 * (virtual * batches + stages - 1)
    assert found.bubble == pytest.approx((stages - 1) / (virtual * batches + stages - 1))
    assert found.sent == 2 * batches * pipeline_traffic(ends, cuts, stages, "received").total
    assert schedule(ends, cuts, stages, batches, "none").most_held == 0


def test_what_a_stage_keeps_is_bounded_by_the_micro_batches_in_flight() -> None:
    ends, cuts = tuple(range(1, 9)), tuple(range(2, 9, 2))  # 4 stages, 2 blocks each
    kept = pipeline_traffic(ends, cuts, 4, "received").kept
    assert kept == (1, 3, 5, 7)
    assert schedule(ends, cuts, 4, 1).most_held == 7
    assert schedule(ends, cuts, 4, 100).most_held == max(in_flight * count for in_flight, count in zip((4, 3, 2, 1), kept, strict=True))


def test_chunks_that_are_not_even_wait_for_the_longest() -> None:
    events = timed([1.0, 3.0], 2, 4)
    assert max(event.end for event in events) == 1 + 4 * 9 + 2
    assert bubble(events, 2) == pytest.approx(1 - 4 * 12 / (2 * 39))
    every = timed([1.0] * 4, 4, 4, "gpipe")
    assert [event.backward for event in every if event.stage == 0] == [False] * 4 + [True] * 4
    assert bubble(every, 4) == pytest.approx(3 / 7)


def test_chunks_are_whole_layers_where_there_are_enough() -> None:
    assert chunk_ends(12, 4) == (2, 6, 8, 12)
    assert chunk_ends(12, 12) == tuple(range(1, 13))
    assert chunk_ends(54, 8)[-1] == 54 and all(end % 2 == 0 for end in chunk_ends(54, 8))


def test_refusals() -> None:
    with pytest.raises(RequestError, match="13 chunks are not allowed; 12 sub-layers make 1 to 12"):
        chunk_ends(12, 13)
    with pytest.raises(RequestError, match="3 chunks on 2 stages"):
        pipeline_traffic((12,), (4, 8, 12), 2, "none")
    with pytest.raises(RequestError, match="2 stages or more"):
        pipeline_traffic((12,), (6, 12), 1, "none")
    with pytest.raises(RequestError, match="chunks end with sub-layer 10 and blocks with 12"):
        pipeline_traffic((12,), (5, 10), 2, "none")
    with pytest.raises(RequestError, match="a multiple of the 2 stages"):
        schedule((12,), (3, 6, 9, 12), 2, 3)
