"""`depthroute recipes`: the model shapes and training recipes by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """List the recipes. Every recipe takes --residual and --set overrides where it is used."""

    json: bool = False
    """Print JSON: every recipe with its whole configuration."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "recipes", arguments)
    from depthroute.common.config import to_json
    from depthroute.recipes import RECIPES

    if options.json:
        whole = {
            name: {"description": made.description, "model": to_json(made.resolve()), "train": to_json(made.train)}
            for name, made in RECIPES.items()
        }
        print(json.dumps(whole, indent=2))
        return
    for name, made in RECIPES.items():
        print(f"{name:<8} {made.description}")
