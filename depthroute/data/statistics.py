"""What the documents of a data directory are like: lengths, ids, entropy, and texts that occur more than once."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.common.errors import FailureError
from depthroute.data.dataset import TokenDataset
from depthroute.data.progress import Progress
from depthroute.data.scan import Sequential, first_not_rising, pieces
from depthroute.data.shards import DTYPES, IDS_DTYPE, ids_file, read_array, token_file
from depthroute.data.spelling import Speller
from depthroute.data.split import SPLITS, Split

CHUNK_TOKENS, CHUNK_DOCUMENTS = 2**22, 2**16
MOST_FREQUENT = 10


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """How many documents have `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of documents in tokens, begin and end included. The quantiles are lengths that occur: the smallest that so many do not exceed."""

    mean: float
    median: int
    p10: int
    p90: int
    p99: int
    max: int
    histogram: tuple[LengthBin, ...]
    """From one power of 2 to the next, from the shortest document to the longest."""


@dataclass(frozen=True, kw_only=True)
class Frequent:
    """An id, its text, and how often it occurs."""

    id: int
    spelling: str
    count: int


@dataclass(frozen=True, kw_only=True)
class StretchStatistics:
    """Of the documents of a split, or of a source in a split. What is None has no value, since there are no documents."""

    documents: int
    tokens: int
    bytes: int
    bytes_per_token: float | None
    lengths: Lengths | None
    entropy_nats: float | None
    """Of the ids, whatever stands before them; begins and ends of documents included."""
    entropy_bits: float | None
    vocabulary_used: int
    """How many ids occur."""
    frequent: tuple[Frequent, ...]
    """The most frequent ids, at most `MOST_FREQUENT`."""
    duplicates: int
    """Documents that have the tokens of one before them in the split."""


@dataclass(frozen=True, kw_only=True)
class SourceStatistics:
    """Of one source in a split."""

    name: str
    all: StretchStatistics


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """Of one split."""

    split: Split
    all: StretchStatistics
    sources: tuple[SourceStatistics, ...]
    """Empty where there is one source."""
    in_train: int | None
    """Documents whose tokens are those of a training document; None for the training split."""
    duplicate_ids: int | None
    """Documents that have the id of one before them in the split; None: ids are not recorded."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of a data directory."""

    vocabulary: int
    splits: tuple[SplitStatistics, ...]
    ids_in_several_splits: int | None
    """How many ids occur in more than one split: 0, unless files were altered. None: ids are not recorded."""


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """A stretch as it was read: how often each id occurs, int64 [vocabulary], and the hash of every document, uint64 [documents]."""

    counts: np.ndarray
    hashes: np.ndarray


def statistics_of(directory: Path, *, progress: Callable[[Progress], None] | None = None) -> Statistics:
    """Read all tokens of a data directory once. It takes some 50 bytes of memory for a document, whatever the number of tokens.

    Documents are compared by 64-bit hashes of their tokens: among ten million different ones, two are taken for the same with a probability
    of 3 in a million.

    Args:
        progress: called after every few million tokens.

    Raises:
        RequestError: it is no data directory.
        FailureError: a file is absent, cut short or altered.
    """
    data = TokenDataset.open(directory)
    return _Reader(data, progress).statistics()


class _Reader:
    def __init__(self, data: TokenDataset, progress: Callable[[Progress], None] | None) -> None:
        self._data, self._progress = data, progress
        self._speller = Speller(data.tokenizer())
        self._total = sum((data.directory / token_file(split)).stat().st_size for split in SPLITS)
        self._ends = {split: self._sound_ends(split) for split in SPLITS}
        self._done, self._start = 0, time.monotonic()

    def statistics(self) -> Statistics:
        train: np.ndarray | None = None
        splits, ids = [], []
        for split in SPLITS:
            stretches = [self._count(split, first, last) for first, last in pairwise(self._ends[split])]
            hashes = np.concatenate([stretch.hashes for stretch in stretches])
            rising = np.sort(hashes)
            repeated = _repeated(hashes, rising)
            of_ids = self._ids(split)
            splits.append(
                SplitStatistics(
                    split=split,
                    all=self._stretch(split, None, sum(stretch.counts for stretch in stretches), repeated),
                    sources=self._sources(split, stretches, repeated),
                    in_train=None if train is None else int(np.count_nonzero(_among(hashes, train))),
                    duplicate_ids=None if of_ids is None else int(np.count_nonzero(of_ids[1:] == of_ids[:-1])),
                )
            )
            train = rising if train is None else train
            ids.append(of_ids)
        return Statistics(vocabulary=self._data.vocabulary, splits=tuple(splits), ids_in_several_splits=_shared(ids))

    def _sound_ends(self, split: Split) -> list[int]:
        """0 and the numbers of documents up to the end of each source, as far as the manifest knows them."""
        boundaries, directory = self._data.boundaries(split), self._data.directory
        tokens = len(self._data.tokens(split))
        if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != tokens or first_not_rising(boundaries) is not None:
            raise FailureError(f"{directory}: the index of {split} is not that of its tokens; `depthroute data verify` says what is wrong.")
        ends = [0]
        for source in self._data.manifest.sources:
            ends.append(ends[-1] + getattr(source.splits, split).documents)
        if self._data.manifest.sources and ends[-1] != len(boundaries) - 1:
            raise FailureError(
                f"{directory}: the sources have {ends[-1]} documents in {split}, and its index {len(boundaries) - 1}; `depthroute data "
                "verify` says what is wrong."
            )
        return ends if self._data.manifest.sources else [0, len(boundaries) - 1]

    def _count(self, split: Split, first: int, last: int) -> _Counted:
        """Of the documents first <= number < last of a split."""
        boundaries = self._data.boundaries(split)
        file = Sequential(self._data.directory / token_file(split), DTYPES[self._data.manifest.dtype])
        tokens = file.items
        raw = tokens.data.cast("B") if len(tokens) else memoryview(b"")
        counts = np.zeros(self._data.vocabulary, dtype=np.int64)
        hashes = np.empty(last - first, dtype=np.uint64)
        for low, high in _chunks(boundaries, first, last):
            offsets = (boundaries[low : high + 1] * tokens.itemsize).tolist()
            digests = [hashlib.blake2b(raw[start:end], digest_size=8).digest() for start, end in pairwise(offsets)]
            hashes[low - first : high - first] = np.frombuffer(b"".join(digests), dtype="<u8")
            for _, piece in pieces(tokens[boundaries[low] : boundaries[high]]):
                found = np.bincount(piece, minlength=len(counts))
                if len(found) > len(counts):
                    path, largest = self._data.directory / token_file(split), len(found) - 1
                    raise FailureError(
                        f"{path} has the id {largest}, the vocabulary {len(counts)} entries; `depthroute data verify` says what is wrong."
                    )
                counts += found
            file.drop(offsets[-1])
            self._tell(offsets[-1] - offsets[0])
        return _Counted(counts=counts, hashes=hashes)

    def _tell(self, read: int) -> None:
        self._done += read
        if self._progress is not None:
            seconds = time.monotonic() - self._start
            self._progress(Progress(doing="counting", done=self._done, total=self._total, found=0, seconds=seconds))

    def _sources(self, split: Split, stretches: list[_Counted], repeated: np.ndarray) -> tuple[SourceStatistics, ...]:
        if len(stretches) == 1:
            return ()
        ends = self._ends[split]
        return tuple(
            SourceStatistics(
                name=source.name, all=self._stretch(split, number, stretches[number].counts, repeated[ends[number] : ends[number + 1]])
            )
            for number, source in enumerate(self._data.manifest.sources)
        )

    def _stretch(self, split: Split, source: int | None, counts: Any, repeated: np.ndarray) -> StretchStatistics:
        """Of a whole split, or of one source in it."""
        ends = self._ends[split]
        first, last = (0, ends[-1]) if source is None else (ends[source], ends[source + 1])
        manifest, boundaries = self._data.manifest, self._data.boundaries(split)
        facts = manifest.split(split) if source is None else getattr(manifest.sources[source].splits, split)
        tokens = int(counts.sum())
        entropy = entropy_nats(counts) if tokens else None
        # Equal counts in the order of the ids, so that the list is the same everywhere.
        frequent = [int(at) for at in np.argsort(-counts, kind="stable")[:MOST_FREQUENT] if counts[at]]
        return StretchStatistics(
            documents=last - first,
            tokens=tokens,
            bytes=facts.bytes,
            bytes_per_token=facts.bytes / tokens if tokens else None,
            lengths=_lengths(np.diff(boundaries[first : last + 1])) if last > first else None,
            entropy_nats=entropy,
            entropy_bits=None if entropy is None else entropy / math.log(2),
            vocabulary_used=int(np.count_nonzero(counts)),
            frequent=tuple(Frequent(id=at, spelling=self._speller.spelling(at), count=int(counts[at])) for at in frequent),
            duplicates=int(np.count_nonzero(repeated)),
        )

    def _ids(self, split: Split) -> np.ndarray | None:
        """The hashes of ids in rising order."""
        if ids_file(split) not in {file.name for file in self._data.manifest.files}:
            return None
        return np.sort(read_array(self._data.directory / ids_file(split), IDS_DTYPE))


def _chunks(boundaries: np.ndarray, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Documents low <= number < high with at most `CHUNK_TOKENS` tokens together, or one that has more."""
    while first < last:
        end = int(np.searchsorted(boundaries, boundaries[first] + CHUNK_TOKENS, side="right")) - 1
        end = min(last, first + CHUNK_DOCUMENTS, max(first + 1, end))
        yield first, end
        first = end


def _lengths(lengths: np.ndarray) -> Lengths:
    p10, median, p90, p99 = np.quantile(lengths, (0.1, 0.5, 0.9, 0.99), method="inverted_cdf").tolist()
    powers = np.frexp(lengths)[1] - 1  # 2^power <= length < 2^(power + 1)
    counts = np.bincount(powers)
    histogram = (
        LengthBin(low=2**power, high=2 ** (power + 1) - 1, documents=int(counts[power])) for power in range(powers.min(), len(counts))
    )
    return Lengths(
        mean=float(lengths.mean()), median=int(median), p10=int(p10), p90=int(p90), p99=int(p99), max=int(lengths.max()),
        histogram=tuple(histogram),
    )  # fmt: skip


def entropy_nats(counts: np.ndarray) -> float:
    """Of the empirical distribution of counts [V], in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _among(values: np.ndarray, rising: np.ndarray) -> np.ndarray:
    """bool [n]: whether each of values [n] is one of rising [m]."""
    found = np.zeros(len(values), dtype=bool)
    if len(rising):
        for first, piece in pieces(values):
            found[first : first + len(piece)] = rising[np.minimum(np.searchsorted(rising, piece), len(rising) - 1)] == piece
    return found


def _repeated(hashes: np.ndarray, rising: np.ndarray) -> np.ndarray:
    """bool [n]: whether each of hashes [n] is that of one before it; `rising` are the same in rising order."""
    again = np.unique(rising[1:][rising[1:] == rising[:-1]])
    found = _among(hashes, again)
    places = np.flatnonzero(found)
    found[places[np.unique(hashes[places], return_index=True)[1]]] = False
    return found


def _shared(ids: list[np.ndarray | None]) -> int | None:
    """How many values are in more than one of the arrays, of which each is rising; None where one is not there."""
    known = [values for values in ids if values is not None]
    if len(known) < len(ids):
        return None
    twice = [values[_among(values, before)] for place, values in enumerate(known) for before in known[:place]]
    return len(np.unique(np.concatenate(twice)))
