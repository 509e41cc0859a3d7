"""What several commands share: reading options, `--set FIELD=VALUE`, and the run that they describe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from depthroute.common.errors import RequestError

if TYPE_CHECKING:
    from depthroute.recipes import Recipe
    from depthroute.train import RunConfig

Options = TypeVar("Options")


def read(options: type[Options], command: str, arguments: Sequence[str]) -> Options:
    """Parse the arguments of a command into its dataclass; a mistake is explained and exits with 2."""
    import tyro

    return tyro.cli(options, prog=f"depthroute {command}", args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))


def changes(settings: Sequence[str]) -> dict[str, Any]:
    """`("train.steps=100",)` as the dotted changes that `override` takes."""
    return pairs("--set", settings, "FIELD=VALUE, such as train.steps=100 or model.width=64")


def pairs(option: str, given: Sequence[str], form: str) -> dict[str, Any]:
    """`("KEY=VALUE", ...)` of an option as a dictionary of texts; `form` is what an error says that it takes."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError(f"{option} {text}: it takes {form}.")
        found[name.strip()] = value.strip()
    return found


def run_from(chosen: Recipe, residual: str | None, data: Path, settings: Sequence[str]) -> RunConfig:
    """The run of a recipe with a residual method on prepared data, `settings` applied last."""
    from depthroute.data import TokenDataset
    from depthroute.recipes import run_of

    dataset = TokenDataset.open(data)
    return run_of(chosen, data, vocabulary=dataset.vocabulary, end=dataset.end, residual=residual, settings=changes(settings))


def show(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts: as JSON, or one `name  value` a line."""
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        print(f"{name:<{width}}  {text}")
