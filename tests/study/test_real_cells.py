"""A study of real training runs, whose process is killed on the way."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json
from depthroute.data import PrepareConfig, prepare
from depthroute.study.plan import Arm, Study, write_plan
from depthroute.study.runner import run_study

DRIVER = "import sys, pathlib; from depthroute.study.runner import run_study; run_study(None, pathlib.Path(sys.argv[1]), console=False)"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def prepare_text(folder: Path) -> Path:
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"the sum of {i} sources, read by site {i % 7}, " * 5}) + "\n" for i in range(200)))
    prepare(PrepareConfig(source=str(source), vocabulary=300, sample_one_in=1, validation_share=0.15), folder / "data")
    return folder / "data"


def test_a_killed_study_stops_its_cells_and_goes_on_where_they_were(study: Study, tmp_path: Path) -> None:
    settings = dataclasses.replace(study.base.train, steps=600, checkpoint_every=50, evaluation_tokens=64)
    base = dataclasses.replace(study.base, data=str(prepare_text(tmp_path)), data_fingerprint="", train=settings)
    arms = {"plain": Arm(label="Plain", config=base), "block": study.arms["block"]}
    study = dataclasses.replace(study, base=base, arms=arms, seeds=(5,), milestones=(300, 600))
    write_plan(study, tmp_path)

    run = tmp_path / "runs" / "plain" / "seed-5"
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)]) as driver:
        wait_for(lambda: any(run.glob("checkpoints/step-*")) or driver.poll() is not None)
        driver.kill()
    assert driver.returncode == -signal.SIGKILL, read_json(tmp_path / "statistics.json")["missing"]

    def free() -> bool:
        try:
            run_study(None, tmp_path, workers=0)
        except RequestError as error:
            return "workers" in str(error)
        return False

    wait_for(free)
    statistics = run_study(study, tmp_path, console=False)
    assert statistics["missing"] == []
    for arm in ("plain", "block"):
        steps = [json.loads(line)["step"] for line in (tmp_path / "runs" / arm / "seed-5" / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 601))
        assert read_json(tmp_path / "runs" / arm / "seed-5" / "result.json")["status"] == "complete"
    assert (tmp_path / "runs/block/seed-5/routing.json").exists()
    assert not (tmp_path / "runs/plain/seed-5/routing.json").exists()
    milestones = statistics["comparisons"][0]["milestones"]
    assert [milestone["step"] for milestone in milestones] == [300, 600]
    assert milestones[0]["differences"] != [0.0]
