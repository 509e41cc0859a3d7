"""`depthroute power`: how many seeds a study needs, from a pilot."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from depthroute.cli.options import read
from depthroute.common.say import say


@dataclass(frozen=True, kw_only=True)
class Options:
    """Seeds that each comparison of a pilot study needs to find a margin."""

    study: tyro.conf.Positional[Path]
    """The pilot: a study folder with two seeds or more."""
    margin: float
    """The smallest difference worth finding, in nats per token."""
    power: float = 0.8
    """The chance of finding it."""
    one_sided: bool = False
    """Test for a lower loss only."""
    equivalence: bool = False
    """Show instead that there is no difference as large as the margin, where there is none at all."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "power", arguments)
    from depthroute.common.errors import RequestError
    from depthroute.report.stored import read_study
    from depthroute.study.power import seeds_for_equivalence, seeds_needed

    if options.equivalence and options.one_sided:
        raise RequestError("--one-sided and --equivalence are different tests; give one of them.")
    found: dict[str, Any] = {}
    equal = []
    for comparison in read_study(options.study).comparisons:
        differences = (comparison.endpoint or {}).get("differences", [])
        if len(differences) > 1 and len(set(differences)) == 1:
            equal.append(comparison.name)
        elif len(differences) > 1:
            found[comparison.name] = (
                seeds_for_equivalence(differences, options.margin, power=options.power) if options.equivalence
                else seeds_needed(differences, options.margin, power=options.power, two_sided=not options.one_sided)
            )  # fmt: skip
    if equal:
        say(f"without spread, so without a number of seeds: {', '.join(equal)}.", sys.stderr)
    if not found:
        raise RequestError(f"{options.study} has no comparison with two seeds that differ; the spread of seeds cannot be known from fewer.")
    if options.json:
        print(json.dumps({name: dataclasses.asdict(needed) for name, needed in found.items()}, indent=2))
        return
    width, margin = max(map(len, found)), f"seeds for {options.margin:g}"
    print(f"{'comparison':<{width}}  pilot seeds  sd, nats  {margin}  cautious")
    for name, needed in found.items():
        numbers = f"{needed.pilot_seeds:>11}  {needed.sd:>8.4f}  {needed.seeds:>{len(margin)}}  {needed.cautious_seeds:>8}"
        print(f"{name:<{width}}  {numbers}")
    print("\ncautious: if the true spread is the upper 80 % bound of the pilot's, which few seeds know poorly.")
