"""Processes that stay for a whole session of tests and run functions of test files as the ranks of a group, over gloo."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 240.0


class World:
    """Up to `size` ranks. A job's function is a function of a module that any process can load, and its arguments can be pickled."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines, self._processes = [], []
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, grouped: bool = True) -> list[Any]:
        """What `function(*arguments)` returns on every rank of a group; an AssertionError with the tracebacks of those that fail.

        `grouped` false: the ranks have the environment that torchrun gives, and the function makes the group.
        """
        port = free_port()
        code = function.__code__.co_filename, function.__name__
        for rank, line in enumerate(self._lines[:ranks]):
            line.send((rank, ranks, port, code, arguments, grouped))
        found, failed = [], []
        until = time.monotonic() + SECONDS
        for rank, line in enumerate(self._lines[:ranks]):
            try:
                worked, value = line.recv() if line.poll(max(0.0, until - time.monotonic())) else (False, f"rank {rank} did not answer")
            except EOFError:
                worked, value = False, f"rank {rank} died"
            (found if worked else failed).append(value)
            if not worked:
                until = min(until, time.monotonic() + 10)  # the others wait for it
        if any("did not answer" in text or "died" in text for text in failed):
            self.close()
            self._start()
        assert not failed, "\n".join(failed)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(line: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, ranks, port, (path, name), arguments, grouped = line.recv()
        except EOFError:
            return
        places = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {key: str(value) for key, value in places.items()}
        try:
            line.send((True, _run(path, name, arguments, grouped)))
        except BaseException:
            line.send((False, f"rank {rank}: {traceback.format_exc()}"))


def _run(path: str, name: str, arguments: tuple[Any, ...], grouped: bool) -> Any:
    from torch import distributed

    from depthroute.parallel.world import leave

    if not grouped:
        return getattr(_module(Path(path)), name)(*arguments)
    distributed.init_process_group("gloo")
    try:
        return getattr(_module(Path(path)), name)(*arguments)
    finally:
        leave()


def _module(path: Path) -> Any:
    """The test file as a module; loaded once in a process."""
    name = f"_ranks_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def free_port() -> int:
    """On which the first rank of a group may be met."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
