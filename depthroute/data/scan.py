"""Files of a data directory looked at once from front to back: hashed, and their contents checked on the way, in bounded memory."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

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
