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
from depthroute.data.manifest import MANIFEST
from depthroute.data.progress import Progress
from depthroute.data.scan import Sequential, among, ends_of_sources, index_fault, pieces, repeated, shared, whole_items
from depthroute.data.shards import DTYPES, IDS_DTYPE, INDEX_DTYPE, ids_file, index_file, token_file
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
        FailureError: a file is absent, cut short or altered, or the manifest has another entropy of the training tokens.
    """
    data = TokenDataset.open(directory)
    return _Reader(data, progress).statistics()


class _Reader:
    def __init__(self, data: TokenDataset, progress: Callable[[Progress], None] | None) -> None:
        self._data, self._progress = data, progress
        tokenizer = data.tokenizer()
        if tokenizer.vocabulary != data.vocabulary:
            raise FailureError(
                f"{data.directory / MANIFEST} has a vocabulary of {data.vocabulary}, the tokenizer {tokenizer.vocabulary} entries; "
                "`depthroute data verify` says what is wrong."
            )
        self._speller = Speller(tokenizer)
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
            again = repeated(hashes, rising)
            of_ids = self._ids(split)
            all_of_it = self._stretch(split, None, sum(stretch.counts for stretch in stretches), again)
            if split == "train":
                self._check_entropy(all_of_it.entropy_nats)
            splits.append(
                SplitStatistics(
                    split=split,
                    all=all_of_it,
                    sources=self._sources(split, stretches, again),
                    in_train=None if train is None else int(np.count_nonzero(among(hashes, train))),
                    duplicate_ids=None if of_ids is None else int(np.count_nonzero(of_ids[1:] == of_ids[:-1])),
                )
            )
            train = rising if train is None else train
            ids.append(of_ids)
        return Statistics(vocabulary=self._data.vocabulary, splits=tuple(splits), ids_in_several_splits=shared(ids))

    def _sound_ends(self, split: Split) -> list[int]:
        """0 and the numbers of documents up to the end of each source, as far as the manifest knows them."""
        directory, manifest = self._data.directory, self._data.manifest
        boundaries = whole_items(directory / index_file(split), INDEX_DTYPE)
        tokens = len(whole_items(directory / token_file(split), DTYPES[manifest.dtype]))
        if (fault := index_fault(boundaries, tokens)) is not None:
            raise FailureError(
                f"{directory / index_file(split)} is not the index of the tokens of {split}: {fault}; `depthroute data verify` says "
                "what else is wrong."
            )
        documents = len(boundaries) - 1
        ends = ends_of_sources(directory, manifest, split, documents)
        return ends if manifest.sources else [0, documents]

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

    def _sources(self, split: Split, stretches: list[_Counted], again: np.ndarray) -> tuple[SourceStatistics, ...]:
        if len(stretches) == 1:
            return ()
        ends = self._ends[split]
        return tuple(
            SourceStatistics(
                name=source.name, all=self._stretch(split, number, stretches[number].counts, again[ends[number] : ends[number + 1]])
            )
            for number, source in enumerate(self._data.manifest.sources)
        )

    def _stretch(self, split: Split, source: int | None, counts: Any, again: np.ndarray) -> StretchStatistics:
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
            duplicates=int(np.count_nonzero(again)),
        )

    def _check_entropy(self, found: float | None) -> None:
        """Only here: to count ids takes longer than to hash them, so `verify` does not."""
        recorded = self._data.manifest.unigram_entropy_nats
        if found is not None and not math.isclose(found, recorded, rel_tol=1e-9, abs_tol=1e-9):
            raise FailureError(
                f"{self._data.directory / MANIFEST} has the unigram_entropy_nats {recorded}, and the training tokens {found}; it was "
                "altered: prepare the data again in a new directory."
            )

    def _ids(self, split: Split) -> np.ndarray | None:
        """The hashes of ids in rising order."""
        if ids_file(split) not in {file.name for file in self._data.manifest.files}:
            return None
        return np.sort(whole_items(self._data.directory / ids_file(split), IDS_DTYPE))


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
