"""How the cores of this machine are split among the cells of a study, chosen by trying: few cells with many threads, or many with one.

The number of threads decides how sums are split, and with it the last bits of a loss. It is therefore chosen before the plan is written,
becomes `train.threads` in it, and is never chosen again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from depthroute.common.config import to_json
from depthroute.common.files import read_json, write_json
from depthroute.common.processors import usable_processors
from depthroute.study.budget import available_memory, estimated_memory
from depthroute.study.compute import token_compute
from depthroute.study.design import Study
from depthroute.study.pace import Pace, measure_pace
from depthroute.study.plan import read_plan
from depthroute.train import RunConfig, resolve
from depthroute.train.devices import resolve_device
from depthroute.train.environment import environment

FORMAT = 1
FACTS = ("processor", "instructions", "platform", "packages", "gpu")


def with_threads(
    study: Study, directory: Path, *, cores: int | None = None, memory_bytes: int | None = None, report: Callable[[str], None] | None = None
) -> Study:
    """The study with `train.threads` in every arm that trains on a CPU and leaves it open.

    Where `directory` holds a plan, its arms say how many. Otherwise each way to split `cores` is tried on the arm of median cost, and the
    one that trains the most tokens a second in all is taken; `directory/machine.json` gets what was measured.

    Args:
        cores: of this machine, to be used. None: all that this process may use.
        memory_bytes: that the cells may take together. None: what is available.
        report: called with a line about what is being done.

    Raises:
        FailureError: the speed could not be measured, or the plan that is there was changed after it was written.
    """
    open_arms = [name for name in study.arms if _is_open(study.config_of(name))]
    if not open_arms:
        return study
    if (directory / "plan.json").exists():
        arms = {arm["name"]: arm["config"]["train"]["threads"] for arm in read_plan(directory)["arms"]}
        others = next((arms[name] for name in open_arms if name in arms), None)
        return _filled(study, {name: arms.get(name, others) for name in open_arms})
    cores = cores or usable_processors()
    cells = sum(len(study.seeds_of(name)) for name in study.arms)
    arm, config = _median(study, open_arms)
    if report is not None:
        report(f"trying how to split {cores} cores among cells, with a few steps of {arm}")
    measured = _measure(config, cores, cells, memory_bytes or available_memory())
    best = max(measured, key=lambda pace: pace.tokens_per_second)
    write_machine(directory, arm, config, measured, best)
    if report is not None:
        report(f"{best.workers} at a time with {best.threads} thread{'s' * (best.threads > 1)} each")
    return _filled(study, dict.fromkeys(open_arms, best.threads))


def splits(cores: int, cells: int) -> list[tuple[int, int]]:
    """Ways to split the cores, (workers, threads): powers of two of workers, and as many as there are cores; no more than cells."""
    numbers = {2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores}
    return [(workers, cores // workers) for workers in sorted(numbers) if workers <= max(cells, 1)]


def read_machine(directory: Path) -> dict[str, Any] | None:
    """What was measured before the plan of a study was written; None where nothing was."""
    path = directory / "machine.json"
    if not path.exists():
        return None
    found: dict[str, Any] = read_json(path)
    return found


def write_machine(directory: Path, arm: str, config: RunConfig, measured: list[Pace], best: Pace) -> None:
    """Write `directory/machine.json`: the machine, what was tried on it with which arm, and what was chosen."""
    facts = environment(config.train.device)
    write_json(
        directory / "machine.json",
        {
            "format": FORMAT,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **{name: facts[name] for name in FACTS if name in facts},
            "cores": best.workers * best.threads,
            "processors": os.cpu_count(),
            "arm": arm,
            "flops_per_token": flops_per_token(config),
            "measured": [to_json(pace) for pace in measured],
            "workers": best.workers,
            "threads": best.threads,
            "tokens_per_second": best.tokens_per_second,
        },
    )


def flops_per_token(config: RunConfig) -> float:
    """Of training, forward and backward; a residual method without a formula counts nothing (see `depthroute.study.compute`)."""
    compute = token_compute(config.model)
    return (compute["plain"] or 0.0) + (compute["residual"] or 0.0)


def _measure(config: RunConfig, cores: int, cells: int, memory: int) -> list[Pace]:
    each = estimated_memory(config)
    tried = [(workers, threads) for workers, threads in splits(cores, cells) if workers == 1 or workers * each <= memory]
    return [measure_pace(config, workers=workers, threads=threads) for workers, threads in tried]


def _median(study: Study, names: list[str]) -> tuple[str, RunConfig]:
    configs = {name: resolve(study.config_of(name)) for name in names}
    order = sorted(names, key=lambda name: flops_per_token(configs[name]) * configs[name].tokens_per_step)
    chosen = order[(len(order) - 1) // 2]
    return chosen, configs[chosen]


def _is_open(config: RunConfig) -> bool:
    settings = config.train  # a GPU that is asked for may be in another machine, and is not looked for
    return settings.threads is None and settings.device != "cuda" and resolve_device(settings.device) == "cpu"


def _filled(study: Study, threads: dict[str, int | None]) -> Study:
    arms = {}
    for name, arm in study.arms.items():
        if name in threads:
            config = study.config_of(name)
            arm = replace(arm, config=replace(config, train=replace(config.train, threads=threads[name])))
        arms[name] = arm
    return replace(study, arms=arms)
