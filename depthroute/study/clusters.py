"""Evaluation noise: how far a validation loss would move on other documents of the same kind.

Tokens of one document are alike, so the document is what is drawn, not the token. This is another uncertainty than that over seeds: all
seeds and arms are scored on the same documents, so more seeds never shrink it, and the spread over seeds does not contain it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthroute.common.errors import RequestError
from depthroute.study.statistics import CONFIDENCE, standard_deviation

if TYPE_CHECKING:
    import numpy

RESAMPLES = 4000
# Document draws held at once, so that memory does not grow with documents times resamples.
DRAWS_AT_ONCE = 4_000_000


@dataclass(frozen=True, kw_only=True)
class ClusterBootstrap:
    """A mean per token, the standard error over documents, and the 95 % percentile interval."""

    documents: int
    mean: float
    error: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Two uncertainties of one mean, side by side.

    `seed_error` is sd / sqrt(n) over seeds on the documents at hand, None with one seed. `document_error` is the cluster bootstrap's for
    the mean over the seeds at hand. `total_error` is the root of the sum of their squares: what to expect on other seeds and other
    documents. Both contain the interaction of seeds with documents once, so the total is a little too large rather than too small.
    (A. B. Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1, 2007.)
    """

    seeds: int
    documents: int
    mean: float
    seed_error: float | None
    document_error: float
    document_interval: tuple[float, float]
    total_error: float | None


def cluster_bootstrap(sums: Sequence[float], counts: Sequence[int], *, resamples: int = RESAMPLES, seed: int = 0) -> ClusterBootstrap:
    """Bootstrap sum(sums) / sum(counts) over documents.

    Each resample draws as many documents as there are, with replacement, each with its sum and its count; the mean is a ratio of two
    resampled sums. `error` is the standard deviation of the resampled means; the interval's ends are their 2.5 % and 97.5 % quantiles.
    The draws are fixed by `seed`. With few documents, or a few that hold most tokens, the interval is too narrow: from 20 documents of
    like length it covers about 92 %. (A. C. Davison and D. V. Hinkley, "Bootstrap Methods and their Application", 1997, sections 2.4, 5.)

    Args:
        sums: NLL in nats summed over each document's tokens. For a difference of two arms, the difference of their sums: the documents
            are the same, and most of what they share then drops out.
        counts: predicted tokens of each document.

    Raises:
        RequestError: fewer than two documents, unequal lengths, a count below one, a sum that is not finite, or fewer than 100 resamples.
    """
    import numpy as np

    _check(len(sums), counts, resamples)
    table = np.stack((np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)), axis=1)
    if not np.isfinite(table).all():
        raise RequestError("a document's sum is not a finite number; every NLL must be.")
    mean = float(table[:, 0].sum() / table[:, 1].sum())
    # Deviations from the mean keep their digits where the sums of near-equal losses would lose them.
    table[:, 0] -= mean * table[:, 1]
    means = mean + _resampled(table, resamples, seed)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return ClusterBootstrap(documents=len(table), mean=mean, error=float(means.std(ddof=1)), interval=(float(low), float(high)))


def noise(sums: Sequence[Sequence[float]], counts: Sequence[int], *, resamples: int = RESAMPLES, seed: int = 0) -> Noise:
    """Seed and document uncertainty of one arm's mean, or of a paired difference, kept apart.

    Args:
        sums: one row a seed, one entry a document, in the same order of documents. For a difference, arm minus parent.
        counts: predicted tokens of each document.

    Raises:
        RequestError: no seed, rows that differ in length from counts, and what `cluster_bootstrap` refuses.
    """
    if not sums:
        raise RequestError("there is no seed; give one row of document sums for each.")
    for row in sums:
        _check(len(row), counts, resamples)
    tokens = sum(counts)
    spread = standard_deviation([math.fsum(row) / tokens for row in sums])
    averages = [math.fsum(document) / len(sums) for document in zip(*sums, strict=True)]
    documents = cluster_bootstrap(averages, counts, resamples=resamples, seed=seed)
    seed_error = None if spread is None else spread / math.sqrt(len(sums))
    return Noise(
        seeds=len(sums),
        documents=documents.documents,
        mean=documents.mean,
        seed_error=seed_error,
        document_error=documents.error,
        document_interval=documents.interval,
        total_error=None if seed_error is None else math.hypot(seed_error, documents.error),
    )


def _resampled(table: numpy.ndarray, resamples: int, seed: int) -> numpy.ndarray:
    import numpy as np

    generator = np.random.default_rng(seed)
    documents = len(table)
    means = np.empty(resamples)
    step = max(1, DRAWS_AT_ONCE // documents)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        picks = generator.multinomial(documents, np.full(documents, 1 / documents), size=size)
        totals = picks @ table
        means[start : start + size] = totals[:, 0] / totals[:, 1]
    return means


def _check(length: int, counts: Sequence[int], resamples: int) -> None:
    if length != len(counts):
        raise RequestError(f"each document needs a sum and a count; there are {length} sums and {len(counts)} counts.")
    if length < 2:
        raise RequestError(f"evaluation noise needs at least two documents, not {length}.")
    if any(count < 1 for count in counts):
        raise RequestError("every document needs at least one predicted token; leave out those with none.")
    if resamples < 100:
        raise RequestError(f"resamples is {resamples}; fewer than 100 say nothing about an interval's ends.")
