"""Sums of sources with given weights: the value half of depth attention, for weights that come from elsewhere.

Shapes: S sources, D width, ... any leading dimensions (batch, tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops.form import statistics_dtype


def weighted_sum(sources: Sequence[Tensor], weights: Sequence[Tensor] | Tensor) -> Tensor:
    """sum_i weights_i sources_i, [..., D] in the sources' dtype, summed in at least float32.

    Args:
        sources: S >= 1 tensors [..., D]. They are never stacked.
        weights: S tensors, or one [S, ...]: a number each, or one a token ([...], or [..., 1]). Any sign.
    """
    first = sources[0]
    exact = statistics_dtype(first.dtype)
    total: Tensor | None = None
    for source, weight in zip(sources, weights, strict=True):
        if weight.ndim and weight.shape == source.shape[:-1]:
            weight = weight[..., None]
        weight = weight.to(exact)
        total = source * weight if total is None else torch.addcmul(total, source, weight)
    assert total is not None
    return total.to(first.dtype)
