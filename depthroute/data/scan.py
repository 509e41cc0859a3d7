"""What `verify`, `statistics` and `show` find out alike: files read once from front to back in bounded memory, hashed and looked at on the
way, and whether an index, the sources and the manifest are sound."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError
from depthroute.data.manifest import MANIFEST, TOKENIZER, Manifest
from depthroute.data.shards import read_array
from depthroute.data.split import Split

CHUNK_BYTES = 2**22
CHUNK_ITEMS = 2**20


def read_hashed(path: Path, look: Callable[[memoryview], None]) -> tuple[int, str]:
    """The size and the SHA-256 of a file; `look` is given its bytes in order, in pieces of `CHUNK_BYTES`, before they are overwritten.

    The next piece is read and looked at by a second thread while this one hashes: together they take as long as the hash, or the disk.
    """
    digest, size = hashlib.sha256(), 0
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as beside:

        def fill(buffer: memoryview) -> memoryview:
            filled = 0
            while filled < len(buffer) and (read := file.readinto(buffer[filled:])):
                filled += read
            look(buffer[:filled])
            return buffer[:filled]

        ahead = beside.submit(fill, buffers[0])
        while piece := ahead.result():
            buffers.reverse()
            ahead = beside.submit(fill, buffers[0])
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


class TokenScan:
    """What the tokens of a split are, seen in order.

    Args:
        boundaries: int64 [documents + 1], rising from 0. None: they are not known, and documents are not looked at.
    """

    def __init__(self, dtype: np.dtype[Any], end: int, begin: int | None, boundaries: np.ndarray | None) -> None:
        self._dtype, self._end, self._begin, self._boundaries = dtype, end, begin, boundaries
        self.tokens = 0
        """Seen so far."""
        self.largest = -1
        """The largest id; -1: there is none."""
        self.ends = 0
        """How often the end occurs."""
        self.without_end: list[int] = []
        """The first documents that the end does not close, and how many there are in `missing_ends`."""
        self.without_begin: list[int] = []
        self.missing_ends = self.missing_begins = 0

    def look(self, data: memoryview) -> None:
        """Take the next bytes: whole tokens, but for a file that is cut inside of one."""
        tokens = np.frombuffer(data[: len(data) - len(data) % self._dtype.itemsize], dtype=self._dtype)
        if len(tokens) == 0:
            return
        self.largest = max(self.largest, int(tokens.max()))
        self.ends += int(np.count_nonzero(tokens == self._end))
        if self._boundaries is not None:
            first, last = self.tokens, self.tokens + len(tokens)
            low, high = np.searchsorted(self._boundaries[1:], (first, last), side="right")
            wrong = low + np.flatnonzero(tokens[self._boundaries[1 + low : 1 + high] - 1 - first] != self._end)
            self.missing_ends += len(wrong)
            self.without_end += wrong[: 3 - len(self.without_end)].tolist()
            if self._begin is not None:
                low, high = np.searchsorted(self._boundaries[:-1], (first, last), side="left")
                wrong = low + np.flatnonzero(tokens[self._boundaries[low:high] - first] != self._begin)
                self.missing_begins += len(wrong)
                self.without_begin += wrong[: 3 - len(self.without_begin)].tolist()
        self.tokens += len(tokens)


class Sequential:
    """A file of items read from front to back through the memory map; what was read need not stay in memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.items = np.zeros(0, dtype=dtype)
        """[file size / item size]."""
        self._mapped, self._dropped = None, 0
        if path.stat().st_size:  # an empty file cannot be mapped
            with path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._mapped.madvise(mmap.MADV_SEQUENTIAL)
            self.items = np.frombuffer(self._mapped, dtype=dtype)

    def drop(self, end: int) -> None:
        """The bytes before `end` are not read again."""
        end -= end % mmap.PAGESIZE
        if self._mapped is not None and end > self._dropped:
            self._mapped.madvise(mmap.MADV_DONTNEED, self._dropped, end - self._dropped)
            self._dropped = end


def pieces(array: np.ndarray, overlap: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """An array [n] in pieces of `CHUNK_ITEMS`, each with its first position and with the first `overlap` items of the next one."""
    for first in range(0, len(array), CHUNK_ITEMS):
        yield first, array[first : first + CHUNK_ITEMS + overlap]


def first_not_rising(boundaries: np.ndarray) -> int | None:
    """The first position whose value is not above the one before it; None: all rise."""
    for first, piece in pieces(boundaries, overlap=1):
        wrong = np.flatnonzero(piece[1:] <= piece[:-1])
        if len(wrong):
            return first + int(wrong[0]) + 1
    return None


def outside(values: np.ndarray, low: int, high: int) -> tuple[int, int | None]:
    """How many unsigned values [n] do not lie in low <= value < high, and the position of the first of them."""
    count, first_wrong = 0, None
    for first, piece in pieces(values):
        # Compared with the last value that is allowed: the range may end at 2^64, which the values cannot hold.
        inside = (piece >= low) & (piece <= high - 1) if high > low else np.zeros(len(piece), dtype=bool)
        wrong = np.flatnonzero(~inside)
        if first_wrong is None and len(wrong):
            first_wrong = first + int(wrong[0])
        count += len(wrong)
    return count, first_wrong


def index_fault(index: np.ndarray, tokens: int) -> str | None:
    """What is wrong with int64 [documents + 1] as the index of so many tokens."""
    if len(index) == 0:
        return "it is empty"
    if index[0] != 0:
        return f"it starts at {index[0]}, not at 0"
    fault = first_not_rising(index)
    if fault is not None:
        return f"document {fault - 1} ends at {index[fault]}, not behind its start at {index[fault - 1]}"
    return None if index[-1] == tokens else f"it ends at {index[-1]}, the file has {tokens} tokens"


def whole_items(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """`read_array` of a file that may be damaged.

    Raises:
        FailureError: its size is no whole number of items.
    """
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise FailureError(f"{path} has {size} bytes, no whole number of {dtype.name}; `depthroute data verify` says what is wrong.")
    return read_array(path, dtype)


def ends_of_sources(directory: Path, manifest: Manifest, split: Split, documents: int) -> list[int]:
    """0 and, for each source, the number of documents up to its end in a split; only 0 where the manifest does not know sources.

    Raises:
        FailureError: they are not those of a split with so many documents.
    """
    ends = [0]
    for source in manifest.sources:
        more = getattr(source.splits, split).documents
        if more < 0:
            raise FailureError(
                f"{directory / MANIFEST} gives {source.name} {more} documents in {split}; it takes 0 or more: `depthroute data verify` "
                "says what is wrong."
            )
        ends.append(ends[-1] + more)
    if manifest.sources and ends[-1] != documents:
        raise FailureError(
            f"{directory / MANIFEST} gives the sources {ends[-1]} documents in {split}, and the index has {documents}; `depthroute data "
            "verify` says what is wrong."
        )
    return ends


def manifest_faults(manifest: Manifest) -> list[str]:
    """What a manifest says that cannot be, whatever the files are."""
    names = Counter(file.name for file in manifest.files)
    faults = [f"it names {name} {count} times" for name, count in names.items() if count > 1]
    faults += [f"{name} is {value}, below 0" for name, value in _numbers(to_json(manifest)) if value < 0]
    recorded, right = manifest.tokenizer.sha256, {file.sha256 for file in manifest.files if file.name == TOKENIZER}
    if right - {recorded}:
        faults.append(f"tokenizer.sha256 is {recorded[:12]}..., that of {TOKENIZER} {min(right - {recorded})[:12]}...")
    train = manifest.splits.train
    ratio = train.bytes / train.tokens if train.tokens else math.nan
    if not math.isclose(ratio, manifest.bytes_per_token, rel_tol=1e-9):
        faults.append(f"bytes_per_token is {manifest.bytes_per_token}, the counts of train give {ratio}")
    return faults


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a manifest by their dotted names, but for those of `prepare`, which is checked where it is read."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in entries:
        if path or name != "prepare":
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    if isinstance(value, int | float):
        yield path, value


def among(values: np.ndarray, rising: np.ndarray) -> np.ndarray:
    """bool [n]: whether each of values [n] is one of rising [m]."""
    found = np.zeros(len(values), dtype=bool)
    if len(rising):
        for first, piece in pieces(values):
            found[first : first + len(piece)] = rising[np.minimum(np.searchsorted(rising, piece), len(rising) - 1)] == piece
    return found


def repeated(hashes: np.ndarray, rising: np.ndarray) -> np.ndarray:
    """bool [n]: whether each of hashes [n] is that of one before it; `rising` are the same in rising order."""
    again = np.unique(rising[1:][rising[1:] == rising[:-1]])
    found = among(hashes, again)
    places = np.flatnonzero(found)
    found[places[np.unique(hashes[places], return_index=True)[1]]] = False
    return found


def shared(ids: list[np.ndarray | None]) -> int | None:
    """How many values are in more than one of the arrays, of which each is rising; None where one is not there."""
    known = [values for values in ids if values is not None]
    if len(known) < len(ids):
        return None
    twice = [values[among(values, before)] for place, values in enumerate(known) for before in known[:place]]
    return len(np.unique(np.concatenate(twice)))
