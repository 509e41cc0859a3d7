"""Where cells are trained: on this machine, or wherever an executor of another kind starts their processes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from depthroute.common.errors import RequestError
from depthroute.study import processes
from depthroute.study.budget import Need
from depthroute.study.plan import Cell, run_folder


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a cell's process ended. `reason`: why the cell is not whole; None where it is. `cut`: a limit of the place it ran in stopped it
    after it had written a checkpoint, so that it may be started again at once."""

    reason: str | None
    cut: bool = False


class Job(Protocol):
    """A cell that is being trained somewhere."""

    @property
    def cell(self) -> Cell: ...

    def poll(self) -> Ended | None:
        """How it ended, once it has; None while it runs or waits for its turn."""
        ...

    def stop(self) -> None:
        """Ask it to write a checkpoint and end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Executor(Protocol):
    """Starts the processes of cells.

    Attributes:
        shares_machine: The cells run beside the study itself, within the cores and the memory of its machine.
    """

    shares_machine: bool

    def start(self, cell: Cell, command: Sequence[str], need: Need) -> Job:
        """Run the command that trains a cell, where there is room for what it needs.

        Raises:
            DepthrouteError: it could not be started.
        """
        ...

    def left(self) -> list[Job]:
        """The jobs that an earlier run of this study started and that may still be alive: to be waited for, not to be started again."""
        ...


class LocalExecutor:
    """Cells as processes of this machine. They inherit the hold on the study (`lock`), and end with a checkpoint when the study dies."""

    shares_machine = True

    def __init__(self, directory: Path, lock: int) -> None:
        self._directory = directory
        self._lock = lock

    def start(self, cell: Cell, command: Sequence[str], need: Need) -> Job:
        output = output_file(self._directory, cell)
        return LocalJob(cell, processes.start_worker(command, output, keep_open=(self._lock,)), output)

    def left(self) -> list[Job]:
        """None of its own: the hold on the study ends with the last of them.

        Raises:
            RequestError: a batch system may still be training a cell.
        """
        for ticket in ticket_files(self._directory):
            raise RequestError(
                f"a job of a batch system may still be training {ticket.parent.name} {ticket.stem}: {ticket} is there. Go on with the "
                "batch system (--slurm), or delete that file if no such job is alive."
            )
        return []


@dataclass(frozen=True)
class LocalJob:
    """A worker of this machine."""

    cell: Cell
    process: subprocess.Popen[bytes]
    output: Path

    def poll(self) -> Ended | None:
        status = self.process.poll()
        if status is None:
            return None
        self.stop()
        return Ended(reason=processes.reason_of(status, self.output))

    def stop(self) -> None:
        processes.close_input(self.process)

    def kill(self) -> None:
        self.process.kill()


def output_file(directory: Path, cell: Cell) -> Path:
    """What the process of a cell prints; kept where the cell fails."""
    return run_folder(directory, *cell).with_suffix(".output.txt")


def ticket_file(directory: Path, cell: Cell) -> Path:
    """Which job of a batch system trains a cell; see `depthroute.study.batch`. Gone once the study knows how it ended."""
    return directory / "jobs" / cell[0] / f"seed-{cell[1]}.json"


def ticket_files(directory: Path) -> list[Path]:
    """The tickets of jobs whose end the study does not know yet."""
    return sorted(path for path in directory.glob("jobs/*/seed-*.json") if not path.name.endswith(".ended.json"))
