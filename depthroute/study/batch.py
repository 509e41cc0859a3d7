"""What a batch system runs for a cell: `python -m depthroute.study.batch TICKET_FILE TICKET OUTPUT -- COMMAND...`.

It starts the worker's command and watches its ticket, a small file in the study folder that names this very job. When the file is gone,
names another job or says `stop`, the worker is asked to stop, or is not started at all. So a study stops its jobs, and takes back one
whose number it never learnt, through the shared disk alone. At the end the exit status is written beside the ticket, for a batch system
does not tell it reliably.

Slurm sends SIGUSR2 before the time limit: the worker writes its checkpoint, and the job ends as `cut`. SIGTERM goes to every process of a
job, so the worker has it already, and passing it on would be a second one, which ends a worker at once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthroute.common.errors import DepthrouteError, RequestError
from depthroute.common.files import read_json, write_json
from depthroute.study.processes import STOPPED, close_input, start_worker

WATCH_SECONDS = 0.2
TICKET_SECONDS = 1.0


def main(ticket_file: Path, ticket: str, output: Path, command: Sequence[str]) -> int:
    """Run `command` as long as its ticket is valid; the exit status is the command's."""
    if not wanted(ticket_file, ticket):
        _end(ticket_file, ticket, STOPPED, cut=False)
        return STOPPED
    warned: list[int] = []
    # Ignored until the worker is there: it inherits that, and does not die of a signal that is meant for this process.
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    process = start_worker(command, output)
    for number in (signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda number, frame: warned.append(number))
    status = _wait(process, ticket_file, ticket, warned)
    _end(ticket_file, ticket, status, cut=bool(warned) and status == STOPPED)
    return status


def read_ticket(ticket_file: Path) -> dict[str, Any] | None:
    """What a ticket file holds; None where there is none.

    Raises:
        FailureError: it is broken.
        OSError: the disk cannot be read now.
    """
    try:
        found: dict[str, Any] = read_json(ticket_file)
    except RequestError:
        return None
    return found


def ended_file(ticket_file: Path) -> Path:
    """Where a job says how it ended: `ticket`, `status` (of the worker; negative for a signal), `cut`."""
    return ticket_file.with_suffix(".ended.json")


def wanted(ticket_file: Path, ticket: str) -> bool:
    """Whether the study still wants the job with this ticket. A disk that fails for a moment is no wish to stop."""
    try:
        found = read_ticket(ticket_file)
    except (OSError, DepthrouteError):
        return True
    return found is not None and found["ticket"] == ticket and not found["stop"]


def _wait(process: subprocess.Popen[bytes], ticket_file: Path, ticket: str, warned: Sequence[int]) -> int:
    asked = False
    looked_at = time.monotonic()
    while (status := process.poll()) is None:
        time.sleep(WATCH_SECONDS)
        stop = bool(warned)
        if time.monotonic() - looked_at >= TICKET_SECONDS:
            looked_at = time.monotonic()
            stop = stop or not wanted(ticket_file, ticket)
        if stop and not asked:
            asked = True
            close_input(process)
    return status


def _end(ticket_file: Path, ticket: str, status: int, *, cut: bool) -> None:
    found = read_ticket(ticket_file)
    if found is not None and found["ticket"] == ticket:  # else the study has another job for the cell, or none
        write_json(ended_file(ticket_file), {"ticket": ticket, "status": status, "cut": cut})


if __name__ == "__main__":
    split = sys.argv.index("--")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[split + 1 :]))
