"""Where the cells of a study stand, as their folders show it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthroute.common.errors import RequestError
from depthroute.study import live
from depthroute.study.live import CellLive, read_live, tail_lines
from depthroute.study.plan import Arm, Study, write_plan

LONG_AGO = 1e9


@pytest.fixture
def folder(study: Study, tmp_path: Path) -> Path:
    write_plan(study, tmp_path)
    return tmp_path


def cell(folder: Path, arm: str, seed: int) -> CellLive:
    return next(one for one in read_live(folder).cells if (one.arm, one.seed) == (arm, seed))


def age(folder: Path, arm: str, seed: int) -> Path:
    """Make a run folder look as if nothing had happened in it for long."""
    run = folder / "runs" / arm / f"seed-{seed}"
    for file in run.iterdir():
        os.utime(file, (LONG_AGO, LONG_AGO))
    return run


def missing(folder: Path, arm: str, seed: int, reason: str, kind: str = "missing") -> None:
    found = {"missing": [], "unanalysed": [], kind: [{"arm": arm, "seed": seed, "reason": reason}]}
    (folder / "statistics.json").write_text(json.dumps(found))


def test_a_planned_study_waits(folder: Path) -> None:
    seen = read_live(folder)
    assert [(one.arm, one.seed, one.state, one.step, one.steps) for one in seen.cells] == [
        ("plain", 7, "waiting", 0, 6), ("block", 7, "waiting", 0, 6), ("plain", 3, "waiting", 0, 6), ("block", 3, "waiting", 0, 6),
    ]
    assert not seen.running and seen.seconds_left is None and (seen.steps_done, seen.steps_total) == (0, 24)


def test_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a study folder"):
        read_live(tmp_path)


def test_a_cell_that_writes_is_running_and_one_that_fell_silent_has_stopped(folder: Path, fake: SimpleNamespace) -> None:
    fake.write_run(folder, "plain", 7, complete=False)
    running = cell(folder, "plain", 7)
    assert (running.state, running.step) == ("running", 3)
    assert running.loss == pytest.approx(fake.nll("plain", 7, 3)) and running.nll == pytest.approx(fake.nll("plain", 7, 3))
    assert running.tokens_per_second == pytest.approx(160) and running.seconds_left == pytest.approx(0.3)
    age(folder, "plain", 7)
    stopped = cell(folder, "plain", 7)
    assert (stopped.state, stopped.reason) == ("stopped", "stopped after step 3")
    assert not read_live(folder).running


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system does not list its locks")
def test_a_locked_run_is_running_however_silent_and_its_lock_is_left_alone(folder: Path, fake: SimpleNamespace) -> None:
    fake.write_run(folder, "plain", 7, complete=False)
    log = folder / "runs/plain/seed-7/log.txt"
    with log.open("a") as held:
        age(folder, "plain", 7)
        assert cell(folder, "plain", 7).state == "stopped"
        fcntl.flock(held, fcntl.LOCK_EX)
        seen = cell(folder, "plain", 7)
        assert seen.state == "running" and seen.peak_memory_bytes is not None and seen.peak_memory_bytes > 1 << 20
        with log.open() as other, pytest.raises(BlockingIOError):  # reading took nothing away
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_failed_cell_says_why(folder: Path, fake: SimpleNamespace) -> None:
    fake.write_run(folder, "plain", 7, complete=False)
    missing(folder, "plain", 7, "its process was killed by SIGKILL")
    assert (cell(folder, "plain", 7).state, cell(folder, "plain", 7).reason) == ("failed", "its process was killed by SIGKILL")
    missing(folder, "plain", 7, "stopped after step 3; run the study again to go on.")
    run = age(folder, "plain", 7)
    assert cell(folder, "plain", 7).state == "stopped"
    run.with_suffix(".output.txt").write_text("some warning\nno room for the data.\n")
    assert (cell(folder, "plain", 7).state, cell(folder, "plain", 7).reason) == ("failed", "no room for the data.")


def test_a_complete_cell_is_its_result(folder: Path, fake: SimpleNamespace) -> None:
    fake.write_run(folder, "block", 7)
    missing(folder, "block", 7, "not analysed yet", kind="unanalysed")
    seen = cell(folder, "block", 7)
    assert (seen.state, seen.step, seen.seconds_left, seen.reason) == ("complete", 6, 0.0, "not analysed yet")
    assert seen.nll == pytest.approx(fake.nll("block", 7, 6))
    missing(folder, "block", 7, "stopped after step 3")  # statistics of a moment ago
    assert cell(folder, "block", 7).reason == ""


def test_what_is_left_counts_every_cell_at_its_pace(folder: Path, fake: SimpleNamespace) -> None:
    fake.write_run(folder, "plain", 7)
    fake.write_run(folder, "block", 7, complete=False)
    seen = read_live(folder)
    # block/7 has 3 steps to go, plain/3 and block/3 six each, at 0.1 s a step, one after the other
    assert seen.running and seen.seconds_left == pytest.approx(0.3 + 0.6 + 0.6) and seen.steps_done == 9
    fake.write_run(folder, "plain", 3, complete=False)
    assert read_live(folder).seconds_left == pytest.approx((0.3 + 0.3 + 0.6) / 2)


def test_steps_that_a_trunk_trains_count_once(study: Study, tmp_path: Path, fake: SimpleNamespace) -> None:
    flat = {"schedule": "wsd", "warmup_fraction": None, "warmup_steps": 1, "decay_fraction": 0.0, "keep_checkpoints": (3,)}
    trunk = replace(study.base, train=replace(study.base.train, milestones=(4, 6), **flat))
    branch = replace(trunk, train=replace(trunk.train, steps=4, decay_fraction=0.25, milestones=(4,), keep_checkpoints=()))
    arms = {"long": Arm(label="Long", config=trunk), "short": Arm(label="Short", config=branch, trunk="long")}
    write_plan(replace(study, arms=arms, comparisons=(("short", "long"),), milestones=(), differs=("train",), seeds=(7,)), tmp_path)
    assert read_live(tmp_path).taken_over == {"short": 3} and read_live(tmp_path).steps_total == 6 + 1
    fake.write_run(tmp_path, "long", 7)
    seen = read_live(tmp_path)
    assert seen.steps_done == 6 and [one.step for one in seen.cells] == [6, 0]


def test_what_is_complete_is_not_read_again(folder: Path, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.write_run(folder, "plain", 7)
    first = read_live(folder)
    read: list[Path] = []
    monkeypatch.setattr(live, "tail_lines", lambda path: read.append(path) or [])
    again = read_live(folder, before=first)
    assert again.cells[0] == first.cells[0] and again.steps_done == 6
    assert not [path for path in read if "plain/seed-7" in str(path)] and len(read) == 6


def test_only_the_end_of_a_file_is_read_and_only_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)) + '{"step": 10')
    assert [line["step"] for line in tail_lines(path, 100)][-2:] == [998, 999]
    assert len(tail_lines(path, 100)) < 8
    path.write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    assert [line["step"] for line in tail_lines(path)] == [1, 2]
    assert tail_lines(tmp_path / "none") == []


def test_a_read_of_many_cells_takes_milliseconds(folder: Path, fake: SimpleNamespace) -> None:
    fake.write_run(folder, "plain", 7, complete=False)
    metrics = folder / "runs/plain/seed-7/metrics.jsonl"
    metrics.write_text(metrics.read_text() * 20_000)
    read_live(folder)
    began = time.process_time()
    for _ in range(10):
        read_live(folder)
    assert time.process_time() - began < 1.0  # reading the four megabytes would take more than that
