"""`depthroute compare`: two runs, or two studies, held against each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say where two runs part: settings, the first step whose loss differs, the gap at every evaluation that both have and at the end.

    Of two studies: what was planned differently, and the gaps of the arms that both have, seed by seed. A gap is B minus A.
    """

    a: tyro.conf.Positional[Path]
    """A run folder or a study folder."""
    b: tyro.conf.Positional[Path]
    """Another of the same kind."""
    json: bool = False
    """Print JSON; the fields are those of depthroute.study.compare."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "compare", arguments)
    from depthroute.study.compare import compare

    found = compare(options.a, options.b)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"a  {found['a']}\nb  {found['b']}")
    for note in found["notes"]:
        print(f"note: {note}")
    (_show_studies if found["kind"] == "studies" else _show_runs)(found)


def _show_runs(found: Mapping[str, Any]) -> None:
    _show_differences("configuration", found["config"])
    steps, first, end = found["steps"], found["first_difference"], found["end"]
    print("\ntraining loss")
    if first is not None:
        print(f"  first differs at step {first['step']}: {first['a']!r} | {first['b']!r}")
    elif steps["common"]:
        print(f"  the same at all {steps['common']} common steps")
    else:
        print("  no step in common")
    if steps["a"] != steps["b"]:
        print(f"  last steps: {steps['a']} | {steps['b']}")
    print("\nloss, nats per token: a | b | b - a")
    for line in found["evaluations"]:
        print(f"  step {line['step']} {line['split']}: {_gap(line)}{_tokens(line)}")
    if not found["evaluations"]:
        print("  no evaluation in common")
    if end is None:
        print("  end: not both runs are complete")
    else:
        apart = "" if end["step"][0] == end["step"][1] else f"  (steps {end['step'][0]} | {end['step'][1]})"
        print(f"  end: {_gap(end)}{apart}{_tokens(end)}")


def _show_studies(found: Mapping[str, Any]) -> None:
    _show_differences("plan", found["plan"])
    _show_differences("configuration of common arms", found["config"])
    _show_arms(found)
    for entry in found["comparisons"]:
        print(f"\n{entry['arm']} minus {entry['parent']} at the endpoint, nats per token")
        for study in ("a", "b"):
            print(f"  {study}: {_effect(entry[study])}")


def _show_arms(found: Mapping[str, Any]) -> None:
    print("\nloss, nats per token: a | b | b - a")
    for entry in found["arms"]:
        print(f"  {entry['arm']}, step {entry['step']}")
        gaps = entry["paired"]["differences"] if entry["paired"] else []
        for seed, a, b, gap in zip(entry["seeds"], entry["a"], entry["b"], gaps, strict=True):
            print(f"    seed {seed}: {_gap({'a': a, 'b': b, 'gap': gap})}")
        if len(gaps) > 1:
            print(f"    {_mean(entry['paired'])}")
        for cell in entry["left_out"]:
            print(f"    seed {cell['seed']} left out in {cell['study']}: {cell['reason']}")
        if not gaps and not entry["left_out"]:
            print("    no seed in common")
    if not found["arms"]:
        print("  no arm in common")


def _effect(end: Mapping[str, Any] | None) -> str:
    if end is None:
        return "no complete pair"
    seeds = ", ".join(f"seed {seed} {_signed(value)}" for seed, value in zip(end["seeds"], end["differences"], strict=True))
    return f"{seeds}; {_mean(end)}" if end["t_interval"] else seeds


def _mean(end: Mapping[str, Any]) -> str:
    low, high = end["t_interval"]
    return f"mean {_signed(end['mean'])}, 95 % t interval {_signed(low)} to {_signed(high)}"


def _show_differences(what: str, entries: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{what}" if entries else f"\n{what}: the same")
    for entry in entries:
        arms = f"  ({', '.join(entry['arms'])})" if "arms" in entry else ""
        print(f"  {entry['field']}: {entry['a']} | {entry['b']}{arms}")


def _gap(line: Mapping[str, Any]) -> str:
    a, b = ("none" if line[name] is None else f"{line[name]:.4f}" for name in ("a", "b"))
    return f"{a} | {b} | {'none' if line['gap'] is None else _signed(line['gap'])}"


def _signed(value: float) -> str:
    """Three digits however small: a gap of 1e-9 is not zero."""
    return f"{value:+.3g}" if value else "0"


def _tokens(line: Mapping[str, Any]) -> str:
    """The tokens behind a line, where the two sides have seen different numbers of them."""
    a, b = line["tokens"]
    return "" if a == b else f"  (tokens {a} | {b})"
