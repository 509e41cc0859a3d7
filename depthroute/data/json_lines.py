"""JSON lines, plain or compressed: parts and rows."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import rows
from depthroute.data.corpus import Part
from depthroute.data.rows import BadRow, BadRows, Row
from depthroute.data.schemas import DEFAULT_TEXT, path_of, resolve, value_at

BUFFER_BYTES = 2**20
UNPACKED_BYTES = 2**16
"""Of a file that is cut short, about so much is lost before its end."""


def plan(path: Path, name: str, text_column: str | None, id_column: str | None, bad_rows: BadRows) -> list[Part]:
    """Ranges of bytes of about `PART_BYTES`, or the whole file where it is compressed. The first row decides about the columns; where bad
    rows are skipped, the first that has them.

    Raises:
        RequestError: a column is not there.
        FailureError: the file, or its first row, is damaged.
    """
    size = path.stat().st_size
    packed = _packing(path)
    if packed and not size:
        raise FailureError(f"{path} is not a whole {packed} file: it is empty.")
    columns, lacking = None, None
    for position, value in _objects(path, 0, size):
        if isinstance(value, dict):
            try:
                columns = resolve(value, name_row(path, position), text_column, id_column)
                break
            except RequestError as error:
                lacking = lacking or error
                if bad_rows == "refuse":
                    raise
        elif bad_rows == "refuse":
            raise rows.refusal(value, lambda position: name_row(path, position))
    if columns is None and lacking is not None:
        raise lacking
    if columns is None:  # nothing but blank lines, or lines that are no objects and are to be skipped
        columns = (text_column or DEFAULT_TEXT, id_column)
    if packed:
        return [Part(name, 0, size, size, columns)]
    ends = [min(start + rows.PART_BYTES, size) for start in range(0, size, rows.PART_BYTES)]
    return [Part(name, start, end, end - start, columns) for start, end in zip([0, *ends], ends, strict=False)]


def read(path: Path, part: Part) -> Iterator[Row | BadRow]:
    """The rows that begin in a part. Positions count bytes, in compressed files lines.

    Raises:
        FailureError: the compressed file is damaged.
    """
    if part.columns is None:
        raise TypeError("a part of a file of JSON lines has columns")
    text_column, id_column = part.columns
    for position, value in _objects(path, part.start, part.end):
        if isinstance(value, BadRow):
            yield value
            continue
        text, given = path_of(value, text_column), None if id_column is None else path_of(value, id_column)
        if text is None:
            yield _lacking(position, "text", text_column)
        elif id_column is not None and given is None:
            yield _lacking(position, "id", id_column)
        else:
            yield Row(position, value_at(value, text), None if given is None else value_at(value, given))


def name_row(path: Path, position: int) -> str:
    """From a position to "FILE row N"."""
    if not _packing(path):
        row, left = 1, position
        with path.open("rb") as file:
            while left and (piece := file.read(min(left, BUFFER_BYTES))):
                row += piece.count(b"\n")
                left -= len(piece)
        position = row - 1
    return f"{path} row {position + 1}"


def _lacking(position: int, what: str, column: str) -> BadRow:
    return BadRow(position, f"rows without the {what} column", f" lacks the {what} column {column!r}.", RequestError)


def _packing(path: Path) -> str | None:
    return {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())


def _objects(path: Path, start: int, end: int) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The position of each row that is not blank, and what it holds."""
    for position, line in _lines(path, start, end):
        if line is None:
            yield position, rows.too_large(position, rows.LARGEST_DOCUMENT + 1)
            continue
        try:
            # A byte order mark belongs to the file, not to its text.
            text = line.decode("utf-8-sig" if position == 0 else "utf-8")
        except UnicodeDecodeError as error:
            yield position, rows.not_utf8(position, error)
            continue
        if not text or text.isspace():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield position, BadRow(position, "rows that are not JSON", f" is not valid JSON ({error}).", FailureError)
            continue
        if isinstance(value, dict):
            yield position, value
        else:
            problem = f" must be a JSON object with a key for the text, not {rows.shorten(value)}."
            yield position, BadRow(position, "rows that are not JSON objects", problem, FailureError)


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes | None]]:
    """The position of each line that begins in the part, and its bytes; None for one that is too long."""
    if packed := _packing(path):
        yield from _unpacked_lines(path, packed)
        return
    with path.open("rb", buffering=BUFFER_BYTES) as file:
        # The line that reaches into the part from before it belongs to the part in which it begins.
        file.seek(max(start - 1, 0))
        if start:
            _pass_line(file)
        while (position := file.tell()) < end and (line := file.readline(rows.LARGEST_DOCUMENT + 1)):
            yield position, _whole(file, line)


def _unpacked_lines(path: Path, packed: str) -> Iterator[tuple[int, bytes | None]]:
    import pyarrow

    row = 0
    try:
        with _unpacked(path, packed) as file:
            while line := file.readline(rows.LARGEST_DOCUMENT + 1):
                yield row, _whole(file, line)
                row += 1
    except (EOFError, zlib.error, pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the system's, not the decoder's
            raise
        raise FailureError(f"{path} is not a whole {packed} file: reading stopped after row {row} ({error}).") from error


def _unpacked(path: Path, packed: str) -> IO[bytes]:
    if packed == "gzip":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    import pyarrow

    return cast("IO[bytes]", io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), UNPACKED_BYTES))


def _whole(file: IO[bytes], line: bytes) -> bytes | None:
    if len(line) <= rows.LARGEST_DOCUMENT:
        return line
    if not line.endswith(b"\n"):
        _pass_line(file)
    return None


def _pass_line(file: IO[bytes]) -> None:
    while (piece := file.readline(BUFFER_BYTES)) and not piece.endswith(b"\n"):
        pass
