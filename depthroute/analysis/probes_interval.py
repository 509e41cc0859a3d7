"""Effects by document: which document a target belongs to, and an interval that takes documents, not tokens, for independent.

Tokens of one document share its subject, so their differences do not average out like independent ones.

Shapes: n windows, T tokens, G documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from depthroute.common.errors import FailureError, RequestError

CONFIDENCE = 0.95


class Effect(NamedTuple):
    """A mean per token and its interval; None for the ends where one document says nothing of the spread."""

    delta: float
    low: float | None
    high: float | None


def clustered(sums: np.ndarray, tokens: np.ndarray) -> Effect:
    """The mean per token and its 95 % interval, robust to any dependence within a document.

    With D_g the sum of differences in document g, n_g its tokens, N = sum_g n_g and m = sum_g D_g / N,

        V = G / (G - 1) * sum_g (D_g - m n_g)^2 / N^2 ,    m -+ t_{0.975, G - 1} sqrt(V) :

    the sandwich variance (CR1) of a regression on a constant alone. It wants some forty documents, none of which holds most tokens; with
    fewer it is too narrow.

    Args:
        sums, tokens: D_g and n_g, [G] each.

    Raises:
        FailureError: a sum is not finite.
    """
    if not np.isfinite(sums).all():
        raise FailureError("the loss under a probe is not finite, so it has no mean.")
    count, total = len(sums), float(tokens.sum())
    mean = math.fsum(sums) / total
    if count == 1:
        return Effect(mean, None, None)
    from scipy.special import stdtrit  # a tenth of the import time of scipy.stats

    variance = count / (count - 1) * math.fsum((sums - mean * tokens) ** 2) / total**2
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return Effect(mean, mean - half, mean + half)


def document_numbers(windows: Sequence[np.ndarray], boundaries: np.ndarray) -> list[np.ndarray]:
    """For batches of windows [n, T + 1] the document of every target, int64 [n, T], counted from 0 without those that have no target.

    An end belongs to the document that it ends.

    Args:
        windows: as `evaluation_windows` yields them: their targets follow each other without a gap, from the second token on.
        boundaries: int64 [documents + 1], those of the `HeldOut` that was cut into these windows.

    Raises:
        RequestError: there are more targets than the boundaries have tokens for.
    """
    shapes = [(batch.shape[0], batch.shape[1] - 1) for batch in windows]
    edges = np.cumsum([rows * columns for rows, columns in shapes])
    if edges[-1] >= boundaries[-1]:
        raise RequestError(
            f"the windows have {edges[-1]} targets, and the documents end after {boundaries[-1]} tokens, the first of which is none; give "
            "the boundaries of the slice that was cut into these windows."
        )
    holders = np.searchsorted(boundaries, np.arange(1, edges[-1] + 1), side="right")
    numbers = np.unique(holders, return_inverse=True)[1]
    return [part.reshape(shape) for part, shape in zip(np.split(numbers, edges[:-1]), shapes, strict=True)]
