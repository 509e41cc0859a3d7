"""The runner over made-up cells: what it runs, in which order, and what a cell that goes wrong leaves behind."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, write_json
from depthroute.study import processes
from depthroute.study.budget import Need
from depthroute.study.collect import collect
from depthroute.study.executors import Job, LocalExecutor
from depthroute.study.plan import Arm, Cell, Study, write_plan
from depthroute.study.runner import plan_study, run_study

pytestmark = pytest.mark.usefixtures("fake_worker")


def started(folder: Path) -> list[str]:
    path = folder / "started.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_every_cell_runs_once_in_pairs_and_the_statistics_follow(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statistics = run_study(study, tmp_path)
    assert started(tmp_path) == ["plain/7", "block/7", "plain/3", "block/3"]
    assert statistics == read_json(tmp_path / "statistics.json")
    assert statistics["missing"] == []
    assert statistics["comparisons"][0]["milestones"][-1]["wins"] == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/4] plain seed 7: validation NLL 3.4700, 160 tokens/s")
    assert lines[-1].startswith("[4/4] block seed 3")
    assert list(tmp_path.glob("runs/*/*.output.txt")) == []
    # Nothing is left to do, with the study or with the folder alone.
    assert run_study(study, tmp_path, console=False) == run_study(None, tmp_path, console=False) == statistics
    assert len(started(tmp_path)) == 4
    assert capsys.readouterr().out == ""


def test_cells_that_fail_are_recorded_and_the_others_go_on(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = tmp_path / "behaviour.json"
    behaviour.write_text(json.dumps({"plain/7": "refuse", "block/7": "traceback", "plain/3": "kill", "block/3": "silent"}))
    statistics = run_study(study, tmp_path)
    reasons = {(entry["arm"], entry["seed"]): entry["reason"] for entry in statistics["missing"]}
    assert reasons == {
        ("plain", 7): "no room for the data; free some space.",
        ("block", 7): "ValueError: a bug",
        ("plain", 3): "its process was killed by SIGKILL, which is what a machine out of memory does; run the study again to go on.",
        ("block", 3): "its process ended with status 3 and said nothing.",
    }
    assert "Traceback" in (tmp_path / "runs/block/seed-7.output.txt").read_text()
    assert "[0/4] plain seed 7: no result: no room for the data" in capsys.readouterr().out
    behaviour.write_text(json.dumps({"block/3": "refuse"}))
    statistics = run_study(None, tmp_path, console=False)
    assert [(entry["arm"], entry["seed"]) for entry in statistics["missing"]] == [("block", 3)]
    assert statistics["comparisons"][0]["milestones"][-1]["seeds"] == [7]
    assert len(started(tmp_path)) == 8
    assert not (tmp_path / "runs/block/seed-7.output.txt").exists()


def test_ctrl_c_lets_the_cells_write_a_checkpoint_and_the_study_goes_on_later(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = tmp_path / "behaviour.json"
    behaviour.write_text(json.dumps({"plain/7": "sleep", "block/7": "sleep"}))

    def interrupt() -> None:
        try:
            wait_for(lambda: len(list(tmp_path.glob("runs/*/seed-7/evaluations.jsonl"))) == 2)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, workers=2)
    assert (tmp_path / "runs/plain/seed-7/checkpoint").exists()
    assert (tmp_path / "runs/block/seed-7/checkpoint").exists()
    assert "The same command goes on from here." in capsys.readouterr().out
    reasons = [entry["reason"] for entry in read_json(tmp_path / "statistics.json")["missing"]]
    assert reasons == ["stopped after step 3; run the study again to go on."] * 2 + ["not started."] * 2
    behaviour.unlink()
    assert run_study(study, tmp_path, console=False)["missing"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_waits_until_the_process_that_is_being_started_is_known(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "sleep", "block/7": "sleep"}))
    start = LocalExecutor.start

    def interrupted(self: LocalExecutor, cell: Cell, command: Sequence[str], need: Need) -> Job:
        job = start(self, cell, command, need)
        wait_for(lambda: (tmp_path / "runs" / cell[0] / f"seed-{cell[1]}" / "evaluations.jsonl").exists())
        if cell == ("block", 7):
            signal.raise_signal(number)
        return job

    monkeypatch.setattr(LocalExecutor, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, workers=2, console=False)
    assert started(tmp_path) == ["plain/7", "block/7"]
    assert len(list(tmp_path.glob("runs/*/seed-7/checkpoint"))) == 2


def test_a_second_ctrl_c_ends_what_does_not_listen(study: Study, tmp_path: Path) -> None:
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "deaf", "block/7": "sleep"}))

    def interrupt() -> None:
        try:
            wait_for(lambda: len(started(tmp_path)) == 2)
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda: (tmp_path / "runs/block/seed-7/checkpoint").exists())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, workers=2, console=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    [deaf] = [int(line.split()[1]) for line in (tmp_path / "started.txt").read_text().splitlines() if line.startswith("plain/7 ")]
    with pytest.raises(ProcessLookupError):
        os.kill(deaf, 0)


def test_a_pipe_that_nobody_reads_neither_ends_a_study_nor_keeps_it_from_stopping(study: Study, tmp_path: Path) -> None:
    """As in `depthroute study ... | head -1`, and with Ctrl-C in `... | tee log`, which ends tee first."""
    write_plan(study, tmp_path)
    root, fake = Path(processes.__file__).parents[2], Path(__file__).with_name("fake_worker.py")
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(root)!r})
from depthroute.study import processes, runner
processes.worker_command = lambda directory, cell, workers, sinks=(): [sys.executable, {str(fake)!r}, str(directory), cell[0], str(cell[1])]
from depthroute.cli import study
study.main = lambda options: runner.run_study(None, pathlib.Path({str(tmp_path)!r}))
from depthroute.cli.main import main
sys.exit(main(["study"]))
"""

    def run(*, interrupted: bool) -> int:
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            process.stderr.close()
            if interrupted:
                wait_for(lambda: (tmp_path / "runs/block/seed-7/evaluations.jsonl").exists())
                process.send_signal(signal.SIGINT)
            return process.wait()

    (tmp_path / "behaviour.json").write_text(json.dumps({"block/7": "sleep"}))
    assert run(interrupted=True) == 130
    assert (tmp_path / "runs/block/seed-7/checkpoint").exists()
    (tmp_path / "behaviour.json").unlink()
    assert run(interrupted=False) == 0
    assert read_json(tmp_path / "statistics.json")["missing"] == []


def test_two_workers_train_at_the_same_time(study: Study, tmp_path: Path) -> None:
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "meet", "block/7": "meet"}))
    statistics = run_study(study, tmp_path, workers=2, console=False)
    assert statistics["missing"] == []
    assert sorted(started(tmp_path)[:2]) == ["block/7", "plain/7"]


def test_a_study_that_is_being_run_is_refused(study: Study, tmp_path: Path) -> None:
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "sleep"}))
    refused: list[Exception] = []

    def second() -> None:
        wait_for(lambda: started(tmp_path) != [])
        try:
            run_study(None, tmp_path, console=False)
        except RequestError as error:
            refused.append(error)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=second, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, console=False)
    assert "is being run by another process" in str(refused[0])


def test_a_failed_analysis_is_not_a_missing_result(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = tmp_path / "behaviour.json"
    behaviour.write_text(json.dumps({"block/7": "unanalysed"}))
    statistics = run_study(study, tmp_path)
    assert "block seed 7: trained, but its source weights were not analysed: no room for the analysis." in capsys.readouterr().out
    assert statistics["missing"] == []
    assert statistics["unanalysed"] == [{"arm": "block", "seed": 7, "reason": "no room for the analysis."}]
    behaviour.unlink()
    assert run_study(None, tmp_path, console=False)["unanalysed"] == []
    assert len(started(tmp_path)) == 5


@pytest.mark.parametrize(("order", "said"), [(None, "none is recorded"), ("feistel-0", "feistel-0")])
def test_no_cell_is_trained_beside_those_of_another_order_of_batches(study: Study, tmp_path: Path, order: str | None, said: str) -> None:
    statistics = run_study(study, tmp_path, console=False)
    for seed in (7, 3):
        path = tmp_path / f"runs/plain/seed-{seed}/result.json"
        result = read_json(path)
        assert result.pop("order") == "feistel-1"
        write_json(path, result if order is None else {"order": order, **result})
    # where there is nothing to train, all goes on
    routing = tmp_path / "runs/block/seed-3/routing.json"
    routing.unlink()
    assert run_study(None, tmp_path, console=False) == collect(tmp_path, {}) == statistics and routing.exists()
    more = dataclasses.replace(study, seeds=(7, 3, 11))
    before = started(tmp_path), (tmp_path / "plan.json").read_bytes()
    there = rf"another order than this version's, feistel-1: plain seed 7 \({said}\), plain seed 3 \({said}\)\. Not trained yet: "
    for ask in (run_study, plan_study):
        with pytest.raises(RequestError, match=there + "plain seed 11, block seed 11. A study keeps one order"):
            ask(more, tmp_path, extend=True, console=False)
    shutil.rmtree(tmp_path / "runs/block/seed-7")
    for given in (study, None):
        with pytest.raises(RequestError, match=there + "block seed 7. .* new folder"):
            run_study(given, tmp_path, console=False)
    assert (started(tmp_path), (tmp_path / "plan.json").read_bytes()) == before
    assert [entry["arm"] for entry in collect(tmp_path, {})["missing"]] == ["block"]


def test_the_plan_is_written_by_the_study_that_holds_the_folder(study: Study, tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="is being run by another process"):
            run_study(study, tmp_path, console=False)
        assert not (tmp_path / "plan.json").exists()
    assert run_study(study, tmp_path, console=False)["missing"] == []


def test_a_folder_that_holds_no_study_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no plan\.json"):
        run_study(None, tmp_path / "new", console=False)
    assert not (tmp_path / "new").exists()


def test_parallel_workers_need_threads_in_the_plan(study: Study, tmp_path: Path) -> None:
    base = dataclasses.replace(study.base, train=dataclasses.replace(study.base.train, threads=None))
    unset = dataclasses.replace(study, base=base, arms={**study.arms, "plain": Arm(label="Plain", config=base)})
    with pytest.raises(RequestError, match=r"workers = 2 needs train\.threads in the plan, and plain leaves it open"):
        run_study(unset, tmp_path, workers=2)
    with pytest.raises(RequestError, match="workers = 0 is not allowed"):
        run_study(study, tmp_path / "other", workers=0)
    assert started(tmp_path) == []
