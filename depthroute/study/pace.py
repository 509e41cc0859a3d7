"""How fast a configuration trains on this machine: a few steps on random tokens, in processes of their own, some at the same time.

`python -m depthroute.study.pace CONFIG_JSON THREADS SECONDS` is one such process. It says "ready" after its first steps, begins when a line
comes in, and writes what it measured as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from depthroute.common.config import from_json, to_json
from depthroute.common.errors import FailureError
from depthroute.model import Decoder
from depthroute.study.processes import python_path
from depthroute.train import RunConfig, initialise
from depthroute.train.devices import keep_freed_memory, peak_memory_bytes
from depthroute.train.on_one import accumulate_gradients
from depthroute.train.optimiser import build_optimiser

WARM_UP_STEPS = 2
LEAST_STEPS = 2
SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What `workers` processes of `threads` threads each did at the same time.

    Attributes:
        tokens_per_second: Of all together.
        memory_bytes: The largest of their peaks; no checkpoint was written and nothing evaluated.
    """

    workers: int
    threads: int
    tokens_per_second: float
    memory_bytes: int


def measure_pace(config: RunConfig, *, workers: int, threads: int, seconds: float = SECONDS) -> Pace:
    """Train `workers` copies of a resolved run for about `seconds`, each for two steps at least, and add up their tokens.

    Raises:
        FailureError: a process ended early; its last words.
    """
    command = [sys.executable, "-m", "depthroute.study.pace", json.dumps(to_json(config)), str(threads), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    running = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(workers)
    ]  # fmt: skip
    try:
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise _failed(process)
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = []
        for process in running:
            said, complaint = process.communicate()
            if process.returncode:
                raise _failed(process, complaint)
            found.append(json.loads(said))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return Pace(
        workers=workers,
        threads=threads,
        tokens_per_second=sum(config.tokens_per_step * entry["steps"] / entry["seconds"] for entry in found),
        memory_bytes=max(entry["peak_memory_bytes"] for entry in found),
    )


def steps_in(config: RunConfig, seconds: float, begin: Any) -> dict[str, Any]:
    """Train on random tokens in this process: warm up, call `begin`, and count the steps of the next `seconds`."""
    settings = config.train
    if settings.device == "cpu":
        keep_freed_memory()
    model = Decoder(config.model)
    initialise(model, 0)
    model.to(settings.device)
    optimiser = build_optimiser(model, settings)
    shape = (settings.sequences, config.model.context + 1)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        batch = torch.randint(0, config.model.vocabulary, shape, generator=generator).to(settings.device)
        accumulate_gradients(model, batch, config).item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip or 1.0)
        optimiser.step()
        optimiser.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    begin()
    started, steps = time.perf_counter(), 0
    while steps < LEAST_STEPS or time.perf_counter() - started < seconds:
        step()
        steps += 1
    return {"steps": steps, "seconds": time.perf_counter() - started, "peak_memory_bytes": peak_memory_bytes(settings.device)}


def _failed(process: subprocess.Popen[str], complaint: str | None = None) -> FailureError:
    if complaint is None:
        _, complaint = process.communicate()
    lines = complaint.strip().splitlines() or [f"it ended with status {process.returncode} and said nothing."]
    return FailureError(f"the speed of this machine could not be measured: {lines[-1]}")


def main(config: RunConfig, threads: int, seconds: float) -> None:
    def begin() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    torch.set_num_threads(threads)
    config = replace(config, train=replace(config.train, threads=threads))
    print(json.dumps(steps_in(config, seconds, begin)))


if __name__ == "__main__":
    main(from_json(RunConfig, json.loads(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]))
