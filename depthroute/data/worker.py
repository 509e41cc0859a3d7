"""The program of a worker: jobs by the line on its standard input, results on its standard output (see `workers`)."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from typing import Any

from depthroute.common.errors import DepthrouteError
from depthroute.data.work import work
from depthroute.data.workers import answer, refusal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business, which ends its workers
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        try:
            result = work(job)
        except Exception as error:
            if not isinstance(error, DepthrouteError | OSError):
                traceback.print_exc()
            result = refusal(error)
        try:
            sys.stdout.write(answer(result))
            sys.stdout.flush()
        except OSError:  # nobody is left to be told
            break


if __name__ == "__main__":
    main()
