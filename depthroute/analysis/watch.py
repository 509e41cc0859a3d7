"""Looking on while a model runs: what every site reads and every sub-layer writes, without a change to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from depthroute.residual import Inputs, Memory, Norm, Residual, Trace

Reader = Callable[[Memory, int, Norm | None], Inputs]
OnWrite = Callable[[int, Tensor], Tensor | None]


@contextmanager
def watching(residual: Residual, *, read: Reader | None = None, on_write: OnWrite | None = None) -> Iterator[None]:
    """For as long as the context lasts, sites read with `read`, and `on_write(site, output)` sees what a sub-layer writes.

    `read` is given what the method's own read is given, and stands in its place; it may call the original, taken before. `on_write` may
    return another tensor to be written. Both are taken away at the end, whatever happens.
    """
    own = residual.write

    def write(memory: Memory, site: int, output: Tensor, *trace: Trace) -> Memory:
        changed = on_write(site, output) if on_write is not None else None
        return own(memory, site, output if changed is None else changed, *trace)

    replaced: dict[str, Any] = {}
    if read is not None:
        replaced["read"] = read
    if on_write is not None:
        replaced["write"] = write
    for name, function in replaced.items():
        object.__setattr__(residual, name, function)  # on the instance: the class keeps its own
    try:
        yield
    finally:
        for name in replaced:
            object.__delattr__(residual, name)


def place(site: int, sublayers: int) -> dict[str, Any]:
    """What a site is called: its number, its kind, and its layer."""
    last = site == sublayers
    return {"site": site, "kind": "output" if last else ("attention", "mlp")[site % 2], "layer": site // 2 - (1 if last else 0)}
