"""What two runs or two studies differ in is found, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, write_json
from depthroute.study.collect import write_statistics
from depthroute.study.compare import compare
from depthroute.study.plan import Arm, Study, cells, write_plan
from depthroute.study.statistics import paired

CONFIG = {
    "model": {"vocabulary": 300, "width": 8},
    "train": {"seed": 1, "learning_rate": 0.01},
    "data": "here",
    "data_fingerprint": "f" * 64,
}


def write_run(
    folder: Path, losses: Mapping[int, float | None], *, nll: Mapping[int, float], end: float | None = None, config: Any = CONFIG
) -> Path:
    write_json(folder / "config.json", {"format": 1, **config})
    metrics = [{"step": step, "tokens": 16 * step, "loss": loss} for step, loss in losses.items()]
    evaluations = [{"step": step, "tokens": 16 * step, "split": "validation", "nll": loss} for step, loss in nll.items()]
    for name, lines in (("metrics", metrics), ("evaluations", evaluations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if end is not None:
        write_json(folder / "result.json", {"status": "complete", "step": max(losses), "tokens": 16 * max(losses), "nll": end})
    return folder


def test_the_first_step_whose_loss_differs_with_both_values(tmp_path: Path) -> None:
    near = math.nextafter(4.0, 5.0)
    a = write_run(tmp_path / "a", {1: 5.0, 2: 4.5, 3: 4.0, 4: 3.0}, nll={2: 4.6, 4: 3.5}, end=3.5)
    b = write_run(tmp_path / "b", {1: 5.0, 2: 4.5, 3: near, 4: 9.0}, nll={2: 4.5, 3: 4.0, 4: 3.75}, end=3.75)
    found = compare(a, b)
    assert found["first_difference"] == {"step": 3, "a": 4.0, "b": near}
    assert found["steps"] == {"a": 4, "b": 4, "common": 4}
    assert [(line["step"], line["a"], line["b"], line["gap"]) for line in found["evaluations"]] == [
        (2, 4.6, 4.5, 4.5 - 4.6),
        (4, 3.5, 3.75, 0.25),
    ]
    assert found["end"] == {"step": [4, 4], "tokens": [64, 64], "a": 3.5, "b": 3.75, "gap": 0.25}
    assert found["config"] == found["notes"] == []


def test_steps_are_matched_by_number_and_a_longer_run_is_no_difference(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {1: 5.0, 2: 4.0}, nll={2: 4.0})
    b = write_run(tmp_path / "b", {2: 4.0, 3: 3.0}, nll={3: 3.0}, end=3.0)
    found = compare(a, b)
    assert found["first_difference"] is None and found["steps"] == {"a": 2, "b": 3, "common": 1}
    assert found["evaluations"] == [] and found["end"] is None


def test_splits_are_compared_with_themselves(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, {1: 5.0}, nll={1: 4.0}) for name in "ab")
    with (b / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "tokens": 16, "split": "test", "nll": 9.0}) + "\n")
    assert [(line["split"], line["gap"]) for line in compare(a, b)["evaluations"]] == [("validation", 0.0)]


def test_a_diverged_run_gives_no_numbers_and_valid_json(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {1: 5.0, 2: math.nan, 3: None}, nll={3: math.nan})
    b = write_run(tmp_path / "b", {1: 5.0, 2: math.nan, 3: 4.0}, nll={3: 4.0})
    found = compare(a, b)
    assert found["first_difference"] == {"step": 3, "a": None, "b": 4.0}  # two NaN are not a difference
    [line] = found["evaluations"]
    assert (line["a"], line["b"], line["gap"]) == (None, 4.0, None)
    json.dumps(found, allow_nan=False)


def test_configurations_differ_by_dotted_field(tmp_path: Path) -> None:
    other = {**CONFIG, "train": {"seed": 1, "learning_rate": 0.02}, "data": "elsewhere"}
    a = write_run(tmp_path / "a", {1: 5.0}, nll={})
    b = write_run(tmp_path / "b", {1: 5.0}, nll={}, config=other)
    assert compare(a, b)["config"] == [{"field": "train.learning_rate", "a": "0.01", "b": "0.02"}]  # where the data lies is none


def test_other_data_is_said_to_forbid_the_gap(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {1: 5.0}, nll={})
    other = {**CONFIG, "data": "elsewhere", "data_fingerprint": "e" * 64, "model": {"vocabulary": 301, "width": 8}}
    found = compare(a, write_run(tmp_path / "b", {1: 5.0}, nll={}, config=other))
    assert [entry["field"] for entry in found["config"]] == ["model.vocabulary", "data", "data_fingerprint"]
    assert "different data fingerprints" in found["notes"][0] and "different vocabularies" in found["notes"][1]


def test_another_order_of_batches_is_said(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, {1: 5.0}, nll={1: 4.0}, end=4.0) for name in "ab")
    assert compare(a, b)["notes"] == []
    write_json(b / "result.json", {**read_json(b / "result.json"), "order": "feistel-1"})
    assert "read their batches in different orders" in compare(a, b)["notes"][0]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {1: 5.0}, nll={})
    write_json(tmp_path / "study" / "plan.json", {})
    with pytest.raises(RequestError, match=r"is a run folder and .* a study folder; compare two of a kind"):
        compare(run, tmp_path / "study")
    with pytest.raises(RequestError, match=r"neither a run folder \(config.json\) nor a study folder"):
        compare(run, tmp_path)
    with pytest.raises(RequestError, match="nowhere is not a folder"):
        compare(tmp_path / "nowhere", run)
    (run / "config.json").write_text("[]")
    with pytest.raises(FailureError, match="holds no object"):
        compare(run, run)


def run_all(study: Study, folder: Path, fake: SimpleNamespace, shift: float = 0.0) -> Path:
    """A study of which every cell is whole, each loss raised by `shift` times the seed."""
    for arm, seed in cells(write_plan(study, folder)):
        fake.write_run(folder, arm, seed)
        path = folder / "runs" / arm / f"seed-{seed}" / "evaluations.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, "nll": line["nll"] + shift * seed}) + "\n" for line in lines))
    write_statistics(folder, {})
    return folder


def test_a_study_against_its_repetition_elsewhere(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    moved = dataclasses.replace(study, base=dataclasses.replace(study.base, data="other-place"))
    moved = dataclasses.replace(moved, arms={"plain": Arm(label="Plain", config=moved.base), "block": study.arms["block"]})
    found = compare(run_all(study, tmp_path / "a", fake), run_all(moved, tmp_path / "b", fake))
    assert found["plan"] == found["config"] == found["notes"] == []
    assert [entry["step"] for entry in found["arms"]] == [6, 6]
    assert [(entry["arm"], entry["seeds"], entry["paired"]["differences"]) for entry in found["arms"]] == [
        ("plain", [7, 3], [0.0, 0.0]),
        ("block", [7, 3], [0.0, 0.0]),
    ]


def test_the_gaps_of_a_common_arm_are_paired_by_seed(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    """The order of seeds in the second plan is another one: pairs go by seed, not by place."""
    turned = dataclasses.replace(study, seeds=(3, 9, 7))
    found = compare(run_all(study, tmp_path / "a", fake), run_all(turned, tmp_path / "b", fake, shift=0.25))
    entry = found["arms"][1]
    assert entry["arm"] == "block" and entry["seeds"] == [7, 3] and entry["left_out"] == []
    assert entry["a"] == [fake.nll("block", seed, 6) for seed in (7, 3)]
    assert entry["paired"]["differences"] == pytest.approx([0.25 * 7, 0.25 * 3])
    expected = paired(entry["b"], entry["a"])
    assert entry["paired"]["t_interval"] == list(expected.t_interval or ()) and entry["paired"]["losses"] == 2
    assert [(line["field"], line["a"], line["b"]) for line in found["plan"]] == [
        ("seeds[0]", "7", "3"),
        ("seeds[1]", "3", "9"),
        ("seeds[2]", "absent", "7"),
    ]


def of_length(study: Study, steps: int) -> Study:
    """The same study over another number of steps: an arm's last milestone is its last step."""
    base = dataclasses.replace(study.base, train=dataclasses.replace(study.base.train, steps=steps))
    return dataclasses.replace(study, base=base, arms={**study.arms, "plain": dataclasses.replace(study.arms["plain"], config=base)})


def test_what_each_comparison_found_stands_side_by_side(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    """Both arms of b are worse by the same: the runs are apart, and the comparison finds what it found in a."""
    early = dataclasses.replace(of_length(study, 5), milestones=(3, 5), seeds=(7,))
    found = compare(run_all(study, tmp_path / "a", fake), run_all(early, tmp_path / "b", fake, shift=0.25))
    [entry] = found["comparisons"]
    assert (entry["arm"], entry["parent"]) == ("block", "plain")
    end = read_json(tmp_path / "a" / "statistics.json")["comparisons"][0]["milestones"][-1]
    assert entry["a"] == {name: end[name] for name in ("step", "seeds", "differences", "mean", "t_interval")} and end["step"] == 6
    assert (entry["b"]["step"], entry["b"]["seeds"], entry["b"]["t_interval"]) == (5, [7], None)
    assert entry["b"]["differences"] == pytest.approx([-0.027]) and found["arms"][0]["paired"]["mean"] == pytest.approx(1.75)
    (tmp_path / "b" / "statistics.json").unlink()
    assert compare(tmp_path / "a", tmp_path / "b")["comparisons"] == [{**entry, "b": None}]


def test_arms_go_by_name_and_a_shared_change_is_said_once(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    base = dataclasses.replace(study.base, train=dataclasses.replace(study.base.train, learning_rate=5e-3))
    arms = {"extra": Arm(label="Extra", config=study.arms["block"].config), "block": Arm(label="Blocks", config=study.arms["block"].config)}
    other = dataclasses.replace(study, base=base, arms={"plain": Arm(label="Plain", config=base), **arms})
    found = compare(run_all(study, tmp_path / "a", fake), run_all(other, tmp_path / "b", fake))
    assert found["arms_only_in"] == {"a": [], "b": ["extra"]}
    assert [entry["arm"] for entry in found["arms"]] == ["plain", "block"]
    assert {(entry["field"], entry["a"], entry["b"], *entry["arms"]) for entry in found["config"]} == {
        ("train.learning_rate", "0.01", "0.005", "plain", "block"),
        ("label", "'Block'", "'Blocks'", "block"),
    }
    assert [entry["field"] for entry in found["plan"]] == ["arms[1]", "arms[2]"]


def test_cells_that_do_not_count_are_left_out_with_their_reason(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    a, b = run_all(study, tmp_path / "a", fake), run_all(study, tmp_path / "b", fake)
    (a / "runs/plain/seed-7/result.json").unlink()
    statistics = read_json(b / "statistics.json")
    statistics["missing"] = [{"arm": "block", "seed": seed, "reason": "its run folder holds another run."} for seed in (7, 3)]
    write_json(b / "statistics.json", statistics)
    plain, block = compare(a, b)["arms"]
    assert plain["seeds"] == [3] and plain["left_out"] == [{"study": "a", "seed": 7, "reason": "it has no result."}]
    assert plain["paired"]["t_interval"] is None and plain["paired"]["differences"] == [0.0]
    assert block["seeds"] == [] and block["paired"] is None
    assert block["left_out"] == [{"study": "b", "seed": seed, "reason": "its run folder holds another run."} for seed in (7, 3)]


def test_the_gap_is_at_the_last_milestone_of_both(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    a = run_all(study, tmp_path / "a", fake)
    early = run_all(dataclasses.replace(of_length(study, 5), milestones=(3, 5)), tmp_path / "early", fake)
    found = compare(a, early)
    assert found["arms"][0]["step"] == 3 and found["arms"][0]["a"] == [fake.nll("plain", seed, 3) for seed in (7, 3)]
    assert found["notes"] == ["plain, block end at steps 6 and 5; the gaps are at step 3, the last milestone of both."]
    none = run_all(dataclasses.replace(of_length(study, 4), milestones=(2, 4)), tmp_path / "none", fake)
    found = compare(a, none)
    assert found["arms"] == [] and "no milestone of plain, block in common" in found["notes"][0]


def test_a_changed_plan_is_not_compared(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    a = run_all(study, tmp_path / "a", fake)
    (a / "plan.json").write_text((a / "plan.json").read_text().replace("Does the fake learn?", "Does it?"))
    with pytest.raises(FailureError, match="changed after it was written"):
        compare(a, a)
