"""Where a run took place: versions, processor, threads, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from depthroute.ops import automatic_backend
from depthroute.train.config import Device


def environment(device: Device) -> dict[str, Any]:
    """The facts of this machine and process that a reader of a run needs, as JSON. Only those that exist are in it."""
    packages = {}
    for name in ("torch", "numpy", "safetensors", "tokenizers"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    backend, refusals = automatic_backend(torch.device(device), torch.float32)
    facts: dict[str, Any] = {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "depth_attention": "; ".join(refusals.values()) or backend,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    commit = _commit()
    if commit:
        facts["commit"] = commit
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed: the commit of whatever encloses site-packages is not ours
        return None
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return f"{head} with changes" if head and changes else head or None
