"""What a cell needs of a machine, and what the machine has: cores and memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.common.config import from_json
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json
from depthroute.common.processors import usable_processors
from depthroute.cost.memory import training_activations
from depthroute.cost.summary import parameter_parts
from depthroute.study.plan import arm_entry, run_folder
from depthroute.train import RunConfig

PROCESS_BYTES = 540 << 20
"""A training process around its tensors: Python, torch, the scratch memory of its libraries, the memory that the allocator keeps and what a
step holds for a moment. Measured in three bodies of 1.6 to 30 million parameters, with one thread on x86-64: 420 to 560 million bytes."""
PER_PARAMETER = 16
"""Bytes: weight, gradient and AdamW's two moments, in float32."""
MEASURED_MARGIN = 1.05
"""Over the largest peak of the arm's other seeds."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one cell takes while it trains.

    Attributes:
        threads: Cores.
        memory_bytes: Of the host, at its peak. For a cell that trains on CUDA that is the process alone.
        measured: The memory is that of a complete cell of the same arm; else it is estimated.
        cuda: It trains on a GPU.
    """

    threads: int
    memory_bytes: int
    measured: bool
    cuda: bool


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the running cells may take together: cores, and bytes of memory."""

    cores: int
    memory_bytes: int

    def __post_init__(self) -> None:
        for name in ("cores", "memory_bytes"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} = {getattr(self, name)} is not allowed; it takes 1 or more.")

    def fits(self, need: Need, running: Collection[Need]) -> bool:
        """Whether a cell may start beside the running ones."""
        cores = sum(other.threads for other in running) + need.threads
        memory = sum(other.memory_bytes for other in running) + need.memory_bytes
        return cores <= self.cores and memory <= self.memory_bytes


def need_of(directory: Path, plan: Mapping[str, Any], arm: str) -> Need:
    """What a cell of an arm takes: the peak memory of a complete cell of it in this study, or an estimate before there is one."""
    entry = arm_entry(plan, arm)
    config = from_json(RunConfig, entry["config"])
    cuda = config.train.device == "cuda"
    threads = config.train.threads or usable_processors()
    results = [run_folder(directory, arm, seed) / "result.json" for seed in entry["seeds"]]
    peaks = [] if cuda else [read_json(path).get("peak_memory_bytes") for path in results if path.exists()]
    if peaks and all(peaks):
        return Need(threads=threads, memory_bytes=round(MEASURED_MARGIN * max(peaks)), measured=True, cuda=False)
    return Need(threads=threads, memory_bytes=estimated_memory(config), measured=False, cuda=cuda)


def estimated_memory(config: RunConfig) -> int:
    """Peak bytes of host memory of the training process of a resolved run: the process itself, and on a CPU its tensors."""
    return PROCESS_BYTES + (0 if config.train.device == "cuda" else tensor_bytes(config))


def tensor_bytes(config: RunConfig) -> int:
    """Bytes on the device of a resolved run that last through a step: parameters, gradients, moments, and what one microbatch keeps for
    the backward pass (see `depthroute.cost.memory`)."""
    settings = config.train
    tokens = (settings.microbatch or settings.sequences) * config.model.context
    activations = training_activations(config.model, mixed=settings.precision == "bf16", on_cpu=settings.device == "cpu").total
    return PER_PARAMETER * parameter_parts(config.model)["total"] + tokens * activations


def check_each_fits(needs: Mapping[str, Need], budget: Budget) -> None:
    """Refuse cells that need more memory than there is even alone. Fewer cores than threads make a cell slow and nothing else.

    Args:
        needs: by arm.

    Raises:
        RequestError: the first such arm, what it needs and what there is.
    """
    for arm, need in sorted(needs.items()):
        if need.memory_bytes > budget.memory_bytes:
            raise RequestError(
                f"a cell of {arm} needs {gigabytes(need.memory_bytes)} of memory ({'measured' if need.measured else 'estimated'}) and "
                f"there are {gigabytes(budget.memory_bytes)}; lower train.microbatch or the model's size, free some memory, or give "
                "another memory budget."
            )


def size_in_bytes(text: str) -> int:
    """"12G" or "800M" in bytes, in powers of 1024; a bare number is bytes.

    Raises:
        RequestError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise RequestError(f"{text!r} is no size of memory; it takes a number and one of K, M, G, T, such as 12G.")
    return round(float(found[1]) * 2.0 ** (10 * " KMGT".index(found[2].upper() or " ")))


def available_memory() -> int:
    """Bytes that new processes can take: what the machine has available, or what the limits of this process's control groups leave."""
    found = [_machine_memory()]
    for limit, used in _group_limits():
        found.append(max(0, limit - used))
    return max(1, min(found))


def _machine_memory() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # all of it, where the system does not say what is free


def _group_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every control group above this process that has a limit, in version 1 or 2.

    What the group keeps of files that can be dropped counts as free.
    """
    found = []
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, names, cached = root, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            base, names, cached = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        else:
            continue
        folder = base / name.lstrip("/")
        # In a container the path may be that of the host, and the group is then the root of what is mounted.
        for place in dict.fromkeys((folder, *(parent for parent in folder.parents if parent.is_relative_to(base)), base)):
            try:
                limit, used = (int((place / file).read_text()) for file in names)
            except (OSError, ValueError):  # no such group here, or "max"
                continue
            if limit < 1 << 60:
                found.append((limit, used - _of_stat(place / "memory.stat", cached)))
    return found


def _of_stat(path: Path, name: str) -> int:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name), 0)
    except OSError:
        return 0


def gigabytes(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / 1e9:.2f} GB"
