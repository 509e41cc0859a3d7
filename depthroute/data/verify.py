"""Whether a data directory is what its manifest says: every file is read once and hashed, and what it holds is checked on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.common.processors import usable_processors
from depthroute.data.dataset import TokenDataset
from depthroute.data.manifest import TOKENIZER, FileFacts, Manifest, read_manifest
from depthroute.data.progress import Progress
from depthroute.data.scan import TokenScan, index_fault, manifest_faults, outside, read_hashed
from depthroute.data.shards import DTYPES, IDS_DTYPE, INDEX_DTYPE, dtype_for, ids_file, index_file, read_array, token_file
from depthroute.data.split import HASH_RANGE, SPLITS, Split, threshold
from depthroute.data.tokenizer import TextTokenizer

NOT_RECORDED = "not recorded"
UNREADABLE = "not looked at: a file that it needs is wrong"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    ok: bool | None
    """None: there was nothing to compare, and `found` says why."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What is known of a directory after `verify`."""

    directory: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def ok(self) -> bool:
        return not self.failures


def verify(directory: Path, *, sample: int = 200, progress: Callable[[Progress], None] | None = None) -> Verification:
    """Prove a data directory, or list what is wrong with it. Damage is listed, never raised.

    The memory of its own does not grow with the files; indices and ids are read through the memory map. A sample of the documents, spread
    evenly over each split, is decoded and encoded again: the tokenizers that are trained here give the same ids, and of a ready one it is
    counted how many documents differ. The entropy in the manifest is not looked at: `statistics_of` counts the ids.

    Args:
        sample: how many documents; 0 leaves this check out.
        progress: called, from one thread at a time, after every piece that was read.

    Raises:
        RequestError: it is no data directory, or `sample` is negative.
    """
    if sample < 0:
        raise RequestError(f"sample cannot be {sample}; it takes 0 (no documents) or more.")
    try:
        manifest = read_manifest(directory)
    except FailureError as error:
        return Verification(directory=str(directory), checks=(Check(name="manifest", found=str(error), ok=False),))
    return Verification(directory=str(directory), checks=tuple(_Verifier(directory, manifest, progress).checks(sample)))


class _Verifier:
    def __init__(self, directory: Path, manifest: Manifest, progress: Callable[[Progress], None] | None) -> None:
        self._directory, self._manifest, self._progress = directory, manifest, progress
        self._names = {file.name for file in manifest.files}
        self._sizes = {name: path.stat().st_size for name in self._names if (path := directory / name).is_file()}
        self._read, self._start, self._lock = 0, time.monotonic(), threading.Lock()
        self._boundaries = {split: self._sound_boundaries(split) for split in SPLITS}
        self._scans = {token_file(split): self._scan(split) for split in SPLITS}

    def checks(self, sample: int) -> Iterator[Check]:
        yield self._recorded()
        once = {file.name: file for file in self._manifest.files}
        with ThreadPoolExecutor(usable_processors()) as pool:
            yield from list(pool.map(self._file, once.values()))
        yield self._dtype()
        tokenizer = self._tokenizer()
        yield tokenizer if isinstance(tokenizer, Check) else self._entries(tokenizer)
        for split in SPLITS:
            yield self._counts(split)
            yield self._index(split)
            yield from self._tokens(split)
            yield self._ids(split)
        yield self._sources()
        if sample:
            yield self._round_trip(sample, None if isinstance(tokenizer, Check) else tokenizer)

    def _recorded(self) -> Check:
        needed = {TOKENIZER, *(name(split) for split in SPLITS for name in (token_file, index_file))}
        ids = {ids_file(split) for split in SPLITS}
        missing = sorted((needed if not ids & self._names else needed | ids) - self._names)
        faults = [f"it does not name {', '.join(missing)}"] if missing else []
        faults += manifest_faults(self._manifest)
        found = "; ".join(faults) or f"{len(self._names)} files named, its numbers fit each other"
        return Check(name="manifest", found=found, ok=not faults)

    def _file(self, expected: FileFacts) -> Check:
        if expected.name not in self._sizes:
            return Check(name=expected.name, found="missing", ok=False)
        scan = self._scans.get(expected.name)

        def look(data: memoryview) -> None:
            if scan is not None:
                scan.look(data)
            with self._lock:
                self._read += len(data)
                if self._progress is not None:
                    total, seconds = sum(self._sizes.values()), time.monotonic() - self._start
                    self._progress(Progress(doing="verifying", done=self._read, total=total, found=0, seconds=seconds))

        try:
            size, digest = read_hashed(self._directory / expected.name, look)
        except OSError as error:
            return Check(name=expected.name, found=f"it cannot be read: {error.strerror}", ok=False)
        if size != expected.bytes:
            return Check(name=expected.name, found=f"{size:,} bytes, recorded are {expected.bytes:,}", ok=False)
        if digest != expected.sha256:
            return Check(name=expected.name, found=f"SHA-256 {digest[:12]}..., recorded is {expected.sha256[:12]}...", ok=False)
        return Check(name=expected.name, found=f"{size:,} bytes, SHA-256 as recorded", ok=True)

    def _dtype(self) -> Check:
        found, right = self._manifest.dtype, dtype_for(self._manifest.vocabulary)
        text = f"{found} for a vocabulary of {self._manifest.vocabulary:,}"
        return Check(name="dtype", found=text if found == right else f"{text}, which takes {right}", ok=found == right)

    def _tokenizer(self) -> TextTokenizer | Check:
        try:
            return TokenDataset(directory=self._directory, manifest=self._manifest).tokenizer()
        except (DepthrouteError, OSError) as error:
            return Check(name="tokenizer", found=str(error), ok=False)

    def _entries(self, tokenizer: TextTokenizer) -> Check:
        entries, end = tokenizer.vocabulary, self._manifest.end
        if entries != self._manifest.vocabulary:
            found, ok = f"{entries:,} entries, recorded are {self._manifest.vocabulary:,}", False
        elif end != tokenizer.end:
            found, ok = f"documents end with {tokenizer.end}, recorded is {end}", False
        else:
            found, ok = f"{entries:,} entries, {tokenizer.name_of(end)} ({end}) ends documents", True
        return Check(name="tokenizer", found=found, ok=ok)

    def _counts(self, split: Split) -> Check:
        facts, name = self._manifest.split(split), f"{split}: counts"
        index, tokens = self._sizes.get(index_file(split)), self._sizes.get(token_file(split))
        if index is None or tokens is None:
            return Check(name=name, found=UNREADABLE, ok=None)
        found = (index // INDEX_DTYPE.itemsize - 1, tokens // DTYPES[self._manifest.dtype].itemsize)
        text = f"{found[0]:,} documents, {found[1]:,} tokens"
        if found != (facts.documents, facts.tokens):
            return Check(name=name, found=f"{text}; recorded are {facts.documents:,} and {facts.tokens:,}", ok=False)
        return Check(name=name, found=text, ok=True)

    def _sound_boundaries(self, split: Split) -> np.ndarray | str | None:
        """The index of a split, what is wrong with it, or None where it and the tokens cannot be read."""
        if index_file(split) not in self._sizes or token_file(split) not in self._sizes:
            return None
        if self._sizes[index_file(split)] % INDEX_DTYPE.itemsize:
            return f"{self._sizes[index_file(split)]} bytes are no whole number of offsets"
        tokens, rest = divmod(self._sizes[token_file(split)], DTYPES[self._manifest.dtype].itemsize)
        if rest:
            return None
        try:
            index = read_array(self._directory / index_file(split), INDEX_DTYPE)
        except OSError:
            return None
        return index_fault(index, tokens) or index

    def _index(self, split: Split) -> Check:
        index, name = self._boundaries[split], f"{split}: index"
        if isinstance(index, np.ndarray):
            return Check(name=name, found=f"rises from 0 to {index[-1]:,}", ok=True)
        return Check(name=name, found=index or UNREADABLE, ok=None if index is None else False)

    def _scan(self, split: Split) -> TokenScan:
        index = self._boundaries[split]
        known = index if isinstance(index, np.ndarray) else None
        return TokenScan(DTYPES[self._manifest.dtype], self._manifest.end, self._manifest.begin, known)

    def _tokens(self, split: Split) -> Iterator[Check]:
        scan, index = self._scans[token_file(split)], self._boundaries[split]
        vocabulary, begin = self._manifest.vocabulary, self._manifest.begin
        names = [f"{split}: {what}" for what in ("tokens below the vocabulary", "documents end", "end inside documents", "documents begin")]
        if token_file(split) not in self._sizes:
            yield from (Check(name=name, found=UNREADABLE, ok=None) for name in names)
            return
        largest = f"the largest is {scan.largest} of {vocabulary}" if scan.largest >= 0 else "no tokens"
        yield Check(name=names[0], found=largest, ok=scan.largest < vocabulary)
        if not isinstance(index, np.ndarray):
            yield from (Check(name=name, found=UNREADABLE, ok=None) for name in names[1:])
            return
        documents = len(index) - 1
        yield _edges(names[1], documents, scan.missing_ends, scan.without_end, f"end with {self._manifest.end}")
        inside = scan.ends - (documents - scan.missing_ends)
        yield Check(name=names[2], found=f"{inside:,} times", ok=inside == 0)
        if begin is not None:
            yield _edges(names[3], documents, scan.missing_begins, scan.without_begin, f"begin with {begin}")

    def _ids(self, split: Split) -> Check:
        file, name, prepare = ids_file(split), f"{split}: document ids", self._manifest.prepare
        if file not in self._names:
            return Check(name=name, found=NOT_RECORDED, ok=None)
        if file not in self._sizes:
            return Check(name=name, found=UNREADABLE, ok=None)
        documents, size = self._manifest.split(split).documents, self._sizes[file]
        if size != documents * IDS_DTYPE.itemsize:
            return Check(name=name, found=f"{size // IDS_DTYPE.itemsize:,} hashes for {documents:,} documents", ok=False)
        validation, test = threshold(prepare.validation_share), HASH_RANGE - threshold(prepare.test_share)
        low, high = {"validation": (0, validation), "train": (validation, test), "test": (test, HASH_RANGE)}[split]
        try:
            count, first = outside(read_array(self._directory / file, IDS_DTYPE), low, high)
        except OSError:
            return Check(name=name, found=UNREADABLE, ok=None)
        if count:
            return Check(name=name, found=f"{count:,} hashes belong to another split, the first is of document {first}", ok=False)
        return Check(name=name, found=f"{documents:,} hashes, all of this split", ok=True)

    def _sources(self) -> Check:
        sources, prepare = self._manifest.sources, self._manifest.prepare
        if not sources and len(prepare.sources) == 1 and prepare.weights is None:
            return Check(name="sources", found=NOT_RECORDED, ok=None)
        if len(sources) != len(prepare.sources):
            return Check(name="sources", found=f"{len(sources)} recorded, {len(prepare.sources)} prepared", ok=False)
        for split in SPLITS:
            whole, parts = self._manifest.split(split), [getattr(source.splits, split) for source in sources]
            for what in ("documents", "tokens", "bytes"):
                total, right = sum(getattr(part, what) for part in parts), getattr(whole, what)
                if total != right:
                    return Check(name="sources", found=f"together {total:,} {what} in {split}, recorded are {right:,}", ok=False)
            index = self._boundaries[split]
            if not isinstance(index, np.ndarray):
                return Check(name="sources", found=UNREADABLE, ok=None)
            documents = tokens = 0
            for source, part in zip(sources, parts, strict=True):
                documents, tokens = documents + part.documents, tokens + part.tokens
                if not 0 <= documents < len(index) or index[documents] != tokens:
                    text = f"the documents of {source.name} in {split} do not end at token {tokens:,}, as recorded"
                    return Check(name="sources", found=text, ok=False)
        return Check(name="sources", found=f"{len(sources)}, their stretches add up to the splits", ok=True)

    def _round_trip(self, sample: int, tokenizer: TextTokenizer | None) -> Check:
        name = "decoded and encoded again"
        indices = {split: index for split, index in self._boundaries.items() if isinstance(index, np.ndarray)}
        if tokenizer is None or len(indices) < len(SPLITS):
            return Check(name=name, found=UNREADABLE, ok=None)
        chosen = _spread(sample, {split: len(index) - 1 for split, index in indices.items()})
        differ: list[str] = []
        too_long: list[str] = []
        # One by one: a document may be as large as the memory allows.
        for split, number in chosen:
            ids = self._text_ids(split, number, indices[split])
            try:
                (again,) = tokenizer.encode_documents([tokenizer.decode(ids.tolist())])
            except RequestError:
                too_long.append(f"{split} document {number}")
                continue
            except FailureError as error:
                return Check(name=name, found=str(error), ok=False)
            if not np.array_equal(ids, again):
                differ.append(f"{split} document {number}")
        compared = len(chosen) - len(too_long)
        left_out = f"; {len(too_long)} cannot be cut and are too long to be encoded whole, the first is {too_long[0]}" if too_long else ""
        if not differ:
            return Check(name=name, found=f"{compared} documents, all the same{left_out}", ok=True if compared or not chosen else None)
        found = f"{len(differ)} of {compared} documents have other ids then, the first is {differ[0]}{left_out}"
        if self._manifest.prepare.tokenizer is not None:
            return Check(name=name, found=f"{found}; a ready tokenizer may change a text", ok=True)
        return Check(name=name, found=found, ok=False)

    def _text_ids(self, split: Split, number: int, index: np.ndarray) -> np.ndarray:
        """The ids of a document without begin and end."""
        tokens = read_array(self._directory / token_file(split), DTYPES[self._manifest.dtype])
        front = 0 if self._manifest.begin is None else 1
        return tokens[index[number] + front : index[number + 1] - 1]


def _edges(name: str, documents: int, missing: int, first: list[int], what: str) -> Check:
    if missing == 0:
        return Check(name=name, found=f"all {documents:,} {what}", ok=True)
    listed = ", ".join(map(str, first))
    return Check(name=name, found=f"{missing:,} of {documents:,} do not {what}, the first: {listed}", ok=False)


def _spread(sample: int, documents: dict[Split, int]) -> list[tuple[Split, int]]:
    """`sample` documents, or all there are: as many of every split as it has, up to an equal share, and of each evenly spaced ones."""
    chosen: list[tuple[Split, int]] = []
    left = sample
    by_size = sorted(documents, key=lambda split: documents[split])
    for place, split in enumerate(by_size):
        take = min(documents[split], -(-left // (len(by_size) - place)))
        left -= take
        chosen += [(split, number * documents[split] // take) for number in range(take)]
    return chosen
