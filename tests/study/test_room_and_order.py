"""When a cell may start: after its trunk, and where cores and memory are free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json
from depthroute.study import runner
from depthroute.study.budget import Need
from depthroute.study.design import Arm, Study
from depthroute.study.executors import Ended, Job
from depthroute.study.plan import Cell
from depthroute.study.runner import run_study

pytestmark = pytest.mark.usefixtures("fake_worker")
ROOM = 10 << 30


def started(folder: Path) -> list[str]:
    path = folder / "started.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def branched(study: Study) -> Study:
    """The first arm is a branch of the second: it decays where the other goes on."""
    settings = dataclasses.replace(study.base.train, schedule="wsd", warmup_fraction=None, warmup_steps=1, decay_fraction=0.0)
    decays = dataclasses.replace(study.base, train=dataclasses.replace(settings, decay_fraction=0.5))
    stays = dataclasses.replace(study.base, train=dataclasses.replace(settings, keep_checkpoints=(3,)))
    return dataclasses.replace(
        study,
        base=stays,
        arms={"plain": Arm(label="Decays", config=decays, trunk="block"), "block": Arm(label="Stays", config=stays)},
        differs=("train.decay_fraction", "train.keep_checkpoints"),
    )


class Script:
    """An executor whose cells end when they are told to. It keeps what ran at the same time."""

    def __init__(self, directory: Path, ends: Sequence[Ended] = (), *, shares_machine: bool = True) -> None:
        self.directory = directory
        self.shares_machine = shares_machine
        self.ends = list(ends)
        self.running: list[Cell] = []
        self.alive: list[Cell] = []
        self.together: list[list[Cell]] = []
        self.steps = 0

    def start(self, cell: Cell, command: Sequence[str], need: Need) -> Job:
        self.running.append(cell)
        self.together.append(list(self.running))
        return ScriptedJob(self, cell)

    def left(self) -> list[Job]:
        return [ScriptedJob(self, cell) for cell in self.alive]


class ScriptedJob:
    """Ends at its third poll, after having written a step."""

    def __init__(self, script: Script, cell: Cell) -> None:
        self.script, self.cell, self.polls = script, cell, 0

    def poll(self) -> Ended | None:
        self.polls += 1
        if self.polls < 3:
            return None
        self.script.running.remove(self.cell)
        folder = self.script.directory / "runs" / self.cell[0] / f"seed-{self.cell[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        ended = self.script.ends.pop(0) if self.script.ends else Ended(reason="made up.")
        if ended.cut:
            self.script.steps += 1
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.script.steps, "loss": 1.0}) + "\n")
        return ended

    def stop(self) -> None: ...

    def kill(self) -> None: ...


def together(study: Study, folder: Path, monkeypatch: pytest.MonkeyPatch, needs: dict[str, Need], **limits: int) -> list[int]:
    """How many cells ran whenever one started."""
    monkeypatch.setattr(runner, "need_of", lambda directory, plan, arm: needs[arm])
    script = Script(folder)
    run_study(study, folder, workers=4, executor=lambda directory, lock: script, console=False, **limits)
    assert len(script.together) == 4
    return [len(cells) for cells in script.together]


def need(threads: int, memory: int) -> Need:
    return Need(threads=threads, memory_bytes=memory, measured=False, cuda=False)


def test_a_branch_waits_for_its_trunk(branched: Study, tmp_path: Path) -> None:
    (tmp_path / "behaviour.json").write_text(json.dumps({"block/7": "meet"}))  # until another one has started: seed 3's trunk
    statistics = run_study(branched, tmp_path, workers=2, cores=2, memory_bytes=ROOM, console=False)
    assert statistics["missing"] == []
    order = started(tmp_path)
    assert sorted(order[:2]) == ["block/3", "block/7"]
    assert sorted(order[2:]) == ["plain/3", "plain/7"]


def test_a_branch_of_a_failed_trunk_is_missing_with_that_reason_and_others_go_on(branched: Study, tmp_path: Path) -> None:
    behaviour = tmp_path / "behaviour.json"
    behaviour.write_text(json.dumps({"block/7": "refuse"}))
    statistics = run_study(branched, tmp_path, console=False)
    assert {(entry["arm"], entry["seed"]): entry["reason"] for entry in statistics["missing"]} == {
        ("block", 7): "no room for the data; free some space.",
        ("plain", 7): "its first steps are those of block seed 7, which failed: no room for the data; free some space.",
    }
    assert started(tmp_path) == ["block/7", "block/3", "plain/3"]
    behaviour.unlink()
    assert run_study(None, tmp_path, console=False)["missing"] == []
    assert started(tmp_path)[3:] == ["block/7", "plain/7"]


def test_cells_that_run_together_fit_into_the_cores_and_the_memory(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    light = {"plain": need(1, 10), "block": need(1, 10)}
    assert together(study, tmp_path / "a", monkeypatch, light, cores=4, memory_bytes=40) == [1, 2, 3, 4]
    assert max(together(study, tmp_path / "b", monkeypatch, light, cores=4, memory_bytes=29)) == 2
    assert max(together(study, tmp_path / "c", monkeypatch, light, cores=3, memory_bytes=40)) == 3
    heavy = {"plain": need(1, 10), "block": need(3, 30)}
    assert together(study, tmp_path / "d", monkeypatch, heavy, cores=4, memory_bytes=40) == [1, 2, 1, 2]  # order is kept
    # More threads than cores: slow, and the only one.
    assert together(study, tmp_path / "e", monkeypatch, heavy, cores=2, memory_bytes=40) == [1, 1, 1, 1]


def test_a_cell_that_does_not_fit_alone_is_refused_before_anything_runs(study: Study, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a cell of block needs 0\.57 GB of memory \(estimated\) and there are 0\.20 GB; lower train"):
        run_study(study, tmp_path, memory_bytes=200_000_000, console=False)
    assert started(tmp_path) == []


def test_the_memory_of_a_complete_cell_replaces_the_estimate(study: Study, tmp_path: Path) -> None:
    run_study(study, tmp_path, console=False)
    path = tmp_path / "runs/block/seed-7/result.json"
    path.write_text(json.dumps({**read_json(path), "peak_memory_bytes": 900_000_000}))
    (tmp_path / "runs/block/seed-3/result.json").unlink()
    with pytest.raises(RequestError, match=r"block needs 0\.94 GB of memory \(measured\) and there are 0\.80 GB"):
        run_study(None, tmp_path, memory_bytes=800_000_000, console=False)


def test_elsewhere_this_machine_does_not_limit_the_cells(study: Study, tmp_path: Path) -> None:
    script = Script(tmp_path, shares_machine=False)
    run_study(study, tmp_path, workers=None, cores=1, memory_bytes=1, executor=lambda directory, lock: script, console=False)
    assert [len(cells) for cells in script.together] == [1, 2, 3, 4]


def test_a_cell_cut_by_its_time_limit_goes_on_as_long_as_it_advances(study: Study, tmp_path: Path) -> None:
    one = dataclasses.replace(study, seeds=(7,))
    cut = Ended(reason="stopped.", cut=True)
    script = Script(tmp_path, [cut, cut, Ended(reason="over.")])
    statistics = run_study(one, tmp_path, executor=lambda directory, lock: script, console=False)
    assert [cells[0][0] for cells in script.together] == ["plain", "plain", "plain", "block"]
    assert [entry["reason"] for entry in statistics["missing"]] == ["over.", "made up."]


def test_a_job_of_an_earlier_start_may_be_of_an_arm_that_is_complete(study: Study, tmp_path: Path) -> None:
    """It ended while nobody looked: its cells need nothing any more, and the others are started beside it."""
    run_study(study, tmp_path, workers=1, console=False)
    for seed in study.seeds:
        (tmp_path / f"runs/block/seed-{seed}/result.json").unlink()
    script = Script(tmp_path, [Ended(reason=None)], shares_machine=False)
    script.running.append(("plain", 3))
    script.alive = [("plain", 3)]
    run_study(None, tmp_path, workers=2, executor=lambda directory, lock: script, console=False)
    assert script.together == [[("plain", 3), ("block", 7)], [("block", 3)]]


def test_as_many_workers_as_the_cores_allow(study: Study, tmp_path: Path) -> None:
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "meet", "block/7": "meet"}))
    statistics = run_study(study, tmp_path, workers=None, cores=2, memory_bytes=ROOM, console=False)
    assert statistics["missing"] == []
    assert sorted(started(tmp_path)[:2]) == ["block/7", "plain/7"]
