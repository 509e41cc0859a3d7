"""Which columns hold the text and the id: named by the user, known from public data sets, or `text`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from depthroute.common.errors import RequestError, choose

DEFAULT_TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns by which the files of a public data set are known, and what they hold."""

    name: str
    columns: frozenset[str]
    """All of them must be there."""
    text: str
    id: str | None
    """None: its documents have no id."""


SCHEMAS = (
    Schema(name="FineWeb", columns=frozenset({"text", "id", "dump", "url"}), text="text", id="id"),
    Schema(name="Ultra-FineWeb", columns=frozenset({"content", "score"}), text="content", id=None),
)


def resolve(tree: Mapping[str, Any], where: Callable[[], str], text_column: str | None, id_column: str | None) -> tuple[str, str | None]:
    """The columns of the text and of the id.

    Args:
        tree: the columns of a file by name; those that have columns of their own are mappings again.
        where: names the file, for messages.
        text_column: None takes that of the first of `SCHEMAS` that fits, or else `text`. A file with a column `text` is not taken for one
            whose text is elsewhere.
        id_column: None takes that of the schema, if its text is the text that is taken, or else none.

    Raises:
        RequestError: a column is not there.
    """
    known = [schema for schema in SCHEMAS if schema.columns <= tree.keys()]
    if text_column is not None:
        known = [schema for schema in known if schema.text == text_column]
    elif DEFAULT_TEXT in tree:
        known = [schema for schema in known if schema.text == DEFAULT_TEXT]
    text = text_column or (known[0].text if known else DEFAULT_TEXT)
    given_id = id_column or (known[0].id if known else None)
    for option, column in (("text_column", text), ("id_column", given_id)):
        if column is not None and path_of(tree, column) is None:
            raise RequestError(f"{where()}: {option}: {choose('column', column, _names(tree))}")
    return text, given_id


def path_of(tree: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """The names that lead to a column: `body.text` is the column of that name, or else `text` in `body`. None where there is none.

    What is null has every column that is asked of it, and all are null.
    """
    if name in tree:
        return (name,)
    # The longest name first: one that has dots itself wins over one that is further in.
    at = name.rfind(".")
    while at > 0:
        head, rest = name[:at], name[at + 1 :]
        if head in tree:
            inner = tree[head]
            if inner is None:
                return (head, rest)
            path = path_of(inner, rest) if isinstance(inner, Mapping) else None
            if path is not None:
                return (head, *path)
        at = name.rfind(".", 0, at)
    return None


def value_at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """What `path_of` leads to; None behind a null."""
    value: Any = tree
    for name in path:
        if value is None:
            return None
        value = value[name]
    return value


def _names(tree: Mapping[str, Any]) -> Iterator[str]:
    for name, inner in tree.items():
        if isinstance(inner, Mapping) and inner:
            yield from (f"{name}.{further}" for further in _names(inner))
        else:
            yield name
