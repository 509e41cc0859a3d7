"""Rows with targets, the table and JSON that every benchmark prints, and repeats that are fair on a shared machine."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One measure. `target` is what it must not exceed (`at_most`) or must reach; None is context and is not checked."""

    measure: str
    value: float
    target: float | None = None
    at_most: bool = True
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def interleaved(candidates: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each candidate, one after the other in every round, so that a drift of the machine hits all of them.

    Every round begins with another, since each leaves the caches to the next as it likes.
    """
    names, seconds = list(candidates), {name: list[float]() for name in candidates}
    for round_number in range(-warm_up, repeats):
        begin = round_number % len(names)
        for name in (*names[begin:], *names[:begin]):
            run = candidates[name]
            started = time.perf_counter()
            run()
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(seconds: Mapping[str, list[float]], name: str, base: str) -> tuple[float, float]:
    """How much longer `name` takes than `base`: the ratio of the minima, and the median of the ratios round by round."""
    pairs = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    return min(seconds[name]) / min(seconds[base]), statistics.median(pairs)


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--check", action="store_true", help="exit with 1 if a target is missed, and name it")
    options.add_argument("--json", type=Path, help="also write the rows to this file")
    return options


def finish(rows: list[Row], options: argparse.Namespace) -> None:
    """Print the table, write the JSON, and leave with the exit status that --check asks for."""
    width = max(len(row.measure) for row in rows)
    for row in rows:
        target = "" if row.target is None else f"  {'at most' if row.at_most else 'at least'} {row.target:g}{row.unit}"
        verdict = {True: "  met", False: "  MISSED", None: ""}[row.met]
        print(f"{row.measure:<{width}}  {row.value:10.4g}{row.unit}{target}{verdict}")
    if options.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": [{**asdict(row), "met": row.met} for row in rows]}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    missed = [row.measure for row in rows if row.met is False]
    if options.check and missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        sys.exit(1)
