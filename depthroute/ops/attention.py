"""Depth attention: the one operator of the family.

    score_mi = q_m . normalise(k_i) + b_mi ;  weight_m = softmax over i ;  output_m = sum_i weight_mi s_i

Shapes: S sources, M queries, D width, R key rank, ... any leading dimensions (batch, tokens).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor

from depthroute.common.errors import RequestError, choose
from depthroute.ops import native
from depthroute.ops.reference import reference, statistics_dtype

Backend = Literal["auto", "reference", "native"]
KeyNorm = Literal["slice", "full"]
BACKENDS = get_args(Backend)


class DepthRead(NamedTuple):
    """What a read returns when its weights or log-sum-exp are asked for. With a query [R] the leading M is absent."""

    output: Tensor | tuple[Tensor, ...]  # [..., D], or M of them
    weights: Tensor | None  # [M, S, ...]
    lse: Tensor | None  # [M, ...]


@overload
def depth_attention(
    sources: Sequence[Tensor], query: Tensor, *, keys: Sequence[Tensor] | None = None, key_norm: KeyNorm = "slice",
    key_gain: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, return_weights: Literal[False] = False,
    return_lse: Literal[False] = False, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


@overload
def depth_attention(
    sources: Sequence[Tensor], query: Tensor, *, keys: Sequence[Tensor] | None = None, key_norm: KeyNorm = "slice",
    key_gain: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, return_weights: Literal[True],
    return_lse: bool = False, backend: Backend = "auto",
) -> DepthRead: ...  # fmt: skip


@overload
def depth_attention(
    sources: Sequence[Tensor], query: Tensor, *, keys: Sequence[Tensor] | None = None, key_norm: KeyNorm = "slice",
    key_gain: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, return_weights: bool = False,
    return_lse: Literal[True], backend: Backend = "auto",
) -> DepthRead: ...  # fmt: skip


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    keys: Sequence[Tensor] | None = None,
    key_norm: KeyNorm = "slice",
    key_gain: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, ...] | DepthRead:
    """Mix the sources by softmax attention over depth (Attention Residuals, Eqs. 1-4; Low-Rank AttnRes, Eqs. 8-13).

    Args:
        sources: S >= 1 tensors [..., D] of one shape and device, any floating dtypes; float16, bfloat16, float32 or float64. They are the
            values, and never stacked.
        query: [R] for one read, or [M, R] for M reads of the same sources (roles, sites). R <= D is the key rank.
        keys: S tensors [..., R], projected keys (Low-Rank AttnRes, Eq. 26). None: the last R coordinates of each source (Eq. 11).
        key_norm: "slice" divides a key by its own RMS; "full" by the RMS of all D coordinates of its source (Eq. 13, the control). With
            R = D the two are the same. Projected keys take "slice" only.
        key_gain: [R], the affine weight of the key norm; folded into the query in the statistics dtype.
        bias: [S] or [M, S], added to the scores. None: zero.
        eps: added to the mean square under the root.
        return_weights, return_lse: also return the weights and the log-sum-exp of the scores, in the statistics dtype.
        backend: "reference" is the definition; "native" the compiled CPU kernel; "auto" takes native where it can serve.

    Returns:
        A tensor [..., D] for a query [R]; a tuple of M of them for [M, R]; a `DepthRead` if weights or log-sum-exp are asked for.
        Outputs have the sources' promoted dtype. Scores, weights and statistics are float32 (float64 for float64 sources).

    Raises:
        RequestError: an argument that does not fit, named with its shape, dtype or device; or a named backend that cannot serve.
    """
    dtype = _check(sources, query, keys, key_norm, key_gain, bias, eps)
    if backend not in BACKENDS:
        raise RequestError(choose("backend", str(backend), BACKENDS))
    exact = statistics_dtype(dtype)
    queries = query.to(exact) if query.ndim == 2 else query.to(exact)[None]
    if key_gain is not None:
        queries = queries * key_gain.to(exact)
    if bias is not None:
        bias = bias.to(exact).expand(queries.shape[0], len(sources))
    full = key_norm == "full" and queries.shape[1] < sources[0].shape[-1]
    extras = return_weights or return_lse
    refusal = _native_refusal(sources, keys, queries, bias, extras) if backend != "reference" else ""
    if backend == "native" and refusal:
        raise RequestError(f"backend 'native' cannot serve this read: {refusal}. Use backend='reference' or 'auto'.")
    read = native.read if refusal is None else reference
    outputs, weights, lse = read(sources, keys, queries, bias, full, eps)
    if not extras:
        return tuple(outputs) if query.ndim == 2 else outputs[0]
    weights, lse = weights.movedim((-2, -1), (0, 1)), lse.movedim(-1, 0)
    if query.ndim == 2:
        return DepthRead(tuple(outputs), weights if return_weights else None, lse if return_lse else None)
    return DepthRead(outputs[0], weights[0] if return_weights else None, lse[0] if return_lse else None)


def _native_refusal(
    sources: Sequence[Tensor], keys: Sequence[Tensor] | None, queries: Tensor, bias: Tensor | None, extras: bool
) -> str | None:
    """Why the native kernel cannot serve, or None."""
    rows = (*sources, *(keys or ()))
    first = sources[0]
    if first.device.type != "cpu":
        return f"it runs on the CPU, and the sources are on {first.device}"
    if first.dtype not in native.DTYPES or any(row.dtype != first.dtype for row in rows):
        found = ", ".join(sorted({str(row.dtype) for row in rows}))
        return f"it takes sources and keys of one dtype, float32, bfloat16 or float64, not {found}"
    if extras and torch.is_grad_enabled() and any(t.requires_grad for t in (*rows, queries, *(() if bias is None else (bias,)))):
        return "its weights and log-sum-exp carry no gradient, and a gradient is being recorded"
    missing: str | None = _native_missing()
    return missing


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # the kernel is built while a model is traced, not traced
def _native_missing() -> str | None:
    reason = native.unavailable()
    if reason is not None:
        _say_slower(reason)
    return reason


@lru_cache(maxsize=1)
def _say_slower(reason: str) -> None:
    warnings.warn(f"depth attention runs without its compiled CPU kernel and is slower: {reason}.", RuntimeWarning, stacklevel=5)


def _check(
    sources: Sequence[Tensor], query: Tensor, keys: Sequence[Tensor] | None, key_norm: str, key_gain: Tensor | None,
    bias: Tensor | None, eps: float,
) -> torch.dtype:  # fmt: skip
    """Refuse by name what does not fit; the sources' promoted dtype."""
    if len(sources) == 0:
        raise RequestError("depth attention needs at least one source; the list is empty.")
    first = sources[0]
    dtype = first.dtype
    for index, source in enumerate(sources):
        if source.shape != first.shape or source.ndim == 0:
            raise RequestError(f"source {index} has shape {tuple(source.shape)}, source 0 has {tuple(first.shape)}; all must be [..., D].")
        if not source.is_floating_point():
            raise RequestError(f"source {index} has dtype {source.dtype}; sources are floating point.")
        if source.device != first.device:
            raise RequestError(f"source {index} is on {source.device}, source 0 on {first.device}; move them to one device.")
        dtype = torch.promote_types(dtype, source.dtype)
    width = first.shape[-1]
    if query.ndim not in (1, 2) or query.shape[0] == 0:
        raise RequestError(f"the query has shape {tuple(query.shape)}; it must be [R] or [M, R].")
    rank = query.shape[-1]
    if rank < 1 or (keys is None and rank > width):
        raise RequestError(f"the key rank {rank} is not allowed; it must be 1 to the width, {width}.")
    if keys is not None:
        if key_norm != "slice":
            raise RequestError("projected keys are divided by their own RMS; key_norm must be 'slice' with keys.")
        if len(keys) != len(sources):
            raise RequestError(f"there are {len(keys)} keys for {len(sources)} sources; give one key a source.")
        for index, key in enumerate(keys):
            if key.shape != (*first.shape[:-1], rank):
                raise RequestError(f"key {index} has shape {tuple(key.shape)}; it must be {(*first.shape[:-1], rank)}.")
    if key_norm not in ("slice", "full"):
        raise RequestError(choose("key_norm", str(key_norm), ("slice", "full")))
    if key_gain is not None and key_gain.shape != (rank,):
        raise RequestError(f"key_gain has shape {tuple(key_gain.shape)}; it must be [{rank}].")
    shapes = ((len(sources),), (query.shape[0], len(sources))) if query.ndim == 2 else ((len(sources),),)
    if bias is not None and tuple(bias.shape) not in shapes:
        raise RequestError(f"bias has shape {tuple(bias.shape)}; it must be {' or '.join(map(str, shapes))}.")
    given = {"query": query, "key_gain": key_gain, "bias": bias, **{f"key {index}": key for index, key in enumerate(keys or ())}}
    for name, tensor in given.items():
        if tensor is not None and not tensor.is_floating_point():
            raise RequestError(f"{name} has dtype {tensor.dtype}; it must be floating point.")
        if tensor is not None and tensor.device != first.device:
            raise RequestError(f"{name} is on {tensor.device}, source 0 on {first.device}; move them to one device.")
    if not eps > 0:
        raise RequestError(f"eps = {eps} is not allowed; it must be positive, or a zero source divides by zero.")
    return dtype
