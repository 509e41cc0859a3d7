"""Token shards: one flat file of token ids per split, one of document boundaries, written as a stream and read through the memory map.

    SPLIT.bin         little-endian uint16 or uint32, the tokens of all documents in corpus order, the end id after each, and before
                      each the begin id, if there is one
    SPLIT.index.bin   little-endian int64, the offset in tokens of every document's start, and at the end the number of tokens
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from depthroute.common.errors import FailureError
from depthroute.common.files import explain_os_errors, sha256_of
from depthroute.data.manifest import FileFacts, Manifest, SplitFacts
from depthroute.data.split import Split

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_DTYPE = np.dtype("<i8")


def dtype_for(vocabulary: int) -> Literal["uint16", "uint32"]:
    """The smallest of the two types that holds every id below `vocabulary`."""
    return "uint16" if vocabulary <= 65_536 else "uint32"


def token_file(split: Split) -> str:
    return f"{split}.bin"


def index_file(split: Split) -> str:
    return f"{split}.index.bin"


class ShardWriter:
    """Writes one split. What it has written counts for nothing until the manifest names it.

    Args:
        vocabulary: ids are below it; it decides the dtype, and the length of `token_counts`.
        end: the id behind every document.
        begin: the id in front of every document, if there is one.
    """

    def __init__(self, directory: Path, split: Split, vocabulary: int, end: int, begin: int | None = None) -> None:
        self._end, self._front = [end], [] if begin is None else [begin]
        self.documents = self.tokens = self.bytes = 0
        self.token_counts = np.zeros(vocabulary, dtype=np.int64)
        self._dtype = DTYPES[dtype_for(vocabulary)]
        self._token_file = _HashedFile(directory / token_file(split))
        self._index_file = _HashedFile(directory / index_file(split))
        self._index_file.write(np.zeros(1, dtype=INDEX_DTYPE))

    def add(self, documents: Sequence[Sequence[int]], text_bytes: int) -> None:
        """Append documents, given as ids without begin and end, whose texts have `text_bytes` bytes together."""
        if not documents:
            return
        flat = np.concatenate([np.array([*self._front, *ids, *self._end], dtype=self._dtype) for ids in documents])
        ends = self.tokens + np.cumsum([len(self._front) + len(ids) + 1 for ids in documents], dtype=INDEX_DTYPE)
        self._token_file.write(flat)
        self._index_file.write(ends)
        self.token_counts += np.bincount(flat, minlength=len(self.token_counts))
        self.documents += len(documents)
        self.tokens += len(flat)
        self.bytes += text_bytes

    def finish(self) -> tuple[SplitFacts, tuple[FileFacts, FileFacts]]:
        """Flush both files to the disk; the counts, and the hashes of the files."""
        facts = SplitFacts(documents=self.documents, tokens=self.tokens, bytes=self.bytes)
        return facts, (self._token_file.finish(), self._index_file.finish())

    def close(self) -> None:
        """Close the files, finished or not."""
        self._token_file.close()
        self._index_file.close()


def file_facts(path: Path) -> FileFacts:
    """Name, size and SHA-256 of a file."""
    return FileFacts(name=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))


def check_files(directory: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Compare every file of a data directory with the manifest: its size, and its SHA-256 where `hashes` asks for it.

    Raises:
        FailureError: a file is absent, cut short, or altered.
    """
    for expected in manifest.files:
        path = directory / expected.name
        advice = "prepare the data again in a new directory"
        if not path.is_file():
            raise FailureError(f"{path} is missing, the manifest names it; {advice}.")
        if path.stat().st_size != expected.bytes:
            size = path.stat().st_size
            raise FailureError(f"{path} has {size} bytes and the manifest says {expected.bytes}; it was cut short or altered: {advice}.")
        if hashes and file_facts(path).sha256 != expected.sha256:
            raise FailureError(f"{path} does not have the SHA-256 that the manifest says; it was altered: {advice}.")


def read_array(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """The file as a read-only array [bytes / item size] through the memory map."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._path, self._hash, self._size = path, hashlib.sha256(), 0
        with explain_os_errors(path, "writing"):
            self._file = path.open("wb")

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        with explain_os_errors(self._path, "writing"):
            self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> FileFacts:
        with explain_os_errors(self._path, "writing"):
            self._file.flush()
            os.fsync(self._file.fileno())
        return FileFacts(name=self._path.name, bytes=self._size, sha256=self._hash.hexdigest())

    def close(self) -> None:
        with explain_os_errors(self._path, "writing"):
            self._file.close()
