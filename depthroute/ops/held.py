"""Sources that many reads share: their gradients are summed in one buffer, in the statistics dtype, and rounded once.

Without it every read would hand autograd a gradient of its own, rounded to the source's dtype, for autograd to add up.

`hold(x)` returns x through a node of the autograd graph. The backward of a read finds that node behind a source, adds to the node's buffer
and gives autograd nothing. The graph runs the node after all who read from it, and then it hands the sum on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from depthroute.ops.form import statistics_dtype


class Held(torch.autograd.Function):
    """`total` belongs to the backward pass numbered `task`: one that ended before it reached this node leaves nothing behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.total, ctx.task, ctx.dtype = None, -1, x.dtype
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        total, ctx.total = (ctx.total if ctx.task == _task() else None), None
        if total is None:
            return gradient
        if gradient is not None:
            total += gradient
        return cast(Tensor, total.to(ctx.dtype))


_NODE: Any = Held._backward_cls  # type: ignore[attr-defined]  # the class of the graph's nodes


def hold(x: Tensor) -> Tensor:
    """`x` as a source of many reads: what they add to its gradient is summed without rounding in between.

    Inside `torch.compile` it is `x` itself; the compiler then places the sums.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    apply: Any = Held.apply  # torch has no types for it
    found: Tensor = apply(x)
    return found


def held_by(source: Tensor) -> Any:
    """The node behind a source that `hold` returned, or None."""
    node = source.grad_fn
    return node if isinstance(node, _NODE) else None


def destinations(sources: Sequence[Tensor], held: Sequence[Any]) -> tuple[list[Tensor], list[bool], list[Tensor | None]]:
    """Where a read's backward puts the gradients of its sources, whether it adds, and what autograd is given for each source."""
    into: list[Tensor] = []
    add: list[bool] = []
    given: list[Tensor | None] = []
    task = _task()
    for source, node in zip(sources, held, strict=True):
        if node is None:
            into.append(torch.empty(source.shape, dtype=source.dtype, device=source.device))
            given.append(into[-1])
            add.append(False)
            continue
        fresh = node.total is None or node.task != task
        if fresh:
            node.total, node.task = torch.empty(source.shape, dtype=statistics_dtype(source.dtype), device=source.device), task
        into.append(node.total)
        given.append(None)
        add.append(not fresh)
    return into, add, given


def _task() -> int:
    return torch._C._current_graph_task_id()
