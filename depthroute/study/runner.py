"""Run a study cell by cell: skip what is whole, go on with what is not, and keep the statistics up to date."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from depthroute.common.errors import DepthrouteError, RequestError
from depthroute.common.files import explain_os_errors
from depthroute.common.processors import usable_processors
from depthroute.common.say import say
from depthroute.study import processes
from depthroute.study.budget import Budget, available_memory, check_each_fits, need_of
from depthroute.study.collect import check_order, is_complete, write_statistics
from depthroute.study.design import Study
from depthroute.study.executors import Ended, Executor, Job, LocalExecutor
from depthroute.study.plan import Cell, cells, read_plan, run_folder, write_plan
from depthroute.study.progress import Progress, last_step
from depthroute.study.split import with_threads
from depthroute.train.interruption import Interruption
from depthroute.train.sinks import check_sinks

POLL_SECONDS = 0.1


def run_study(
    study: Study | None,
    directory: Path,
    *,
    workers: int | None = 1,
    cores: int | None = None,
    memory_bytes: int | None = None,
    executor: Callable[[Path, int], Executor] = LocalExecutor,
    sinks: Sequence[str] = (),
    extend: bool = False,
    console: bool = True,
) -> dict[str, Any]:
    """Run every cell of a study that is not whole yet, and return its statistics.

    Cells run in processes of their own, all arms of a seed before the next seed; a cell whose arm has a trunk waits for the trunk's cell
    of its seed. One starts when the cores and the memory that it needs are free (see `depthroute.study.budget`). A cell that fails is
    written down under `missing` with its reason (and its output kept in `runs/ARM/seed-S.output.txt`), and the others go on.
    `statistics.json` is rewritten after every cell. `depthroute.study.collect.check_complete` turns the result into an error where a cell
    is missing.

    Args:
        study: what to run; None runs the plan that `directory` holds.
        workers: cells trained at the same time, at most. None: as many as the cores allow at `train.threads` each, one on a GPU,
            and where a new study leaves those open, what trains fastest (see `depthroute.study.split`). More than one needs
            `train.threads` in the plan: threads decide the last bits of sums, and cells that crowd each other's processors would make
            every timing wrong.
        cores: of this machine, for all cells together. None: those that this process may use.
        memory_bytes: of this machine, for all cells together. None: what is available when the study starts.
        executor: where cells run, made from the folder and the hold on it: processes of this machine, or `depthroute.study.slurm`. Cells
            that run elsewhere are not held to `cores` and `memory_bytes`.
        sinks: what else is given the numbers of every run (see `depthroute.train.train`).
        extend: add what is new in `study` to the plan that is there (see `write_plan`).
        console: write progress to standard output.

    Raises:
        RequestError: the study is refused (see `write_plan`), another process runs it, `workers` is not allowed, a cell needs more memory
            than there is, or cells are whole whose batches came in another order than those of the next ones would.
        FailureError: the plan that is there was changed after it was written.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the cells in progress have then written a checkpoint. A second one ends them at once, and a
            third this process as well.
    """
    if workers is not None and workers < 1:
        raise RequestError(f"workers = {workers} is not allowed; it takes 1 or more.")
    sinks = check_sinks(sinks)
    budget = _budget(cores, memory_bytes)
    if study is None:
        read_plan(directory)  # before the lock makes a folder of it
    with ExitStack() as stack:
        lock = stack.enter_context(_only_one(directory))
        # Under the lock: of two studies that start at once, one writes the plan.
        split = budget if workers is None and executor is LocalExecutor else None
        made = executor(directory, lock)

        def at_once(planned: Mapping[str, Any]) -> int:
            check_order(directory, planned)
            return _workers(planned, workers, budget, made)

        here = made.shares_machine
        plan = read_plan(directory) if study is None else _planned(study, directory, split, here, at_once, extend=extend, console=console)
        number = at_once(plan)
        progress = stack.enter_context(Progress(plan, directory, visible=console))
        interruption = stack.enter_context(Interruption(limit=2))
        run = _Run(directory, plan, made, progress, number, sinks, budget if made.shares_machine else None, interruption)
        try:
            return run.complete()
        except KeyboardInterrupt:
            progress.say("Stopping: the cells in progress write a checkpoint. Ctrl-C again ends them at once.")
            run.stop()
            progress.say("Stopped. The same command goes on from here.")
            raise
        except BaseException:
            run.stop()
            raise


def plan_study(
    study: Study,
    directory: Path,
    *,
    workers: int | None = 1,
    cores: int | None = None,
    memory_bytes: int | None = None,
    executor: Callable[[Path, int], Executor] = LocalExecutor,
    extend: bool = False,
    console: bool = True,
) -> dict[str, Any]:
    """Write the plan that `run_study` would write, and train nothing. Arguments and errors are those of `run_study`."""
    if workers is not None and workers < 1:
        raise RequestError(f"workers = {workers} is not allowed; it takes 1 or more.")
    budget = _budget(cores, memory_bytes)
    with _only_one(directory) as lock:
        made = executor(directory, lock)
        split = budget if workers is None and executor is LocalExecutor else None

        def at_once(planned: Mapping[str, Any]) -> int:
            check_order(directory, planned)
            return _workers(planned, workers, budget, made)

        return _planned(study, directory, split, made.shares_machine, at_once, extend=extend, console=console)


def _budget(cores: int | None, memory_bytes: int | None) -> Budget:
    return Budget(
        cores=usable_processors() if cores is None else cores, memory_bytes=available_memory() if memory_bytes is None else memory_bytes
    )


def _planned(
    study: Study,
    directory: Path,
    split: Budget | None,
    here: bool,
    check: Callable[[Mapping[str, Any]], object],
    *,
    extend: bool,
    console: bool,
) -> dict[str, Any]:
    """The plan of a study. Open threads are those of the plan that is there, or measured to be best on the machine of `split`."""
    if split is not None or (directory / "plan.json").exists():
        cores, memory = (None, None) if split is None else (split.cores, split.memory_bytes)
        study = with_threads(study, directory, cores=cores, memory_bytes=memory, report=say if console else None)
    return write_plan(study, directory, extend=extend, here=here, check=check)


class _Run:
    def __init__(
        self,
        directory: Path,
        plan: Mapping[str, Any],
        executor: Executor,
        progress: Progress,
        workers: int,
        sinks: Sequence[str],
        budget: Budget | None,
        interruption: Interruption,
    ) -> None:
        self.directory = directory
        self.plan = plan
        self.executor = executor
        self.progress = progress
        self.workers = workers
        self.sinks = sinks
        self.budget = budget
        self.interruption = interruption
        self.trunks: dict[str, str | None] = {arm["name"]: arm["trunk"] for arm in plan["arms"]}
        self.failures: dict[Cell, str] = {}
        self.waiting = [cell for cell in cells(plan) if not is_complete(directory, plan, cell)]
        self.needs = {name: need_of(directory, plan, name) for name in {cell[0] for cell in self.waiting}}
        if budget is not None:
            check_each_fits(self.needs, budget)
        self.running: list[Job] = []
        self.began_at: dict[Cell, int] = {}

    def complete(self) -> dict[str, Any]:
        """Run what waits; the statistics at the end. KeyboardInterrupt, between two rounds, where a stop was requested meanwhile."""
        for job in self.executor.left():
            self._follow(job)
        for job in self.running:
            self.progress.say(f"{job.cell[0]} seed {job.cell[1]} is still being trained by a job of an earlier start; waiting for it")
        statistics = write_statistics(self.directory, self.failures)
        while self.waiting or self.running:
            if self.interruption.requested:  # here, where every process that was started is known
                raise KeyboardInterrupt
            changed = self._start_what_can()
            if self.running:
                time.sleep(POLL_SECONDS)
            self.progress.update([job.cell for job in self.running])
            changed |= self._collect_ended()
            if changed:
                statistics = write_statistics(self.directory, self.failures)
        return statistics

    def stop(self) -> None:
        """Ask every job to write a checkpoint and end, and wait for it. Another Ctrl-C meanwhile kills them."""
        for job in self.running:
            job.stop()
        self._wait(lambda: self.interruption.count > 1)
        for job in self.running:
            job.kill()
        self._wait(lambda: False)
        write_statistics(self.directory, self.failures)

    def _start_what_can(self) -> bool:
        """Start cells in their order as long as there is room; whether one failed at that."""
        failed = False
        for cell in list(self.waiting):
            if len(self.running) >= self.workers or self.interruption.requested:
                break
            trunk = self._lacks(cell)
            if trunk is not None:
                if trunk in self.failures:
                    self._fail(cell, f"its first steps are those of {trunk[0]} seed {trunk[1]}, which failed: {self.failures[trunk]}")
                    failed = True
                continue
            need = self.needs[cell[0]]
            if self.budget is not None and self.running and not self.budget.fits(need, [self.needs[job.cell[0]] for job in self.running]):
                break  # the order of cells is kept: what is smaller does not overtake
            try:
                command = processes.worker_command(self.directory.absolute(), cell, self.workers, self.sinks)
                self._follow(self.executor.start(cell, command, need))
            except DepthrouteError as error:
                if self.interruption.count:  # a Ctrl-C on the terminal goes to what submits a job as well
                    break
                self._fail(cell, str(error))
                failed = True
        return failed

    def _lacks(self, cell: Cell) -> Cell | None:
        """The trunk's cell that must be trained first."""
        trunk = self.trunks[cell[0]]
        if trunk is None or (run_folder(self.directory, trunk, cell[1]) / "result.json").exists():
            return None
        return trunk, cell[1]

    def _follow(self, job: Job) -> None:
        self.running.append(job)
        self.began_at[job.cell] = last_step(self.directory, job.cell)
        if job.cell in self.waiting:
            self.waiting.remove(job.cell)

    def _collect_ended(self) -> bool:
        """Take note of the jobs that ended; whether there were any."""
        found = [(job, ended) for job in self.running if (ended := job.poll()) is not None]
        for job, ended in found:
            self.running.remove(job)
            if ended.cut and last_step(self.directory, job.cell) > self.began_at[job.cell]:
                self.waiting.insert(0, job.cell)
                self.progress.say(f"{job.cell[0]} seed {job.cell[1]} came to the end of its time; it goes on in another job")
            else:
                self._note(job.cell, ended)
        return bool(found)

    def _note(self, cell: Cell, ended: Ended) -> None:
        if ended.reason is not None:
            self._fail(cell, ended.reason)
            return
        self.progress.ended(cell, None)
        if cell[0] in self.needs:
            self.needs[cell[0]] = need_of(self.directory, self.plan, cell[0])

    def _fail(self, cell: Cell, reason: str) -> None:
        if cell in self.waiting:
            self.waiting.remove(cell)
        self.failures[cell] = reason
        self.progress.ended(cell, reason)

    def _wait(self, enough: Callable[[], bool]) -> None:
        while self.running and not enough():
            self.running = [job for job in self.running if job.poll() is None]
            time.sleep(POLL_SECONDS if self.running else 0)


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


def _workers(plan: Mapping[str, Any], workers: int | None, budget: Budget, executor: Executor) -> int:
    """How many cells at the same time, at most."""
    settings = {arm["name"]: arm["config"]["train"] for arm in plan["arms"]}
    # Elsewhere a cell on a GPU has a machine to itself.
    unset = [name for name, train in settings.items() if train["threads"] is None and (executor.shares_machine or train["device"] == "cpu")]
    if workers is None:
        number = len(cells(plan))
        if not executor.shares_machine:
            workers = number
        elif unset or any(train["device"] == "cuda" for train in settings.values()):
            return 1
        else:
            workers = max(1, min(number, budget.cores // min(train["threads"] for train in settings.values())))
    if workers > 1 and unset:
        raise RequestError(
            f"workers = {workers} needs train.threads in the plan, and {unset[0]} leaves it open; set it in the study's base "
            "configuration, or use workers = 1."
        )
    return workers
