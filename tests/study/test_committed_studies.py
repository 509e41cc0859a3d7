"""The studies that the repository holds are whole: plans as they were hashed, and statistics that follow from every run's results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from depthroute.common.files import read_json
from depthroute.study.collect import collect
from depthroute.study.plan import cells, read_plan, run_folder

STUDIES = sorted(path.parent for path in (Path(__file__).parents[2] / "studies").glob("*/plan.json"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_the_statistics_follow_from_the_runs(study: Path) -> None:
    plan, written = read_plan(study), read_json(study / "statistics.json")
    assert plan["extensions"] == []
    found = collect(study, {})
    absent = [(cell["arm"], cell["seed"]) for cell in written["missing"]]  # a study that was stopped says so
    assert absent == [(cell["arm"], cell["seed"]) for cell in found["missing"]]
    for ours, theirs in zip(found["comparisons"], written["comparisons"], strict=True):
        for here, there in zip(ours["milestones"], theirs["milestones"], strict=True):
            for name in ("step", "seeds", "arm_nll", "parent_nll", "differences", "wins"):
                assert json.loads(json.dumps(here[name])) == there[name]
            assert here["mean"] == pytest.approx(there["mean"], rel=1e-12)
    assert [(claim["text"], claim["verdict"]) for claim in found["claims"]] == [(c["text"], c["verdict"]) for c in written["claims"]]
    for arm, seed in (cell for cell in cells(plan) if cell not in absent):
        environment = read_json(run_folder(study, arm, seed) / "environment.json")
        assert environment["started_at"] >= plan["written_at"]  # nothing ran before the plan was there


def test_there_are_studies() -> None:
    assert {"role-decoupled", "low-rank"} <= {path.name for path in STUDIES}
