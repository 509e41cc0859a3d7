"""Frozen dataclasses to and from JSON: strict reading, dotted overrides, a content hash.

A class that stands for several (a residual method) defines `variants()`, a mapping from name to class, and the written form then
carries the name under `tag`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from typing import Any, TypeVar

from depthroute.common.errors import RequestError, choose

Config = TypeVar("Config")


def to_json(config: Any) -> Any:
    """Turn a config, or any value inside one, into what JSON can hold."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
        tag = getattr(type(config), "tag", None)
        return {tag: type(config).name, **fields} if tag else fields  # type: ignore[attr-defined]
    if isinstance(config, tuple | list):
        return [to_json(value) for value in config]
    if isinstance(config, dict):
        return {key: to_json(value) for key, value in config.items()}
    return config


def from_json(cls: type[Config], value: Any, path: str = "") -> Config:
    """Build a `cls` from parsed JSON.

    Raises:
        RequestError: an unknown field (with the nearest right one), a missing field, or a value of the wrong type, by its dotted path.
    """
    where = path or cls.__name__
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object with fields, not {value!r}.")
    value = dict(value)
    if getattr(cls, "tag", None):
        tag: str = cls.tag  # type: ignore[attr-defined]
        variants: dict[str, type] = cls.variants()  # type: ignore[attr-defined]
        name = value.pop(tag, None)
        if not isinstance(name, str) or name not in variants:
            raise RequestError(f"{where}.{tag}: {choose(tag, str(name), variants)}")
        cls = variants[name]
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in value:
        if name not in fields:
            raise RequestError(f"{where}: {choose('field', name, fields)}")
    arguments = {name: _coerce(hints[name], given, f"{path}.{name}" if path else name) for name, given in value.items()}
    missing = [
        name for name, field in fields.items()
        if name not in arguments and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RequestError(f"{where} lacks the field {missing[0]!r}.")
    return cls(**arguments)


def override(config: Config, changes: dict[str, Any]) -> Config:
    """A copy of `config` with dotted fields replaced: `{"train.steps": "100"}`. Text is read as the field's own type.

    Raises:
        RequestError: the field does not exist (with the nearest right one), or the text cannot be its type.
    """
    changed: Config = _override(config, {tuple(dotted.split(".")): value for dotted, value in changes.items()}, "")
    return changed


def fingerprint(config: Any) -> str:
    """The SHA-256 of a config's canonical JSON, as 64 hexadecimal digits."""
    text = json.dumps(to_json(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _override(config: Any, changes: dict[tuple[str, ...], Any], path: str) -> Any:
    """All changes of one level at once, so that a config is only ever checked with every one of them in place."""
    hints = typing.get_type_hints(type(config))
    fields = {f.name for f in dataclasses.fields(config)}
    values: dict[str, Any] = {}
    for name in dict.fromkeys(names[0] for names in changes):
        dotted = f"{path}{name}"
        if name not in fields:
            raise RequestError(f"{dotted}: {choose('field', name, fields)}")
        inner = {names[1:]: value for names, value in changes.items() if names[0] == name}
        if () in inner:
            values[name] = _coerce(hints[name], _from_text(hints[name], inner.pop(()), dotted), dotted)
        if inner:
            current = values.get(name, getattr(config, name))
            if not dataclasses.is_dataclass(current):
                raise RequestError(f"{dotted} has no field {next(iter(inner))[0]!r}: it is {_describe(hints[name])}.")
            values[name] = _override(current, inner, f"{dotted}.")
    return dataclasses.replace(config, **values)


def _from_text(hint: Any, value: Any, path: str) -> Any:
    """Text from a command line as the JSON value it stands for; anything else is left as it is."""
    if isinstance(value, str) and dataclasses.is_dataclass(hint) and not value.lstrip().startswith("{"):
        raise RequestError(f"{path} has fields of its own; set one of them as {path}.FIELD, or use the command's own option for it.")
    if not isinstance(value, str) or _accepts_text(hint):
        return None if value in ("none", "null") and _accepts_none(hint) else value
    try:
        return json.loads({"none": "null", "True": "true", "False": "false"}.get(value, value))
    except json.JSONDecodeError as error:
        raise RequestError(f"{path} cannot be {value!r}; it takes {_describe(hint)}.") from error


def _coerce(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        options = tuple(option for option in options if option is not type(None))
        if len(options) == 1:
            return _coerce(options[0], value, path)
        for option in options:
            if isinstance(option, type) and type(value) is option:
                return value
    elif origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise RequestError(f"{path}: {choose('value', str(value), [str(a) for a in typing.get_args(hint)])}")
    elif origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)[0]
        return tuple(_coerce(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_json(hint, value, path)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise RequestError(f"{path} cannot be {value!r}; it takes {_describe(hint)}.")


def _accepts_text(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_accepts_text(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return all(isinstance(a, str) for a in typing.get_args(hint))
    return hint is str


def _accepts_none(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "none"}
    if hint in words:
        return words[hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of which each is {_describe(typing.get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint))
