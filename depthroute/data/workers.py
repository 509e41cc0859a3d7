"""Jobs on processes of their own, with their results in the order of the jobs.

A worker is the program of `depthroute.data.worker`: a line of JSON on its standard input is a job, a line of JSON into its pipe the result.
It is a program of its own because a pool of `multiprocessing` would either fork a process that has threads (PyTorch's, the tokenizer's) or
import the caller's main script again. A worker whose parent is gone ends at once.
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

import depthroute
from depthroute.common.errors import DepthrouteError, FailureError, RequestError

Job = Mapping[str, Any]
Result = dict[str, Any]
PROGRAM = """
import sys
from importlib import util
folder, pipe = sys.argv[1:]
spec = util.spec_from_file_location("depthroute", f"{folder}/__init__.py", submodule_search_locations=[folder])
sys.modules["depthroute"] = util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["depthroute"])
from depthroute.data.worker import main
main(int(pipe))
"""
"""The package of this process, wherever it lies, and no other of its name; the rest of the path is the worker's own."""
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
        started = []
        for _ in range(processes):
            worker = _Worker(threads)
            started.append(worker)
            stack.callback(worker.close)
            stack.callback(worker.kill)
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in started:
            stack.callback(worker.kill)  # also before the threads of the pool, which wait for them, are waited for
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
        """Raises FailureError where it cannot be started."""
        # A data set of the hub was fetched when its parts were counted; workers do not look there again.
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = {**os.environ, **offline, "TOKENIZERS_PARALLELISM": "true" if threads else "false"}
        # Its answers have a pipe of their own: anything that is imported may print.
        read, write = os.pipe()
        self._answers = os.fdopen(read, encoding="utf-8")
        try:
            self._process = subprocess.Popen(
                # -P: what lies in the current folder must not stand in for anybody's module.
                [sys.executable, "-P", "-c", PROGRAM, str(Path(depthroute.__file__).parent), str(write)],
                stdin=subprocess.PIPE,
                stdout=2,
                text=True,
                encoding="utf-8",
                env=environment,
                pass_fds=(write,),
            )
        except OSError as error:
            self._answers.close()
            raise FailureError(f"no process could be started with {sys.executable} ({error.strerror or error}).") from error
        finally:
            os.close(write)

    def do(self, job: Job) -> Result:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(answer(dict(job)))
            self._process.stdin.flush()
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            status = self._process.wait()
            if status < 0:
                how = f"was killed by signal {-status}, perhaps for want of memory: with fewer --workers it needs less"
            else:
                how = f"ended with status {status}; what it printed says why"
            raise FailureError(f"a process that prepared data {how}. The same command goes on from here.")
        result: Result = json.loads(line)
        if "refused" in result:
            raise (RequestError if result["refused"] == "request" else FailureError)(result["message"])
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._answers.close()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:  # what was not read any more
            return
