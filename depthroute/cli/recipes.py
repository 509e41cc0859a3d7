"""`depthroute recipes`: the model shapes, training recipes and studies by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """List the recipes of runs (--recipe) and of studies (--study). All take --set overrides where they are used."""

    json: bool = False
    """Print JSON: every recipe of a run with its whole configuration, every study with what it is."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "recipes", arguments)
    from depthroute.common.config import to_json
    from depthroute.recipes import RECIPES
    from depthroute.recipes.registry import STUDIES

    if options.json:
        runs = {
            name: {"description": made.description, "model": to_json(made.resolve()), "train": to_json(made.train)}
            for name, made in RECIPES.items()
        }
        studies = {name: {"description": made.description} for name, made in STUDIES.items()}
        print(json.dumps({"runs": runs, "studies": studies}, indent=2))
        return
    width = max(map(len, [*RECIPES, *STUDIES]))
    for heading, listed in (("runs: --recipe NAME", RECIPES), ("\nstudies: depthroute study OUT --study NAME", STUDIES)):
        print(heading)
        for name, described in listed.items():
            print(f"  {name:<{width}}  {described.description}")
