"""Two models on the same items: planted differences, McNemar by hand, and other items refused."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.evals.metrics import clustered
from depthroute.evals.paired import compare_evaluations, matched, mcnemar_p, newcombe, t_p
from depthroute.evals.presets import LOW_RANK
from depthroute.evals.store import write_evaluation
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


def compared(
    folder: Path, a: dict[str, Items], b: dict[str, Items], reported: str = "acc", settings: tuple[Any, Any] = ({}, {})
) -> dict[str, Any]:
    for name, by_task, made_with in (("a", a, settings[0]), ("b", b, settings[1])):
        for task, items in by_task.items():
            renamed = [{**item, "task": task} for item in items]
            stands_for = "nll" if task == "perplexity" else reported
            write_evaluation(folder / name, task, {"tasks": {task: {"reported": stands_for}}, "settings": made_with}, renamed)
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
    assert acc["interval"] == newcombe(48, 9, 2, 41)


def test_the_interval_of_paired_shares_is_newcombes() -> None:
    """The example of the paper (method 10): 36, 12, 2 and 0 give 0.0569 to 0.3404."""
    assert newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    low, high = newcombe(36, 2, 12, 0)
    assert (low, high) == pytest.approx((-0.3404, -0.0569), abs=5e-5), "it mirrors"
    for counts in ((5, 0, 0, 0), (3, 0, 0, 2), (0, 30, 0, 0), (0, 0, 1, 1)):
        low, high = newcombe(*counts)
        assert -1 <= low < high <= 1 and high - low > 0.1, "no counts are certain"


def test_items_of_one_document_are_not_mcnemars(tmp_path: Path) -> None:
    """Six documents of ten items that all go one way: 40 against 20 items, a p of 0.01 for McNemar, are 4 documents against 2."""
    right = [1.0] * 40 + [0.0] * 20
    ours, theirs = answered(right), answered([1 - value for value in right])
    for items in (ours, theirs):
        for number, item in enumerate(items):
            item["document"] = number // 10
    acc = compared(tmp_path, {"some": ours}, {"some": theirs})["tasks"]["some"]["metrics"]["acc"]
    of_documents = [1.0] * 4 + [-1.0] * 2
    assert acc["p"] == pytest.approx(paired_t_p(of_documents), rel=1e-9) and acc["p"] > 0.3 > 0.02 > mcnemar_p(40, 20)
    assert acc["interval"] == pytest.approx(t_interval(of_documents), rel=1e-9)
    assert (acc["only_a"], acc["only_b"]) == (40, 20)


@pytest.mark.parametrize("documents", [1, 4, 10])
def test_what_has_no_spread_says_nothing_of_chance(tmp_path: Path, documents: int) -> None:
    """One document, few, or many with the same difference: neither an interval without width nor a p of zero."""
    draw = random.Random(3)
    values = [draw.gauss(0, 1) for _ in range(40)]
    shift = [0.25] * 40 if documents == 10 else [draw.gauss(0.3, 0.1) for _ in range(40)]
    ours = answered([value + by for value, by in zip(values, shift, strict=True)], "perplexity")
    theirs = answered(values, "perplexity")
    for items in (ours, theirs):
        for number, item in enumerate(items):
            item["document"] = number % documents
    found = compared(tmp_path, {"some": ours}, {"some": theirs})["tasks"]["some"]
    metric = found["metrics"]["log_probability"]
    assert metric["error"] is metric["interval"] is metric["p"] is found["adjusted_p"] is None and metric["difference"] > 0.1


def test_answers_that_all_differ_or_none_do_are_not_certain(tmp_path: Path) -> None:
    right, wrong = answered([1.0] * 30), answered([0.0] * 30)
    same = compared(tmp_path / "same", {"some": right[:5]}, {"some": right[:5]})["tasks"]["some"]["metrics"]["acc"]
    assert same["interval"][0] < -0.3 and same["interval"][1] > 0.3 and same["p"] == 1
    other = compared(tmp_path / "other", {"some": right}, {"some": wrong})["tasks"]["some"]["metrics"]["acc"]
    assert other["interval"][0] < 0.9 and other["interval"][1] == 1 and 0 < other["p"] < 1e-6


def test_values_that_are_not_numbers_are_not_compared(tmp_path: Path) -> None:
    ours, theirs = answered([1.0, 0.0, math.nan, 1.0]), answered([1.0] * 4)
    found = compared(tmp_path / "some", {"some": ours}, {"some": theirs})["tasks"]["some"]
    assert found["metrics"]["acc"]["items"] == 3 and found["metrics"]["acc"]["a"] == pytest.approx(2 / 3)
    one = {"whole": answered([1.0, 0.0]), "broken": answered([math.nan] * 2)}
    assert list(compared(tmp_path / "two", one, one)["left_out"]) == ["broken"]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    items = {"some": answered([1.0, 0.0])}
    alike = ({"checkpoint": "a", "weights": "1", "seed": 0, "data": "x"}, {"checkpoint": "b", "weights": "2", "seed": 0, "data": "y"})
    assert compared(tmp_path / "one", items, items, settings=alike)["tasks"], "the tokens of a harness task may differ"
    with pytest.raises(RequestError, match=r"on some with different settings: fewshot = None and 5"):
        compared(tmp_path / "two", items, items, settings=({"seed": 0}, {"seed": 0, "fewshot": 5}))
    read_twice = {"perplexity": read([1.0, 2.0], [3, 4])}
    with pytest.raises(RequestError, match=r"on perplexity with different settings: data = 'x' and 'y'"):
        compared(tmp_path / "three", read_twice, read_twice, settings=alike)


def test_other_metrics_are_compared_by_their_differences(tmp_path: Path) -> None:
    draw = random.Random(1)
    theirs = [draw.gauss(-3, 1) for _ in range(40)]
    ours = [value + draw.gauss(0.2, 0.1) for value in theirs]
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    a, b = answered(ours, "perplexity"), answered(theirs, "perplexity")
    found = compared(tmp_path / "one", {"some": a}, {"some": b})["tasks"]["some"]
    assert found["reported"] == "log_probability"
    by_item = found["metrics"]["log_probability"]
    assert by_item["p"] == pytest.approx(paired_t_p(differences), rel=1e-9) and "only_a" not in by_item
    for items in (a, b):
        for number, item in enumerate(items):
            item["document"] = number // 2
    of_documents = compared(tmp_path / "two", {"some": a}, {"some": b})["tasks"]["some"]["metrics"]["log_probability"]
    means = [(differences[n] + differences[n + 1]) / 2 for n in range(0, 40, 2)]
    assert of_documents["interval"] == pytest.approx(t_interval(means), rel=1e-9)
    assert of_documents["p"] == pytest.approx(paired_t_p(means), rel=1e-6) and 0 < of_documents["p"] < 1e-6


def test_perplexities_differ_by_document(tmp_path: Path) -> None:
    draw = random.Random(2)
    tokens = [draw.randint(5, 50) for _ in range(30)]
    theirs = [count * draw.gauss(5, 1) for count in tokens]
    ours = [nats - count * draw.gauss(0.1, 0.02) for nats, count in zip(theirs, tokens, strict=True)]
    found = compared(tmp_path, {"perplexity": read(ours, tokens)}, {"perplexity": read(theirs, tokens)})["tasks"]["perplexity"]
    nll = found["metrics"]["nll"]
    error, interval = clustered([a - b for a, b in zip(ours, theirs, strict=True)], tokens)
    assert nll["difference"] == pytest.approx(nll["a"] - nll["b"], abs=1e-12)
    assert (nll["error"], nll["interval"]) == (error, interval) and nll["interval"][1] < 0
    assert nll["p"] == t_p(nll["difference"], error, 30) and 0 < nll["p"] < 1e-6


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


def test_the_average_of_a_preset_is_compared_where_all_its_tasks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = {task.name: answered([1.0, 1.0, 0.0, 1.0, 0.0], task.metric) for task in LOW_RANK}
    b = {task.name: answered([1.0, 0.0, 0.0, 1.0, 0.0], task.metric) for task in LOW_RANK}
    limited = compared(tmp_path, a, b)["averages"]["low-rank"]
    assert limited["difference"] is limited["p"] is None and limited["partial"] == [task.name for task in LOW_RANK]
    small = tuple(dataclasses.replace(task, items=5) for task in LOW_RANK)
    monkeypatch.setattr("depthroute.evals.paired.PRESETS", {"low-rank": small})
    found = compare_evaluations(tmp_path / "a", tmp_path / "b", list(a))["averages"]["low-rank"]
    error = math.sqrt(0.2 / 5) / math.sqrt(8)  # of five items one differs by 1: variance 1/5, so standard error 1/5 in each task
    assert found["difference"] == pytest.approx(0.2, abs=1e-12) and found["error"] == pytest.approx(error, abs=1e-12)
    assert found["interval"] == pytest.approx((0.2 - 1.959964 * error, 0.2 + 1.959964 * error), abs=1e-6)
    a.pop("piqa")
    without = compare_evaluations(tmp_path / "a", tmp_path / "b", list(a))["averages"]["low-rank"]
    assert without["difference"] is None and without["missing"] == ["piqa"]
