"""A user's own documents: parquet, JSON lines (plain or gzip), text files, or a folder of them. Everything is streamed."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.data.corpus import Document

KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".txt")
ROWS_PER_READ = 256
NAMED_FILES = 20
"""How many files the manifest names; of more it gives the number."""


class FileCorpus:
    """The documents of a file, or of all files of a folder (recursive, in the order of their relative paths).

    Args:
        source: a `.parquet`, `.jsonl`, `.jsonl.gz` or `.txt` file, or a folder. A text file is one document.
        text_column: the column, or key, of the text.
        id_column: the column of the id, text or whole numbers. Without one, and where the value is null, the id is the SHA-256 of the text,
            so that exact copies land in the same split.

    Raises:
        RequestError: the source does not exist, is of another kind, or is a folder without a file of these kinds.
    """

    def __init__(self, source: Path, *, text_column: str = "text", id_column: str | None = None) -> None:
        self._text_column, self._id_column = text_column, id_column
        self._source = source
        self._files, others = _find(source)
        self._ignored = dict(sorted(others.items()))
        self.name = source.resolve().name
        names = tuple(self._relative(path) for path in self._files)
        self.contents = names if len(names) <= NAMED_FILES else (f"{len(names)} files",)
        self.missing: tuple[str, ...] = ()

    def documents(self, skipped: Counter[str]) -> Iterator[Document]:
        """All documents; null and blank texts, and files of other kinds, are counted in `skipped`.

        Raises:
            RequestError: a column does not exist, or does not hold text.
            FailureError: a file is damaged (not UTF-8, broken gzip, parquet or JSON). Messages name the file and the row, counted from 1.
        """
        skipped.update(self._ignored)
        for path in self._files:
            try:
                for row, text, given in self._rows(path):
                    if text is None:
                        skipped["rows whose text is null"] += 1
                    elif not text.strip():
                        skipped["documents whose text is empty or blank"] += 1
                    else:
                        yield _document(path, row, text, given)
            except OSError as error:
                raise FailureError(f"{path} cannot be read ({error.strerror or error}).") from error

    def stamp(self) -> list[list[Any]]:
        """Relative path, size and modification time of every file."""
        status = [(path, path.stat()) for path in self._files]
        return [[self._relative(path), found.st_size, found.st_mtime_ns] for path, found in status]

    def _relative(self, path: Path) -> str:
        return path.name if path == self._source else path.relative_to(self._source).as_posix()

    def _rows(self, path: Path) -> Iterator[tuple[int, str | None, str | None]]:
        kind = _kind(path)
        if kind == ".txt":
            if self._id_column is not None:
                raise RequestError(f"{path} is a text file and has no column {self._id_column!r}; leave id_column out.")
            return iter([(1, _decode(path, 1, path.read_bytes()), None)])
        if kind == ".parquet":
            return self._parquet_rows(path)
        return self._json_rows(path, gzip.open if kind == ".jsonl.gz" else open)

    def _json_rows(self, path: Path, open_file: Callable[..., Any]) -> Iterator[tuple[int, str | None, str | None]]:
        for row, line in _lines(path, open_file):
            text = _decode(path, row, line)
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise FailureError(f"{path} row {row} is not valid JSON ({error}).") from error
            if not isinstance(value, dict):
                raise FailureError(f"{path} row {row} must be a JSON object with the key {self._text_column!r}, not {_shorten(value)}.")
            for option, column in self._columns():
                if column not in value:
                    raise _no_column(f"{path} row {row}", option, column, value)
            yield row, _text(path, row, self._text_column, value[self._text_column]), self._identifier(path, row, value)

    def _parquet_rows(self, path: Path) -> Iterator[tuple[int, str | None, str | None]]:
        import pyarrow
        import pyarrow.parquet

        row = 1
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for option, column in self._columns():
                    if column not in file.schema_arrow.names:
                        raise _no_column(str(path), option, column, file.schema_arrow.names)
                wanted = list(dict.fromkeys(column for _, column in self._columns()))
                for batch in file.iter_batches(batch_size=ROWS_PER_READ, columns=wanted):
                    columns = [batch.column(name) for name in wanted]
                    for i in range(batch.num_rows):
                        try:
                            value = {name: column[i].as_py() for name, column in zip(wanted, columns, strict=True)}
                        except UnicodeDecodeError as error:
                            raise _not_utf8(path, row, error) from error
                        yield row, _text(path, row, self._text_column, value[self._text_column]), self._identifier(path, row, value)
                        row += 1
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # the system's, not Arrow's
                raise
            first = str(error).strip().splitlines()[0]
            raise FailureError(f"{path} is not a whole parquet file: reading row {row} failed ({first}).") from error

    def _columns(self) -> list[tuple[str, str]]:
        columns = [("text_column", self._text_column)]
        return columns if self._id_column is None else [*columns, ("id_column", self._id_column)]

    def _identifier(self, path: Path, row: int, value: dict[str, Any]) -> str | None:
        given = None if self._id_column is None else value[self._id_column]
        if given is None or isinstance(given, str):
            return given
        if isinstance(given, int) and not isinstance(given, bool):
            return str(given)
        raise RequestError(f"{path} row {row}: column {self._id_column!r} must hold text or whole numbers, not {_shorten(given)}.")


def _find(source: Path) -> tuple[list[Path], Counter[str]]:
    """The files to read, in order, and how many others there are by kind."""
    if source.is_file():
        if _kind(source) is None:
            raise RequestError(f"{source} is not of a kind that can be read; allowed: {', '.join(KINDS)}, or a folder of them.")
        return [source], Counter()
    if not source.is_dir():
        raise RequestError(f"the source {str(source)!r} does not exist; give a file ({', '.join(KINDS)}), a folder, or 'docstrings'.")
    files, others = [], Counter[str]()
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if _kind(path) is None:
                others[f"files of another kind ({path.suffix or 'no suffix'})"] += 1
            else:
                files.append(path)
    if not files:
        raise RequestError(f"the folder {source} holds no file that can be read; allowed: {', '.join(KINDS)}.")
    return sorted(files, key=lambda path: path.relative_to(source).as_posix()), others


def _kind(path: Path) -> str | None:
    return next((kind for kind in KINDS if path.name.lower().endswith(kind)), None)


def _lines(path: Path, open_file: Callable[..., Any]) -> Iterator[tuple[int, bytes]]:
    row = 0
    try:
        with open_file(path, "rb") as file:
            for row, line in enumerate(file, start=1):
                yield row, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FailureError(f"{path} is not a whole gzip file: reading stopped after row {row} ({error}).") from error


def _document(path: Path, row: int, text: str, given: str | None) -> Document:
    try:
        data = text.encode("utf-8")
        if given is not None:
            given.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FailureError(f"{path} row {row} holds half a surrogate pair (\\u{ord(error.object[error.start]):04x}), not text.") from error
    return Document(given if given is not None else hashlib.sha256(data).hexdigest(), text)


def _decode(path: Path, row: int, data: bytes) -> str:
    try:
        # A byte order mark belongs to the file, not to its text.
        return data.decode("utf-8-sig" if row == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, row, error) from error


def _not_utf8(path: Path, row: int, error: UnicodeDecodeError) -> FailureError:
    return FailureError(f"{path} row {row} is not valid UTF-8 (byte 0x{error.object[error.start]:02x}); convert the file to UTF-8.")


def _text(path: Path, row: int, column: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"{path} row {row}: column {column!r} must hold text, not {_shorten(value)}; choose another text_column.")


def _no_column(where: str, option: str, column: str, names: Iterable[str]) -> RequestError:
    return RequestError(f"{where}: {option}: {choose('column', column, names)}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
