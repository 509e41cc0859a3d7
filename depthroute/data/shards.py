"""Token shards: one flat file of token ids per split and two of its documents, written as a stream and read through the memory map.

    SPLIT.bin         little-endian uint16 or uint32, the tokens of all documents in corpus order, the end id after each, and before
                      each the begin id, if there is one
    SPLIT.index.bin   little-endian int64, the offset in tokens of every document's start, and at the end the number of tokens
    SPLIT.ids.bin     little-endian uint64, the hash of every document's id that decides its split (`DocumentSplit.split_hash`)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from depthroute.common.errors import FailureError
from depthroute.common.files import explain_os_errors, sha256_of
from depthroute.data.manifest import IDS, FileFacts, Manifest, SplitFacts
from depthroute.data.split import Split

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_DTYPE, IDS_DTYPE = np.dtype("<i8"), np.dtype("<u8")
CHUNK_BYTES = 2**20


def dtype_for(vocabulary: int) -> Literal["uint16", "uint32"]:
    """The smallest of the two types that holds every id below `vocabulary`."""
    return "uint16" if vocabulary <= 65_536 else "uint32"


def token_file(split: Split) -> str:
    return f"{split}.bin"


def index_file(split: Split) -> str:
    return f"{split}.index.bin"


def ids_file(split: Split) -> str:
    return f"{split}{IDS}"


class ShardWriter:
    """Writes one split. What it has written counts for nothing until the manifest names it.

    Args:
        vocabulary: ids are below it; it decides the dtype, and the length of `token_counts`.
        found: what an earlier writer had written and is kept: what the files hold behind it is cut off.
        hashes: the SHA-256 of what is kept of its files, by their names.

    Raises:
        FailureError: the files do not hold what is to be kept, the disk is full, or they cannot be written.
    """

    def __init__(self, directory: Path, split: Split, vocabulary: int, found: SplitFacts, hashes: Mapping[str, str]) -> None:
        self.documents, self.tokens, self.bytes = found.documents, found.tokens, found.bytes
        self.token_counts = np.zeros(vocabulary, dtype=np.int64)
        """int64 [vocabulary], how often each id was written."""
        self._dtype = DTYPES[dtype_for(vocabulary)]
        ends = found.documents + 1 if found.documents else 0
        with ExitStack() as stack:
            self._tokens = stack.enter_context(_HashedFile(directory / token_file(split), self._dtype, found.tokens, self._count))
            self._index = stack.enter_context(_HashedFile(directory / index_file(split), INDEX_DTYPE, ends))
            self._ids = stack.enter_context(_HashedFile(directory / ids_file(split), IDS_DTYPE, found.documents))
            if ends == 0:
                self._index.write(np.zeros(1, dtype=INDEX_DTYPE))
            for file in (self._tokens, self._index, self._ids) if found.documents else ():
                if file.facts().sha256 != hashes.get(file.facts().name):
                    raise FailureError(f"{file.path} is not what was written to it; delete {directory} and prepare the data again.")
            self._files = stack.pop_all()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the files, finished or not."""
        self._files.__exit__(*error)

    def add_tokens(self, path: Path) -> None:
        """Append a file of tokens in the dtype of the shard, begins and ends of documents included."""
        with explain_os_errors(path, "reading"), path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                array = np.frombuffer(data, dtype=self._dtype)
                self._tokens.write(array)
                self._count(array)

    def add_documents(self, lengths: np.ndarray, ids: np.ndarray, text_bytes: int) -> None:
        """Append to what is known of the documents.

        Args:
            lengths: int64 [documents], their numbers of tokens.
            ids: uint64 [documents], the hashes of their ids.
            text_bytes: of their texts, together.
        """
        self._index.write((self.tokens + np.cumsum(lengths)).astype(INDEX_DTYPE))
        self._ids.write(ids.astype(IDS_DTYPE, copy=False))
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())
        self.bytes += text_bytes

    def finish(self) -> tuple[FileFacts, ...]:
        """Hand all that was added to the disk; the names, sizes and hashes of the files."""
        for file in (self._tokens, self._index, self._ids):
            file.sync()
        return tuple(file.facts() for file in (self._tokens, self._index, self._ids))

    def _count(self, tokens: np.ndarray) -> None:
        counts = np.bincount(tokens, minlength=len(self.token_counts))
        self.token_counts += counts[: len(self.token_counts)]  # what is above the vocabulary was altered, and its hash says so


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
    """A file that is hashed while it is written; `kept` items of an earlier one are hashed first, and `seen` is given them."""

    def __init__(self, path: Path, dtype: np.dtype[Any], kept: int, seen: Callable[[np.ndarray], None] | None = None) -> None:
        self.path, self._hash, self._size = path, hashlib.sha256(), kept * dtype.itemsize
        with explain_os_errors(path, "writing"):
            if kept and (path.stat().st_size if path.exists() else 0) < self._size:
                raise FailureError(f"{path} is shorter than what was written to it; delete {path.parent} and prepare the data again.")
            self._file = path.open("r+b" if kept else "wb")
        if kept:
            self._keep(dtype, seen)

    def _keep(self, dtype: np.dtype[Any], seen: Callable[[np.ndarray], None] | None) -> None:
        """Hash what is kept, and cut off the rest."""
        left = self._size
        with explain_os_errors(self.path, "reading"):
            while left:
                data = self._file.read(min(left, CHUNK_BYTES))
                self._hash.update(data)
                if seen is not None:
                    seen(np.frombuffer(data, dtype=dtype))
                left -= len(data)
            self._file.truncate(self._size)

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        with explain_os_errors(self.path, "writing"):
            self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def sync(self) -> None:
        with explain_os_errors(self.path, "writing"):
            self._file.flush()
            os.fsync(self._file.fileno())

    def facts(self) -> FileFacts:
        return FileFacts(name=self.path.name, bytes=self._size, sha256=self._hash.hexdigest())

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with explain_os_errors(self.path, "writing"):
                self._file.close()
        except (FailureError, OSError):
            if kind is None:  # or else it would hide what went wrong first
                raise
