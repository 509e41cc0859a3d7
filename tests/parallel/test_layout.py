"""Layouts as people type them, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthroute.common.errors import RequestError
from depthroute.model import ModelConfig
from depthroute.parallel.cut import layers_of_chunks
from depthroute.parallel.layout import AXES, Layout, parse_layout


@pytest.mark.parametrize(
    ("text", "processes", "expected"),
    [
        ("ddp", 4, Layout(ddp=4)),
        ("fsdp:2,ddp", 6, Layout(fsdp=2, ddp=3)),
        ("pp:2,virtual=2,fsdp", 8, Layout(pp=2, virtual=2, fsdp=4)),
        ("pp,schedule=gpipe,keeps=none,microbatch=2", 3, Layout(pp=3, schedule="gpipe", keeps="none", microbatch=2)),
        ("tp:2,fsdp:2,ddp:2,pp:2", 16, Layout(tp=2, fsdp=2, ddp=2, pp=2)),
    ],
)
def test_what_is_typed(text: str, processes: int, expected: Layout) -> None:
    assert parse_layout(text).fitted(processes) == expected


@given(st.sampled_from(sorted(AXES)), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["none", "received", "all"]))
def test_a_layout_is_described_as_it_is_typed(axis: str, size: int, stages: int, keeps: str) -> None:
    layout = Layout(**{axis: size} | ({"pp": stages, "virtual": 2, "keeps": keeps} if stages > 1 else {}))  # type: ignore[arg-type]
    if layout.processes > 1:
        assert parse_layout(layout.describe()) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dpp", "ddp"),
        ("ddp,ddp:2", "ddp is given twice"),
        ("ddp,fsdp", "only one axis may be without a size"),
        ("ddp:0", "1 or more"),
        ("ddp:x", "not 'x'"),
        ("pp:2,virtual=0", "1 or more"),
        ("ddp,keeps=none", "belongs to a pipeline"),
        ("pp:2,keeps=some", "keeps"),
        ("pp:2,schedule=zerobubble", "schedule"),
        ("pp:2,schedule=1f1b,virtual=2", "does not go with virtual=2"),
        ("pp:2,schedule=interleaved", "does not go with virtual=1"),
        ("pp:2:3", "not '2:3'"),
        ("", "axis"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_layout(text)


def test_the_processes_must_be_those_of_the_layout() -> None:
    with pytest.raises(RequestError, match="a layout for 4 processes, and there are 3"):
        parse_layout("pp:2,fsdp:2").fitted(3)
    with pytest.raises(RequestError, match="a multiple of 2 processes, and there are 3"):
        parse_layout("pp:2,fsdp").fitted(3)


def test_micro_batches_of_a_pipeline() -> None:
    assert Layout(pp=2).microbatches(16, largest=16) == 8  # four a stage
    assert Layout(pp=2).microbatches(16, largest=1) == 16  # no larger than train.microbatch
    assert Layout(pp=2, ddp=2).microbatches(16, largest=16) == 8
    assert Layout(pp=4, virtual=2).microbatches(8, largest=8) == 8  # as many as there are
    assert Layout(pp=2, microbatch=4).microbatches(16, largest=1) == 4
    with pytest.raises(RequestError, match="multiples of 4"):
        Layout(pp=4, virtual=2).microbatches(6, largest=6)
    with pytest.raises(RequestError, match="4 or more"):
        Layout(pp=4, microbatch=4).microbatches(8, largest=8)
    with pytest.raises(RequestError, match="does not divide"):
        Layout(pp=2, microbatch=3).microbatches(8, largest=8)
    with pytest.raises(RequestError, match=r"3 shares of the batch \(ddp x fsdp\)"):
        Layout(ddp=3).rows(8)


@pytest.mark.parametrize(
    ("layers", "chunks", "vocabulary", "expected"),
    [
        (8, 4, 17, [2, 2, 2, 2]),
        (7, 4, 17, [2, 2, 2, 1]),
        (9, 4, 17, [2, 2, 3, 2]),
        (8, 1, 17, [8]),
        (16, 4, 240, [4, 4, 5, 3]),  # the head weighs two layers: 5 and not 6 is the longest
        (32, 2, 960, [20, 12]),  # eight
        (4, 4, 10_000, [1, 1, 1, 1]),
    ],
)
def test_layers_are_cut_evenly_and_the_head_is_weighed(layers: int, chunks: int, vocabulary: int, expected: list[int]) -> None:
    config = ModelConfig(vocabulary=vocabulary, width=12, layers=layers, heads=2, mlp_width=20, context=12)  # a layer is 1,440 products
    cut = layers_of_chunks(config, chunks)
    assert [len(chunk) for chunk in cut] == expected
    assert [layer for chunk in cut for layer in chunk] == list(range(layers))


def test_more_chunks_than_layers_are_refused() -> None:
    config = ModelConfig(vocabulary=17, width=12, layers=3, heads=2, mlp_width=20, context=8)
    with pytest.raises(RequestError, match=r"model\.layers = 3"):
        layers_of_chunks(config, 4)
