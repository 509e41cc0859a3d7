"""`depthroute study`: which study is meant, its plan and price before it starts, and arms that are added later."""

from __future__ import annotations

from pathlib import Path

import pytest

from depthroute.cli.main import main
from depthroute.common.files import read_json

SMALL = (
    "--set", "model.width=16", "--set", "model.layers=2", "--set", "model.heads=2", "--set", "model.mlp_width=32", "--set",
    "model.context=16", "--set", "train.steps=4", "--set", "train.sequences=2", "--set", "train.evaluation_tokens=64", "--set",
    "train.warmup_fraction=0.25",
)  # fmt: skip


@pytest.fixture
def tokens(trained_run: Path) -> Path:
    return trained_run.parent / "tokens"


ARMS = ("--arm", "prenorm", "--arm", "block:2", *SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--baselines", "--arm", "prenorm"), "--baselines and --arm are different studies; give one of them"),
        (("--study", "low-rank", "--baselines"), "--study and --baselines are different studies"),
        (("--study", "low-rank", "--recipe", "small"), "--recipe does not go with --study"),
        (("--study", "lowrank"), "unknown study 'lowrank'; perhaps you meant 'low-rank'"),
        (("--form", "paper"), "--form belongs to --study"),
        (("--set", "train.seed=4"), "name its seeds: --seeds 1 2 3"),
        (("--set", 'model.residual={"method": "prenorm"}'), "--set model.residual does not apply to a study"),
        (("--set", "train.steps"), "--set train.steps: it takes FIELD=VALUE"),
        ((*ARMS, "--memory", "much"), "'much' is no size of memory"),
        ((*ARMS, "--memory", "1M"), "needs"),
        ((*ARMS, "--slurm", "partition"), "--slurm partition: it takes KEY=VALUE"),
        ((*ARMS, "--log", "tensorbord"), "perhaps you meant 'tensorboard'"),
        ((*ARMS, "--workers", "0"), "workers = 0 is not allowed"),
    ],
)
def test_a_wrong_request_is_refused_before_any_run(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "study"
    assert main(["study", str(out), "--data", str(tokens), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (out / "runs").exists()


def test_a_study_is_planned_priced_run_and_extended(tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    command = ["study", str(out), "--data", str(tokens), "--seeds", "1", "2", *ARMS]
    assert main([*command, "--plan"]) == 0
    said = capsys.readouterr().out
    plan = read_json(out / "plan.json")
    assert f"hash {plan['hash'][:12]}" in said and not (out / "runs").exists()
    assert all(word in said for word in ("FLOPs", "memory", "time", "PreNorm", "GFLOP/s"))

    assert main(command) == 0
    capsys.readouterr()
    assert read_json(out / "plan.json") == plan
    statistics = read_json(out / "statistics.json")
    assert statistics["missing"] == [] and [claim["arm"] for claim in statistics["claims"]] == ["block-2"]
    finished = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*/result.json")}
    assert len(finished) == 4

    more = [*command, "--arm", "rd:2"]
    assert main(more) == 2 and "Add to the plan that is there with --extend" in capsys.readouterr().err
    assert main([*more, "--extend"]) == 0
    grown = read_json(out / "plan.json")
    assert grown["extensions"][0]["arms"] == ["rd-2"] and grown["extensions"][0]["complete_cells"] == 4
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(list(out.glob("runs/*/*/result.json"))) == 6
    assert "post hoc" in (out / "report" / "report.md").read_text()
