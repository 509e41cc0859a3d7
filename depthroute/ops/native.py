"""The CPU backend: `kernel.c` behind a registered custom operator.

One pass a token forward and one backward. Beside the sources it saves three scalars a source and token. Without a C compiler
`unavailable()` says so, and the reference serves.

The operator is registered key by key: the CPU kernel, its shapes for tracing, and an autograd rule. `torch.library.custom_op` would do the
same in fewer lines, but its generated rule costs three times as much per call, which small models feel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops.build import library
from depthroute.ops.reference import statistics_dtype

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64"}


def unavailable() -> str | None:
    """Why this backend cannot serve on this machine, or None."""
    found = library()
    return found if isinstance(found, str) else None


def read(
    sources: Sequence[Tensor], keys: Sequence[Tensor] | None, queries: Tensor, bias: Tensor | None, full: bool, eps: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """As `reference.reference`, for CPU tensors of one dtype in `DTYPES`. Weights and log-sum-exp carry no gradient."""
    count = queries.shape[0]
    if bias is None:
        bias = queries.new_zeros(count, len(sources))
    found = torch.ops.depthroute.depth_read(list(sources), list(keys or ()), queries, bias, full, eps)
    return found[:count], found[count], found[count + 1]


def _kernel(stem: str, dtype: torch.dtype) -> Any:
    compiled = library()
    assert isinstance(compiled, ctypes.CDLL), compiled
    return getattr(compiled, f"{stem}_{DTYPES[dtype]}")


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p] | None:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors]) if tensors else None


def _forward(sources: list[Tensor], keys: list[Tensor], queries: Tensor, bias: Tensor, full: bool, eps: float) -> list[Tensor]:
    """M outputs [..., D], then weights [..., M, S], log-sum-exp [..., M], rstd [..., S], scores [..., M, S]."""
    sources = [source.contiguous() for source in sources]
    keys = [key.contiguous() for key in keys]
    queries, bias = queries.contiguous(), bias.contiguous()
    found = _empty_results(sources, keys, queries, bias, full, eps)
    count = queries.shape[0]
    weights, lse, rstd, scores = found[count:]
    _kernel("depth_forward", sources[0].dtype)(
        lse.numel() // count, sources[0].shape[-1], len(sources), count, queries.shape[1], _addresses(sources), _addresses(keys),
        queries.data_ptr(), bias.data_ptr(), int(full), eps, _addresses(found[:count]), rstd.data_ptr(), scores.data_ptr(),
        weights.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return found


def _empty_results(sources: list[Tensor], keys: list[Tensor], queries: Tensor, bias: Tensor, full: bool, eps: float) -> list[Tensor]:
    first, count, number = sources[0], queries.shape[0], len(sources)
    lead, exact = first.shape[:-1], statistics_dtype(first.dtype)
    shapes = ((*lead, count, number), (*lead, count), (*lead, number), (*lead, count, number))
    return [first.new_empty(first.shape) for _ in range(count)] + [first.new_empty(shape, dtype=exact) for shape in shapes]


def _backward(
    sources: list[Tensor], keys: list[Tensor], queries: Tensor, full: bool, gradients: list[Tensor], statistics: list[Tensor]
) -> list[Tensor]:
    """Gradients of the sources, the keys, the queries [M, R] and the bias [M, S], from those of the M outputs."""
    sources = [source.contiguous() for source in sources]
    keys = [key.contiguous() for key in keys]
    queries = queries.contiguous()
    gradients = [gradient.contiguous() for gradient in gradients]
    weights, rstd, scores = statistics
    found = _empty_gradients(sources, keys, queries, full, gradients, statistics)
    dqueries, dbias = found[-2:]
    kernel = _kernel("depth_backward", sources[0].dtype)
    tokens = rstd.numel() // len(sources)
    chunks = -(-tokens // library().depth_chunk_tokens(tokens))  # type: ignore[union-attr]
    partial = queries.new_empty(max(chunks, 1), dqueries.numel() + dbias.numel())
    kernel(
        tokens, sources[0].shape[-1], len(sources), queries.shape[0], queries.shape[1], _addresses(sources), _addresses(keys),
        queries.data_ptr(), int(full), _addresses(gradients), rstd.data_ptr(), scores.data_ptr(), weights.data_ptr(),
        _addresses(found[: len(sources)]), _addresses(found[len(sources) : -2]), partial.data_ptr(), dqueries.data_ptr(), dbias.data_ptr(),
    )  # fmt: skip
    return found


def _empty_gradients(
    sources: list[Tensor], keys: list[Tensor], queries: Tensor, full: bool, gradients: list[Tensor], statistics: list[Tensor]
) -> list[Tensor]:
    rows = [row.new_empty(row.shape) for row in (*sources, *keys)]
    return [*rows, queries.new_empty(queries.shape), queries.new_empty(queries.shape[0], len(sources))]


class _DepthRead(torch.autograd.Function):
    """The autograd rule. Lists travel flat, because autograd sees only tensors among the arguments."""

    @staticmethod
    def forward(ctx: Any, number: int, full: bool, eps: float, queries: Tensor, bias: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            found = torch.ops.depthroute.depth_read(rows[:number], rows[number:], queries, bias, full, eps)
        weights, _, rstd, scores = found[queries.shape[0] :]
        ctx.number, ctx.full = number, full
        ctx.save_for_backward(queries, weights, rstd, scores, *rows)
        ctx.mark_non_differentiable(*found[queries.shape[0] :])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        queries, weights, rstd, scores, *rows = ctx.saved_tensors
        number = ctx.number
        complete = [rows[0].new_zeros(rows[0].shape) if g is None else g for g in gradients[: queries.shape[0]]]
        found = torch.ops.depthroute.depth_read_backward(
            rows[:number], rows[number:], queries, ctx.full, complete, [weights, rstd, scores]
        )
        return None, None, None, found[-2], found[-1], *found[:-2]


def _autograd(sources: list[Tensor], keys: list[Tensor], queries: Tensor, bias: Tensor, full: bool, eps: float) -> list[Tensor]:
    apply: Any = _DepthRead.apply  # torch has no types for it
    return list(apply(len(sources), full, eps, queries, bias, *sources, *keys))


def _register() -> torch.library.Library:
    library_of_operators: Any = torch.library.Library  # torch has no types for it
    operators = library_of_operators("depthroute", "DEF")
    operators.define("depth_read(Tensor[] sources, Tensor[] keys, Tensor queries, Tensor bias, bool full, float eps) -> Tensor[]")
    operators.define(
        "depth_read_backward(Tensor[] sources, Tensor[] keys, Tensor queries, bool full, Tensor[] gradients, Tensor[] statistics)"
        " -> Tensor[]"
    )
    operators.impl("depth_read", _forward, "CPU")
    operators.impl("depth_read_backward", _backward, "CPU")
    operators.impl("depth_read", _autograd, "Autograd")
    torch.library.register_fake("depthroute::depth_read", _empty_results, lib=operators)
    torch.library.register_fake("depthroute::depth_read_backward", _empty_gradients, lib=operators)
    return cast(torch.library.Library, operators)


_OPERATORS = _register()  # the registration lasts as long as this object
