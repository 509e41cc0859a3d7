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
from depthroute.data import PrepareConfig, TokenDataset, prepare
from depthroute.study.plan import Arm, Study, write_plan
from depthroute.study.runner import run_study
from depthroute.study.worker import data_folder

DRIVER = "import sys, pathlib; from depthroute.study.runner import run_study; run_study(None, pathlib.Path(sys.argv[1]), console=False)"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def prepare_text(folder: Path, text: str = "the sum of") -> Path:
    folder.mkdir()
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"{text} {i} sources, read by site {i % 7}, " * 5}) + "\n" for i in range(200)))
    prepare(PrepareConfig.of(str(source), vocabulary=300, sample_one_in=1, validation_share=0.15), folder / "data")
    return folder / "data"


def test_a_killed_study_stops_its_cells_goes_on_where_they_were_and_can_be_moved(study: Study, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    settings = dataclasses.replace(study.base.train, steps=400, checkpoint_every=50, evaluation_tokens=64)
    base = dataclasses.replace(study.base, data=str(prepare_text(folder)), data_fingerprint="", train=settings)
    arms = {"plain": Arm(label="Plain", config=base), "block": study.arms["block"]}
    study = dataclasses.replace(study, base=base, arms=arms, seeds=(5,), milestones=(200, 400))
    write_plan(study, folder)

    run = folder / "runs" / "plain" / "seed-5"
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)]) as driver:
        wait_for(lambda: any(run.glob("checkpoints/step-*")) or driver.poll() is not None)
        driver.kill()
    assert driver.returncode == -signal.SIGKILL, read_json(folder / "statistics.json")["missing"]

    # The cell still writes its checkpoint; until it has ended, the study is not free.
    deadline = time.monotonic() + 60
    while True:
        try:
            statistics = run_study(study, folder, console=False)
            break
        except RequestError as error:
            assert "is being run by another process" in str(error)
            assert time.monotonic() < deadline, "the cell did not end"
            time.sleep(0.05)
    log = (run / "log.txt").read_text()
    assert "interrupted after step" in log
    assert "continuing after step" in log
    assert statistics["missing"] == statistics["unanalysed"] == []
    for arm in ("plain", "block"):
        steps = [json.loads(line)["step"] for line in (folder / "runs" / arm / "seed-5" / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 401))
        assert read_json(folder / "runs" / arm / "seed-5" / "result.json")["status"] == "complete"
        assert read_json(folder / "runs" / arm / "seed-5" / "environment.json")["workers"] == 1
    assert (folder / "runs/block/seed-5/routing.json").exists()
    assert not (folder / "runs/plain/seed-5/routing.json").exists()
    milestones = statistics["comparisons"][0]["milestones"]
    assert [milestone["step"] for milestone in milestones] == [200, 400]
    assert milestones[0]["differences"] != [0.0]

    # The plan names the data by the old path; in a study that was moved they lie beside it.
    moved = folder.rename(tmp_path / "moved")
    for name in ("result.json", "routing.json"):
        (moved / "runs/block/seed-5" / name).unlink()
    again = run_study(None, moved, console=False)
    assert again == statistics
    assert (moved / "runs/block/seed-5/routing.json").exists()


def test_a_cell_reads_the_data_beside_it_only_if_they_are_the_ones_it_names(study: Study, tmp_path: Path) -> None:
    beside, elsewhere = prepare_text(tmp_path / "study"), prepare_text(tmp_path / "other", "the mean of")
    config = dataclasses.replace(study.base, data=str(elsewhere), data_fingerprint=TokenDataset.open(beside).fingerprint)
    assert data_folder(tmp_path / "study", config) == beside  # though what lies at the old path exists: it is other data
    config = dataclasses.replace(config, data_fingerprint=TokenDataset.open(elsewhere).fingerprint)
    assert data_folder(tmp_path / "study", config) == elsewhere
    assert data_folder(tmp_path / "without data", config) == elsewhere
