"""The program of a worker: jobs by the line on its standard input, results by the line into a pipe (see `workers`)."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

from depthroute.common.errors import DepthrouteError
from depthroute.data.work import work
from depthroute.data.workers import answer, refusal


def main(pipe: int) -> None:
    """Do jobs until standard input closes. `pipe`: the descriptor to write to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business, which ends its workers
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    try:
        with open(pipe, "w", encoding="utf-8") as answers:
            while True:
                job: dict[str, Any] = json.loads(jobs.get())
                try:
                    result = work(job)
                except Exception as error:
                    if not isinstance(error, DepthrouteError | OSError):
                        traceback.print_exc()
                    result = refusal(error)
                answers.write(answer(result))
                answers.flush()
    except BrokenPipeError:  # nobody is left to be told
        return


def _listen(jobs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)  # in the middle of a job too: the parent has all that it wants, or is gone
