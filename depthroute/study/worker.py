"""One cell in a process of its own: `python -m depthroute.study.worker STUDY ARM SEED`.

Peak memory is counted per process, and a cell that crashes does not take the others with it. The exit status is 0 for a whole cell,
130 for one that was stopped and can go on, and otherwise that of the error, whose sentence is the last line on stderr.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from depthroute.analysis.routing import write_routing
from depthroute.common.errors import DepthrouteError
from depthroute.study.plan import cell_config, read_plan, run_folder
from depthroute.study.runner import STOPPED
from depthroute.train import train


def main(directory: Path, arm: str, seed: int) -> int:
    """Train one cell of the plan in `directory`, or go on with it, then write down what its model reads; return the exit status."""
    stop_with_the_study()
    try:
        folder = run_folder(directory, arm, seed)
        config = cell_config(read_plan(directory), arm, seed)
        if not Path(config.data).exists():  # the study was moved; the fingerprint says whether this is the same data
            config = dataclasses.replace(config, data=str(directory / "data"))
        if config.train.threads is not None:  # the analysis must not crowd the cells beside this one either
            torch.set_num_threads(config.train.threads)
        train(config, folder, console=False)
        write_routing(folder, data=Path(config.data))
    except KeyboardInterrupt:
        return STOPPED
    except DepthrouteError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
