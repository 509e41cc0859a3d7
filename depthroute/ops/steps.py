"""Steps of a decoding program: calls of the compiled kernels whose arguments lie ready, and stay where they are from token to token.

On the CPU, interpreting a small model's forward pass costs as much as running it. A `Program` runs all its steps in one call. `steps.c`
says what each of them does.

Shapes: R rows, I inputs, O outputs, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from depthroute.ops.build import library

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
MATRICES = 3
_KINDS = {"store": 0, "add": 1, "swiglu": 2}


class Step:
    """A function of the library and its structure of arguments.

    `kept`: what is behind the addresses. Of tensors the storage is kept: a parameter that is cast would let go of it.
    """

    def __init__(self, function: str, arguments: ctypes.Structure, kept: object) -> None:
        self._function = getattr(library(), function)
        self.arguments = arguments
        self._kept = pytree.tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, kept)

    @property
    def address(self) -> int | None:
        return ctypes.cast(self._function, ctypes.c_void_p).value

    def __call__(self) -> None:
        self._function(ctypes.byref(self.arguments))


class Program:
    """Steps in their order; a call runs them."""

    def __init__(self, steps: Sequence[Step]) -> None:
        count = len(steps)
        self._steps = list(steps)
        self._functions = (ctypes.c_void_p * count)(*[step.address for step in steps])
        self._arguments = (ctypes.c_void_p * count)(*[ctypes.addressof(step.arguments) for step in steps])
        self._run: Any = getattr(library(), "run_steps")  # noqa: B009 - the library is a ctypes one wherever steps can be made

    def __call__(self) -> None:
        self._run(self._functions, self._arguments, len(self._steps))


@lru_cache(maxsize=1)
def most_rows() -> int:
    """How many rows a step takes; 0 where there is no compiled kernel."""
    compiled: Any = library()
    return int(compiled.most_rows()) if isinstance(compiled, ctypes.CDLL) else 0


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _LookUp(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64), ("bytes", ctypes.c_int64), ("table", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("out", ctypes.c_void_p)
    ]  # fmt: skip


def look_up(table: Tensor, ids: Tensor, out: Tensor) -> Step:
    """The rows `ids` [R] (int64) of `table` [V, D] into `out` [R, D] of the same dtype."""
    given = _LookUp(len(ids), table.shape[1] * table.element_size(), address(table), address(ids), address(out))
    return Step("look_up", given, (table, ids, out))


class _Product(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64), ("inputs", ctypes.c_int64), ("count", ctypes.c_int64), ("kind", ctypes.c_int64),
        ("weights", ctypes.c_void_p * MATRICES), ("biases", ctypes.c_void_p * MATRICES),
        ("outputs", ctypes.c_int64 * MATRICES), ("stride", ctypes.c_int64 * MATRICES),
        ("x", ctypes.c_void_p), ("y", ctypes.c_void_p * MATRICES), ("widened", ctypes.c_void_p),
    ]  # fmt: skip


def product(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], into: Sequence[Tensor],
    kind: Literal["store", "add", "swiglu"] = "store",
) -> Step:  # fmt: skip
    """x W_k^T + b_k of x [R, I] and up to three matrices [O_k, I], all of one dtype, into tensors [R, O_k] with adjacent columns.

    "add" adds to what is there; "swiglu" takes two matrices and puts silu(y_0) y_1 into the first tensor.
    """
    rows, inputs = x.shape
    widened = None if x.dtype == torch.float32 else torch.empty(rows, inputs)
    matrices, integers = ctypes.c_void_p * MATRICES, ctypes.c_int64 * MATRICES
    given = _Product(
        rows, inputs, len(weights), _KINDS[kind], matrices(*map(address, weights)), matrices(*map(address, biases)),
        integers(*[weight.shape[0] for weight in weights]), integers(*[one.stride(0) for one in into]), address(x),
        matrices(*map(address, into)), address(widened),
    )  # fmt: skip
    return Step(f"product_{SUFFIXES[x.dtype]}", given, (x, weights, biases, into, widened))


class _Attention(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("key_value_heads", ctypes.c_int64), ("width", ctypes.c_int64),
        ("query", ctypes.c_void_p), ("key", ctypes.c_void_p), ("value", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64), ("key_stride", ctypes.c_int64), ("value_stride", ctypes.c_int64),
        ("query_gain", ctypes.c_void_p), ("key_gain", ctypes.c_void_p), ("eps", ctypes.c_double), ("scale", ctypes.c_double),
        ("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64), ("slots", ctypes.c_void_p), ("first", ctypes.c_void_p),
        ("scores", ctypes.c_void_p), ("capacity", ctypes.c_int64), ("out", ctypes.c_void_p),
    ]  # fmt: skip


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, gains: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor, keys: Tensor,
    values: Tensor, slots: Tensor, first: Tensor | None, scores: Tensor, out: Tensor,
) -> Step:  # fmt: skip
    """Softmax attention of one new token a row, with its by-head norms, its rotation and its entry into the cache.

    Args:
        query, key, value: projected, [R, H*E], [R, K*E] and [R, K*E], with adjacent columns.
        gains: of the norms of queries and keys, [E] each; None is no norm.
        cos, sin: float32 [R, E/2], of the positions.
        keys, values: the cache, [R, K, C, E], of which the new token's slot is filled.
        slots: int64 [2], the first slot that is seen and the new token's own.
        first: int64 [R], a later first slot for each row; None where rows have no padding.
        scores: float32, at least [R * H, C]; scratch that steps may share.
        out: [R, H*E].
    """
    rows, heads, width = len(query), out.shape[1] // keys.shape[3], keys.shape[3]
    of_query, of_key = gains or (None, None)
    given = _Attention(
        rows, heads, keys.shape[1], width, address(query), address(key), address(value), query.stride(0), key.stride(0), value.stride(0),
        address(of_query), address(of_key), eps, width**-0.5, address(cos), address(sin), address(keys), address(values), keys.stride(0),
        keys.stride(1), address(slots), address(first), address(scores), keys.shape[2], address(out),
    )  # fmt: skip
    return Step(f"attention_{SUFFIXES[query.dtype]}", given, (query, key, value, gains, cos, sin, keys, values, slots, first, scores, out))
