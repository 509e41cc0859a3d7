"""Values, errors, intervals and chance levels of metrics, and what is kept of the harness's samples."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from depthroute.evals.metrics import cells_of, clustered, documents_of, items_of, mean_uncertainty, metrics_of, uncertainty, wilson
from depthroute.evals.perplexity import perplexity_metrics
from depthroute.evals.presets import LOW_RANK, average
from depthroute.study.clusters import cluster_bootstrap
from depthroute.study.statistics import t_interval


def sample(number: int, right: int, **fields: Any) -> dict[str, Any]:
    return {
        "doc_id": number, "doc": {"cell": f"depth {number % 2}"}, "target": right, "arguments": [("q", " a"), ("q", " b")],
        "filter": "none", "resps": [], "filtered_resps": [(-1.5, False), (np.float64(-2.5), np.bool_(True))],
        "metrics": ["acc", "f1"], "acc": float(right), "f1": (right, 1), **fields,
    }  # fmt: skip


@pytest.mark.parametrize(("right", "count"), [(0, 20), (1, 2), (7, 20), (20, 20), (431, 1000)])
def test_the_interval_of_a_share_is_wilsons(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert right or wilson(0, count)[0] == 0


def test_items_hold_numbers_and_answers() -> None:
    one, other = items_of("local_needle", [sample(0, 1), sample(1, 0, arguments=[("other", " a"), ("q", " b")])])
    assert one["metrics"] == {"acc": 1.0} and one["answers"] == [[-1.5, False], [-2.5, True]] and one["cell"] == "depth 0"
    assert one["item"] != other["item"] and one["item"] == items_of("local_needle", [sample(5, 0)])[0]["item"]
    assert "cell" not in items_of("piqa", [sample(0, 1)])[0], "fields of other tasks are nothing to us"
    assert items_of("x", [sample(0, 1, filtered_resps=["text"])])[0]["answers"] == ["text"]
    assert items_of("x", [sample(0, 1, filtered_resps=[-3.25])])[0]["answers"] == [-3.25]


def test_metrics_of_a_task() -> None:
    samples = [sample(number, number % 3 == 0) for number in range(9)]
    items = items_of("local_needle", samples)
    found = metrics_of("multiple_choice", {"acc,none": 1 / 3, "acc_stderr,none": "N/A", "alias": "x", "f1,none": 0.25}, items, [1] * 9)
    acc = found["acc"]
    assert list(found) == ["acc", "f1"] and acc["value"] == 1 / 3 and acc["chance"] == 0.5
    assert acc["interval"] == wilson(1 / 3, 9) and acc["error"] == pytest.approx(0.5 / 3, abs=1e-12)
    assert found["f1"] == {"value": 0.25, "error": None, "interval": None, "chance": None}
    for item in items:
        item["metrics"]["acc_mutual_info"] = 0.0
    assert metrics_of("multiple_choice", {"acc,none": 1 / 3}, items, [1] * 9)["acc"]["chance"] == 1, "half of the two answers are unasked"
    cells = cells_of(items, "acc")
    assert {name: cell["items"] for name, cell in cells.items()} == {"depth 0": 5, "depth 1": 4}
    assert cells["depth 0"]["value"] == 0.4 and cells["depth 0"]["interval"] == wilson(0.4, 5)


def test_the_chance_of_a_word_is_that_of_the_most_frequent_one() -> None:
    items = items_of("x", [sample(number, 0, filtered_resps=[(-1.0, False)]) for number in range(4)])
    found = metrics_of("loglikelihood", {"acc,none": 0.0}, items, [" a", " b", " a", " c"])
    assert found["acc"]["chance"] == 0.5


def test_the_perplexity_of_answers_has_the_interval_of_its_logarithm() -> None:
    values = [-1.0, -2.5, -0.5, -3.0, -1.75]
    found = uncertainty("perplexity", math.exp(7 / 4), values)
    interval = t_interval(values)
    assert interval is not None
    assert found["interval"] == pytest.approx((math.exp(-interval[1]), math.exp(-interval[0])))
    assert found["error"] == pytest.approx(math.exp(7 / 4) * statistics.stdev(values) / math.sqrt(5))


def test_items_of_one_document_are_not_independent() -> None:
    draw = random.Random(0)
    documents = [number for number in range(20) for _ in range(5)]
    right = {number: float(draw.random() < 0.5) for number in range(20)}
    values = [right[number] for number in documents]
    error, interval = mean_uncertainty(values, documents)
    alone, _ = mean_uncertainty(values)
    assert error is not None and alone is not None and error > 2 * alone
    assert error == pytest.approx(statistics.stdev(right.values()) / math.sqrt(20))
    assert interval == pytest.approx(t_interval([*right.values()]))
    mean = sum(values) / 100
    assert uncertainty("acc", mean, values, documents)["interval"] == interval
    assert uncertainty("acc", 0.0, [0.0] * 100, documents) == {"error": None, "interval": wilson(0, 20)}
    assert uncertainty("acc", mean, values, list(range(100)))["interval"] == wilson(mean, 100)
    assert mean_uncertainty(values, [n // 25 for n in range(100)]) == mean_uncertainty(values, [0] * 100) == (None, None), "too few to know"
    assert documents_of([{"document": 1}, {}]) is None and documents_of([]) is None and documents_of([{"document": 1}]) == [1]


def test_a_value_that_is_no_mean_of_items_has_no_interval() -> None:
    assert uncertainty("acc", 0.3, [0.0, 1.0]) == uncertainty("acc", 1.0, [1.0]) == {"error": None, "interval": None}


def test_the_average_of_a_preset_has_equal_weights_and_no_gaps() -> None:
    measured = {
        task.name: {"items": task.items, "metrics": {task.metric: {"value": 0.1 * number, "error": 0.01}, "other": {"value": 9}}}
        for number, task in enumerate(LOW_RANK)
    }
    whole = average("low-rank", measured)
    assert whole["value"] == pytest.approx(0.35, abs=1e-12) and whole["error"] == pytest.approx(0.01 / math.sqrt(8), abs=1e-12)
    assert (whole["missing"], whole["partial"]) == ([], [])
    measured["piqa"]["items"] = 10
    assert average("low-rank", measured) == {"value": None, "error": None, "missing": [], "partial": ["piqa"]}
    del measured["boolq"]
    assert average("low-rank", measured) == {"value": None, "error": None, "missing": ["boolq"], "partial": ["piqa"]}


def test_the_error_of_a_ratio_is_that_of_a_bootstrap_over_documents() -> None:
    draw = random.Random(5)
    counts = [draw.randint(1, 40) for _ in range(400)]
    sums = [count * draw.gauss(3, 1) for count in counts]
    (error, interval), drawn = clustered(sums, counts), cluster_bootstrap(sums, counts)
    assert error == pytest.approx(drawn.error, rel=0.05) and interval == pytest.approx(drawn.interval, rel=0.01)


def test_answers_of_code_and_numbers_that_are_none_are_kept() -> None:
    """Lists of texts, as code tasks have, truth values of numpy, and log-probabilities that are not finite."""
    answers = [["def f(): pass", "def g(): pass"], (np.float64("nan"), np.bool_(False)), [("x", True)], float("-inf"), None]
    (item,) = items_of("x", [sample(0, 1, filtered_resps=answers, acc=math.nan)])
    assert item["answers"] == [["def f(): pass", "def g(): pass"], [None, False], [["x", True]], None, None]
    assert item["answers"][1][1] is False and item["metrics"] == {"acc": None}
    items = items_of("local_needle", [sample(0, 1, acc=math.nan), *(sample(n, 1) for n in range(1, 9))])
    nothing = metrics_of("multiple_choice", {"acc,none": math.nan}, items, [1] * 9)["acc"]
    assert nothing == {"value": None, "error": None, "interval": None, "chance": 0.5}
    assert metrics_of("multiple_choice", {"acc,none": 1.0}, items, [1] * 9)["acc"]["interval"] is None
    assert cells_of(items, "acc")["depth 0"]["items"] == 4


def test_an_average_has_no_error_where_a_task_has_none() -> None:
    measured = {task.name: {"items": task.items, "metrics": {task.metric: {"value": 0.5, "error": 0.1}}} for task in LOW_RANK}
    measured["piqa"]["metrics"]["acc_norm"]["error"] = None  # type: ignore[index]
    assert average("low-rank", measured) == {"value": 0.5, "error": None, "missing": [], "partial": []}
    measured["piqa"]["metrics"]["acc_norm"]["value"] = None  # type: ignore[index]
    assert average("low-rank", measured)["value"] is None


def test_the_perplexity_of_one_document_has_no_interval() -> None:
    """Little text is no reason to say nothing; of its spread nothing is known."""
    one = {"task": "perplexity", "doc_id": 0, "item": "a", "nats": 30.0, "tokens": 10, "bytes": 20}
    found = perplexity_metrics([one])
    assert found["nll"] == {"value": 3.0, "error": None, "interval": None}
    assert found["perplexity"] == {"value": pytest.approx(math.exp(3)), "error": None, "interval": None}
    assert found["bits_per_byte"]["value"] == pytest.approx(1.5 / math.log(2)) and found["bits_per_byte"]["interval"] is None
    assert perplexity_metrics([{**one, "bytes": 0}])["bits_per_byte"]["value"] is None
    several = perplexity_metrics([{**one, "doc_id": number, "nats": 30.0 + number} for number in range(5)])
    low, high = several["nll"]["interval"]
    assert several["nll"]["value"] == pytest.approx(3.2) and low < 3.2 < high
