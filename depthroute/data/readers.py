"""A user's own documents: parquet, JSON lines (plain, gzip or zstd), text files, or a folder of them. Everything is streamed."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.common.processors import usable_processors
from depthroute.data import json_lines, parquet, rows
from depthroute.data.config import HUB, Source
from depthroute.data.corpus import Document, Part
from depthroute.data.hub import HubCorpus
from depthroute.data.manifest import LOCK, MANIFEST, SOURCE
from depthroute.data.packed import Lines
from depthroute.data.rows import BadRow, BadRows, Row, to_documents
from depthroute.data.schemas import DEFAULT_TEXT

KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
NAMED_FILES = 20
"""How many files the manifest names; of more it gives the number."""


class FileCorpus:
    """The documents of a file, or of all files of a folder (recursive, in the order of their relative paths). Nothing is looked at before
    it is asked for.

    Args:
        source: a `.parquet`, `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.txt` file, or a folder. A text file is one document.
        text_column: the column, or key, of the text; dots lead into nested ones (`body.text`) where no column has that name itself. None:
            found for each file, see `schemas.resolve`.
        id_column: the column of the id, text or whole numbers. Without one, and where the value is null, the id is the SHA-256 of the text,
            so that exact copies land in the same split. None: found for each file, see `schemas.resolve`.
        bad_rows: what happens at a row that cannot be read: `refuse` raises, `skip` leaves it out and counts it. Damage that loses the
            rest of a file is always refused.
        report: called with a line where finding the parts takes long.
    """

    def __init__(
        self,
        source: Path,
        *,
        text_column: str | None = None,
        id_column: str | None = None,
        bad_rows: BadRows = "refuse",
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._source, self._text_column, self._id_column, self._bad_rows = source, text_column, id_column, bad_rows
        self._report = report
        self.name = source.resolve().name
        self.missing: tuple[str, ...] = ()
        self._lines: Lines | None = None

    @property
    def contents(self) -> tuple[str, ...]:
        """The relative paths of the files, or how many there are. Raises what `parts` raises of the source."""
        names = tuple(self._relative(path) for path in self._found[0])
        return names if len(names) <= NAMED_FILES else (f"{len(names)} files",)

    def parts(self, skipped: Counter[str]) -> Sequence[Part]:
        """Of parquet files ranges of row groups, of JSON lines ranges of bytes, of text files the whole. Compressed files are read through
        once for it. Files of other kinds are counted in `skipped`. `Part.columns` are the columns of the text and the id, None for text
        files.

        Raises:
            RequestError: the source does not exist, is of another kind, or is a folder without a file of these kinds; a file may not be
                read, lacks a column, or holds something else than text in it.
            FailureError: a file is damaged, as far as that can be seen without reading it all.
        """
        files, others = self._found
        skipped.update(others)
        packed = sum(Lines(path).packing is not None for path in files)
        if packed and self._report is not None:
            self._report(f"unpacking {packed} compressed file{'s' * (packed > 1)} once, to know that nothing is missing")
        found: list[Part] = []
        with ThreadPoolExecutor(usable_processors()) as pool:  # unpacking leaves the interpreter free
            for parts in pool.map(self._plan, files):
                found += parts
        return found

    def documents(self, part: Part, skipped: Counter[str]) -> Iterator[Document]:
        """The documents of a part. Null and blank texts are counted in `skipped`, and bad rows if they are to be skipped.

        Raises:
            RequestError: a row lacks a column, does not hold text, or more than `LARGEST_DOCUMENT` of it.
            FailureError: a file is damaged (not UTF-8, broken gzip, zstd, parquet or JSON). Messages name the file and the row, counted
                from 1.
        """
        path = self._source / part.name if self._source.is_dir() else self._source
        try:
            found, name_row = self._rows(path, part)
            yield from to_documents(found, name_row, part.columns or (DEFAULT_TEXT, None), self._bad_rows, skipped)
        except OSError as error:
            raise _unreadable(path, error) from error

    def stamp(self) -> list[list[Any]]:
        """Relative path, size and modification time of every file that is there now."""
        status = [(path, _status(path)) for path in _find(self._source)[0]]
        return [[self._relative(path), found.st_size, found.st_mtime_ns] for path, found in status]

    @cached_property
    def _found(self) -> tuple[list[Path], Counter[str]]:
        return _find(self._source)

    def _relative(self, path: Path) -> str:
        return path.name if path == self._source else path.relative_to(self._source).as_posix()

    def _rows(self, path: Path, part: Part) -> tuple[Iterator[Row | BadRow], Callable[[int], str]]:
        """The rows of a part, and from their positions to "FILE row N"."""
        kind = _kind(path)
        if kind in (".parquet", ".txt"):
            found = parquet.read(path, part) if kind == ".parquet" else _text_row(path)
            return found, lambda position: f"{path} row {position + 1}"
        if self._lines is None or self._lines.path != path:
            self._lines = Lines(path)
        return json_lines.read(self._lines, part), partial(json_lines.name_row, self._lines)

    def _plan(self, path: Path) -> list[Part]:
        try:
            return self._parts(path)
        except OSError as error:
            raise _unreadable(path, error) from error

    def _parts(self, path: Path) -> list[Part]:
        name, kind, size = self._relative(path), _kind(path), _status(path).st_size
        if kind == ".parquet":
            return parquet.plan(path, name, self._text_column, self._id_column)
        if kind != ".txt":
            return json_lines.plan(Lines(path), name, self._text_column, self._id_column, self._bad_rows)
        if self._id_column is not None:
            raise RequestError(f"{path} is a text file and has no column {self._id_column!r}; leave id_column out.")
        path.open("rb").close()  # may it be read?
        return [Part(name, 0, 1, size)]


def open_source(source: Source, bad_rows: BadRows, report: Callable[[str], None] | None = None) -> FileCorpus | HubCorpus:
    """The corpus of a source: of the hub where its path begins with `hf:`, or else of files. The sources `docstrings` and `multi-hop` are
    not known here. `report`: see `FileCorpus`.

    Raises:
        RequestError: what follows `hf:` is not understood.
    """
    if source.path.startswith(HUB):
        return HubCorpus(source.path, text_column=source.text_column, id_column=source.id_column, bad_rows=bad_rows)
    columns = {"text_column": source.text_column, "id_column": source.id_column}
    return FileCorpus(Path(source.path), **columns, bad_rows=bad_rows, report=report)


def _find(source: Path) -> tuple[list[Path], Counter[str]]:
    """The files to read, in order, and how many others there are by kind."""
    if not source.is_dir():
        if not source.exists():
            raise RequestError(
                f"the source {str(source)!r} does not exist; give a file ({', '.join(KINDS)}), a folder, 'docstrings', or hf:NAME."
            )
        if _kind(source) is None:
            raise RequestError(f"{source} is not of a kind that can be read; allowed: {', '.join(KINDS)}, or a folder of them.")
        return _with_names([source]), Counter()
    files, others = [], Counter[str]()
    for folder, subfolders, names in os.walk(source, onerror=_refuse_folder):
        if SOURCE in names and (LOCK in names or MANIFEST in names):  # prepared data: a source does not grow by what is made of it
            subfolders.clear()
            continue
        others["hidden files and folders"] += sum(name.startswith(".") for name in (*subfolders, *names))
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        others["folders that are links"] += sum(Path(folder, name).is_symlink() for name in subfolders)
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if _kind(path) is None:
                suffix = path.suffix if _is_unicode(path.suffix) else "not UTF-8"
                others[f"files of another kind ({suffix or 'no suffix'})"] += 1
            else:
                files.append(path)
    if not files:
        raise RequestError(f"the folder {source} holds no file that can be read; allowed: {', '.join(KINDS)}.")
    return sorted(_with_names(files), key=lambda path: path.relative_to(source).as_posix()), +Counter(dict(sorted(others.items())))


def _with_names(files: list[Path]) -> list[Path]:
    strange = next((path for path in files if not _is_unicode(str(path))), None)
    if strange is not None:
        raise RequestError(f"the name of the file {str(strange)!r} is not UTF-8; rename it.")
    return files


def _refuse_folder(error: OSError) -> None:
    raise _unreadable(Path(error.filename), error) from error


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(path: Path) -> str | None:
    return next((kind for kind in KINDS if path.name.lower().endswith(kind)), None)


def _status(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise RequestError(f"{path} is not a regular file but a pipe or a device, and cannot be read twice; write it to a file.")
    return found


def _unreadable(path: Path, error: OSError) -> DepthrouteError:
    # Arrow's own words are long.
    message = f"{path} cannot be read ({os.strerror(error.errno) if error.errno else error})."
    return RequestError(message) if isinstance(error, (PermissionError, FileNotFoundError)) else FailureError(message)


def _text_row(path: Path) -> Iterator[Row | BadRow]:
    size = path.stat().st_size
    if size > rows.LARGEST_DOCUMENT:
        yield rows.too_large(0, size)
        return
    try:
        # A byte order mark belongs to the file, not to its text.
        yield Row(0, path.read_bytes().decode("utf-8-sig"), None)
    except UnicodeDecodeError as error:
        yield rows.not_utf8(0, error)
