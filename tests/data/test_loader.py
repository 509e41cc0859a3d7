"""Batches read ahead in the background, and which document each token is of."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import TokenDataset
from depthroute.data.loader import Batch, Loader
from tests.data.shards_by_hand import END, directory

CONTEXT, SEQUENCES, SEED = 12, 8, 3
LENGTHS = [1, 1, 30, 5, 1, 2, *range(1, 40), 200, 1, 1, 7]


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    return directory(tmp_path / "data", {"text": {"train": LENGTHS, "validation": [20]}})


def loader(dataset: TokenDataset, **settings: int) -> Loader:
    return Loader(dataset, context=CONTEXT, sequences=SEQUENCES, seed=SEED, **settings)


def taken(batches: Loader, count: int) -> list[Batch]:
    with batches:
        return list(itertools.islice(batches, count))


def equal(one: Batch, other: Batch) -> bool:
    assert one.documents is not None and other.documents is not None
    same = np.array_equal(one.tokens, other.tokens) and np.array_equal(one.documents, other.documents)
    return same and one.step == other.step


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def wait_for_no_threads() -> None:
    until = time.monotonic() + 10
    while threads() and time.monotonic() < until:
        time.sleep(0.005)
    assert not threads()


def test_ids_that_are_none_of_the_vocabulary_are_named(dataset: TokenDataset) -> None:
    """The size of the file is as it was, and the model would fail of them in the middle of a step."""
    for split in ("train", "validation"):
        path = dataset.directory / f"{split}.bin"
        path.write_bytes(path.read_bytes()[:-2] + dataset.vocabulary.to_bytes(2, "little"))
    size = dataset.vocabulary
    match = rf"%s\.bin holds the id {size}, and the vocabulary ends at {size - 1}: it was altered\. .*data verify"
    opened = TokenDataset.open(dataset.directory)
    with pytest.raises(FailureError, match=match % "validation"):
        opened.held_out()
    opened.held_out(limit=5)
    with pytest.raises(FailureError, match=match % "train"), Loader(opened, context=1, sequences=1, seed=SEED) as batches:
        for _ in itertools.islice(batches, sum(LENGTHS)):
            pass


def test_batches_are_those_of_the_order(dataset: TokenDataset) -> None:
    order, tokens = dataset.order(CONTEXT, SEQUENCES, SEED), dataset.tokens("train")
    found = taken(loader(dataset), 30)
    assert [batch.step for batch in found] == list(range(30))
    for batch in found:
        assert batch.tokens.dtype == np.int64 and batch.tokens.flags.writeable and batch.tokens.flags.c_contiguous
        np.testing.assert_array_equal(batch.tokens, order.batch(tokens, batch.step))


def test_documents_are_counted_by_their_boundaries(dataset: TokenDataset) -> None:
    """One by one: a token is of the next document behind each end, and tokens that are ends begin none themselves."""
    of_position = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    starts = dataset.order(CONTEXT, SEQUENCES, SEED).windows
    for batch in taken(loader(dataset), 30):
        assert batch.documents is not None and batch.documents.dtype == np.int32
        for row, tokens, start in zip(batch.documents, batch.tokens, starts(batch.step).tolist(), strict=True):
            wanted = of_position[start : start + CONTEXT + 1]
            assert row.tolist() == (wanted - wanted[0]).tolist()
            assert (np.flatnonzero(np.diff(row)) == np.flatnonzero(tokens[:-1] == END)).all()


def test_documents_are_left_out_where_nobody_asked(dataset: TokenDataset) -> None:
    quiet = Loader(dataset, context=CONTEXT, sequences=SEQUENCES, seed=SEED, documents=False)
    assert [batch.documents for batch in taken(quiet, 3)] == [None] * 3


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_any_number_of_ranks_reads_the_same_batches(tmp_path: Path, world_size: int) -> None:
    mixed = directory(tmp_path / "data", {"a": {"train": LENGTHS}, "b": {"train": LENGTHS[6:]}}, [0.75, 0.25])
    whole = taken(loader(mixed), 12)
    ranks = [taken(loader(mixed, rank=rank, world_size=world_size), 12) for rank in range(world_size)]
    for batch, *rows in zip(whole, *ranks, strict=True):
        np.testing.assert_array_equal(batch.tokens, np.concatenate([part.tokens for part in rows]))
        np.testing.assert_array_equal(batch.documents, np.concatenate([part.documents for part in rows]))
        assert {part.tokens.shape for part in rows} == {(SEQUENCES // world_size, CONTEXT + 1)}


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_a_resumed_loader_goes_on_with_the_same_batches(dataset: TokenDataset, ahead: int) -> None:
    whole = taken(loader(dataset), 20)
    resumed = taken(loader(dataset, start=13, ahead=ahead), 7)
    alone = loader(dataset)
    assert all(equal(ours, theirs) and equal(ours, alone.batch_at(ours.step)) for ours, theirs in zip(resumed, whole[13:], strict=True))


def test_batches_are_made_ahead_and_no_more_than_asked_for(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = Loader.batch_at

    def spy(self: Loader, step: int) -> Batch:
        made.append(step)
        return real(self, step)

    monkeypatch.setattr(Loader, "batch_at", spy)
    with loader(dataset, ahead=3) as batches:
        iterator = iter(batches)
        for got in range(4):
            until = time.monotonic() + 10
            while len(made) < 3 + got and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(0.02)  # in which one too many would be made
            assert made == list(range(3 + got))
            assert next(iterator).step == got


def test_the_kernel_is_told_before_a_batch_is_read(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the batches ahead too, and for every page of their windows."""
    events: list[tuple[str, int]] = []
    told: list[tuple[int, int]] = []
    advise, read = Loader._advise_step, Loader.batch_at
    monkeypatch.setattr(Loader, "_advise_step", lambda self, step: (events.append(("advise", step)), advise(self, step))[1])
    monkeypatch.setattr(Loader, "batch_at", lambda self, step: (events.append(("read", step)), read(self, step))[1])

    class Map:
        def madvise(self, option: int, start: int, length: int) -> None:
            told.append((start, start + length))

    batches = loader(dataset, ahead=2)
    assert batches._map is not None  # the kernel takes what it is told; here it is heard
    batches._advise_step(0)
    batches._map = Map()  # type: ignore[assignment]
    taken(batches, 4)
    for step in range(4):
        assert {("advise", one) for one in range(step + 3)} <= set(events[: events.index(("read", step))])
    starts = np.concatenate([batches.order.windows(step) for step in range(6)]) * 2
    assert all(any(start <= first and first + 2 * (CONTEXT + 1) <= end for start, end in told) for first in starts.tolist())
    assert all(start % 4096 == 0 for start, _ in told)


def test_a_close_waits_for_one_batch_and_not_for_those_ahead(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    read = Loader.batch_at
    monkeypatch.setattr(Loader, "batch_at", lambda self, step: (made.append(step), time.sleep(0.05), read(self, step))[2])
    with loader(dataset, ahead=8) as batches:
        next(iter(batches))
    assert len(made) <= 3


def test_a_forked_process_is_told_that_its_iterator_has_no_thread(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader(dataset) as batches:
        iterator = iter(batches)
        next(iterator)
        monkeypatch.setattr("depthroute.data.loader.os.getpid", lambda: -1)
        with pytest.raises(RequestError, match="this process was forked"):
            next(iterator)


def test_what_fails_in_the_background_is_raised_at_its_batch(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Loader.batch_at

    def failing(self: Loader, step: int) -> Batch:
        if step == 3:
            raise OSError("the disk is gone")
        return real(self, step)

    monkeypatch.setattr(Loader, "batch_at", failing)
    with loader(dataset) as batches:
        iterator = iter(batches)
        assert [next(iterator).step for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(iterator)
    wait_for_no_threads()


def test_each_iteration_begins_at_the_start(dataset: TokenDataset) -> None:
    with loader(dataset, start=5) as batches:
        first, second = iter(batches), iter(batches)
        assert [next(first).step, next(first).step, next(second).step, next(first).step] == [5, 6, 5, 7]


def test_threads_end_with_the_loader_or_their_iterator(dataset: TokenDataset) -> None:
    with loader(dataset) as batches:
        iterator = iter(batches)
        next(iterator)
        assert len(threads()) == 1
    assert not threads()
    with pytest.raises(StopIteration):
        next(iterator)
    dropped = iter(loader(dataset))
    next(dropped)
    del dropped
    gc.collect()
    wait_for_no_threads()


def test_a_program_ends_with_a_loader_open(dataset: TokenDataset) -> None:
    code = (
        "import sys; from pathlib import Path; from depthroute.data import TokenDataset; from depthroute.data.loader import Loader\n"
        "batches = iter(Loader(TokenDataset.open(Path(sys.argv[1])), context=12, sequences=8, seed=3)); print(next(batches).step)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(dataset.directory)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 3}, "8 sequences cannot be shared by a world_size of 3"),
        ({"world_size": 0}, "world_size cannot be 0; it takes 1 or more"),
        ({"rank": 2, "world_size": 2}, "rank cannot be 2 of a world_size of 2; it takes 0 to 1"),
        ({"rank": -1}, "rank cannot be -1"),
        ({"start": -1}, "start cannot be -1"),
        ({"ahead": 0}, "ahead cannot be 0"),
    ],
)
def test_wrong_requests_are_refused(dataset: TokenDataset, settings: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        loader(dataset, **settings)


def test_a_long_set_is_opened_and_read_without_reading_it(tmp_path: Path) -> None:
    """Ten billion tokens, in a file of holes."""
    made = directory(tmp_path / "data", {"text": {"train": [1000] * 5, "validation": [20]}})
    tokens = 10_000_000_000
    with (made.directory / "train.bin").open("r+b") as file:
        file.truncate(2 * tokens)
    manifest = (made.directory / "manifest.json").read_text()
    assert manifest.count('"tokens": 5000') == 2
    manifest = manifest.replace('"tokens": 5000', f'"tokens": {tokens}').replace('"bytes": 10000', f'"bytes": {2 * tokens}')
    (made.directory / "manifest.json").write_text(manifest)
    started = time.perf_counter()
    long = Loader(TokenDataset.open(made.directory), context=1024, sequences=32, seed=0, documents=False)
    batch = long.batch_at(10**9)
    assert time.perf_counter() - started < 1, "a permutation of ten million windows, or a pass over the tokens, takes longer"
    assert batch.tokens.shape == (32, 1025) and long.order.windows_per_epoch == 9_765_624
