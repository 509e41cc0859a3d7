"""`depthroute eval`: a trained run on tasks and held-out text, and against another run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from depthroute.cli.options import read
from depthroute.common.say import say


@dataclass(frozen=True, kw_only=True)
class Options:
    """Evaluate a trained run: perplexity and tasks of held-out text, or any tasks of the lm-evaluation-harness.

    Finished tasks stay in RUN/evals and are not run again; the same command goes on where it was stopped.
    """

    run: tyro.conf.Positional[Path]
    """A run folder with a checkpoint, or one of its checkpoint folders."""
    tasks: str = "perplexity,local"
    """Names with commas between them: perplexity; local (tasks of the run's own held-out text: local_last_word, local_sentence_order,
    local_needle); low-rank (the eight tasks of the Low-Rank paper); any task or group of the harness."""
    against: Path | None = None
    """Evaluate this run too, and compare the two item by item."""
    split: Literal["validation", "test"] = "validation"
    """The held-out text of perplexity and local tasks."""
    tokens: int | None = None
    """Held-out tokens of perplexity. Default: all."""
    items: int = 200
    """Items of each local task, at most. Few of local_needle are spread over its cells."""
    context: int | None = None
    """Tokens of the longest prompt of a local task, no more than the model's context, which is the default."""
    limit: int | None = None
    """Only the first items of each task; of local_needle they are spread over its cells. Perplexity is not bounded by it: see --tokens."""
    fewshot: int | None = None
    """Solved examples before each question. Default: as the task says."""
    seed: int = 0
    """Of the local tasks, of the choice of examples, and of generation where a task samples."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the layers; head and log-probabilities are float32. auto is bf16 where the processor multiplies it natively."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is CUDA where there is a GPU."""
    batch_tokens: int = 16_384
    """Tokens of a pass, padding included. It bounds the memory, and changes results by rounding only."""
    data: Path | None = None
    """The token shards, for tokenizer and held-out text. Default: those the run names."""
    out: Path | None = None
    """Where results go. Default: RUN/evals. With --against, the other run's go to its own RUN/evals all the same."""
    again: bool = False
    """Run finished tasks again."""
    download: bool = False
    """Let the harness fetch data sets from the hub. Without it this process reaches no other machine."""
    json: bool = False
    """Print JSON; the fields are those of depthroute.evals."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "eval", arguments)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars, which are no good in a log file; tqdm reads it when imported
    from depthroute.evals import EvalConfig, compare_runs, evaluate_run

    config = EvalConfig(
        tasks=tuple(name.strip() for name in options.tasks.split(",")), split=options.split, tokens=options.tokens, items=options.items,
        context=options.context, limit=options.limit, fewshot=options.fewshot, seed=options.seed, precision=options.precision,
        device=options.device, batch_tokens=options.batch_tokens, download=options.download,
    )  # fmt: skip
    if options.against is None:
        found = evaluate_run(options.run, config, out=options.out, data=options.data, again=options.again, report=_tell)
    else:
        found = compare_runs(
            options.run, options.against, config, out=options.out, data=options.data, again=options.again, report=_tell
        )
    if options.json:
        print(json.dumps(found, indent=2))
    elif options.against is None:
        _show(found)
    else:
        _show_comparison(found)


def _tell(line: str) -> None:
    say(line, sys.stderr)


def _show(found: Mapping[str, Any]) -> None:
    print(f"{found['run']}, {found['checkpoint']}, {found['precision']}")
    rows = [("task", "metric", "value", "95 % interval", "chance", "items")]
    for evaluation in found["evaluations"].values():
        for task, entry in evaluation["tasks"].items():
            for metric, value in entry["metrics"].items():
                rows.append((task, metric, _number(value["value"]), _interval(value), _number(value.get("chance")), f"{entry['items']:,}"))
    _print_table(rows)
    for evaluation in found["evaluations"].values():
        for task, entry in evaluation["tasks"].items():
            if "cells" in entry:
                print(f"\n{task}, {entry['reported']}")
                cells = [(cell, _number(of["value"]), _interval(of), str(of["items"])) for cell, of in entry["cells"].items()]
                _print_table([("cell", "value", "95 % interval", "items"), *cells])
            if "left_out" in entry:
                print(f"\n{task}: {entry['left_out']}")
        if evaluation["cut"]:
            print(f"\n{evaluation['name']}: {evaluation['cut']} texts are longer than the model's context and were cut at the left.")
    for name, reason in found["left_out"].items():
        print(f"\n{name} is left out: {reason}")
    for preset, of in found["averages"].items():
        print(f"\n{preset}: {_average(of)}")


def _average(of: Mapping[str, Any]) -> str:
    if of["value"] is not None:
        error = "not known" if of["error"] is None else f"{100 * of['error']:.2f}"
        return f"the equal-weight average is {100 * of['value']:.2f} %, standard error {error}"
    return _no_average(of)


def _no_average(of: Mapping[str, Any]) -> str:
    missing = [f"{', '.join(names)} {what}" for what, names in (("missing", of["missing"]), ("not whole", of["partial"])) if names]
    return f"no average: {'; '.join(missing) or 'a value is not a number'}"


def _show_comparison(found: Mapping[str, Any]) -> None:
    print(f"a  {found['a']}\nb  {found['b']}\n")
    rows = [("task", "metric", "a", "b", "a - b", "95 % interval", "p", "Holm", "only a : b", "items")]
    for task, entry in found["tasks"].items():
        for metric, of in entry["metrics"].items():
            holm = _number(entry["adjusted_p"]) if metric == entry["reported"] else ""
            alone = f"{of['only_a']} : {of['only_b']}" if "only_a" in of else ""
            numbers = _number(of["a"]), _number(of["b"]), f"{of['difference']:+.3g}", _interval(of), _number(of["p"]), holm, alone
            rows.append((task, metric, *numbers, f"{entry['items']:,}"))
    _print_table(rows)
    for name, reason in found["left_out"].items():
        print(f"\n{name} is left out: {reason}")
    for preset, of in found["averages"].items():
        if of["difference"] is None:
            print(f"\n{preset}: {_no_average(of)}")
            continue
        chance = "no interval" if of["interval"] is None else f"95 % interval {_interval(of)}, p {_number(of['p'])}"
        print(f"\n{preset}: the equal-weight average is {of['difference']:+.4f} apart, {chance}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _interval(value: Mapping[str, Any]) -> str:
    return "" if value["interval"] is None else f"{_number(value['interval'][0])} to {_number(value['interval'][1])}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
