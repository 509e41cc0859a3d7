"""From the row of a file to a document: what is text, what is left out, and what happens at a row that cannot be read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.data.corpus import Document

BadRows = Literal["refuse", "skip"]

PART_BYTES = 2**24
"""About how much of a file is one part."""
LARGEST_DOCUMENT = 2**28
"""Bytes in UTF-8 that a document may have, and bytes that a line of JSON may have: either is held in memory as a whole."""


class Row(NamedTuple):
    """What a row holds where the text and the id should be."""

    position: int
    """Where it begins in its file, in what the kind of file counts: rows, or bytes."""
    text: Any
    id: Any


class BadRow(NamedTuple):
    """A row that cannot become a document."""

    position: int
    reason: str
    """In the plural, for the counts."""
    problem: str
    """Goes on after "FILE row N"."""
    error: type[DepthrouteError]


def to_documents(
    rows: Iterable[Row | BadRow],
    name_row: Callable[[int], str],
    columns: tuple[str, str | None],
    bad_rows: BadRows,
    skipped: Counter[str],
) -> Iterator[Document]:
    """The documents of rows. Null and blank texts, and bad rows that are to be skipped, are counted in `skipped`. Without an id the SHA-256
    of the text in hexadecimal digits is the id.

    Args:
        name_row: from a position to "FILE row N", for messages.

    Raises:
        FailureError: a row is damaged.
        RequestError: a row does not hold text, or holds too much of it.
    """
    for row in rows:
        found = row if isinstance(row, BadRow) else _document(row, *columns)
        if isinstance(found, Document):
            yield found
        elif isinstance(found, str):
            skipped[found] += 1
        elif bad_rows == "skip":
            skipped[found.reason] += 1
        else:
            raise refusal(found, name_row)


def refusal(bad: BadRow, name_row: Callable[[int], str]) -> DepthrouteError:
    return bad.error(f"{name_row(bad.position)}{bad.problem} To leave such rows out, set bad_rows to skip.")


def not_utf8(position: int, error: UnicodeDecodeError) -> BadRow:
    problem = f" is not valid UTF-8 (byte 0x{error.object[error.start]:02x}); convert the file to UTF-8."
    return BadRow(position, "rows that are not UTF-8", problem, FailureError)


def too_large(position: int, count: int) -> BadRow:
    problem = f" has {count} bytes or more, above the {LARGEST_DOCUMENT} that are allowed; cut it into smaller documents."
    return BadRow(position, "rows that are too large", problem, RequestError)


def not_text(position: int, column: str, wanted: str, value: Any) -> BadRow:
    problem = f": column {column!r} must hold {wanted}, not {shorten(value)}; choose another column."
    return BadRow(position, "rows whose text or id is not text", problem, RequestError)


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _document(row: Row, text_column: str, id_column: str | None) -> Document | BadRow | str:
    """A document, what is wrong with the row, or why it is none."""
    position, text, given = row
    if text is None:
        return "rows whose text is null"
    if not isinstance(text, str):
        return not_text(position, text_column, "text", text)
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    if given is not None and not isinstance(given, str):
        return not_text(position, str(id_column), "text or whole numbers", given)
    if not text or text.isspace():
        return "documents whose text is empty or blank"
    if len(text) > LARGEST_DOCUMENT:
        return too_large(position, len(text))
    try:
        data = text.encode("utf-8")
        if given is not None:
            given.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f" holds half a surrogate pair (\\u{ord(error.object[error.start]):04x}), not text."
        return BadRow(position, "rows that hold half a surrogate pair", problem, FailureError)
    if len(data) > LARGEST_DOCUMENT:
        return too_large(position, len(data))
    return Document(hashlib.sha256(data).hexdigest() if given is None else given, text)
