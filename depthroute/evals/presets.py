"""Sets of tasks that a paper reports as one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PresetTask:
    """A task by the harness's name, the metric that is reported of it, and how many items all of it has."""

    name: str
    metric: str
    items: int


LOW_RANK = (
    PresetTask(name="arc_challenge", metric="acc_norm", items=1172),
    PresetTask(name="arc_easy", metric="acc_norm", items=2376),
    PresetTask(name="boolq", metric="acc", items=3270),
    PresetTask(name="commonsense_qa", metric="acc", items=1221),
    PresetTask(name="hellaswag", metric="acc_norm", items=10042),
    PresetTask(name="openbookqa", metric="acc_norm", items=500),
    PresetTask(name="piqa", metric="acc_norm", items=1838),
    PresetTask(name="social_iqa", metric="acc", items=1954),
)
"""The eight tasks of Low-Rank Attention Residuals (Appendix G), zero-shot: `acc_norm` divides log-probabilities by characters."""

PRESETS = {"low-rank": LOW_RANK}
REPORTED = {task.name: task.metric for tasks in PRESETS.values() for task in tasks}
"""The metric by which a task of a preset is reported."""


def average(preset: str, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The equal-weight average over a preset's tasks, of `measured`: a task's `items`, and its `metrics` with `value` and `error` of each.

    Returns:
        `value` and `error` (the root of the sum of the squared standard errors, divided by the number of tasks), both null unless every
        task was measured on all its items, and each null where a task's own is; `missing` (tasks that were not measured) and `partial`
        (those on other than all items).
    """
    tasks = PRESETS[preset]
    missing = [task.name for task in tasks if task.name not in measured]
    found = {task.name: measured[task.name] for task in tasks if task.name not in missing}
    partial = [task.name for task in tasks if task.name in found and found[task.name]["items"] != task.items]
    if missing or partial:
        return {"value": None, "error": None, "missing": missing, "partial": partial}
    metrics = [found[task.name]["metrics"][task.metric] for task in tasks]
    value = _sum(metric["value"] for metric in metrics)
    squares = _sum(None if metric["error"] is None else metric["error"] ** 2 for metric in metrics)
    value, error = None if value is None else value / len(tasks), None if squares is None else math.sqrt(squares) / len(tasks)
    return {"value": value, "error": error, "missing": [], "partial": []}


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else math.fsum(value for value in known if value is not None)
