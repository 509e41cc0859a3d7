"""A cell whose arm has a trunk takes its first steps over from the trunk's run of the same seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.files import read_json, read_json_lines
from depthroute.data import PrepareConfig, prepare
from depthroute.study import worker
from depthroute.study.plan import Arm, Study, run_folder, write_plan
from depthroute.train import RunConfig


def arm(base: RunConfig, **train: Any) -> RunConfig:
    return dataclasses.replace(base, train=dataclasses.replace(base.train, **train))


def test_a_branch_starts_from_the_trunk_of_its_seed_once_that_is_complete(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "stop_with_the_study", lambda: None)  # the cells run in this process
    source, data = tmp_path / "text.jsonl", tmp_path / "data"
    source.write_text("".join(json.dumps({"text": f"the sum of {i} sources, read by site {i % 7}, " * 5}) + "\n" for i in range(200)))
    prepare(PrepareConfig.of(str(source), vocabulary=300, sample_one_in=1, validation_share=0.15), data)
    base = arm(
        dataclasses.replace(study.base, data=str(data), data_fingerprint=""), schedule="wsd", warmup_fraction=None, warmup_steps=2,
        decay_fraction=0.25, evaluation_tokens=64, steps=16, milestones=(4, 16), keep_checkpoints=(6,), checkpoint_every=0,
    )
    short = arm(base, steps=8, milestones=(4, 8), keep_checkpoints=())
    arms = {
        "long": Arm(label="Long", config=base),
        "short": Arm(label="Short", config=short, trunk="long"),
        "alone": Arm(label="Short, alone", config=short),
    }
    differs = ("train.steps", "train.milestones", "train.keep_checkpoints")
    study = dataclasses.replace(study, base=base, arms=arms, comparisons=(("short", "alone"),), seeds=(7,), milestones=(), differs=differs)
    folder = tmp_path / "study"
    write_plan(study, folder)

    assert worker.main(folder, "short", 7, 1) == 1
    assert "runs/long/seed-7, which is not complete; run the study again" in capsys.readouterr().err
    assert not run_folder(folder, "short", 7).exists()

    assert [worker.main(folder, name, 7, 1) for name in ("long", "alone", "short", "short")] == [0, 0, 0, 0]
    origin = read_json(run_folder(folder, "short", 7) / "environment.json")["branched_from"]
    assert origin == {"folder": "../../long/seed-7", "step": 6}
    metrics = {name: read_json_lines(run_folder(folder, name, 7) / "metrics.jsonl") for name in arms}
    losses = {name: [line["loss"] for line in lines] for name, lines in metrics.items()}
    assert losses["short"] == losses["alone"] and len(losses["short"]) == 8
    assert losses["short"][:7] == losses["long"][:7] and losses["short"][7] != losses["long"][7]
