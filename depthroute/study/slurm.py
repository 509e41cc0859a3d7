"""Cells as jobs of a Slurm cluster, submitted with submitit (`pip install depthroute[slurm]`).

What is submitted is a command line, `depthroute.study.batch` around the worker's own, and nothing is read back but the small JSON files of
that program. submitit pickles the name of a function of the standard library and a list of words; its pickled results are never loaded.

Jobs live on when the study is killed or its connection is lost. The same command finds them by the tickets in STUDY/jobs and waits for
them. The study folder must lie on a disk that all nodes share.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.common.files import read_json, write_json
from depthroute.study import processes
from depthroute.study.batch import ended_file, read_ticket
from depthroute.study.budget import Need
from depthroute.study.executors import Ended, Executor, Job, output_file, ticket_file, ticket_files
from depthroute.study.plan import Cell

GRACE_SECONDS = 60.0
"""How long a shared disk may take to show what a job wrote at its end."""
LOOK_SECONDS = 1.0
WARNING_SECONDS = 120
"""Before the time limit, for the checkpoint."""
MARGIN = 1.25
"""Of a job's memory over what its cell is estimated to need: Slurm kills what exceeds it."""

Cluster = Literal["slurm", "local"]


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What a job asks for; what is None is left to the cluster's own defaults, or follows from the cell.

    Attributes:
        time: Minutes, or H:MM:SS, or D-HH:MM:SS. A cell that needs longer is cut after a checkpoint and submitted again.
        cpus: None: the cell's `train.threads`.
        mem: "8G". None: what the cell is estimated to need, and a quarter more.
        gpus: None: 1 for a cell that trains on CUDA.
        account, qos, constraint: As sbatch takes them.
    """

    partition: str | None = None
    time: str = "60"
    cpus: int | None = None
    mem: str | None = None
    gpus: int | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None

    def __post_init__(self) -> None:
        minutes(self.time)
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem):
            raise RequestError(f"mem = {self.mem!r} is not allowed; it takes a number and one of K, M, G, T, such as 8G.")
        for name, lowest in (("cpus", 1), ("gpus", 0)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise RequestError(f"{name} = {value} is not allowed; it takes {lowest} or more.")


def slurm_config(options: Mapping[str, str]) -> SlurmConfig:
    """`{"partition": "cpu", "time": "8:00:00"}` as a configuration.

    Raises:
        RequestError: an unknown name, or a value that is not allowed.
    """
    names = SlurmConfig.__dataclass_fields__
    for name, value in options.items():
        if name not in names:
            raise RequestError(choose("Slurm option", name, names))
        if name in ("cpus", "gpus") and not value.isdecimal():
            raise RequestError(f"{name} = {value!r} is not allowed; it takes a whole number.")
    return SlurmConfig(**{name: int(value) if name in ("cpus", "gpus") else value for name, value in options.items()})  # type: ignore[arg-type]


def on_slurm(options: Mapping[str, str]) -> Callable[[Path, int], Executor]:
    """The executor of `run_study` for options as a command line has them.

    Raises:
        RequestError: an option that is not allowed, no submitit, or no Slurm here.
    """
    config = slurm_config(options)
    check_slurm()
    return lambda directory, lock: SlurmExecutor(directory, config)


def check_slurm(cluster: Cluster = "slurm") -> Any:
    """The module `submitit`, where jobs can be submitted; RequestError elsewhere."""
    try:
        import submitit
    except ImportError as error:
        raise RequestError("running cells on Slurm needs submitit; install it with: pip install 'depthroute[slurm]'.") from error
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise RequestError("there is no sbatch here; run the study on a node from which jobs can be submitted.")
    return submitit


def minutes(time_limit: str) -> int:
    """Slurm's ways to write a time limit, in whole minutes: "90", "1:30:00", "1-12", "1-12:30", "1-12:30:00"."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
    if found is None:
        raise RequestError(f"time = {time_limit!r} is not allowed; it takes minutes, H:MM:SS or D-HH:MM:SS.")
    days, *rest = (None if part is None else int(part) for part in found.groups())
    first, second, third = rest[0] or 0, rest[1] or 0, rest[2] or 0
    short = days is None and rest[2] is None  # minutes, or minutes:seconds
    seconds = 60 * first + second if short else 86_400 * (days or 0) + 3600 * first + 60 * second + third
    if seconds < 60:
        raise RequestError(f"time = {time_limit!r} is not allowed; it takes a minute or more.")
    return math.ceil(seconds / 60)


class SlurmExecutor:
    """Starts cells through submitit.

    Args:
        cluster: "local" runs the same jobs as processes of this machine, which is how the whole path is tested without a cluster.

    Raises:
        RequestError: submitit is not installed, or there is no Slurm here.
    """

    shares_machine = False

    def __init__(self, directory: Path, config: SlurmConfig, *, cluster: Cluster = "slurm") -> None:
        self._submitit = check_slurm(cluster)
        self._directory = directory.resolve()
        self._config = config
        self._cluster = cluster

    def start(self, cell: Cell, command: Sequence[str], need: Need) -> Job:
        path, ticket = ticket_file(self._directory, cell), uuid.uuid4().hex
        ended_file(path).unlink(missing_ok=True)
        # Before the job exists: one that is submitted just as the study dies is known by its ticket, if not by its number.
        write_json(path, {"ticket": ticket, "stop": False, "cluster": self._cluster, "job": None})
        words = [
            "env", f"PYTHONPATH={processes.python_path()}", sys.executable, "-m", "depthroute.study.batch",
            str(path), ticket, str(output_file(self._directory, cell)), "--", *command,
        ]  # fmt: skip
        try:
            executor = self._submitit.AutoExecutor(folder=self._scripts, cluster=self._cluster)
            executor.update_parameters(**self._parameters(cell, need))
            # The job becomes the command. Inside submitit's own process, a warning before the time limit would requeue or kill it.
            job = executor.submit(os.execvp, words[0], words)
        except Exception as error:
            path.unlink()
            raise FailureError(f"Slurm did not take the job of {cell[0]} seed {cell[1]}: {str(error).strip()}") from error
        write_json(path, {"ticket": ticket, "stop": False, "cluster": self._cluster, "job": job.job_id})
        return SlurmJob(cell, self._directory, ticket, job, self._cluster)

    def left(self) -> list[Job]:
        jobs: list[Job] = []
        for path in ticket_files(self._directory):
            found = read_ticket(path)
            assert found is not None
            if found["job"] is None:  # it may have been submitted; without its ticket it ends by itself, or never begins
                path.unlink()
                continue
            if found["cluster"] != self._cluster:
                raise RequestError(f"{path} is a job of the cluster {found['cluster']!r}; go on there, or delete it if the job is gone.")
            cell = (path.parent.name, int(path.stem.removeprefix("seed-")))
            kind = {"slurm": self._submitit.SlurmJob, "local": self._submitit.LocalJob}[self._cluster]
            jobs.append(SlurmJob(cell, self._directory, found["ticket"], kind(self._scripts, found["job"]), self._cluster))
        return jobs

    @property
    def _scripts(self) -> Path:
        return self._directory / "jobs" / ".submitit"

    def _parameters(self, cell: Cell, need: Need) -> dict[str, Any]:
        config = self._config
        found: dict[str, Any] = {"timeout_min": minutes(config.time)}
        if self._cluster == "local":
            return found
        gpus = config.gpus if config.gpus is not None else int(need.cuda)
        found |= {
            "name": f"{cell[0]}-seed-{cell[1]}",
            "cpus_per_task": config.cpus or need.threads,
            "slurm_signal_delay_s": WARNING_SECONDS,
            # The study itself submits a cell again; a requeued job would be a second one.
            "slurm_additional_parameters": {"no-requeue": True},
            "slurm_partition": config.partition,
            "slurm_account": config.account,
            "slurm_qos": config.qos,
            "slurm_constraint": config.constraint,
            "slurm_mem": config.mem or f"{math.ceil(MARGIN * need.memory_bytes / 2**20)}M",
        }
        if gpus:
            found["slurm_gpus_per_node"] = gpus
        return {name: value for name, value in found.items() if value is not None}


class SlurmJob:
    """One submitted cell."""

    def __init__(self, cell: Cell, directory: Path, ticket: str, job: Any, cluster: Cluster) -> None:
        self.cell = cell
        self._directory = directory
        self._path = ticket_file(directory, cell)
        self._ticket = ticket
        self._job = job
        self._cluster = cluster
        self._looked_at = -math.inf
        self._gone_since: float | None = None

    def poll(self) -> Ended | None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return None
        self._looked_at = now
        ended, alive = self._said(), self._alive()
        if alive and (ended is None or self._cluster == "local"):  # a process of ours is waited for to its very end
            self._gone_since = None
            return None
        if ended is None:
            # Its last words may be on their way through the shared disk.
            self._gone_since = self._gone_since or now
            patience = GRACE_SECONDS if self._cluster == "slurm" else 2 * LOOK_SECONDS
            if now - self._gone_since < patience:
                return None
            state = str(self._job.state).lower()
            ended = Ended(reason=f"its job {self._job.job_id} ended ({state}) and said nothing; {processes.AGAIN}")
        self._forget()
        return ended

    def stop(self) -> None:
        """The job sees it in its ticket; one that still waits in the queue is taken out of it."""
        write_json(self._path, {"ticket": self._ticket, "stop": True, "cluster": self._cluster, "job": self._job.job_id})
        if self._cluster == "slurm" and str(self._job.state).upper() == "PENDING":
            self._job.cancel(check=False)

    def kill(self) -> None:
        self._job.cancel(check=False)

    def _said(self) -> Ended | None:
        path = ended_file(self._path)
        if not path.exists():
            return None
        said = read_json(path)
        if said["ticket"] != self._ticket:
            return None
        return Ended(reason=processes.reason_of(said["status"], output_file(self._directory, self.cell)), cut=said["cut"])

    def _alive(self) -> bool:
        if self._cluster == "slurm":
            # A job that Slurm does not know (yet) counts as alive: waiting in vain is safe, training a cell twice is not.
            return not self._job.watcher.is_done(self._job.job_id)
        return not self._job.done() or _submitit_process(int(self._job.job_id))

    def _forget(self) -> None:
        for path in (self._path, ended_file(self._path)):
            path.unlink(missing_ok=True)
        for path in self._job.paths.folder.glob(f"{self._job.job_id}_*"):
            path.unlink(missing_ok=True)


def _submitit_process(pid: int) -> bool:
    """Whether the process that watches over a local job is alive, however it was started, and not another one with its number."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/status")
        if status.exists() and "\nState:\tZ" in status.read_text():
            return False
        command = Path(f"/proc/{pid}/cmdline")
        return not command.exists() or b"submitit" in command.read_bytes()
    except (ProcessLookupError, FileNotFoundError):
        return False
