"""Frozen configurations: strict reading, overrides in words, and a fingerprint of the content."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from depthroute.common.config import fingerprint, from_json, override, to_json
from depthroute.common.errors import RequestError
from depthroute.model import ModelConfig
from depthroute.recipes import RECIPES, recipe
from depthroute.residual import AttnResConfig, PreNormConfig
from depthroute.train import RunConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    steps: int
    rate: float = 0.1
    label: str = "x"
    flag: bool = False
    mode: Literal["fast", "slow"] = "fast"
    marks: tuple[int, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    limit: int | None = None
    clip: float | None = 1.0
    either: int | str = 0
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit > self.steps:
            raise RequestError("limit is larger than steps")


def run_of(name: str, residual: str | None = None) -> RunConfig:
    made = recipe(name)
    return RunConfig(model=made.resolve(residual), train=made.train, data="tokens")


@pytest.mark.parametrize("residual", ["prenorm", "full", "rd:2", "low-rank:2,rank=4,keys=projected"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name: str, residual: str) -> None:
    run = run_of(name, residual)
    written = json.loads(json.dumps(to_json(run), allow_nan=False))
    read = from_json(RunConfig, written)
    assert read == run and fingerprint(read) == fingerprint(run)
    assert type(read.model.residual) is type(run.model.residual)
    assert isinstance(read.train.milestones, tuple)


def test_the_variant_is_written_by_name() -> None:
    written = to_json(run_of("small", "rd").model)
    assert written["residual"]["method"] == "attnres" and written["residual"]["roles"] == "decoupled"
    assert to_json(PreNormConfig()) == {"method": "prenorm"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stps": 3}, "unknown field 'stps'; perhaps you meant 'steps'"),
        ({"inner": {"siz": 3}}, "inner: unknown field 'siz'; perhaps you meant 'size'"),
        ({"steps": "3"}, "steps cannot be '3'; it takes a whole number"),
        ({"steps": 3.0}, "steps cannot be 3.0; it takes a whole number"),
        ({"steps": True}, "steps cannot be True; it takes a whole number"),
        ({"steps": None}, "steps cannot be None; it takes a whole number"),
        ({"rate": "fast"}, "rate cannot be 'fast'; it takes a number"),
        ({"rate": True}, "rate cannot be True; it takes a number"),
        ({"rate": float("inf")}, "rate cannot be inf; it takes a number"),
        ({"clip": float("nan")}, "clip cannot be nan; it takes a number"),
        ({"flag": 1}, "flag cannot be 1; it takes true or false"),
        ({"label": 3}, "label cannot be 3; it takes text"),
        ({"mode": "fst"}, "mode: unknown value 'fst'; perhaps you meant 'fast'. Allowed: fast, slow"),
        ({"marks": [1, "2"]}, r"marks\[1\] cannot be '2'; it takes a whole number"),
        ({"marks": 3}, "marks cannot be 3; it takes a list of which each is a whole number"),
        ({"limit": "none"}, "limit cannot be 'none'; it takes a whole number"),
        ({"either": 1.5}, "either cannot be 1.5; it takes a whole number or text"),
        ({"inner": 3}, "inner must be an object with fields, not 3"),
    ],
)
def test_reading_is_strict(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        from_json(Outer, {"steps": 1, **changes})


def test_reading_other_mistakes() -> None:
    with pytest.raises(RequestError, match="Outer lacks the field 'steps'"):
        from_json(Outer, {})
    with pytest.raises(RequestError, match=r"Outer must be an object with fields, not \[\]"):
        from_json(Outer, [])
    written = to_json(run_of("small"))
    written["model"]["residual"]["method"] = "atnres"
    with pytest.raises(RequestError, match=r"model.residual.method: unknown method 'atnres'; perhaps you meant 'attnres'"):
        from_json(RunConfig, written)
    written["model"]["residual"]["method"] = ["attnres"]
    with pytest.raises(RequestError, match=r"model.residual.method: unknown method"):
        from_json(RunConfig, written)


def test_reading_takes_what_json_makes_of_values() -> None:
    read = from_json(Outer, {"steps": 5, "rate": 1, "marks": [1, 2], "limit": None, "either": "word", "inner": {"name": "n"}})
    assert read == Outer(steps=5, rate=1.0, marks=(1, 2), either="word", inner=Inner(name="n"))
    assert isinstance(read.rate, float)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"steps": "7"}, {"steps": 7}),
        ({"rate": "3e-4"}, {"rate": 3e-4}),
        ({"rate": "2"}, {"rate": 2.0}),
        ({"label": "none"}, {"label": "none"}),
        ({"label": "12"}, {"label": "12"}),
        ({"flag": "true"}, {"flag": True}),
        ({"flag": "False"}, {"flag": False}),
        ({"mode": "slow"}, {"mode": "slow"}),
        ({"marks": "[1, 2]"}, {"marks": (1, 2)}),
        ({"betas": "[0.5,0.6]"}, {"betas": (0.5, 0.6)}),
        ({"clip": "none"}, {"clip": None}),
        ({"clip": "null"}, {"clip": None}),
        ({"limit": "1"}, {"limit": 1}),
        ({"inner.size": "9"}, {"inner": Inner(size=9)}),
        ({"inner.name": "none"}, {"inner": Inner(name=None)}),
        ({"inner.name": "7", "inner.size": "8", "rate": "1"}, {"inner": Inner(name="7", size=8), "rate": 1.0}),
        ({"inner": '{"size": 5}', "inner.name": "n"}, {"inner": Inner(size=5, name="n")}),
        ({"steps": 50, "rate": 0.25}, {"steps": 50, "rate": 0.25}),
    ],
)
def test_text_is_read_as_the_fields_type(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    base = Outer(steps=1)
    assert override(base, changes) == replace(base, **expected)
    assert base == Outer(steps=1)


def test_changes_that_only_fit_together_are_checked_together() -> None:
    assert override(Outer(steps=1), {"limit": "9", "steps": "9"}) == Outer(steps=9, limit=9)
    model = run_of("small").model
    assert override(model, {"width": "65", "heads": "5", "head_width": "4"}).width == 65
    run = override(run_of("small", "block:8"), {"model.residual.block": "none", "model.residual.num_blocks": "4"})
    assert run.model.residual == AttnResConfig(num_blocks=4)
    run = override(run_of("small", "rd"), {"model.residual.rank": "16", "train.milestones": "[5]", "train.steps": "10"})
    assert isinstance(run.model.residual, AttnResConfig) and run.model.residual.rank == 16 and run.train.milestones == (5,)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stps": "1"}, "stps: unknown field 'stps'; perhaps you meant 'steps'"),
        ({"inner.siz": "1"}, "inner.siz: unknown field 'siz'; perhaps you meant 'size'"),
        ({"steps.size": "1"}, "steps has no field 'size': it is a whole number"),
        ({"steps": "many"}, "steps cannot be 'many'; it takes a whole number"),
        ({"steps": "none"}, "steps cannot be None; it takes a whole number"),
        ({"steps": "1.5"}, "steps cannot be 1.5; it takes a whole number"),
        ({"rate": "NaN"}, "rate cannot be nan; it takes a number"),
        ({"mode": "slw"}, "mode: unknown value 'slw'; perhaps you meant 'slow'"),
        ({"marks": "1,2"}, "marks cannot be '1,2'; it takes a list"),
        ({"limit": "2"}, "limit is larger than steps"),
    ],
)
def test_a_wrong_change_is_explained(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        override(Outer(steps=1), changes)


def test_a_field_of_another_method_is_unknown() -> None:
    with pytest.raises(RequestError, match=r"model.residual.rank: unknown field 'rank'; there is none"):
        override(run_of("small", "prenorm"), {"model.residual.rank": "4"})


def test_a_fingerprint_is_of_the_content() -> None:
    base = Outer(steps=1)
    assert fingerprint(base) == fingerprint(Outer(steps=1, inner=Inner(size=3)))
    others = [replace(base, rate=0.2), replace(base, marks=(1,)), replace(base, inner=Inner(size=4)), replace(base, clip=None)]
    assert len({fingerprint(config) for config in (base, *others)}) == 5
    assert fingerprint({"b": 1, "a": [2]}) == fingerprint({"a": (2,), "b": 1})
    assert fingerprint(Inner()) == hashlib.sha256(b'{"name":null,"size":3}').hexdigest()


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from depthroute.common.config import fingerprint; from depthroute.recipes import recipe; "
        "print(fingerprint(recipe('small').resolve()))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"})
    assert other.stdout.strip() == fingerprint(recipe("small").resolve())


def test_configs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        recipe("small").resolve().width = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModelConfig(10, 2, 2, 1, 4, 8)  # type: ignore[misc]
