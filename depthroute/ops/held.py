"""Sources that many reads share: their gradients are summed in one buffer, in the statistics dtype, and rounded once.

Without it every read would hand autograd a gradient of its own, rounded to the source's dtype, for autograd to add up.

`hold(x)` returns x with a second tensor behind it that reads use in its place. The backward of a read adds to the buffer of that tensor's
node. The graph comes to the node after all who read, and then it hands the sum on as the gradient of what `hold` returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.ops.form import statistics_dtype


class Buffer:
    """The sum of one backward pass, numbered `task`: a pass that ended before it reached the node leaves nothing behind."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.task = -1


class _Held(torch.autograd.Function):
    """The identity, with a buffer that hangs on its node. What autograd brings is the zero of the first read, see `destinations`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Buffer) -> Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, zero: Tensor) -> tuple[Tensor, None]:
        total, ctx.buffer.total = ctx.buffer.total, None
        if total is None or ctx.buffer.task != _task():
            return zero, None
        total = total.to(zero.dtype)
        # Under create_graph the zero knows that a read is not differentiated twice, and the sum must know it too.
        return total + zero if torch.is_grad_enabled() else total, None


def hold(x: Tensor) -> Tensor:
    """`x` as a source of many reads: what they add to its gradient is summed in the statistics dtype and rounded once.

    The reads must be given what `hold` returned, not a view or a cast of it. Inside `torch.compile` it is `x` itself: there the compiler
    places the sums.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    apply: Any = _Held.apply  # torch has no types for it
    buffer = Buffer()
    seen: Any = x.view_as(x)
    seen._depthroute_held = (apply(seen, buffer), buffer)
    held: Tensor = seen
    return held


def behind(source: Tensor) -> tuple[Tensor, Buffer | None]:
    """The tensor that a read uses in place of a source, and its buffer; the source itself and None where it is not held."""
    found: tuple[Tensor, Buffer | None] = getattr(source, "_depthroute_held", (source, None))
    return found


def destinations(sources: Sequence[Tensor], buffers: Sequence[Buffer | None]) -> tuple[list[Tensor], list[bool], list[Tensor | None]]:
    """Where a read's backward puts the gradients of its sources, whether it adds, and what autograd is given for each source.

    The first read of a held source gives autograd a zero without memory, so that the node has a gradient; the others give nothing.
    """
    into: list[Tensor] = []
    add: list[bool] = []
    given: list[Tensor | None] = []
    task = _task()
    for source, buffer in zip(sources, buffers, strict=True):
        if buffer is None:
            total = torch.empty(source.shape, dtype=source.dtype, device=source.device)
            fresh = True
            given.append(total)
        elif buffer.total is None or buffer.task != task:
            total = torch.empty(source.shape, dtype=statistics_dtype(source.dtype), device=source.device)
            fresh, buffer.total, buffer.task = True, total, task
            given.append(source.new_zeros(()).expand(source.shape))
        else:
            total, fresh = buffer.total, False
            given.append(None)
        into.append(total)
        add.append(not fresh)
    return into, add, given


def _task() -> int:
    return torch._C._current_graph_task_id()
