"""Parquet files, and Arrow tables of other origin: columns, parts and rows, in little memory whatever the size of a row group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import rows
from depthroute.data.corpus import Part
from depthroute.data.rows import BadRow, Row
from depthroute.data.schemas import path_of, resolve, value_at

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

BATCH_BYTES = 2**18
"""About how much is decoded at a time, going by the mean row of the row group."""
BATCH_ROWS = 64
"""Few, because a text that the row group stores once and repeats counts for next to nothing in the mean."""
LARGEST_LIST = 2**22
"""Bytes of the texts of a batch that are made at once."""
BUFFER_BYTES = 2**20
"""What is read of the file at a time, of each column."""


def plan(path: Path, name: str, text_column: str | None, id_column: str | None) -> list[Part]:
    """Ranges of row groups of about `PART_BYTES`; a larger row group is a part of its own.

    Raises:
        RequestError: a column is not there, or is not of text.
        FailureError: the file is damaged.
    """
    with _explained(path, "its end"), _open(path) as file:
        columns = columns_of(file.schema_arrow, str(path), text_column, id_column)
        # How much a single column takes is not asked: of a damaged footer Arrow's answer can be the end of the process.
        unpacked = [max(0, file.metadata.row_group(group).total_byte_size) for group in range(file.num_row_groups)]
    sizes = [path.stat().st_size * size // max(1, sum(unpacked)) for size in unpacked]
    parts, start = [], 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sum(sizes[start : end + 1]) > rows.PART_BYTES:
            parts.append(Part(name, start, end, sum(sizes[start:end]), columns))
            start = end
    return parts


def read(path: Path, part: Part) -> Iterator[Row | BadRow]:
    """The rows of a part; positions count the rows of the file.

    Raises:
        FailureError: the file is damaged.
    """
    if part.columns is None:
        raise TypeError("a part of a parquet file has columns")
    with _explained(path, "its end"), _open(path) as file:
        wanted = _read_names(file.schema_arrow, part.columns)
        position = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        for group in range(part.start, part.end):
            count, size = file.metadata.row_group(group).num_rows, file.metadata.row_group(group).total_byte_size
            batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES * count // max(size, 1)))
            end = position + count
            batches = file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=wanted, use_threads=False)
            while True:
                with _explained(path, f"row {position + 1}"):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield from batch_rows_of(batch, part.columns, position)
                position += batch.num_rows
            if position != end:
                raise FailureError(f"{path} is not a whole parquet file: row group {group + 1} ends after row {position}, not {end}.")


def columns_of(schema: pyarrow.Schema, where: str, text_column: str | None, id_column: str | None) -> tuple[str, str | None]:
    """The columns of the text and of the id.

    Raises:
        RequestError: a column is not there, is there twice, or is not of text (the id: text or whole numbers).
    """

    tree = _tree(schema)
    columns = resolve(tree, lambda: where, text_column, id_column)
    for option, column in zip(("text_column", "id_column"), columns, strict=True):
        if column is None:
            continue
        path = path_of(tree, column) or ()
        if list(schema.names).count(path[0]) > 1:
            raise RequestError(f"{where}: {option}: there are several columns {path[0]!r}; rename all but one.")
        found = value_at(tree, path)
        if not _fits(found, numbers=option == "id_column"):
            allowed = "text" if option == "text_column" else "text or whole numbers"
            names = "columns of its own" if isinstance(found, dict) else str(found)
            raise RequestError(f"{where}: column {column!r} must hold {allowed}, not {names}; choose another {option}.")
    return columns


def _fits(kind: Any, *, numbers: bool) -> bool:
    """Whether a column of this type, or all columns of a struct, is text; or whole numbers, where those are allowed."""
    from pyarrow import types

    if isinstance(kind, dict):
        return False
    if types.is_dictionary(kind):
        kind = kind.value_type
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(text or types.is_null(kind) or (numbers and types.is_integer(kind)))


def batch_rows_of(batch: pyarrow.RecordBatch, columns: tuple[str, str | None], position: int) -> Iterator[Row | BadRow]:
    """The rows of a batch; `position` is that of its first row."""
    tree = _tree(batch.schema)
    text, given = (None if column is None else _values(batch, path_of(tree, column) or ()) for column in columns)
    assert text is not None
    try:
        # Large texts are made one after the other.
        texts = text.to_pylist() if text.nbytes <= LARGEST_LIST else None
        ids = itertools.repeat(None) if given is None or texts is None else given.to_pylist()
    except UnicodeDecodeError:
        texts = None
    if texts is None:
        yield from _one_by_one(text, given, position)
    else:
        yield from map(Row, itertools.count(position), texts, ids)


def _one_by_one(text: pyarrow.Array, given: pyarrow.Array | None, position: int) -> Iterator[Row | BadRow]:
    for i in range(len(text)):
        size = _largest(text[i : i + 1])
        if size > rows.LARGEST_DOCUMENT:
            yield rows.too_large(position + i, size)
            continue
        try:
            yield Row(position + i, text[i].as_py(), None if given is None else given[i].as_py())
        except UnicodeDecodeError as error:
            yield rows.not_utf8(position + i, error)


def _largest(text: pyarrow.Array) -> int:
    """Bytes of the longest text."""
    from pyarrow import compute, types

    return 0 if types.is_null(text.type) else int(compute.max(compute.binary_length(text)).as_py() or 0)


def _values(batch: pyarrow.RecordBatch, path: tuple[str, ...]) -> pyarrow.Array:
    import pyarrow
    from pyarrow import compute, types

    found = batch.column(path[0])
    for name in path[1:]:
        found = compute.struct_field(found, [found.type.get_field_index(name)])
    if types.is_dictionary(found.type):
        found = found.dictionary_decode()
    return found.cast(pyarrow.large_string()) if types.is_string_view(found.type) else found


def _tree(fields: Any) -> dict[str, Any]:
    """The columns of a schema, or the fields of a struct, by name: structs as mappings, all others by their types."""
    from pyarrow import types

    return {field.name: _tree(field.type) if types.is_struct(field.type) else field.type for field in fields}


def _read_names(schema: pyarrow.Schema, columns: tuple[str, str | None]) -> list[str]:
    """What Parquet calls the columns that are to be read."""
    tree = _tree(schema)
    return list(dict.fromkeys(".".join(path_of(tree, column) or ()) for column in columns if column is not None))


@contextmanager
def _open(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    import pyarrow.parquet

    # Read ahead only a little: a row group may be larger than the memory. Not mapped: a file that is cut short would end the process.
    little = {"memory_map": False, "pre_buffer": False, "buffer_size": BUFFER_BYTES}
    with pyarrow.parquet.ParquetFile(path, **little, page_checksum_verification=True) as file:
        yield file


@contextmanager
def _explained(path: Path, at: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, IndexError) as error:  # names of columns, row groups
        if isinstance(error, OSError) and error.errno:  # the system's, not Arrow's
            raise
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise FailureError(f"{path} is not a whole parquet file: reading {at} failed ({first}).") from error
