"""Products of sorted rows with one matrix a group, and the way from tokens to such rows and back: what a mixture of experts is made of.

How many rows a group has is known only while it runs; `routed` hides that behind operators whose results have static shapes.

Shapes: N rows, X groups (ends: [X]), D inputs, F outputs, T tokens, K rows of a token (N = T K).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNED = 8  # numbers of 16 bits: the grouped kernels of CUDA read 16 bytes at a time


def as_autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product in the dtype that autocast gives those of `F.linear`."""
    kind = operands[0].device.type
    if not torch.is_autocast_enabled(kind) or operands[0].dtype == torch.float64:
        return operands
    return tuple(operand.to(torch.get_autocast_dtype(kind)) for operand in operands)


def spread(tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Row n of the result is the token order[n] // K: [T, D] to [N, D]. `order` and `places` [T, K] (int64) are each other's inverse."""
    found: Tensor = _Spread.apply(tokens, order, places)  # type: ignore[no-untyped-call]
    return found


def collect(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """The sum of the rows places[t] of every token t, always in the same order: [N, D] to [T, D]. The transpose of `spread`."""
    found: Tensor = _Collect.apply(rows, order, places)  # type: ignore[no-untyped-call]
    return found


class _Spread(torch.autograd.Function):
    """The rule of indexing would add the rows of the gradient one by one, in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return tokens.index_select(0, order // places.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return collect(gradient, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return summed(rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return spread(gradient, *ctx.saved_tensors), None, None


def summed(rows: Tensor, places: Tensor) -> Tensor:
    """`collect` without a gradient: in one pass, in at least float32."""
    return torch.nn.functional.embedding_bag(places, rows, mode="sum")


def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The rows of group x times the matrix of group x, without a gradient: [N, D] and [X, F, D] to [N, F].

    `ends`: int64 [X], group x has the rows ends[x - 1] to ends[x] - 1, and the last end is N.
    """
    if _kernel_serves(rows, weights.shape[1]):
        return torch.nn.functional.grouped_mm(rows.contiguous(), weights.transpose(1, 2), offs=ends.int())
    found = rows.new_empty(len(rows), weights.shape[1])
    start = 0
    for weight, end in zip(weights.transpose(1, 2).unbind(), ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], weight, out=found[start:end])
        start = end
    return found


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left_x^T right_x of the rows of each group: [N, F] and [N, D] to [X, F, D]."""
    if _kernel_serves(left, right.shape[1]):
        found = torch.nn.functional.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends.int())
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return found.masked_fill_(empty[:, None, None], 0)  # the kernel need not write what sums over nothing
    found = left.new_empty(len(ends), left.shape[1], right.shape[1])
    start = 0
    for matrix, end in zip(found.unbind(), ends.tolist(), strict=True):
        torch.mm(left[start:end].t(), right[start:end], out=matrix)  # zeros where there are no rows
        start = end
    return found


def _kernel_serves(rows: Tensor, others: int) -> bool:
    """Whether torch's grouped kernel takes rows [N, D] and `others` outputs."""
    if rows.device.type != "cuda" or rows.dtype not in (torch.bfloat16, torch.float16) or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    return rows.shape[1] % ALIGNED == 0 and others % ALIGNED == 0 and len(rows) > 0
