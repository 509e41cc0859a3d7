"""The program of a worker: jobs by the line on its standard input, results by the line into a pipe (see `workers`)."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from typing import Any

from depthroute.common.errors import DepthrouteError
from depthroute.data.work import work
from depthroute.data.workers import answer, refusal


def main(pipe: int) -> None:
    """Do jobs until there is no more. `pipe`: the descriptor to write to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business, which ends its workers
    try:
        with open(pipe, "w", encoding="utf-8") as answers:
            for line in sys.stdin:
                job: dict[str, Any] = json.loads(line)
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
