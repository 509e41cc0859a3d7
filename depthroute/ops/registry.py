"""The backends by name, and which one serves a read."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Literal, get_args

import torch

from depthroute.common.errors import RequestError, choose
from depthroute.ops import compiled, native, triton_backend
from depthroute.ops.form import Backend

BackendName = Literal["auto", "reference", "compiled", "native", "triton"]
BACKEND_NAMES = get_args(BackendName)
BACKENDS: dict[str, Backend] = {"compiled": compiled, "native": native, "triton": triton_backend}
# The first of these that can serve is what `auto` takes; the definition where none can.
AUTOMATIC = {"cpu": ("native",), "cuda": ("triton",)}


def automatic(device: torch.device, dtype: torch.dtype) -> tuple[str, dict[str, str]]:
    """What `auto` takes, and why each backend before it cannot serve."""
    refusals: dict[str, str] = {}
    for name in AUTOMATIC.get(device.type, ()):
        reason = BACKENDS[name].refusal(device, dtype)
        if reason is None:
            return name, refusals
        refusals[name] = reason
    return "reference", refusals


def serving(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the backend that serves a read of `dtype` rows on `device`; warns once where a device's own backend is missing.

    Raises:
        RequestError: an unknown backend, or one asked for by name that cannot serve.
    """
    if name not in BACKEND_NAMES:
        raise RequestError(choose("backend", name, BACKEND_NAMES))
    if name == "reference":
        return name
    if name != "auto":
        refusal = BACKENDS[name].refusal(device, dtype)
        if refusal is None:
            return name
        raise RequestError(f"backend '{name}' cannot serve this read: {refusal}. Use backend='reference' or 'auto'.")
    found, refusals = automatic(device, dtype)
    for candidate, reason in refusals.items():
        _say_slower(candidate, reason)
    return found


# Decided while a model is traced, not traced. What `torch.compiler.assume_constant_result` sets, without loading the compiler.
serving._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=8)
def _say_slower(name: str, reason: str) -> None:
    warnings.warn(f"depth attention runs without its {name} kernel and is slower: {reason}.", RuntimeWarning, stacklevel=4)
