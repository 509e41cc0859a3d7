"""Depth attention: the one operator of the family.

    score_mi = q_m . normalise(k_i) + b_mi ;  weight_m = softmax over i ;  output_m = sum_i weight_mi s_i

Shapes: S sources, M queries, H heads, D width, R key rank, ... any leading dimensions (batch, tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from depthroute.ops.arguments import KeyNorm, Weighting, check, unstacked
from depthroute.ops.form import DepthRead, Form, Found, Operands, statistics_dtype
from depthroute.ops.operator import read
from depthroute.ops.reference import reference
from depthroute.ops.registry import BackendName, serving

Prior = DepthRead | Sequence[DepthRead]


@overload
def depth_attention(
    sources: Sequence[Tensor] | Tensor, query: Tensor, *, keys: Sequence[Tensor] | Tensor | None = None, heads: int = 1,
    key_norm: KeyNorm = "slice", key_gain: Tensor | None = None, bias: Tensor | None = None, weighting: Weighting = "softmax",
    output_gain: Tensor | None = None, prior: Prior | None = None, eps: float = 1e-6, output_eps: float = 1e-6,
    return_weights: Literal[False] = False, return_statistics: Literal[False] = False, backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


@overload
def depth_attention(
    sources: Sequence[Tensor] | Tensor, query: Tensor, *, keys: Sequence[Tensor] | Tensor | None = None, heads: int = 1,
    key_norm: KeyNorm = "slice", key_gain: Tensor | None = None, bias: Tensor | None = None, weighting: Weighting = "softmax",
    output_gain: Tensor | None = None, prior: Prior | None = None, eps: float = 1e-6, output_eps: float = 1e-6,
    return_weights: Literal[True], return_statistics: bool = False, backend: BackendName = "auto",
) -> DepthRead | tuple[DepthRead, ...]: ...  # fmt: skip


@overload
def depth_attention(
    sources: Sequence[Tensor] | Tensor, query: Tensor, *, keys: Sequence[Tensor] | Tensor | None = None, heads: int = 1,
    key_norm: KeyNorm = "slice", key_gain: Tensor | None = None, bias: Tensor | None = None, weighting: Weighting = "softmax",
    output_gain: Tensor | None = None, prior: Prior | None = None, eps: float = 1e-6, output_eps: float = 1e-6,
    return_weights: bool = False, return_statistics: Literal[True], backend: BackendName = "auto",
) -> DepthRead | tuple[DepthRead, ...]: ...  # fmt: skip


def depth_attention(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    keys: Sequence[Tensor] | Tensor | None = None,
    heads: int = 1,
    key_norm: KeyNorm = "slice",
    key_gain: Tensor | None = None,
    bias: Tensor | None = None,
    weighting: Weighting = "softmax",
    output_gain: Tensor | None = None,
    prior: Prior | None = None,
    eps: float = 1e-6,
    output_eps: float = 1e-6,
    return_weights: bool = False,
    return_statistics: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, ...] | DepthRead | tuple[DepthRead, ...]:
    """Mix the sources by attention over depth (Attention Residuals, Eqs. 1-4; Low-Rank AttnRes, Eqs. 8-13).

    Args:
        sources: S >= 1 tensors [..., D] of one shape and device, float16, bfloat16, float32 or float64, mixed or not; or one stacked
            tensor [S, ..., D]. They are the values. Views with any strides are read where they are if their channels are adjacent.
        query: [R] for one read, or [M, R] for M reads of the same sources (roles, or the sites of a block). R <= D is the key rank.
        keys: S tensors [..., R] or one [S, ..., R], projected keys (Low-Rank AttnRes, Eq. 26). None: the last R coordinates of each source
            (Eq. 11).
        heads: H groups of D/H adjacent channels that are mixed apart, each scored by its R/H key coordinates (Attention Residuals, Table 4;
            Multi-Head Attention Residuals). The key is normalised as a whole before it is split.
        key_norm: "slice" divides a key by its own RMS; "full" by the RMS of all D coordinates of its source (Eq. 13, the control); "none"
            takes it as it is. With R = D the first two are the same. Projected keys take "slice" or "none".
        key_gain: [R], the affine weight of the key norm; folded into the query in the statistics dtype.
        bias: [S] or [M, S], added to the scores. None: zero.
        weighting: "softmax" over the sources, or "sigmoid" of each score, not normalised (Attention Residuals, Table 4).
        output_gain: [D], RMS-normalises each output with this gain: the norm that a sub-layer puts before itself, in the same pass.
        prior: an earlier read of other sources by the same query, with its statistics (M of them for [M, R]). The result is that of one
            read of all the sources: closed sources are read once for many sites, and each site merges what is new (two-phase computation,
            Attention Residuals, Algorithm 1). It must come without `output_gain`. With the sigmoid its output is added.
        eps, output_eps: added to the mean square under the root of the key norm and of the output norm.
        return_weights, return_statistics: also return the weights of `sources`, and the maximum and sum of the softmax.
        backend: "reference" is the definition; "native" the compiled C kernel for the CPU; "triton" the one for CUDA and ROCm; "compiled"
            the same passes through Inductor; "auto" takes the device's own kernel where it can serve and the definition elsewhere.

    Returns:
        A tensor [..., D] for a query [R], a tuple of M of them for [M, R]; `DepthRead`s in their place if more is asked for.
        Outputs have the sources' promoted dtype. Scores, weights and statistics are float32 (float64 for float64 sources).

    Raises:
        RequestError: an argument that does not fit, named with its shape, dtype or device; or a named backend that cannot serve.
    """
    sources, keys = unstacked("sources", "D", sources), None if keys is None else unstacked("keys", "R", keys)
    single = query.ndim == 1
    priors: Sequence[DepthRead] = () if prior is None else (prior,) if isinstance(prior, DepthRead) else prior
    dtype = check(
        sources, query, keys, heads, key_norm, key_gain, bias, weighting, output_gain, priors, eps, output_eps, return_statistics
    )  # fmt: skip
    serving_backend = serving(backend, sources[0].device, dtype)
    form = Form(heads, resolved_key_norm(key_norm, query, sources[0]), weighting, eps, output_eps)
    operands = operands_of(sources, query, keys, key_gain, bias, output_gain, priors, dtype, weighting)
    found = reference(operands, form) if serving_backend == "reference" else read(operands, form, serving_backend)
    if not (return_weights or return_statistics):
        return found.outputs[0] if single else tuple(found.outputs)
    reads = tuple(_described(found, m, heads, len(sources), return_weights, return_statistics) for m in range(operands.reads))
    return reads[0] if single else reads


def resolved_key_norm(key_norm: str, query: Tensor, source: Tensor) -> str:
    """At full rank the two norms are one."""
    return "slice" if key_norm == "full" and query.shape[-1] == source.shape[-1] else key_norm


def operands_of(
    sources: Sequence[Tensor], query: Tensor, keys: Sequence[Tensor] | None, key_gain: Tensor | None, bias: Tensor | None,
    output_gain: Tensor | None, priors: Sequence[DepthRead], dtype: torch.dtype, weighting: str,
) -> Operands:  # fmt: skip
    """Checked arguments as backends take them, of the promoted `dtype`."""
    exact = statistics_dtype(dtype)
    queries = query.to(exact) if query.ndim == 2 else query.to(exact)[None]
    if key_gain is not None:
        queries = queries * key_gain.to(exact)
    if bias is not None:
        bias = bias.to(exact).expand(queries.shape[0], len(sources))
    prior = [one.output.to(dtype) for one in priors]
    if weighting == "softmax":
        statistics = [*(one.max for one in priors), *(one.sum for one in priors)]
        prior += [part.to(exact) for part in statistics if part is not None]
    return Operands(
        sources=[source.to(dtype) for source in sources],
        keys=[key.to(dtype) for key in keys or ()],
        queries=queries,
        bias=bias,
        output_gain=None if output_gain is None else output_gain.to(exact),
        prior=prior,
    )


def _described(found: Found, m: int, heads: int, number: int, weights: bool, statistics: bool) -> DepthRead:
    """Read m, with the axis of a single head dropped."""
    of_sources = found.weights[..., m, :, :number]  # [..., H, S]; without the prior's
    return DepthRead(
        found.outputs[m],
        (of_sources[..., 0, :].movedim(-1, 0) if heads == 1 else of_sources.movedim((-2, -1), (0, 1))) if weights else None,
        *(part[m] if statistics else None for part in (found.max, found.sum)),
    )
