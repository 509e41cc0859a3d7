"""What a plan costs before it starts: arithmetic, memory, and hours where the speed of the machine is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.common.config import from_json
from depthroute.common.duration import duration
from depthroute.common.processors import usable_processors
from depthroute.study.budget import gigabytes, need_of, tensor_bytes
from depthroute.study.compute import token_compute
from depthroute.study.pace import measure_pace
from depthroute.study.plan import arm_entry
from depthroute.study.split import flops_per_token, read_machine
from depthroute.study.status import aligned
from depthroute.train import RunConfig, branch_step


@dataclass(frozen=True, kw_only=True)
class ArmPrice:
    """What one arm costs.

    Attributes:
        cells: One a seed.
        tokens: Trained in one cell, without those that its trunk trains for it.
        flops: Of training all its cells, forward and backward (see `depthroute.study.compute.arm_compute`); evaluations are not counted.
        counted: Whether the residual method has a formula; otherwise `flops` are those of the rest.
        memory_bytes: At the peak of one cell, estimated or measured (see `depthroute.study.budget`). On CUDA the tensors of a step.
        hours: Of the whole machine. None: its speed is not known.
    """

    arm: str
    label: str
    cells: int
    tokens: int
    flops: float
    counted: bool
    memory_bytes: int
    hours: float | None


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a plan costs.

    Attributes:
        flops_per_second: The speed that the hours are reckoned with, all cells that run at the same time together. None: not known.
    """

    arms: tuple[ArmPrice, ...]
    flops_per_second: float | None

    @property
    def cells(self) -> int:
        return sum(arm.cells for arm in self.arms)

    @property
    def tokens(self) -> int:
        return sum(arm.tokens * arm.cells for arm in self.arms)

    @property
    def flops(self) -> float:
        return sum(arm.flops for arm in self.arms)

    @property
    def memory_bytes(self) -> int:
        """Of the largest cell."""
        return max(arm.memory_bytes for arm in self.arms)

    @property
    def hours(self) -> float | None:
        return None if self.flops_per_second is None else self.flops / self.flops_per_second / 3600


def price_of(
    plan: Mapping[str, Any], directory: Path, *, measure: bool = False, workers: int | None = None, cores: int | None = None
) -> Price:
    """The price of a plan that is, or may come to be, in `directory`.

    Args:
        measure: take the speed from a few steps of the arm of median cost, in processes of their own, where `directory/machine.json`
            does not have it. An arm is taken to run at the same FLOP/s as that one.
        workers, cores: as `depthroute.study.runner.run_study` takes them. A speed in machine.json is of the split that it names, and
            does not count where these say another one.

    Raises:
        FailureError: the speed could not be measured.
    """
    configs = {arm["name"]: from_json(RunConfig, arm["config"]) for arm in plan["arms"]}
    rate = _rate(plan, configs, directory, measure, workers, cores)
    found = []
    for entry in plan["arms"]:
        name, config = entry["name"], configs[entry["name"]]
        first = branch_step(config, configs[entry["trunk"]]) if entry["trunk"] else 0
        tokens = (config.train.steps - first) * config.tokens_per_step
        flops = flops_per_token(config) * tokens * len(entry["seeds"])
        need = need_of(directory, plan, name)
        found.append(
            ArmPrice(
                arm=name,
                label=entry["label"],
                cells=len(entry["seeds"]),
                tokens=tokens,
                flops=flops,
                counted=token_compute(config.model)["residual"] is not None,
                memory_bytes=tensor_bytes(config) if need.cuda else need.memory_bytes,
                hours=None if rate is None else flops / rate / 3600,
            )
        )
    return Price(arms=tuple(found), flops_per_second=rate)


def price_lines(price: Price) -> list[str]:
    """The price as a table of plain text."""
    rows = [("arm", "cells", "tokens a cell", "FLOPs", "memory", "time")]
    for arm in price.arms:
        flops = f"{arm.flops:.2e}{'' if arm.counted else ' *'}"
        rows.append((arm.label, f"{arm.cells}", f"{arm.tokens:,}", flops, gigabytes(arm.memory_bytes), _time(arm.hours)))
    rows.append(("all", f"{price.cells}", "", f"{price.flops:.2e}", gigabytes(price.memory_bytes), _time(price.hours)))
    lines = aligned(rows)
    if not all(arm.counted for arm in price.arms):
        lines.append("* without its residual method, which has no formula")
    if price.flops_per_second is None:
        lines.append("the time is not known before the speed of the machine is measured")
    else:
        lines.append(f"time at {price.flops_per_second / 1e9:.3g} GFLOP/s, without evaluations")
    return lines


def _rate(
    plan: Mapping[str, Any], configs: Mapping[str, RunConfig], directory: Path, measure: bool, workers: int | None, cores: int | None
) -> float | None:
    machine = read_machine(directory)
    if machine is not None and workers in (None, machine["workers"]) and cores in (None, machine["cores"]):
        return float(machine["tokens_per_second"] * machine["flops_per_token"])
    if not measure:
        return None
    order = sorted(configs, key=lambda name: flops_per_token(configs[name]) * configs[name].tokens_per_step)
    config = configs[order[(len(order) - 1) // 2]]
    cores = cores or usable_processors()
    threads = config.train.threads or cores
    cells = sum(len(arm_entry(plan, name)["seeds"]) for name in configs)
    room = 1 if config.train.device == "cuda" else max(1, min(cores // threads, cells))
    pace = measure_pace(config, workers=room if workers is None else min(workers, room), threads=threads)
    return pace.tokens_per_second * flops_per_token(config)


def _time(hours: float | None) -> str:
    return "" if hours is None else duration(3600 * hours)
