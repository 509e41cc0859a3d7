"""Two evaluated models, item by item: on the same items, how far apart they are, and what chance alone would do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.evals.local_tasks import MAKERS
from depthroute.evals.metrics import clustered, documents_of, mean_uncertainty, wilson
from depthroute.evals.perplexity import PERPLEXITY
from depthroute.evals.presets import PRESETS
from depthroute.evals.store import StoredItem, read_evaluation, read_items
from depthroute.study.multiplicity import holm
from depthroute.study.statistics import CONFIDENCE

LOG_PROBABILITY = "log_probability"


def compare_evaluations(a: Path, b: Path, names: Sequence[str]) -> dict[str, Any]:
    """Compare finished evaluations of two models. A difference is a minus b, of means over the same items.

    Args:
        a, b: the folders of the evaluations.
        names: which, by the names they were asked for; both folders have them.

    Returns:
        `a`, `b`, `tasks`: by name, {`items`, `reported` (the metric that stands for the task), `metrics`: by name, {`items`, `a`, `b`,
        `difference`, `error`, `interval` (95 %), `p`}, and for right and wrong answers `only_a` and `only_b`, how many items one of the two
        has right alone; `adjusted_p`: Holm's, of the reported metrics of all tasks}; `left_out`: by name, why a task was not compared; and
        `averages`: by preset of which a task is there, {`difference`, `error`, `interval`, `p`} of the equal-weight average, all null
        unless every task was asked on all its items, with `missing` and `partial` as in `depthroute.evals.presets.average`.

        Right and wrong answers, where every item is a document of its own: `p` is McNemar's exact one and `interval` Newcombe's. Else,
        `p` and `interval` are those of a t test over documents, with one degree of freedom fewer than there are documents and a standard
        error between these (`depthroute.evals.metrics.clustered`); McNemar's test would take the items of one document for independent.
        So is perplexity (`nll`, nats per token). `error`, `interval` and `p` are null where there are fewer than five documents, or where
        the differences have no spread: nothing is known about chance then. The perplexity of answers is compared as `log_probability`, the
        mean of theirs.

    Raises:
        RequestError: an evaluation is missing, the two were made with other settings than checkpoint and weights (and, for tasks of the
            harness, data, which are the tokenizer alone there), or they did not answer the same items.
        FailureError: a file is broken.
    """
    tasks: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        evaluation = _stored(a, name), _stored(b, name)
        _refuse_other_settings(name, *(found.get("settings", {}) for found in evaluation))
        ours, theirs = (_by_task(read_items(folder, name)) for folder in (a, b))
        for task in dict.fromkeys(task for found in evaluation for task in found["tasks"]):
            if any(task not in found["tasks"] for found in evaluation):
                left_out[task] = f"only one of the two evaluations of {name} has it."
                continue
            facts = evaluation[0]["tasks"][task]
            pairs = matched(task, ours.get(task, []), theirs.get(task, []))
            metrics = _perplexity(pairs) if task == PERPLEXITY else _metrics(pairs)
            if metrics:
                reported = facts["reported"] if facts["reported"] in metrics else next(iter(metrics))
                tasks[task] = {"items": len(pairs), "reported": reported, "metrics": metrics}
            else:
                left_out[task] = "there is no metric that both models have on two items or more."
    if not tasks:
        why = "".join(f" {task}: {reason}" for task, reason in left_out.items())
        raise RequestError(f"there is no item that both models answered and that can be compared.{why}")
    p_values = {task: entry["metrics"][entry["reported"]]["p"] for task, entry in tasks.items()}
    # A task without a p stays in the family: it was looked at like the others.
    adjusted = holm({task: 1.0 if p is None else p for task, p in p_values.items()})
    for task, entry in tasks.items():
        entry["adjusted_p"] = None if p_values[task] is None else adjusted[task]
    averages = {preset: _average(preset, tasks) for preset, of in PRESETS.items() if any(task.name in tasks for task in of)}
    return {"a": str(a), "b": str(b), "tasks": tasks, "left_out": left_out, "averages": averages}


def matched(task: str, a: Sequence[StoredItem], b: Sequence[StoredItem]) -> list[tuple[StoredItem, StoredItem]]:
    """The items of both in the order of a's. Raises RequestError where they are not the same ones."""
    ours, theirs = ({(item.get("filter"), item["doc_id"]): item for item in items} for items in (a, b))
    odd = next((key for key in [*ours, *theirs] if key not in ours or key not in theirs or ours[key]["item"] != theirs[key]["item"]), None)
    if odd is not None:
        why = "was asked of one of them only" if odd not in ours or odd not in theirs else "is not the same text"
        raise RequestError(
            f"the two did not answer the same items of {task}: number {odd[1]} {why}. Evaluate both with the same data, split, limit, seed "
            "and --context; to compare perplexities, they need the same tokens."
        )
    return [(ours[key], theirs[key]) for key in ours]


def mcnemar_p(only_a: int, only_b: int) -> float:
    """McNemar's exact two-sided p: of the items that one of two models has right alone, how often a fair coin is as uneven.

    (Q. McNemar, "Note on the sampling error of the difference between correlated proportions", Psychometrika 12, 1947.)
    """
    if only_a + only_b == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(only_a, only_a + only_b, 0.5).pvalue)


def newcombe(both: int, only_a: int, only_b: int, neither: int) -> tuple[float, float]:
    """The 95 % score interval of a difference of paired shares: a's minus b's, of items that both, one or neither has right.

    Wilson's intervals of the two shares, joined by their correlation with a correction for continuity. It has a width whatever the counts.
    (R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired data", Statistics in
    Medicine 17, 1998, method 10.)
    """
    count = both + only_a + only_b + neither
    of_a, of_b = (both + only_a) / count, (both + only_b) / count
    (low_a, high_a), (low_b, high_b) = wilson(of_a, count), wilson(of_b, count)
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    covariance = float(both * neither - only_a * only_b)
    if covariance > 0:
        covariance = max(covariance - count / 2, 0.0)
    correlation = covariance / math.sqrt(margins) if margins else 0.0
    below, above = (
        math.sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0))
        for one, other in ((of_a - low_a, high_b - of_b), (high_a - of_a, of_b - low_b))
    )
    difference = (only_a - only_b) / count
    return max(difference - below, -1.0), min(difference + above, 1.0)


def t_p(difference: float, error: float | None, documents: int) -> float | None:
    """The two-sided p of a difference over its standard error, `documents` - 1 degrees of freedom; None without a standard error."""
    if error is None:
        return None
    from scipy.special import stdtr

    return 2 * float(stdtr(documents - 1, -abs(difference) / error))


def _metrics(pairs: Sequence[tuple[StoredItem, StoredItem]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys((item["filter"], name) for item, _ in pairs for name in item["metrics"]):
        of_filter, name = key
        chosen = [pair for pair in pairs if pair[0]["filter"] == of_filter and all(item["metrics"].get(name) is not None for item in pair)]
        if len(chosen) < 2:
            continue
        values = [(one["metrics"][name], other["metrics"][name]) for one, other in chosen]
        shown = LOG_PROBABILITY if name == "perplexity" else name
        found[shown if of_filter == "none" else f"{shown},{of_filter}"] = _difference(values, documents_of([one for one, _ in chosen]))
    return found


def _difference(values: Sequence[tuple[float, float]], documents: Sequence[int] | None) -> dict[str, Any]:
    differences = [one - other for one, other in values]
    mean = math.fsum(differences) / len(differences)
    count = len(values) if documents is None else len(set(documents))
    error, interval = mean_uncertainty(differences, documents)
    entry = {
        "items": len(values),
        "a": math.fsum(one for one, _ in values) / len(values),
        "b": math.fsum(other for _, other in values) / len(values),
        "difference": mean,
        "error": error,
        "interval": interval,
        "p": t_p(mean, error, count),
    }
    if all(value in (0.0, 1.0) for pair in values for value in pair):
        only_a, only_b = differences.count(1.0), differences.count(-1.0)
        entry |= {"only_a": only_a, "only_b": only_b}
        if count == len(values):
            both = sum(one == other == 1.0 for one, other in values)
            neither = len(values) - both - only_a - only_b
            entry |= {"interval": newcombe(both, only_a, only_b, neither), "p": mcnemar_p(only_a, only_b)}
    return entry


def _perplexity(pairs: Sequence[tuple[StoredItem, StoredItem]]) -> dict[str, dict[str, Any]]:
    counts = [one["tokens"] for one, _ in pairs]
    a, b = (math.fsum(pair[place]["nats"] for pair in pairs) / sum(counts) for place in (0, 1))
    differences = [one["nats"] - other["nats"] for one, other in pairs]
    mean = math.fsum(differences) / sum(counts)
    error, interval = clustered(differences, counts)
    p = t_p(mean, error, len(pairs))
    return {"nll": {"items": len(pairs), "a": a, "b": b, "difference": mean, "error": error, "interval": interval, "p": p}}


def _average(preset: str, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    missing, partial, metrics = [], [], []
    for task in PRESETS[preset]:
        metric = tasks[task.name]["metrics"].get(task.metric) if task.name in tasks else None
        if metric is None:
            missing.append(task.name)
        elif metric["items"] != task.items:
            partial.append(task.name)
        else:
            metrics.append(metric)
    found: dict[str, Any] = {"difference": None, "error": None, "interval": None, "p": None, "missing": missing, "partial": partial}
    if missing or partial:
        return found
    found["difference"] = difference = math.fsum(metric["difference"] for metric in metrics) / len(metrics)
    if all(metric["error"] is not None for metric in metrics):
        error = math.sqrt(math.fsum(metric["error"] ** 2 for metric in metrics)) / len(metrics)
        half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
        p = math.erfc(abs(difference) / (error * math.sqrt(2)))
        found |= {"error": error, "interval": (difference - half, difference + half), "p": p}
    return found


def _refuse_other_settings(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    # The items of other tasks are texts, the same ones with any tokenizer.
    free = ("checkpoint", "weights") if name == PERPLEXITY or name in MAKERS else ("checkpoint", "weights", "data")
    for field in dict.fromkeys([*a, *b]):
        if field not in free and a.get(field) != b.get(field):
            raise RequestError(
                f"the two were evaluated on {name} with different settings: {field} = {a.get(field)!r} and {b.get(field)!r}. Evaluate both "
                "with the same ones."
            )


def _by_task(items: Sequence[StoredItem]) -> dict[str, list[StoredItem]]:
    found: dict[str, list[StoredItem]] = {}
    for item in items:
        found.setdefault(item["task"], []).append(item)
    return found


def _stored(folder: Path, name: str) -> dict[str, Any]:
    found = read_evaluation(folder, name)
    if found is None:
        raise RequestError(f"{folder} has no finished evaluation {name!r}; evaluate it first.")
    return found
