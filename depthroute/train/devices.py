"""What the device of a run can do, and how much memory it took."""

from __future__ import annotations

import ctypes
import platform
import resource
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from depthroute.common.errors import RequestError
from depthroute.train.config import Device, Precision

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def resolve_device(wanted: Device) -> Device:
    """The device that `wanted` stands for on this machine.

    Raises:
        RequestError: "cuda" where torch sees no GPU.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RequestError("train.device is 'cuda' and torch sees no GPU here; use train.device=cpu in a new folder.")
    return wanted


def resolve_precision(wanted: Precision, device: Device) -> Precision:
    """The precision that `wanted` stands for on `device`: "auto" is bf16 where matrix products of bf16 are native.

    A processor that only emulates bf16 is slower with it than with float32.
    """
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "float32"


def autocast(device: Device, precision: Precision) -> AbstractContextManager[object]:
    """bf16 autocast, or nothing in float32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16")


def peak_memory_bytes(device: Device) -> int:
    """The largest resident set of this process, or the largest CUDA allocation.

    Both belong to the process, not to the run: runs that are to be compared must each have a process of their own. On Linux this is
    VmHWM, since `ru_maxrss` of a child process starts at the peak of the parent that spawned it.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_freed_memory() -> None:
    """Have the C library keep the memory that a step frees for the next step, instead of giving it back page by page.

    Every step allocates what the one before it freed. Under glibc's own thresholds much of it goes back to the kernel in between and
    comes back as page faults: 4 to 12 ms in a step of 220 ms on one core, most of it in arms with many short-lived tensors. Blocks
    above 32 MB are still returned. Elsewhere than under glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for parameter, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20)):
        mallopt(parameter, value)
