"""Statistics count whole cells of the plan and nothing else, and say why the others are missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthroute.common.errors import FailureError
from depthroute.common.files import read_json
from depthroute.study.collect import check_complete, is_complete, write_statistics
from depthroute.study.plan import Study, cells, read_plan, write_plan
from depthroute.study.statistics import paired


@pytest.fixture
def folder(study: Study, fake: SimpleNamespace, tmp_path: Path) -> Path:
    """A study of which every cell is whole."""
    for cell in cells(write_plan(study, tmp_path)):
        fake.write_run(tmp_path, *cell)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_whole_cells_become_paired_statistics_at_every_milestone(folder: Path, fake: SimpleNamespace) -> None:
    statistics = write_statistics(folder, {})
    assert statistics == read_json(folder / "statistics.json")
    assert statistics["comparisons"][0]["endpoint_step"] == 6
    assert statistics["missing"] == []
    [comparison] = statistics["comparisons"]
    assert (comparison["arm"], comparison["parent"]) == ("block", "plain")
    assert [milestone["step"] for milestone in comparison["milestones"]] == [3, 6]
    last = comparison["milestones"][-1]
    assert (last["tokens"], last["seeds"]) == (96, [7, 3])
    assert last["arm_nll"] == [fake.nll("block", 7, 6), fake.nll("block", 3, 6)]
    expected = paired(last["arm_nll"], [fake.nll("plain", 7, 6), fake.nll("plain", 3, 6)])
    assert last["differences"] == list(expected.differences)
    assert last["t_interval"] == list(expected.t_interval or ())
    assert list(last) == [
        "step", "tokens", "seeds", "arm_nll", "parent_nll", "differences", "mean", "sd", "t_interval", "bootstrap_interval", "sign_flip_p",
        "wins", "losses", "ties", "relative_perplexity_reduction", "mean_relative_perplexity_reduction",
    ]
    check_complete(statistics)


def missing(folder: Path, failures: dict[tuple[str, int], str] | None = None) -> list[tuple[str, int, str]]:
    return [(entry["arm"], entry["seed"], entry["reason"]) for entry in write_statistics(folder, failures or {})["missing"]]


def test_a_pair_needs_both_cells(folder: Path) -> None:
    (folder / "runs/block/seed-7/result.json").unlink()
    assert missing(folder) == [("block", 7, "stopped after step 6; run the study again to go on.")]
    [comparison] = read_json(folder / "statistics.json")["comparisons"]
    assert [milestone["seeds"] for milestone in comparison["milestones"]] == [[3], [3]]
    assert comparison["milestones"][0]["t_interval"] is None


def test_no_pair_is_an_empty_list(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    statistics = write_statistics(tmp_path, {("plain", 7): "the disk is full."})
    assert statistics["comparisons"] == [{"arm": "block", "parent": "plain", "endpoint_step": 6, "milestones": []}]
    assert [entry["reason"] for entry in statistics["missing"]] == ["the disk is full.", "not started.", "not started.", "not started."]
    with pytest.raises(FailureError, match=r"no result: 4 \(plain seed 7, block seed 7, .*The first: the disk is full\."):
        check_complete(statistics)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"data_fingerprint": "f', '"data_fingerprint": "0', "data_fingerprint is"),
        ('"seed": 7', '"seed": 8', "train.seed is 8 there and 7 in the plan"),
        ('"width": 8', '"width": 16', "model.width is 16 there and 8 in the plan"),
    ],
)
def test_a_run_that_is_not_the_planned_one_does_not_count(folder: Path, old: str, new: str, reason: str) -> None:
    edit(folder / "runs/plain/seed-7/config.json", old, new)
    [(arm, seed, why)] = missing(folder)
    assert (arm, seed) == ("plain", 7)
    assert "holds another run" in why
    assert reason in why


def test_moved_data_still_counts(folder: Path) -> None:
    edit(folder / "runs/plain/seed-7/config.json", "no-such-data", "moved")
    assert missing(folder) == []


def test_damaged_and_diverged_cells_are_missing_with_their_reason(folder: Path, fake: SimpleNamespace) -> None:
    lines = (folder / "runs/plain/seed-7/evaluations.jsonl").read_text().splitlines(keepends=True)
    (folder / "runs/plain/seed-7/evaluations.jsonl").write_text(lines[1])
    value = fake.nll("block", 7, 6)
    edit(folder / "runs/block/seed-7/evaluations.jsonl", f"{value}", "NaN")
    (folder / "runs/plain/seed-3/config.json").write_text('{"form')
    edit(folder / "runs/block/seed-3/evaluations.jsonl", "validation", "test")
    reasons = [reason for _, _, reason in missing(folder)]
    assert reasons[0] == "its evaluations.jsonl has no validation at step 3, a milestone of the plan."
    assert reasons[1] == "its validation NLL at step 6 is nan: it diverged."
    assert "not valid JSON" in reasons[2]
    assert "no validation at step 3" in reasons[3]


def test_a_plan_with_an_unmatched_pair_is_refused(folder: Path) -> None:
    from depthroute.common.config import fingerprint
    from depthroute.study.plan import UNHASHED

    plan = read_plan(folder)
    plan["arms"][1]["config"]["train"]["learning_rate"] = 0.5
    plan["hash"] = fingerprint({name: value for name, value in plan.items() if name not in UNHASHED})
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"train\.learning_rate is 0\.5 in block and 0\.01 in plain"):
        write_statistics(folder, {})


def test_a_cell_without_its_analysis_counts_but_the_study_is_not_complete(folder: Path) -> None:
    (folder / "runs/plain/seed-7/routing.json").unlink()  # PreNorm has no source weights
    (folder / "runs/block/seed-7/routing.json").unlink()
    statistics = write_statistics(folder, {("block", 7): "a shard is cut short."})
    assert statistics["missing"] == []
    assert statistics["comparisons"][0]["milestones"][-1]["seeds"] == [7, 3]
    assert statistics["unanalysed"] == [{"arm": "block", "seed": 7, "reason": "a shard is cut short."}]
    unanalysed = r"cells with a result but no routing\.json: 1 \(block seed 7\)\. The first: "
    with pytest.raises(FailureError, match=f"^{unanalysed}a shard is cut short"):
        check_complete(statistics)
    (folder / "runs/plain/seed-3/result.json").unlink()
    with pytest.raises(FailureError, match=rf"no result: 1 \(plain seed 3\)\. .* {unanalysed}not analysed yet; run the study again"):
        check_complete(write_statistics(folder, {}))


def test_a_cell_that_stopped_before_its_first_step_says_what_to_do(folder: Path) -> None:
    (folder / "runs/plain/seed-7/result.json").unlink()
    (folder / "runs/plain/seed-7/metrics.jsonl").unlink()
    assert missing(folder) == [("plain", 7, "stopped before its first step ended; run the study again to go on.")]


def test_a_cell_is_complete_with_the_analysis_its_method_allows(folder: Path) -> None:
    plan = read_plan(folder)
    (folder / "runs/plain/seed-7/routing.json").unlink()  # PreNorm has no source weights
    (folder / "runs/block/seed-7/routing.json").unlink()
    (folder / "runs/block/seed-3/result.json").unlink()
    assert [cell for cell in cells(plan) if not is_complete(folder, plan, cell)] == [("block", 7), ("block", 3)]
