"""Jobs on processes of their own, with their results in the order of the jobs.

A worker is `python -m depthroute.data.worker`: a line of JSON on its standard input is a job, and a line of JSON on its standard output the
result. It is a program of its own because a pool of `multiprocessing` would either fork a process that has threads (PyTorch's, the
tokenizer's) or import the caller's main script again. A worker whose parent is gone ends when it has finished its job.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from depthroute.common.errors import DepthrouteError, FailureError, RequestError

Job = Mapping[str, Any]
Result = dict[str, Any]
AHEAD = 2
"""Jobs for each worker that may be done or being done while the first of them is waited for: what is finished out of order lies on disk."""


def run_jobs(jobs: Iterable[Job], work: Callable[[Job], Result], *, processes: int, threads: bool = False) -> Iterator[Result]:
    """The results of jobs, in their order.

    Args:
        work: what does a job; called in this process where there is one process, and else in the workers, by `depthroute.data.worker`.
        processes: how many jobs are done beside each other.
        threads: whether a worker uses all cores, not one.

    Raises:
        RequestError, FailureError: what a job raises, at its turn. FailureError: a worker was killed.
    """
    if processes == 1 and not threads:
        yield from map(work, jobs)
        return
    with ExitStack() as stack:
        started = [_Worker(threads) for _ in range(processes)]
        for worker in started:
            stack.callback(worker.close)
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in started:
            stack.callback(worker.kill)  # before the threads of the pool, which wait for them, are waited for
            workers.put(worker)
        pending: deque[Future[Result]] = deque()
        for job in jobs:
            pending.append(pool.submit(_with_one, workers, job))
            if len(pending) >= AHEAD * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def answer(result: Result) -> str:
    """A line for a result."""
    return json.dumps(result, ensure_ascii=True) + "\n"


def refusal(error: Exception) -> Result:
    """What a worker answers where its job fails."""
    kind = "request" if isinstance(error, RequestError) else "failure"
    known = isinstance(error, DepthrouteError | OSError)
    return {"refused": kind, "message": str(error) if known else f"unexpected {type(error).__name__}: {error}"}


def _with_one(workers: queue.SimpleQueue[_Worker], job: Job) -> Result:
    worker = workers.get()
    try:
        return worker.do(job)
    finally:
        workers.put(worker)


class _Worker:
    def __init__(self, threads: bool) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        # A data set of the hub was fetched when its parts were counted; workers do not look there again.
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = {**os.environ, **offline, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "true" if threads else "false"}
        self._process = subprocess.Popen(
            # -P: what lies in the current folder must not stand in for anybody's module.
            [sys.executable, "-P", "-m", "depthroute.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
        )

    def do(self, job: Job) -> Result:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(answer(dict(job)))
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            status = self._process.wait()
            how = f"was killed by signal {-status}, perhaps for want of memory" if status < 0 else f"ended with status {status}"
            raise FailureError(f"a process that prepared data {how}; run the same command again, with fewer --workers if it happens again.")
        result: Result = json.loads(line)
        if "refused" in result:
            raise (RequestError if result["refused"] == "request" else FailureError)(result["message"])
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # what was not read any more
                continue
