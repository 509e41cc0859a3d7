"""Run a study cell by cell: skip what is whole, go on with what is not, and keep the statistics up to date."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import depthroute
from depthroute.common.errors import RequestError
from depthroute.common.files import explain_os_errors
from depthroute.study.collect import is_complete, write_statistics
from depthroute.study.plan import Cell, Study, cells, read_plan, run_folder, write_plan
from depthroute.study.progress import Progress

POLL_SECONDS = 0.1
STOPPED = 130  # exit status of a worker that was interrupted and can go on


def run_study(study: Study | None, directory: Path, *, workers: int = 1, console: bool = True) -> dict[str, Any]:
    """Run every cell of a study that is not whole yet, and return its statistics.

    Cells run in processes of their own, all arms of a seed before the next seed. A cell that fails is written down under `missing` with
    its reason (and its output kept in `runs/ARM/seed-S.output.txt`), and the others go on. `statistics.json` is rewritten after every
    cell. `depthroute.study.collect.check_complete` turns the result into an error where a cell is missing.

    Args:
        study: what to run; None runs the plan that `directory` holds.
        workers: cells trained at the same time. More than one needs `train.threads` in the plan: threads decide the last bits of sums,
            and cells that crowd each other's processors would make every timing wrong.
        console: write progress to standard output.

    Raises:
        RequestError: the study is refused (see `write_plan`), another process runs it, or `workers` is not allowed.
        FailureError: the plan that is there was changed after it was written.
        KeyboardInterrupt: Ctrl-C; the cells in progress have then written a checkpoint. A second one ends them at once.
    """
    if study is None:
        read_plan(directory)  # before the lock makes a folder of it
    with ExitStack() as stack:
        lock = stack.enter_context(_only_one(directory))
        # Under the lock: of two studies that start at once, one writes the plan.
        plan = read_plan(directory) if study is None else write_plan(study, directory)
        _check_workers(plan, workers)
        progress = stack.enter_context(Progress(plan, directory, visible=console))
        failures: dict[Cell, str] = {}
        waiting = [cell for cell in cells(plan) if not is_complete(directory, plan, cell)]
        running: list[_Worker] = []
        statistics = write_statistics(directory, failures)
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    running.append(_start(directory, waiting.pop(0), workers, lock))
                time.sleep(POLL_SECONDS)
                progress.update([worker.cell for worker in running])
                for worker in [worker for worker in running if worker.process.poll() is not None]:
                    running.remove(worker)
                    reason = _end(worker)
                    if reason is not None:
                        failures[worker.cell] = reason
                    progress.ended(worker.cell, reason)
                    statistics = write_statistics(directory, failures)
        except KeyboardInterrupt:
            progress.say("Stopping: the cells in progress write a checkpoint. Ctrl-C again ends them at once.")
            _stop(running)
            write_statistics(directory, failures)
            progress.say("Stopped. The same command goes on from here.")
            raise
        except BaseException:
            _stop(running)
            raise
    return statistics


@dataclass(frozen=True)
class _Worker:
    cell: Cell
    process: subprocess.Popen[bytes]
    output: Path


def worker_command(directory: Path, cell: Cell, workers: int) -> list[str]:
    """The command line of the process that trains one cell, as one of `workers` at a time."""
    return [sys.executable, "-m", "depthroute.study.worker", str(directory), cell[0], str(cell[1]), str(workers)]


def _start(directory: Path, cell: Cell, workers: int, lock: int) -> _Worker:
    root = str(Path(depthroute.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    output = run_folder(directory, *cell).with_suffix(".output.txt")
    output.parent.mkdir(parents=True, exist_ok=True)
    with explain_os_errors(output, "writing"), output.open("wb") as file:
        process = subprocess.Popen(
            worker_command(directory, cell, workers),
            stdin=subprocess.PIPE,  # closing it is how a worker is asked to stop, and dying closes it
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C in the terminal is for the study to pass on, once
            pass_fds=(lock,),
        )
    return _Worker(cell, process, output)


def _end(worker: _Worker) -> str | None:
    """Clean up after a worker that ended; the reason if its cell did not."""
    status = worker.process.wait()
    _close_input(worker)
    said = worker.output.read_text(encoding="utf-8", errors="replace").strip()
    if status in (0, STOPPED):
        worker.output.unlink()
        return None if status == 0 else "stopped from outside; run the study again to go on."
    if status < 0:
        hint = ", which is what a machine out of memory does" if -status == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-status).name}{hint}; run the study again to go on."
    return said.splitlines()[-1] if said else f"its process ended with status {status} and said nothing."


def _stop(running: list[_Worker]) -> None:
    """Ask every worker to write a checkpoint and end, and wait for it. Another Ctrl-C meanwhile kills them."""
    try:
        for worker in running:
            _close_input(worker)
        for worker in running:
            worker.process.wait()
    except KeyboardInterrupt:
        for worker in running:
            worker.process.kill()
    for worker in running:
        _end(worker)


def _close_input(worker: _Worker) -> None:
    assert worker.process.stdin is not None
    worker.process.stdin.close()


@contextmanager
def _only_one(directory: Path) -> Iterator[int]:
    """Hold the study for this process; its workers inherit the hold, so a study that died is free when the last of them has ended."""
    path = directory / ".lock"  # a file that nothing replaces: a lock is on what a name led to when it was opened
    with explain_os_errors(path, "writing"):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError(f"{directory} is being run by another process; wait for it, or stop it first.") from error
        yield handle
    finally:
        os.close(handle)


def _check_workers(plan: Mapping[str, Any], workers: int) -> None:
    if workers < 1:
        raise RequestError(f"workers = {workers} is not allowed; it takes 1 or more.")
    unset = [arm["name"] for arm in plan["arms"] if arm["config"]["train"]["threads"] is None]
    if workers > 1 and unset:
        raise RequestError(
            f"workers = {workers} needs train.threads in the plan, and {unset[0]} leaves it open; set it in the study's base "
            "configuration, or use workers = 1."
        )
