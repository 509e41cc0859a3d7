"""Two evaluated models, item by item: on the same items, how far apart they are, and what chance alone would do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.evals.metrics import Item, documents_of, mean_uncertainty
from depthroute.evals.perplexity import PERPLEXITY
from depthroute.evals.presets import PRESETS
from depthroute.evals.store import read_evaluation, read_items
from depthroute.study.clusters import cluster_bootstrap
from depthroute.study.multiplicity import holm, paired_t_p
from depthroute.study.statistics import CONFIDENCE

LOG_PROBABILITY = "log_probability"


def compare_evaluations(a: Path, b: Path, names: Sequence[str]) -> dict[str, Any]:
    """Compare finished evaluations of two models. A difference is a minus b, of means over the same items.

    Args:
        a, b: the folders of the evaluations.
        names: which, by the names they were asked for; both folders have them.

    Returns:
        `a`, `b`, `tasks`: by name, {`items`, `reported` (the metric that stands for the task), `metrics`: by name, {`a`, `b`, `difference`,
        `error`, `interval` (95 %), `p`}, and for right and wrong answers `only_a` and `only_b`, how many items one of the two has right
        alone; `adjusted_p`: Holm's, of the reported metrics of all tasks}; and `averages`: by preset, {`difference`, `error`, `interval`,
        `p`} of the equal-weight average where all its tasks are there.

        `p` is McNemar's exact one for right and wrong answers, of a t test over items otherwise; where a document has several items, and
        for perplexity (`nll`, nats per token), that of a difference divided by the standard error of a bootstrap over documents. The
        perplexity of answers is compared as `log_probability`, the mean of theirs.

    Raises:
        RequestError: an evaluation is missing, or the two did not answer the same items.
        FailureError: a file is broken.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for name in names:
        evaluation = _stored(a, name), _stored(b, name)
        ours, theirs = (_by_task(read_items(folder, name)) for folder in (a, b))
        for task, facts in evaluation[0]["tasks"].items():
            pairs = matched(task, ours.get(task, []), theirs.get(task, []))
            metrics = _perplexity(pairs) if task == PERPLEXITY else _metrics(pairs)
            if metrics:
                reported = facts["reported"] if facts["reported"] in metrics else next(iter(metrics))
                tasks[task] = {"items": len(pairs), "reported": reported, "metrics": metrics}
    if not tasks:
        raise RequestError("there is no item that both models answered and that can be compared.")
    adjusted = holm({task: entry["metrics"][entry["reported"]]["p"] for task, entry in tasks.items()})
    for task, entry in tasks.items():
        entry["adjusted_p"] = adjusted[task]
    averages = {preset: _average(preset, tasks) for preset, of in PRESETS.items() if all(task.name in tasks for task in of)}
    return {"a": str(a), "b": str(b), "tasks": tasks, "averages": averages}


def matched(task: str, a: Sequence[Item], b: Sequence[Item]) -> list[tuple[Item, Item]]:
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


def _metrics(pairs: Sequence[tuple[Item, Item]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys((item["filter"], name) for item, _ in pairs for name in item["metrics"]):
        of_filter, name = key
        of_both = [pair for pair in pairs if all(name in item["metrics"] for item in pair)]
        chosen = [(one, other) for one, other in of_both if one["filter"] == of_filter]
        if len(chosen) < 2:
            continue
        values = [(one["metrics"][name], other["metrics"][name]) for one, other in chosen]
        shown = LOG_PROBABILITY if name == "perplexity" else name
        found[shown if of_filter == "none" else f"{shown},{of_filter}"] = _difference(values, documents_of([one for one, _ in chosen]))
    return found


def _difference(values: Sequence[tuple[float, float]], documents: Sequence[int] | None) -> dict[str, Any]:
    differences = [one - other for one, other in values]
    mean = math.fsum(differences) / len(differences)
    error, interval = mean_uncertainty(differences, documents)
    entry = {
        "a": math.fsum(one for one, _ in values) / len(values),
        "b": math.fsum(other for _, other in values) / len(values),
        "difference": mean,
        "error": error,
        "interval": interval,
    }
    if all(value in (0.0, 1.0) for pair in values for value in pair):
        only_a, only_b = differences.count(1.0), differences.count(-1.0)
        return entry | {"p": mcnemar_p(only_a, only_b), "only_a": only_a, "only_b": only_b}
    several = documents is not None and len(set(documents)) < len(documents)
    return entry | {"p": _normal_p(mean, error) if several else paired_t_p(differences)}


def _perplexity(pairs: Sequence[tuple[Item, Item]]) -> dict[str, dict[str, Any]]:
    counts = [one["tokens"] for one, _ in pairs]
    drawn = cluster_bootstrap([one["nats"] - other["nats"] for one, other in pairs], counts)
    means = (math.fsum(pair[place]["nats"] for pair in pairs) / sum(counts) for place in (0, 1))
    found = {"difference": drawn.mean, "error": drawn.error, "interval": drawn.interval, "p": _normal_p(drawn.mean, drawn.error)}
    return {"nll": dict(zip(("a", "b"), means, strict=True)) | found}


def _average(preset: str, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    metrics = [tasks[task.name]["metrics"][task.metric] for task in PRESETS[preset]]
    difference = math.fsum(metric["difference"] for metric in metrics) / len(metrics)
    error = math.sqrt(math.fsum(metric["error"] ** 2 for metric in metrics)) / len(metrics)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    interval = (difference - half, difference + half)
    return {"difference": difference, "error": error, "interval": interval, "p": _normal_p(difference, error)}


def _normal_p(difference: float, error: float) -> float:
    if difference == 0:
        return 1.0
    return math.erfc(abs(difference) / (error * math.sqrt(2))) if error else 0.0


def _by_task(items: Sequence[Item]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item["task"], []).append(item)
    return found


def _stored(folder: Path, name: str) -> dict[str, Any]:
    found = read_evaluation(folder, name)
    if found is None:
        raise RequestError(f"{folder} has no finished evaluation {name!r}; evaluate it first.")
    return found
