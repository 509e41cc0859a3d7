"""Evaluations in a folder: NAME.json, which says that one is finished, and NAME.items.jsonl beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, read_json_lines, write_json, write_text

FORMAT = 1
StoredItem = dict[str, Any]


def write_evaluation(folder: Path, name: str, evaluation: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
    """Write the items, and then what was measured on them; a crash in between leaves an evaluation that is not there.

    Numbers that are not finite are written as null. What cannot be written at all leaves what was there.
    """
    path = _path(folder, name)
    lines = [json.dumps(_with_null(item), ensure_ascii=False, allow_nan=False) + "\n" for item in items]
    whole = _with_null({"format": FORMAT, "name": name, **evaluation})
    json.dumps(whole, allow_nan=False)
    path.unlink(missing_ok=True)
    write_text(_items(folder, name), "".join(lines))
    write_json(path, whole)


def read_evaluation(folder: Path, name: str) -> dict[str, Any] | None:
    """A finished evaluation, or None.

    Raises:
        FailureError: the file is broken, or of a format of another version.
    """
    path = _path(folder, name)
    if not path.exists():
        return None
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FailureError(f"{path} is no evaluation of the format {FORMAT}; delete it and evaluate again.")
    return value


def read_items(folder: Path, name: str) -> list[StoredItem]:
    """The items of a finished evaluation."""
    found: list[StoredItem] = read_json_lines(_items(folder, name))
    return found


def refuse_other_settings(folder: Path, name: str, recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to take an evaluation with other settings for the one wanted, naming the first that differs."""
    for field in [*wanted, *(field for field in recorded if field not in wanted)]:
        if recorded.get(field) != wanted.get(field):
            raise RequestError(
                f"{_path(folder, name)} was made with {field} = {recorded.get(field)!r}, not {wanted.get(field)!r}; choose another folder "
                "with --out, or replace it with --again."
            )


def _with_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_null(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _items(folder: Path, name: str) -> Path:
    return folder / f"{name}.items.jsonl"
