"""Studies of real training runs that are killed at random moments end as one that never was, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json
from depthroute.data import PrepareConfig, prepare
from depthroute.study.plan import Arm, Cell, Study, cell_config, cells, read_plan, run_folder, write_plan
from depthroute.study.runner import run_study
from depthroute.train import train

DRIVER = "import sys, pathlib; from depthroute.study.runner import run_study; run_study(None, pathlib.Path(sys.argv[1]), console=False)"
STEPS, EVERY = 300, 20


@pytest.fixture
def planned(study: Study, tmp_path: Path) -> Path:
    """A study folder with data and a plan of two cells of a second or two."""
    folder = tmp_path / "study"
    folder.mkdir()
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"the sum of {i} sources, read by site {i % 7}, " * 5}) + "\n" for i in range(200)))
    prepare(PrepareConfig.of(str(source), vocabulary=300, sample_one_in=1, validation_share=0.15), folder / "data")
    settings = dataclasses.replace(study.base.train, steps=STEPS, checkpoint_every=EVERY, evaluation_tokens=64)
    base = dataclasses.replace(study.base, data=str(folder / "data"), data_fingerprint="", train=settings)
    arms = {"plain": Arm(label="Plain", config=base), "block": study.arms["block"]}
    write_plan(dataclasses.replace(study, base=base, arms=arms, seeds=(5,), milestones=(100, STEPS)), folder)
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoint_step(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*")), default=0)


def start(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], start_new_session=True)


def kill(driver: subprocess.Popen[bytes], *, cells_too: bool) -> None:
    """SIGKILL to the study's process group, and to the cells, which have sessions of their own."""
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    workers = [int(pid) for pid in children.read_text().split()] if cells_too and children.exists() else []
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    driver.wait()


def finish(folder: Path) -> dict[str, object]:
    """Run the study to its end, once its last cell has let go of it."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return run_study(None, folder, console=False)
        except RequestError as error:
            assert "is being run by another process" in str(error)
            assert time.monotonic() < deadline, "the cell did not end"
            time.sleep(0.05)


def check_against_runs_that_never_stopped(folder: Path, elsewhere: Path) -> None:
    plan = read_plan(folder)
    for cell in cells(plan):
        run = run_folder(folder, *cell)
        alone = elsewhere / "-".join(map(str, cell))
        result = train(cell_config(plan, *cell), alone, console=False)
        assert read_json(run / "result.json")["nll"] == result["nll"]
        assert losses(run) == losses(alone)
        for name in ("model.safetensors", "optimizer.safetensors"):
            ended = f"checkpoints/step-{STEPS:08d}/{name}"
            assert (run / ended).read_bytes() == (alone / ended).read_bytes()


def continued_after(folder: Path, cell: Cell) -> list[int]:
    log = run_folder(folder, *cell) / "log.txt"
    return [int(step) for step in re.findall(r"continuing after step (\d+)", log.read_text())] if log.exists() else []


def test_a_study_killed_with_its_cell_loses_the_steps_since_the_last_checkpoint(planned: Path, tmp_path: Path) -> None:
    run = run_folder(planned, "plain", 5)
    driver = start(planned)
    deadline = time.monotonic() + 120
    while checkpoint_step(run) == 0 and driver.poll() is None:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    time.sleep(random.random() * 0.3)
    kill(driver, cells_too=True)
    time.sleep(0.1)
    reached = checkpoint_step(run)
    statistics = finish(planned)
    assert statistics["missing"] == statistics["unanalysed"] == []
    if reached < STEPS:
        assert continued_after(planned, ("plain", 5)) == [reached]
    check_against_runs_that_never_stopped(planned, tmp_path / "alone")


@pytest.mark.slow
def test_a_study_killed_again_and_again_ends_as_one_that_never_was(planned: Path, tmp_path: Path) -> None:
    plan = read_plan(planned)
    reached = dict.fromkeys(cells(plan), 0)
    seen = dict.fromkeys(cells(plan), 0)
    for _ in range(8):
        driver = start(planned)  # refused at once while a cell of the one before still writes its checkpoint
        time.sleep(1.0 + random.random() * 6.0)
        kill(driver, cells_too=random.random() < 0.5)
        time.sleep(0.1)
        for cell in cells(plan):
            continued = continued_after(planned, cell)
            # A cell that outlived its study writes one more checkpoint, so it may be further on than was seen, and never less.
            assert all(step >= reached[cell] for step in continued[seen[cell] :])
            seen[cell], reached[cell] = len(continued), checkpoint_step(run_folder(planned, *cell))
    assert finish(planned)["missing"] == []
    check_against_runs_that_never_stopped(planned, tmp_path / "alone")
