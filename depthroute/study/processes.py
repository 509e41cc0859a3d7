"""The process that trains one cell: its command line, how it is asked to stop, and what its end means. Imports nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import depthroute
from depthroute.common.files import explain_os_errors

STOPPED = 130  # exit status of a worker that was interrupted and can go on
AGAIN = "run the study again to go on."


def worker_command(directory: Path, cell: tuple[str, int], workers: int, sinks: Sequence[str] = ()) -> list[str]:
    """The command line of the process that trains one cell, as one of `workers` at a time; its numbers also go to `sinks`."""
    return [sys.executable, "-m", "depthroute.study.worker", str(directory), cell[0], str(cell[1]), str(workers), *sinks]


def python_path() -> str:
    """PYTHONPATH for a process that must find this very depthroute, installed or not."""
    root = str(Path(depthroute.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def start_worker(command: Sequence[str], output: Path, *, keep_open: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a worker that writes into `output`. Closing its standard input is how it is asked to stop, and dying closes it."""
    with explain_os_errors(output, "writing"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": python_path()},
                start_new_session=True,  # Ctrl-C in the terminal is for the study to pass on, once
                pass_fds=keep_open,
            )


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Ask a worker to write a checkpoint and end."""
    assert process.stdin is not None
    process.stdin.close()


def reason_of(status: int, output: Path) -> str | None:
    """Why a cell whose process ended with an exit status (negative: a signal) is not whole, or None. Removes output nobody needs."""
    said = output.read_text(encoding="utf-8", errors="replace").strip() if output.exists() else ""
    if status in (0, STOPPED):
        output.unlink(missing_ok=True)
        return None if status == 0 else f"stopped from outside; {AGAIN}"
    if status < 0:
        hint = ", which is what a machine out of memory does" if -status == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-status).name}{hint}; {AGAIN}"
    return said.splitlines()[-1] if said else f"its process ended with status {status} and said nothing."
