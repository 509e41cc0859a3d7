"""The CPU backend: `kernel.c`, one pass a token forward and one backward, called through ctypes.

Without a C compiler `missing()` says so, and the definition serves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.ops.build import library
from depthroute.ops.form import Form, Gradients, Operands, Saved, Upstream
from depthroute.ops.steps import Step

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
_KEY_NORMS = {"none": 0, "slice": 1, "full": 2}


def missing() -> str | None:
    """Why there is no compiled kernel on this machine, or None."""
    found = library()
    return found if isinstance(found, str) else None


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot serve, or None."""
    if device.type != "cpu":
        return f"it runs on the CPU, and the sources are on {device}"
    reason = missing()
    if reason is None and (dtype not in _SUFFIXES or not hasattr(library(), f"depth_forward_{_SUFFIXES[dtype]}")):
        return f"it was compiled without arithmetic for {dtype}"
    return reason


def forward(operands: Operands, form: Form, outputs: Sequence[Tensor], saved: Saved) -> None:
    """As `form.Backend.forward`."""
    operands, strides = _rows(operands)
    bias = None if operands.bias is None else operands.bias.contiguous()
    prior_max = _addresses(operands.prior[operands.reads : 2 * operands.reads])
    _function("depth_forward", operands)(
        *_common(operands, form, strides), prior_max, _address(bias), form.eps, form.output_eps, _addresses(outputs),
        _addresses(saved.max), _addresses(saved.sum), *map(_address, saved[2:]),
    )  # fmt: skip


class _Read(ctypes.Structure):
    """`depth_read` of kernel.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "D", "S", "M", "R", "H", "key_norm", "sigmoid")),
        *((name, ctypes.c_void_p) for name in (
            "sources", "source_strides", "queries", "gain", "prior", "prior_strides", "prior_sum", "prior_max", "bias"
        )),
        ("eps", ctypes.c_double), ("output_eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("outputs", "maxima", "sums", "weights", "scores", "rstd", "output_rstd")),
    ]  # fmt: skip


def step(operands: Operands, form: Form, outputs: Sequence[Tensor], saved: Saved) -> Step:
    """The forward pass of sliced keys as a step: run again, it reads what is in its tensors by then. Rows have one stride."""
    operands, strides = _rows(operands)
    bias = None if operands.bias is None else operands.bias.contiguous()
    prior_max = _addresses(operands.prior[operands.reads : 2 * operands.reads])
    *sizes, sources, source_strides, _, _, queries, gain, prior, prior_strides, prior_sum = _common(operands, form, strides)
    lists = [sources, source_strides, prior, prior_strides, prior_sum, prior_max]
    lists += [_addresses(tensors) for tensors in (outputs, saved.max, saved.sum)]
    at = [None if one is None else ctypes.addressof(one) for one in lists]
    given = _Read(
        *map(int, sizes), at[0], at[1], queries, gain, at[2], at[3], at[4], at[5], _address(bias), form.eps, form.output_eps, at[6], at[7],
        at[8], *map(_address, saved[2:]),
    )  # fmt: skip
    return Step(f"depth_step_{_SUFFIXES[operands.sources[0].dtype]}", given, (operands, bias, outputs, saved, lists))


def backward(
    operands: Operands, form: Form, saved: Saved, upstream: Upstream, into: Sequence[Tensor], add: Sequence[bool], found: Gradients
) -> None:
    """As `form.Backend.backward`."""
    operands, strides = _rows(operands)
    gradients = [gradient.contiguous() for gradient in upstream.outputs]
    sums = [gradient.contiguous() for gradient in upstream.sums]
    weights = None if upstream.weights is None else upstream.weights.contiguous()
    exact = bytes(destination.dtype == operands.queries.dtype for destination in into)
    partial = operands.queries.new_empty(_chunks(_tokens(operands)), sum(part.numel() for part in found[2:]))
    _function("depth_backward", operands)(
        *_common(operands, form, strides), _addresses(saved.sum), *map(_address, saved[2:]), _addresses(gradients), _addresses(sums),
        _address(weights), _addresses(into), exact, bytes(add), _addresses(found.keys), _addresses(found.prior), _address(partial),
        *map(_address, found[2:]),
    )  # fmt: skip


def _rows(operands: Operands) -> tuple[Operands, list[list[int]]]:
    """The operands with every row reachable by one stride, and the strides of sources, keys and prior outputs."""
    sources, keys, queries, bias, gain, prior = operands
    count = operands.reads
    parts = [[_strided(row) for row in rows] for rows in (sources, keys, prior[:count])]
    strides = [[stride for _, stride in part] for part in parts]
    sources, keys, outputs = ([row for row, _ in part] for part in parts)
    statistics = [part.contiguous() for part in prior[count:]]
    gain = None if gain is None else gain.contiguous()
    return Operands(sources, keys, queries.contiguous(), bias, gain, [*outputs, *statistics]), strides


def _strided(row: Tensor) -> tuple[Tensor, int]:
    """A view [..., D] whose tokens lie one stride apart, and that stride in elements; a copy where there is no such stride."""
    if row.is_contiguous():
        return row, row.shape[-1]
    if row.stride(-1) == 1 or row.shape[-1] == 1:
        try:
            return row, row.view(-1, row.shape[-1]).stride(0)
        except RuntimeError:  # the leading dimensions are not one run of tokens
            pass
    return row.contiguous(), row.shape[-1]


def _common(operands: Operands, form: Form, strides: list[list[int]]) -> tuple[Any, ...]:
    """The arguments that both passes begin with: sizes, the kind of read, and the rows."""
    sources, keys, queries, _, gain, prior = operands
    count, rank = queries.shape
    sizes = (_tokens(operands), sources[0].shape[-1], len(sources), count, rank, form.heads)
    of_sources, of_keys, of_prior = (_integers(part) for part in strides)
    return (
        *sizes, _KEY_NORMS[form.key_norm], form.weighting == "sigmoid", _addresses(sources), of_sources, _addresses(keys), of_keys,
        _address(queries), _address(gain), _addresses(prior[:count]), of_prior, _addresses(prior[2 * count :]),
    )  # fmt: skip


def _tokens(operands: Operands) -> int:
    return operands.sources[0].numel() // operands.sources[0].shape[-1]


def _chunks(tokens: int) -> int:
    compiled: Any = library()
    return int(compiled.depth_chunks(tokens))


def _function(stem: str, operands: Operands) -> Any:
    compiled = library()
    assert isinstance(compiled, ctypes.CDLL), compiled
    return getattr(compiled, f"{stem}_{_SUFFIXES[operands.sources[0].dtype]}")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p] | None:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors]) if tensors else None


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
