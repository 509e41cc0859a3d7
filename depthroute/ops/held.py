"""Sources that many reads share: their gradients are summed in one buffer, in the statistics dtype, and rounded once.

Without it every read would hand autograd a gradient of its own, rounded to the source's dtype, for autograd to add up.

`hold(x)` returns x through a node of the autograd graph. The backward of a read finds the node's buffer behind a source and adds to it. The
graph comes to the node after all who read from it; then the sum takes the place of its gradient, for hooks and `retain_grad` to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from depthroute.ops.form import statistics_dtype


class Buffer:
    """The sum of one backward pass, numbered `task`: a pass that ended before it reached the node leaves nothing behind."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.task = -1

    def take(self, gradient: Tensor) -> Tensor:
        """A hook on the node: `gradient`, what ordinary operations gave, with the sum of the reads."""
        total, self.total = (self.total if self.task == _task() else None), None
        if total is None:
            return gradient
        total += gradient
        found = total.to(gradient.dtype)
        if torch.is_grad_enabled():  # under create_graph: the reads cannot be differentiated twice, and the sum must say so too
            refusal: Any = torch._C._functions.DelayedError
            found = refusal(b"depth attention: the native and triton kernels do not differentiate twice; use backend='reference'", 1)(found)
        return found


class Held(torch.autograd.Function):
    """The identity, with a buffer that hangs on its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Buffer) -> Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


_NODE: Any = Held._backward_cls  # the class of the graph's nodes


def hold(x: Tensor) -> Tensor:
    """`x` as a source of many reads: what they add to its gradient is summed in the statistics dtype and rounded once.

    The read must see what `hold` returned, not a view or a cast of it. Inside `torch.compile` it is `x` itself: there the compiler places
    the sums.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    apply: Any = Held.apply  # torch has no types for it
    buffer = Buffer()
    found: Any = apply(x, buffer)
    found.register_hook(buffer.take)
    return cast(Tensor, found)


def held_by(source: Tensor) -> Buffer | None:
    """The buffer of a source that `hold` returned, or None."""
    node: Any = source.grad_fn
    return node.buffer if isinstance(node, _NODE) else None


def destinations(sources: Sequence[Tensor], held: Sequence[Buffer | None]) -> tuple[list[Tensor], list[bool], list[Tensor | None]]:
    """Where a read's backward puts the gradients of its sources, whether it adds, and what autograd is given for each source.

    The first read of a held source gives autograd a zero without memory, so that the node has a gradient; the others give nothing.
    """
    into: list[Tensor] = []
    add: list[bool] = []
    given: list[Tensor | None] = []
    task = _task()
    for source, buffer in zip(sources, held, strict=True):
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
