"""One cell in a process of its own: `python -m depthroute.study.worker STUDY ARM SEED WORKERS [SINK...]`.

Peak memory is counted per process, and a cell that crashes does not take the others with it. The exit status is 0 for a whole cell,
130 for one that was stopped and can go on, and otherwise that of the error, whose sentence is the last line on stderr.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from depthroute.analysis.routing import write_routing
from depthroute.common.errors import DepthrouteError, FailureError
from depthroute.common.files import read_json, write_json
from depthroute.data import read_manifest
from depthroute.study.plan import cell_config, read_plan, run_folder
from depthroute.study.processes import STOPPED
from depthroute.train import RunConfig, train
from depthroute.train.branch import branch_run, started


def main(directory: Path, arm: str, seed: int, workers: int, sinks: Sequence[str] = ()) -> int:
    """Train one cell of the plan in `directory`, or go on with it, then write down what its model reads; return the exit status.

    How many `workers` share the machine goes into environment.json when the training ends: without it nobody can read the timings.
    """
    stop_with_the_study()
    try:
        folder = run_folder(directory, arm, seed)
        plan = read_plan(directory)
        config = cell_config(plan, arm, seed)
        config = dataclasses.replace(config, data=str(data_folder(directory, config)))
        if config.train.threads is not None:  # the analysis must not crowd the cells beside this one either
            torch.set_num_threads(config.train.threads)
        already_trained = (folder / "result.json").exists()
        trunk = next(entry.get("trunk") for entry in plan["arms"] if entry["name"] == arm)
        if trunk is not None and not started(folder):
            branch_off(config, folder, run_folder(directory, trunk, seed))
        train(config, folder, console=False, sinks=sinks)
        if not already_trained:
            path = folder / "environment.json"
            write_json(path, read_json(path) | {"workers": workers})
        write_routing(folder, data=Path(config.data))
    except KeyboardInterrupt:
        return STOPPED
    except DepthrouteError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def branch_off(config: RunConfig, folder: Path, trunk: Path) -> None:
    """Take the first steps of a cell over from its trunk's run, which comes before it.

    Raises:
        FailureError: the trunk's run is not complete.
    """
    if not (trunk / "result.json").exists():
        raise FailureError(f"its first steps are those of {trunk}, which is not complete; run the study again to train that first.")
    branch_run(config, folder, trunk)


def data_folder(directory: Path, config: RunConfig) -> Path:
    """Where the cell's data lie: beside its runs if those are the data it names, for a study may have been moved; else where it says."""
    beside = directory / "data"
    try:
        return beside if read_manifest(beside).fingerprint == config.data_fingerprint else Path(config.data)
    except DepthrouteError:
        return Path(config.data)


def stop_with_the_study() -> None:
    """Interrupt this process when its standard input closes: the study asks for it so, and so does its death, however it came."""
    # A shell starts background jobs with SIGINT ignored, and Python would leave it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
