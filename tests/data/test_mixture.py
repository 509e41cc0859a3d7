"""Several sources in one directory: how training draws from them, and what an evaluation holds out of each."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthroute.common.errors import RequestError
from depthroute.data import BatchOrder, TokenDataset
from depthroute.data.order import BLOCK, Stretch
from depthroute.data.shares import shares
from tests.data.shards_by_hand import END, directory

MIXTURE = (
    Stretch(name="large", start=0, end=5_003, weight=0.2),
    Stretch(name="small", start=5_003, end=5_024, weight=0.5),
    Stretch(name="middle", start=5_024, end=5_999, weight=0.3),
)
WINDOWS = (500, 2, 97)
ORDER = BatchOrder(5_999, 10, 7, 11, MIXTURE)


def samples(order: BatchOrder, count: int) -> np.ndarray:
    return np.concatenate([order.windows(step) for step in range(-(-count // order.sequences))])[:count]


def test_every_block_has_the_shares_of_the_weights_whatever_the_sizes() -> None:
    found = samples(ORDER, 3 * BLOCK)
    for block in range(3):
        mine = found[block * BLOCK : (block + 1) * BLOCK]
        assert [int(((mine >= one.start) & (mine < one.end)).sum()) for one in MIXTURE] == [200, 500, 300]


def test_windows_lie_inside_their_source() -> None:
    found = samples(ORDER, 3 * BLOCK)
    for stretch, windows in zip(MIXTURE, WINDOWS, strict=True):
        mine = found[(found >= stretch.start) & (found < stretch.end)]
        assert set(mine.tolist()) <= {stretch.start + 10 * window for window in range(windows)}
        assert mine.max() + 10 < stretch.end


def test_a_source_is_read_evenly() -> None:
    """After whole epochs that end with a block, each window was read as often: 500 of 2 windows a block, and 5 blocks of 200 for 500."""
    found, counts = np.unique(samples(ORDER, 5 * BLOCK), return_counts=True)
    by_start = dict(zip(found.tolist(), counts.tolist(), strict=True))
    assert [by_start[start] for start in (5_003, 5_013)] == [1_250, 1_250]
    assert {by_start[window * 10] for window in range(500)} == {2}
    middle = [by_start[5_024 + window * 10] for window in range(97)]
    assert set(middle) == {15, 16} and sum(middle) == 1_500


def test_sources_are_mixed_within_a_block_and_each_in_another_order() -> None:
    found = samples(ORDER, 2 * BLOCK)
    kinds = np.searchsorted([one.start for one in MIXTURE], found, side="right") - 1
    assert not np.array_equal(kinds[:BLOCK], kinds[BLOCK:])
    for part in np.split(kinds, 2 * BLOCK // 100):  # none waits for the end of its block
        assert set(part.tolist()) == {0, 1, 2}
    large = found[kinds == 0]
    assert len(set(large[:400].tolist())) > 395 and (np.diff(large) < 0).mean() > 0.4


def test_a_step_depends_on_no_other() -> None:
    forwards = [ORDER.windows(step).tolist() for step in range(60)]
    again = BatchOrder(5_999, 10, 7, 11, MIXTURE)
    assert [again.windows(step).tolist() for step in range(59, -1, -1)] == forwards[::-1]
    in_large_batches = samples(BatchOrder(5_999, 10, 350, 11, MIXTURE), 1_050)
    assert in_large_batches.tolist() == samples(ORDER, 1_050).tolist(), "the stream is that of the samples, not of the batches"
    assert samples(BatchOrder(5_999, 10, 7, 12, MIXTURE), 1_050).tolist() != in_large_batches.tolist()


def test_the_order_does_not_change_between_versions() -> None:
    assert ORDER.windows(0).tolist() == GOLDEN_FIRST
    assert ORDER.windows(1_000_000_000).tolist() == GOLDEN_LATE


def test_sources_that_cannot_have_their_share_are_refused() -> None:
    short = Stretch(name="web", start=0, end=10, weight=0.5)
    rest = Stretch(name="code", start=10, end=900, weight=0.9998)
    with pytest.raises(RequestError, match="the source web has 10 training tokens, which is less than a window of 10 and one more"):
        BatchOrder(900, 10, 4, 0, (short, rest))
    with pytest.raises(RequestError, match="less than a batch of 99 sequences"):
        BatchOrder(900, 10, 99, 0, (Stretch(name="web", start=0, end=111, weight=1), Stretch(name="code", start=111, end=900, weight=1)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 500)), min_size=1, max_size=6), st.data())
def test_shares_add_up_and_follow_the_weights(sources: list[tuple[float, int]], data: st.DataObject) -> None:
    weights, most = [max(weight, 1e-3) for weight, _ in sources], [size for _, size in sources]
    total = data.draw(st.integers(0, sum(most)))
    free = shares(total, weights)
    assert sum(free) == total
    assert all(abs(count - total * weight / sum(weights)) < 1 + 1e-6 for count, weight in zip(free, weights, strict=True))
    found = shares(total, weights, most)
    assert sum(found) == total and all(0 <= count <= limit for count, limit in zip(found, most, strict=True))
    open_ = [(count, weight) for count, weight, limit in zip(found, weights, most, strict=True) if count < limit]
    for (count, weight), (other, its) in pairwise(open_):  # of those that are not used up
        assert abs(count / weight - other / its) <= 1 / weight + 1 / its


SOURCES = {
    "web": {"train": [400, 300, 301], "validation": [10, 20, 30, 40]},
    "code": {"train": [50, 51], "validation": [7, 8]},
    "books": {"train": [899], "validation": [60, 25]},
}


@pytest.fixture
def weighted(tmp_path: Path) -> TokenDataset:
    return directory(tmp_path / "weighted", SOURCES, [2, 1, 1])


@pytest.fixture
def plain(tmp_path: Path) -> TokenDataset:
    return directory(tmp_path / "plain", SOURCES)


def test_a_directory_with_weights_is_read_by_them(weighted: TokenDataset, plain: TokenDataset) -> None:
    order = weighted.order(10, 8, 3)
    assert [(one.name, one.start, one.end, one.weight) for one in order.stretches] == [
        ("web", 0, 1_001, 0.5), ("code", 1_001, 1_102, 0.25), ("books", 1_102, 2_001, 0.25),
    ]  # fmt: skip
    assert order.number_of_tokens == 2_001 and weighted.tokens("train").shape == (2_001,)
    assert plain.order(10, 8, 3) == BatchOrder(2_001, 10, 8, 3)


def parts(dataset: TokenDataset, limit: int | None) -> list[list[int]]:
    """The tokens held out, by document."""
    held = dataset.held_out(limit=limit)
    assert held.boundaries.dtype == np.int64 and held.boundaries[0] == 0 and held.boundaries[-1] == len(held.tokens)
    return [held.tokens[start:end].tolist() for start, end in pairwise(held.boundaries.tolist())]


def document(start: int, length: int, *, whole: bool = True) -> list[int]:
    tokens = list(range(start + 10, start + 10 + length))
    return [*tokens[:-1], END] if whole else tokens


def test_each_source_is_held_out_by_its_weight(weighted: TokenDataset) -> None:
    """40 tokens and the first: 20.5, 10.25 and 10.25 of 41."""
    assert parts(weighted, 40) == [
        document(0, 10), document(10, 11, whole=False),
        document(100, 7), document(107, 3, whole=False),
        document(115, 10, whole=False),
    ]  # fmt: skip


def test_what_a_source_lacks_the_others_give(weighted: TokenDataset) -> None:
    """Of 101 tokens code has 15 and not 25.25: web gives 57.33 and books 28.67."""
    found = parts(weighted, 100)
    assert [len(part) for part in found] == [10, 20, 27, 7, 8, 29]
    assert found[3:] == [document(100, 7), document(107, 8), document(115, 29, whole=False)]


def test_without_weights_a_source_gives_what_it_has(plain: TokenDataset) -> None:
    """100, 15 and 85 of 200 tokens; a slice that ends where a document does cuts none."""
    assert parts(plain, 39) == [
        document(0, 10), document(10, 10, whole=False), document(100, 3, whole=False), document(115, 17, whole=False),
    ]  # fmt: skip
    assert [len(part) for part in parts(plain, 19)] == [10, 2, 8] and parts(plain, 19)[0] == document(0, 10)


@pytest.mark.parametrize("limit", [None, 199, 200, 10_000])
def test_all_of_a_split_is_the_split(weighted: TokenDataset, limit: int | None) -> None:
    held = weighted.held_out(limit=limit)
    assert isinstance(held.tokens, np.memmap) and held.tokens.tolist() == weighted.tokens("validation").tolist()
    assert held.boundaries.tolist() == weighted.boundaries("validation").tolist()


def test_of_one_source_it_is_the_beginning_where_it_lies(tmp_path: Path) -> None:
    dataset = directory(tmp_path / "one", {"web": SOURCES["web"]})
    held = dataset.held_out(limit=29)
    assert isinstance(held.tokens, np.memmap) and held.tokens.tolist() == dataset.tokens("validation")[:30].tolist()
    assert held.boundaries.tolist() == [0, 10, 30]
    assert dataset.held_out(limit=30).boundaries.tolist() == [0, 10, 30, 31]
    with pytest.raises(RequestError, match="limit cannot be 0"):
        dataset.held_out(limit=0)
    assert dataset.held_out("test").tokens.shape == (0,)


def test_the_number_of_targets_is_exact(weighted: TokenDataset, plain: TokenDataset) -> None:
    for limit in range(1, 200):
        for dataset in (weighted, plain):
            assert len(dataset.held_out(limit=limit).tokens) == limit + 1


GOLDEN_FIRST = [4580, 5394, 5013, 2200, 2680, 5194, 5414]
GOLDEN_LATE = [5214, 5634, 5013, 290, 2520, 5003, 5013]
