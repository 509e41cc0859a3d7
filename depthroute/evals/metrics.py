"""From the harness's samples to items that can be stored, and from items to metrics with their uncertainty over items."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

from depthroute.study.statistics import CONFIDENCE

AnsweredItem = dict[str, Any]
FEWEST_DOCUMENTS = 5  # below, no spread between documents is known well enough for an interval
CHOSEN = ("acc", "acc_norm", "acc_bytes")


def items_of(task: str, samples: Iterable[Mapping[str, Any]]) -> list[AnsweredItem]:
    """One item for each sample of the harness.

    Each has `task`, `filter`, `doc_id`, `item` (a hash of all that the model was asked, the same for every model), `metrics` (numbers by
    name, null where they are not finite) and `answers`: [log-probability, whether it is greedy] of every answer, a log-probability for a
    whole text, a generated text, or, of code, a list of them. Items of local tasks have `document` or `cell` too.
    """
    found = []
    for sample in samples:
        asked = json.dumps(sample["arguments"], sort_keys=True, default=str)
        values = {name: sample[name] for name in sample["metrics"]}
        doc = sample["doc"] if task.startswith("local_") else {}
        found.append(
            {"task": task, "filter": sample["filter"], "doc_id": sample["doc_id"], "item": hashlib.sha256(asked.encode()).hexdigest()[:16]}
            | {name: doc[name] for name in ("document", "cell") if name in doc}
            | {"metrics": {name: _finite(float(value)) for name, value in values.items() if _is_number(value)}}
            | {"answers": [_plain(answer) for answer in sample["filtered_resps"]]}
        )  # fmt: skip
    return found


def metrics_of(
    output_type: str | None, aggregated: Mapping[str, Any], items: Sequence[AnsweredItem], targets: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """Value, standard error, 95 % interval and chance level of a task's metrics; null where they are not known.

    Args:
        output_type: the harness's.
        aggregated: the harness's results of the task, `metric,filter` to value.
        items: of the task, `items_of`.
        targets: what is right, an entry an item.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in aggregated.items():
        name, comma, of_filter = key.partition(",")
        if not comma or name.endswith("_stderr") or not _is_number(value):
            continue
        chosen = [item for item in items if item["filter"] == of_filter and name in item["metrics"]]
        values = [item["metrics"][name] for item in chosen]
        entry: dict[str, Any] = {"value": _finite(float(value)), "error": None, "interval": None, "chance": None}
        if entry["value"] is not None and None not in values:
            entry |= uncertainty(name, float(value), values, documents_of(chosen))
        if output_type == "multiple_choice" and name in CHOSEN and chosen:
            entry["chance"] = math.fsum(1 / _choices(item) for item in chosen) / len(chosen)
        elif output_type == "loglikelihood" and name == "acc":
            entry["chance"] = Counter(map(str, targets)).most_common(1)[0][1] / len(targets)
        found[name if of_filter == "none" else key] = entry
    return found


def uncertainty(name: str, value: float, values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> dict[str, Any]:
    """`error` and `interval` of a metric that is the mean of `values`, or exp(-mean) if it is a perplexity; null for any other.

    Those of `mean_uncertainty`, but for items that are 0 or 1, a document each: their interval is Wilson's, which has a width even where
    all items are alike. (E. B. Wilson, Journal of the American Statistical Association 22, 1927.)
    """
    if len(values) < 2:
        return {"error": None, "interval": None}
    mean = math.fsum(values) / len(values)
    error, interval = mean_uncertainty(values, clusters)
    if name == "perplexity" and math.isclose(value, math.exp(-mean), rel_tol=1e-6):
        if error is None or interval is None:
            return {"error": None, "interval": None}
        return {"error": value * error, "interval": (math.exp(-interval[1]), math.exp(-interval[0]))}
    if not math.isclose(value, mean, rel_tol=1e-6, abs_tol=1e-12):
        return {"error": None, "interval": None}
    documents = len(set(clusters)) if clusters else len(values)
    if set(values) <= {0.0, 1.0} and (documents == len(values) or len(set(values)) == 1):
        interval = wilson(mean, documents)
    return {"error": error, "interval": interval}


def mean_uncertainty(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float | None, tuple[float, float] | None]:
    """Standard error and 95 % interval of the mean of items, of which `clusters` says the documents; None: an item is one of its own."""
    sizes = Counter(range(len(values)) if clusters is None else clusters)
    sums = dict.fromkeys(sizes, 0.0)
    for cluster, item in zip(sums if clusters is None else clusters, values, strict=True):
        sums[cluster] += item
    return clustered(list(sums.values()), list(sizes.values()))


def clustered(sums: Sequence[float], counts: Sequence[int]) -> tuple[float | None, tuple[float, float] | None]:
    """Standard error and 95 % interval of sum(sums) / sum(counts), where the documents, an entry each, are what is drawn.

    With n documents and the mean m, the squared error is n / (n - 1) * sum((sum_d - m count_d)^2) / sum(counts)^2, the linearised variance
    of a ratio (W. G. Cochran, Sampling Techniques, 1977, chapter 6); for documents of one item each, sd / sqrt(n). The interval is
    Student's t with n - 1 degrees of freedom. Both are None with fewer than five documents, or where these do not differ at all.
    """
    documents, total = len(sums), sum(counts)
    if documents < FEWEST_DOCUMENTS:
        return None, None
    from scipy.special import stdtrit  # a tenth of the import time of scipy.stats

    mean = math.fsum(sums) / total
    deviations = [of - mean * count for of, count in zip(sums, counts, strict=True)]
    error = math.sqrt(documents / (documents - 1) * math.fsum(deviation**2 for deviation in deviations)) / total
    if error <= 1e-12 * max(map(abs, sums)):  # rounding alone
        return None, None
    half = float(stdtrit(documents - 1, (1 + CONFIDENCE) / 2)) * error
    return error, (mean - half, mean + half)


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % score interval of a share of `count` items."""
    z2 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return 0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half  # both exactly, whatever the rounding


def documents_of(items: Sequence[AnsweredItem]) -> list[int] | None:
    """The document of every item, where all have one."""
    found = [item["document"] for item in items if "document" in item]
    return found if items and len(found) == len(items) else None


def cells_of(items: Sequence[AnsweredItem], metric: str) -> dict[str, dict[str, Any]]:
    """`items`, `value` and `interval` of a metric for each cell of a task, in the order in which they come."""
    by_cell: dict[str, list[float]] = {}
    for item in items:
        if "cell" in item and item["metrics"].get(metric) is not None:
            by_cell.setdefault(item["cell"], []).append(item["metrics"][metric])
    return {
        cell: {"items": len(values), "value": (mean := math.fsum(values) / len(values)), "interval": wilson(mean, len(values))}
        for cell, values in by_cell.items()
    }


def _choices(item: AnsweredItem) -> int:
    # For mutual information every choice is scored once more, without the question.
    return len(item["answers"]) // (2 if "acc_mutual_info" in item["metrics"] else 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers


def _plain(answer: Any) -> Any:
    """An answer as JSON has it."""
    if isinstance(answer, tuple | list):
        return [_plain(part) for part in answer]
    if answer is None or isinstance(answer, bool):
        return answer
    if type(answer).__module__ == "numpy" and type(answer).__name__ in ("bool", "bool_"):
        return bool(answer)
    return _finite(float(answer)) if _is_number(answer) else str(answer)
