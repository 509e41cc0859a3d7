"""The definition of depth attention in plain PyTorch: what every backend must agree with.

Shapes: S sources, M queries, D width, R key rank, ... any leading dimensions (batch, tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and normalisation statistics: float64 for float64 sources, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference(
    sources: Sequence[Tensor], keys: Sequence[Tensor] | None, queries: Tensor, bias: Tensor | None, full: bool, eps: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Read the sources with M queries. Differentiable as often as you like.

    Args:
        sources: S tensors [..., D], never stacked.
        keys: S tensors [..., R], or None for the last R coordinates of each source.
        queries: [M, R] in the statistics dtype, key gain folded in.
        bias: [M, S] in the statistics dtype, or None for zero.
        full: divide by the RMS of all D coordinates of the source instead of the key's own.
        eps: added to the mean square under the root.

    Returns:
        M outputs [..., D] in the sources' promoted dtype; weights [..., M, S]; log-sum-exp of the scores [..., M].
    """
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)
    exact = queries.dtype
    rank = queries.shape[-1]
    scores = []
    device = sources[0].device.type
    # autocast would take the scores' product to bfloat16; meta tensors have none
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        for index, source in enumerate(sources):
            key = (source[..., source.shape[-1] - rank :] if keys is None else keys[index]).to(exact)
            normalised = source.to(exact) if full else key
            rstd = torch.rsqrt(normalised.square().mean(-1, keepdim=True) + eps)
            scores.append((key * rstd) @ queries.T)
    score = torch.stack(scores)  # [S, ..., M]: a scalar for each source, token and query; the sources themselves stay apart
    if bias is not None:
        score = score + bias.T.reshape(len(sources), *[1] * (score.ndim - 2), -1)
    weights = torch.softmax(score, dim=0)
    outputs = []
    for m in range(queries.shape[0]):
        mixed = weights[0, ..., m, None] * sources[0]
        for index in range(1, len(sources)):
            mixed = mixed + weights[index, ..., m, None] * sources[index]
        outputs.append(mixed.to(dtype))
    return outputs, weights.movedim(0, -1), torch.logsumexp(score, dim=0)
