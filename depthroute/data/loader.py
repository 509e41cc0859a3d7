"""Batches for a training loop, read ahead of it in the background.

R sequences of a batch that a rank has, T tokens of context.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import numpy as np

from depthroute.common.errors import RequestError
from depthroute.data.dataset import TokenDataset
from depthroute.data.order import gather


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a rank has of the batch of a step.

    Attributes:
        step: Counted from 0.
        tokens: int64 [R, T + 1]: inputs are `[:, :-1]`, targets `[:, 1:]`.
        documents: int32 [R, T + 1], which of the documents of its row a token belongs to, counted from 0; None where not asked for.
            Attention within documents is that between equal numbers.
    """

    step: int
    tokens: np.ndarray
    documents: np.ndarray | None


class Loader:
    """The batches of the training split from step `start` on, without an end, in the order of `BatchOrder`.

        with Loader(TokenDataset.open(Path("data")), context=1024, sequences=32, seed=0) as batches:
            for batch in batches:
                ...

    A batch depends on the seed and its step alone: a run is resumed with `start`, and the batches of all ranks, one below the other, are
    the same for any number of them. An iteration has a thread of its own that reads the next `ahead` batches while the caller works;
    what fails there is raised where its batch is asked for. Each iteration begins at `start` again. Leaving the `with` ends the threads,
    as does dropping an iterator. Threads do not live on in a forked process: iterate there anew.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        context: int,
        sequences: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        ahead: int = 2,
        documents: bool = True,
    ) -> None:
        """
        Args:
            context: T.
            sequences: of the batch of all ranks together.
            rank: which share of the rows this is, of `world_size`.
            start: the step of the first batch.
            ahead: how many batches are made before they are asked for.
            documents: whether batches say which document a token is of.

        Raises:
            RequestError: a value is not allowed, the ranks do not divide the sequences, or what `BatchOrder` refuses.
        """
        for name, value, least in (("world_size", world_size, 1), ("start", start, 0), ("ahead", ahead, 1)):
            if value < least:
                raise RequestError(f"{name} cannot be {value}; it takes {least} or more.")
        if not 0 <= rank < world_size:
            raise RequestError(f"rank cannot be {rank} of a world_size of {world_size}; it takes 0 to {world_size - 1}.")
        if sequences % world_size:
            raise RequestError(f"{sequences} sequences cannot be shared by a world_size of {world_size}; give a multiple of it.")
        self._dataset = dataset
        self.order = dataset.order(context, sequences, seed)
        self.start, self.ahead = start, ahead
        rows = sequences // world_size
        self._rows = slice(rank * rows, (rank + 1) * rows)
        mapped = dataset.tokens("train")
        self._map: mmap.mmap | None = getattr(mapped, "_mmap", None)
        self._tokens = np.asarray(mapped)
        self._boundaries = np.asarray(dataset.boundaries("train")) if documents else None
        self._running: weakref.WeakSet[_Ahead] = weakref.WeakSet()

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, read now.

        Raises:
            FailureError: it holds an id that is none of the vocabulary.
        """
        starts, context = self._starts(step), self.order.context
        self._advise(starts)  # or else the disk is asked for one window after the other
        documents = None if self._boundaries is None else _documents(self._boundaries, starts, context + 1)
        return Batch(step=step, tokens=self._dataset.checked(gather(self._tokens, starts, context), "train"), documents=documents)

    def __iter__(self) -> Iterator[Batch]:
        iterator = _Ahead(self)
        self._running.add(iterator)
        return iterator

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all iterations, and wait for their threads."""
        for iterator in list(self._running):
            iterator.close()

    def _starts(self, step: int) -> np.ndarray:
        return self.order.windows(step)[self._rows]

    def _advise_step(self, step: int) -> None:
        self._advise(self._starts(step))

    def _advise(self, starts: np.ndarray) -> None:
        """Tell the kernel that these windows will be read, so that the disk begins before they are."""
        if self._map is None or not hasattr(mmap, "MADV_WILLNEED"):
            return
        size, page = self._tokens.itemsize, mmap.PAGESIZE
        first = starts * size // page * page
        last = (starts + self.order.context + 1) * size
        for begin, end in zip(first.tolist(), last.tolist(), strict=True):
            self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)


class _Ahead:
    """An iteration: hands over what its thread has made.

    The thread knows the queues and not this object, which can so be dropped. Putting into a `SimpleQueue` is safe at any time, also
    when the garbage collector does it.
    """

    def __init__(self, loader: Loader) -> None:
        self._wanted: SimpleQueue[None] = SimpleQueue()  # each entry: make another one, or look whether this has ended
        self._made: SimpleQueue[Batch | BaseException | None] = SimpleQueue()  # None: it was closed
        for _ in range(loader.ahead):
            self._wanted.put(None)
        self._ended: BaseException | None = None
        self._process = os.getpid()
        stopped = threading.Event()
        self._end = weakref.finalize(self, _stop, stopped, self._wanted)
        self._thread = threading.Thread(target=_work, args=(loader, stopped, self._wanted, self._made), name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Batch:
        if self._ended is not None:
            raise self._ended
        if os.getpid() != self._process:
            raise RequestError("this process was forked, and the thread that makes the batches was not; iterate over the loader anew.")
        self._wanted.put(None)
        found = self._made.get()
        if isinstance(found, Batch):
            return found
        self._ended = StopIteration() if found is None else found
        raise self._ended

    def close(self) -> None:
        self._ended = self._ended or StopIteration()
        self._end()
        self._made.put(None)  # for a thread of the caller that waits
        self._thread.join()


def _stop(stopped: threading.Event, wanted: SimpleQueue[None]) -> None:
    stopped.set()
    wanted.put(None)


def _work(loader: Loader, stopped: threading.Event, wanted: SimpleQueue[None], made: SimpleQueue[Batch | BaseException | None]) -> None:
    step = advised = loader.start
    try:
        while not (wanted.get() or stopped.is_set()):
            while advised <= step + loader.ahead:
                loader._advise_step(advised)
                advised += 1
            made.put(loader.batch_at(step))
            step += 1
    except BaseException as error:  # whatever it is, it belongs to whoever asks for this batch
        made.put(error)


def _documents(boundaries: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """int32 [len(starts), length]: how many documents begin behind the first token of a window, up to and with each token."""
    first = np.searchsorted(boundaries, starts, side="right")
    counts = np.searchsorted(boundaries, starts + (length - 1), side="right") - first
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.zeros((len(starts), length), dtype=np.int32)
    np.add.at(begins, (rows, boundaries[first[rows] + within] - starts[rows]), 1)
    return begins.cumsum(axis=1, dtype=np.int32)
