"""Two models on the same items: planted differences, McNemar by hand, and other items refused."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.evals.paired import compare_evaluations, matched, mcnemar_p
from depthroute.evals.presets import LOW_RANK
from depthroute.evals.store import write_evaluation
from depthroute.study.clusters import cluster_bootstrap
from depthroute.study.multiplicity import holm, paired_t_p
from depthroute.study.statistics import t_interval

Items = list[dict[str, Any]]


def answered(values: list[float], metric: str = "acc", **fields: Any) -> Items:
    return [
        {"task": "some", "filter": "none", "doc_id": number, "item": f"hash {number}", "metrics": {metric: value}, **fields}
        for number, value in enumerate(values)
    ]


def read(values: list[float], tokens: list[int]) -> Items:
    return [
        {"task": "perplexity", "doc_id": number, "item": f"hash {number}", "nats": nats, "tokens": count, "bytes": 3 * count}
        for number, (nats, count) in enumerate(zip(values, tokens, strict=True))
    ]


def compared(folder: Path, a: dict[str, Items], b: dict[str, Items], reported: str = "acc") -> dict[str, Any]:
    for name, by_task in (("a", a), ("b", b)):
        for task, items in by_task.items():
            renamed = [{**item, "task": task} for item in items]
            stands_for = "nll" if task == "perplexity" else reported
            write_evaluation(folder / name, task, {"tasks": {task: {"reported": stands_for}}}, renamed)
    return compare_evaluations(folder / "a", folder / "b", list(a))


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (0, 0, 1.0),
        (1, 5, 2 * (1 + 6) / 2**6),
        (5, 1, 2 * (1 + 6) / 2**6),
        (3, 3, 1.0),
        (0, 8, 2 / 2**8),
        (9, 2, 2 * (1 + 11 + 55) / 2**11),
    ],
)
def test_mcnemar_is_the_fair_coin(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar_p(only_a, only_b) == pytest.approx(p, abs=1e-12)


def test_a_planted_difference_of_answers(tmp_path: Path) -> None:
    theirs = [1.0, 0.0] * 50
    ours = list(theirs)
    for number in (1, 3, 5, 7, 9, 11, 13, 15, 17):
        ours[number] = 1.0
    for number in (0, 2):
        ours[number] = 0.0
    found = compared(tmp_path, {"some": answered(ours)}, {"some": answered(theirs)})["tasks"]["some"]
    acc = found["metrics"]["acc"]
    assert found["items"] == 100 and (acc["only_a"], acc["only_b"]) == (9, 2)
    assert (acc["a"], acc["b"]) == (0.57, 0.5) and acc["difference"] == pytest.approx(0.07, abs=1e-12)
    assert acc["p"] == found["adjusted_p"] == pytest.approx(2 * 67 / 2**11, abs=1e-12)
    assert acc["interval"] == t_interval([a - b for a, b in zip(ours, theirs, strict=True)])


def test_other_metrics_are_compared_by_their_differences(tmp_path: Path) -> None:
    draw = random.Random(1)
    theirs = [draw.gauss(-3, 1) for _ in range(40)]
    ours = [value + draw.gauss(0.2, 0.1) for value in theirs]
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    a, b = answered(ours, "perplexity"), answered(theirs, "perplexity")
    found = compared(tmp_path / "one", {"some": a}, {"some": b})["tasks"]["some"]
    assert found["reported"] == "log_probability"
    assert found["metrics"]["log_probability"]["p"] == paired_t_p(differences) and "only_a" not in found["metrics"]["log_probability"]
    for items in (a, b):
        for number, item in enumerate(items):
            item["document"] = number // 2
    of_documents = compared(tmp_path / "two", {"some": a}, {"some": b})["tasks"]["some"]["metrics"]["log_probability"]
    drawn = cluster_bootstrap([differences[n] + differences[n + 1] for n in range(0, 40, 2)], [2] * 20)
    assert of_documents["interval"] == drawn.interval and 0 < of_documents["p"] < 1e-6


def test_perplexities_differ_by_document(tmp_path: Path) -> None:
    draw = random.Random(2)
    tokens = [draw.randint(5, 50) for _ in range(30)]
    theirs = [count * draw.gauss(5, 1) for count in tokens]
    ours = [nats - count * draw.gauss(0.1, 0.02) for nats, count in zip(theirs, tokens, strict=True)]
    found = compared(tmp_path, {"perplexity": read(ours, tokens)}, {"perplexity": read(theirs, tokens)})["tasks"]["perplexity"]
    nll = found["metrics"]["nll"]
    drawn = cluster_bootstrap([a - b for a, b in zip(ours, theirs, strict=True)], tokens)
    assert nll["difference"] == drawn.mean == pytest.approx(nll["a"] - nll["b"], abs=1e-12)
    assert nll["interval"] == drawn.interval and nll["interval"][1] < 0
    assert nll["p"] == pytest.approx(math.erfc(-drawn.mean / drawn.error / math.sqrt(2)), rel=1e-12) and nll["p"] > 0


def test_p_values_hold_for_all_tasks_together(tmp_path: Path) -> None:
    right, base = [1.0] * 30, [1.0] * 30
    names = {"first": 8, "second": 6, "third": 1}
    a = {name: answered(right) for name in names}
    b = {name: answered([0.0] * wrong + base[wrong:]) for name, wrong in names.items()}
    found = compared(tmp_path, a, b)["tasks"]
    expected = holm({name: 2 / 2**wrong for name, wrong in names.items()})
    assert {name: entry["adjusted_p"] for name, entry in found.items()} == pytest.approx(expected)
    assert found["second"]["adjusted_p"] == pytest.approx(2 * 2 / 2**6)


def test_other_items_are_refused() -> None:
    a = answered([1.0, 0.0, 1.0])
    with pytest.raises(RequestError, match="the same items of some: number 2 was asked of one of them only"):
        matched("some", a, a[:2])
    with pytest.raises(RequestError, match="number 2 was asked of one of them only"):
        matched("some", a[:2], a)
    with pytest.raises(RequestError, match="number 1 is not the same text"):
        matched("some", a, [a[0], {**a[1], "item": "other"}, a[2]])
    assert [(one["doc_id"], other["doc_id"]) for one, other in matched("some", a, a[::-1])] == [(0, 0), (1, 1), (2, 2)]


def test_an_evaluation_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "a", "some", {"tasks": {"some": {"reported": "acc"}}}, answered([1.0, 0.0]))
    with pytest.raises(RequestError, match="has no finished evaluation 'some'"):
        compare_evaluations(tmp_path / "a", tmp_path / "b", ["some"])
    with pytest.raises(RequestError, match="no item that both"):
        compare_evaluations(tmp_path / "a", tmp_path / "a", [])


def test_the_average_of_a_preset_is_compared_where_all_its_tasks_are(tmp_path: Path) -> None:
    a = {task.name: answered([1.0, 1.0, 0.0, 1.0], task.metric) for task in LOW_RANK}
    b = {task.name: answered([1.0, 0.0, 0.0, 1.0], task.metric) for task in LOW_RANK}
    found = compared(tmp_path, a, b)["averages"]["low-rank"]
    error = 0.25 / math.sqrt(8)  # a quarter in each task: one of four items differs, so sd 1/2 and standard error 1/4
    assert found["difference"] == pytest.approx(0.25, abs=1e-12) and found["error"] == pytest.approx(error, abs=1e-12)
    assert found["interval"] == pytest.approx((0.25 - 1.959964 * error, 0.25 + 1.959964 * error), abs=1e-6)
    a.pop("piqa")
    assert compare_evaluations(tmp_path / "a", tmp_path / "b", list(a))["averages"] == {}
