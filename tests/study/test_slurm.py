"""Cells as batch jobs, through submitit's local executor and a program that stands in for Slurm's."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("submitit")

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json
from depthroute.study import batch, processes, slurm
from depthroute.study.budget import Need
from depthroute.study.design import Study
from depthroute.study.executors import Executor, ticket_files
from depthroute.study.plan import write_plan
from depthroute.study.runner import plan_study, run_study
from depthroute.study.slurm import SlurmConfig, SlurmExecutor, minutes, on_slurm, slurm_config

NEED = Need(threads=1, memory_bytes=800 << 20, measured=False, cuda=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, fake_worker: None) -> None:
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(slurm, "GRACE_SECONDS", 0.3)


def local(directory: Path, lock: int) -> Executor:
    return SlurmExecutor(directory, SlurmConfig(time="5"), cluster="local")


def started(folder: Path) -> list[str]:
    path = folder / "started.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_study_runs_as_jobs_and_leaves_nothing_of_them(study: Study, tmp_path: Path) -> None:
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "refuse", "block/3": "kill"}))
    statistics = run_study(study, tmp_path, workers=None, executor=local, console=False)
    assert {(entry["arm"], entry["seed"]): entry["reason"] for entry in statistics["missing"]} == {
        ("plain", 7): "no room for the data; free some space.",
        ("block", 3): "its process was killed by SIGKILL, which is what a machine out of memory does; run the study again to go on.",
    }
    assert sorted(started(tmp_path)) == ["block/3", "block/7", "plain/3", "plain/7"]
    assert [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()] == []
    assert (tmp_path / "runs/plain/seed-7.output.txt").exists()


def test_what_is_pickled_is_a_command_line(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "sleep"}))
    job = local(tmp_path, 0).start(("plain", 7), processes.worker_command(tmp_path, ("plain", 7), 1), NEED)
    [pickled] = (tmp_path / "jobs/.submitit").glob("*_submitted.pkl")
    names = pickled.read_bytes()
    assert b"execvp" in names
    assert b"depthroute.study.batch" in names
    assert b"depthroute.study.slurm" not in names  # nothing of ours is needed to load it
    job.stop()
    wait_for(lambda: job.poll() is not None)


DRIVER = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from depthroute.study import processes
from depthroute.study.runner import run_study
from depthroute.study.slurm import SlurmConfig, SlurmExecutor
processes.worker_command = lambda directory, cell, workers, sinks=(): [sys.executable, sys.argv[3], str(directory), cell[0], str(cell[1])]
executor = lambda directory, lock: SlurmExecutor(directory, SlurmConfig(time="5"), cluster="local")
run_study(None, pathlib.Path(sys.argv[1]), workers=2, executor=executor, console=False)
"""


@pytest.fixture
def outlived(study: Study, tmp_path: Path) -> Iterator[Path]:
    """A study whose process was killed while jobs train two cells, which need their input to close, and it does not."""
    write_plan(study, tmp_path)
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "sleep", "block/7": "sleep"}))
    root, fake = Path(processes.__file__).parents[2], Path(__file__).with_name("fake_worker.py")
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), str(root), str(fake)]) as driver:
        wait_for(lambda: len(started(tmp_path)) == 2 and all(read_json(path)["job"] for path in ticket_files(tmp_path)))
        driver.kill()
    yield tmp_path


def test_jobs_outlive_a_killed_study_and_are_waited_for(outlived: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match=r"a job of a batch system may still be training block seed-7"):
        run_study(None, outlived, console=False)
    assert len(started(outlived)) == 2

    def interrupt() -> None:
        try:
            wait_for(lambda: "is still being trained by a job of an earlier start" in capfd.readouterr().out)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_study(None, outlived, workers=1, executor=local)
    assert len(started(outlived)) == 2  # nothing was started twice
    assert (outlived / "runs/plain/seed-7/checkpoint").exists()
    assert (outlived / "runs/block/seed-7/checkpoint").exists()
    assert ticket_files(outlived) == []
    (outlived / "behaviour.json").unlink()
    assert run_study(None, outlived, workers=2, executor=local, console=False)["missing"] == []
    assert len(started(outlived)) == 6


def test_ctrl_c_while_jobs_are_submitted(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also reaches sbatch, which fails of it: no cell has failed by that, and none is submitted after it."""
    asked: list[tuple[str, int]] = []

    def submit(self: SlurmExecutor, cell: tuple[str, int], command: object, need: Need) -> None:
        asked.append(cell)
        signal.raise_signal(signal.SIGINT)
        raise FailureError("Slurm did not take the job: ")

    monkeypatch.setattr(SlurmExecutor, "start", submit)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, workers=None, executor=local, console=False)
    assert len(asked) == 1
    assert {entry["reason"] for entry in read_json(tmp_path / "statistics.json")["missing"]} == {"not started."}


def test_what_slurm_does_not_take_leaves_no_ticket(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError('Could not detect "srun"')

    monkeypatch.setattr(SlurmExecutor, "_parameters", refuse)
    statistics = run_study(study, tmp_path, workers=None, executor=local, console=False)
    assert all('did not take the job of' in entry["reason"] and 'detect "srun"' in entry["reason"] for entry in statistics["missing"])
    assert len(statistics["missing"]) == 4 and ticket_files(tmp_path) == []


def test_a_job_whose_number_was_never_learnt_ends_by_itself(outlived: Path) -> None:
    for path in ticket_files(outlived):
        path.write_text(json.dumps({**read_json(path), "job": None}))
    assert local(outlived, 0).left() == []
    wait_for(lambda: len(list(outlived.glob("runs/*/seed-7/checkpoint"))) == 2)


def test_a_job_that_disappears_is_a_failed_cell(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    path = tmp_path / "jobs/plain/seed-7.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"ticket": "a", "stop": False, "cluster": "local", "job": "4194304"}))  # above the highest process number
    statistics = run_study(None, tmp_path, workers=1, executor=local, console=False)
    assert [(entry["arm"], entry["seed"]) for entry in statistics["missing"]] == [("plain", 7)]
    assert "its job 4194304 ended" in statistics["missing"][0]["reason"]
    assert started(tmp_path) == ["block/7", "plain/3", "block/3"]


def test_the_warning_before_the_time_limit_ends_in_a_checkpoint(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    (tmp_path / "behaviour.json").write_text(json.dumps({"plain/7": "sleep"}))
    ticket = tmp_path / "jobs/plain/seed-7.json"
    ticket.parent.mkdir(parents=True)
    ticket.write_text(json.dumps({"ticket": "mine", "stop": False}))
    worker = processes.worker_command(tmp_path, ("plain", 7), 1)
    command = [sys.executable, "-m", "depthroute.study.batch", str(ticket), "mine", str(tmp_path / "output.txt"), "--", *worker]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": processes.python_path()}) as job:
        wait_for(lambda: (tmp_path / "runs/plain/seed-7/evaluations.jsonl").exists())
        pid = int((tmp_path / "started.txt").read_text().split()[1])
        os.kill(pid, signal.SIGUSR2)  # Slurm sends it to all processes of a job; the worker takes no notice
        os.kill(job.pid, signal.SIGTERM)  # nor does the program around it of this one, which is the worker's
        time.sleep(0.5)
        assert job.poll() is None
        os.kill(job.pid, signal.SIGUSR2)
        assert job.wait() == processes.STOPPED
    assert (tmp_path / "runs/plain/seed-7/checkpoint").exists()
    assert read_json(batch.ended_file(ticket)) == {"ticket": "mine", "status": processes.STOPPED, "cut": True}


def test_a_job_that_nobody_wants_does_not_begin(tmp_path: Path) -> None:
    ticket = tmp_path / "seed-7.json"
    ticket.write_text(json.dumps({"ticket": "another", "stop": False}))
    assert batch.main(ticket, "mine", tmp_path / "output.txt", ["false"]) == processes.STOPPED
    ticket.write_text(json.dumps({"ticket": "mine", "stop": True}))
    assert batch.main(ticket, "mine", tmp_path / "output.txt", ["false"]) == processes.STOPPED
    assert not (tmp_path / "output.txt").exists()
    assert read_json(batch.ended_file(ticket))["cut"] is False


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch, srun, sacct and scancel that write down what they were given; a job is pending for ever."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answers = {
        "sbatch": 'cp "$1" "$(dirname "$0")/script.sh"; echo Submitted batch job 77',
        "srun": "true",
        "sacct": "printf 'JobID|State|NodeList\\n77|PENDING|None\\n'",
        "scancel": 'echo "$@" >> "$(dirname "$0")/cancelled"',
    }
    for name, answer in answers.items():
        (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_what_slurm_is_asked_for(cluster: Path, study: Study, tmp_path: Path) -> None:
    config = slurm_config({"partition": "cpu", "time": "1-02:30:00", "account": "me"})
    executor = SlurmExecutor(tmp_path, config)
    command = ["python", "-m", "depthroute.study.worker", "a folder"]
    job = executor.start(("block", 7), command, dataclasses.replace(NEED, threads=3))
    script = (cluster / "script.sh").read_text()
    for line in (
        "job-name=block-seed-7", "partition=cpu", "account=me", "time=1590", "cpus-per-task=3", "mem=1000M", "no-requeue",
        "signal=USR2@120",
    ):  # fmt: skip
        assert f"#SBATCH --{line}\n" in script
    assert "gpus" not in script
    assert job.poll() is None
    [left] = executor.left()
    assert left.cell == ("block", 7)
    job.stop()
    assert (cluster / "cancelled").read_text() == "77\n"  # it had not begun
    executor.start(("plain", 7), command, dataclasses.replace(NEED, cuda=True))
    assert "#SBATCH --gpus-per-node=1\n" in (cluster / "script.sh").read_text()


def test_a_gpu_that_jobs_are_to_have_is_not_looked_for_here(cluster: Path, study: Study, tmp_path: Path) -> None:
    """Where no GPU is, "cuda" is refused for cells of this machine and planned for cells of another one."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    train = dataclasses.replace(study.base.train, device="cuda", threads=None)
    base = dataclasses.replace(study.base, train=train)
    runs = {name: dataclasses.replace(study.config_of(name), train=train) for name in study.arms}
    arms = {name: dataclasses.replace(arm, config=runs[name]) for name, arm in study.arms.items()}
    given = dataclasses.replace(study, base=base, arms=arms)
    with pytest.raises(RequestError, match="torch sees no GPU here"):
        plan_study(given, tmp_path / "here", workers=None, console=False)
    for _ in range(2):  # the plan is found again as well
        plan = plan_study(given, tmp_path / "there", workers=None, executor=on_slurm({}), console=False)
    assert [arm["config"]["train"]["device"] for arm in plan["arms"]] == ["cuda", "cuda"]
    auto = dataclasses.replace(base, train=dataclasses.replace(train, precision="auto"))
    arms = {**arms, "plain": dataclasses.replace(arms["plain"], config=auto)}
    with pytest.raises(RequestError, match=r"train\.precision = 'auto' is for the GPU to choose, which is in another machine"):
        plan_study(dataclasses.replace(given, arms=arms), tmp_path / "auto", workers=None, executor=on_slurm({}), console=False)


def test_a_submission_that_slurm_refuses_is_a_failed_cell(cluster: Path, study: Study, tmp_path: Path) -> None:
    (cluster / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    statistics = run_study(study, tmp_path / "study", executor=on_slurm({}), console=False)
    assert len(statistics["missing"]) == 4
    assert statistics["missing"][0]["reason"].startswith("Slurm did not take the job of plain seed 7: ")
    assert "invalid partition" in statistics["missing"][0]["reason"]
    assert ticket_files(tmp_path / "study") == []


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("1:30:00", 90), ("90:30", 91), ("1-0", 1440), ("1-12:30", 2190), ("0:01:00", 1)])
def test_time_limits_as_slurm_writes_them(text: str, value: int) -> None:
    assert minutes(text) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitoin": "cpu"}, "perhaps you meant 'partition'"),
        ({"time": "tomorrow"}, "time = 'tomorrow' is not allowed"),
        ({"time": "0"}, "a minute or more"),
        ({"mem": "lots"}, "mem = 'lots' is not allowed"),
        ({"cpus": "two"}, "cpus = 'two' is not allowed; it takes a whole number"),
        ({"cpus": "0"}, "cpus = 0 is not allowed"),
    ],
)
def test_options_that_are_wrong_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        slurm_config(options)


def test_without_slurm_or_submitit_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RequestError, match="there is no sbatch here"):
        on_slurm({})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(RequestError, match=r"needs submitit; install it with: pip install 'depthroute\[slurm\]'"):
        on_slurm({})
