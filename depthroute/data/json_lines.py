"""JSON lines, plain or compressed: parts and rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import rows
from depthroute.data.corpus import Part
from depthroute.data.packed import Lines
from depthroute.data.rows import BadRow, BadRows, Row
from depthroute.data.schemas import DEFAULT_TEXT, path_of, resolve, value_at

PACKED = 4
"""Whoever reads a part of a compressed file has to unpack what is before it as well: with larger parts fewer processes do that."""

DEEPEST = 200
"""Levels of lists and objects in a row. Python's own limit depends on the caller: one process would read a row that another refuses."""
STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')


def plan(lines: Lines, name: str, text_column: str | None, id_column: str | None, bad_rows: BadRows) -> list[Part]:
    """Ranges of bytes of about `PART_BYTES`, and `PACKED` times that where the file is compressed. The first row decides about the columns;
    where bad rows are skipped, the first that has them.

    Raises:
        RequestError: a column is not there.
        FailureError: the file, if it is compressed, or its first row, is damaged.
    """
    lines.check_name()
    size = lines.size()
    columns, lacking = None, None
    for position, value in _objects(lines, 0, size):
        if isinstance(value, dict):
            # Only the first that lacks a column may be named: to name a row is to read all before it.
            where = partial(name_row, lines, position) if lacking is None else str
            try:
                columns = resolve(value, where, text_column, id_column)
                break
            except RequestError as error:
                lacking = lacking or error
                if bad_rows == "refuse":
                    raise
        elif bad_rows == "refuse":
            raise rows.refusal(value, lambda position: name_row(lines, position))
    if columns is None and lacking is not None:
        raise lacking
    if columns is None:  # nothing but blank lines, or lines that are no objects and are to be skipped
        columns = (text_column or DEFAULT_TEXT, id_column)
    step = rows.PART_BYTES * (PACKED if lines.packing else 1)
    ends = [min(start + step, size) for start in range(0, size, step)]
    return [Part(name, start, end, end - start, columns) for start, end in zip([0, *ends], ends, strict=False)]


def read(lines: Lines, part: Part) -> Iterator[Row | BadRow]:
    """The rows that begin in a part; positions count bytes.

    Raises:
        FailureError: the compressed file is damaged.
    """
    if part.columns is None:
        raise TypeError("a part of a file of JSON lines has columns")
    text_column, id_column = part.columns
    for position, value in _objects(lines, part.start, part.end):
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


def name_row(lines: Lines, position: int) -> str:
    """From a position to "FILE row N"."""
    return f"{lines.path} row {lines.row(position) + 1}"


def _lacking(position: int, what: str, column: str) -> BadRow:
    return BadRow(position, f"rows without the {what} column", f" lacks the {what} column {column!r}.", RequestError)


def _objects(lines: Lines, start: int, end: int) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The position of each row that is not blank, and what it holds."""
    for position, line in lines.read(start, end):
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
        if _depth(text) > DEEPEST:
            problem = f" is nested deeper than the {DEEPEST} levels that are allowed."
            yield position, BadRow(position, "rows that are nested too deep", problem, FailureError)
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            yield position, BadRow(position, "rows that are not JSON", f" is not valid JSON ({error}).", FailureError)
            continue
        if isinstance(value, dict):
            yield position, value
        else:
            problem = f" must be a JSON object with a key for the text, not {rows.shorten(value)}."
            yield position, BadRow(position, "rows that are not JSON objects", problem, FailureError)


def _depth(text: str) -> int:
    """How deep lists and objects lie in each other, at most; of what is no JSON some number."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return 0  # not deeper than that
    depth = deepest = 0
    for character in re.findall(r"[\[\]{}]", STRINGS.sub("", text)):
        depth += 1 if character in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
