"""Statistics of paired seeds: pure functions of one number per seed.

A difference is arm minus parent, in nats per token: negative is better. The t interval is the headline. A percentile bootstrap of few
seeds is too narrow (with 5 seeds it covers 84.5 % where it says 95 %) and is given because papers print it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthroute.common.errors import RequestError

if TYPE_CHECKING:
    import numpy

CONFIDENCE = 0.95
# Beyond these many seeds the exact enumerations outgrow memory, and fixed pseudo-random draws stand in for them.
MOST_ENUMERATED_FLIPS = 20
MOST_ENUMERATED_RESAMPLES = 6
DRAWS = 100_000


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What one comparison says at one milestone. The fields are those of `statistics.json`.

    `sd` and `t_interval` are None with one seed. `wins` counts the seeds in which the arm's NLL is lower.
    """

    differences: tuple[float, ...]
    mean: float
    sd: float | None
    t_interval: tuple[float, float] | None
    bootstrap_interval: tuple[float, float]
    sign_flip_p: float
    wins: int
    losses: int
    ties: int
    relative_perplexity_reduction: tuple[float, ...]
    mean_relative_perplexity_reduction: float


def paired(arm: Sequence[float], parent: Sequence[float]) -> Paired:
    """Compare an arm with its parent, seed by seed.

    Args:
        arm, parent: validation NLL in nats per token, one per seed, in the same order of seeds.

    Raises:
        RequestError: no seed, different numbers of seeds, or a value that is not finite.
    """
    if len(arm) != len(parent):
        raise RequestError(f"paired seeds come in equal numbers, not {len(arm)} of the arm and {len(parent)} of the parent.")
    differences = [a - p for a, p in zip(arm, parent, strict=True)]
    _check(differences)
    reductions = [-math.expm1(difference) for difference in differences]
    return Paired(
        differences=tuple(differences),
        mean=_mean(differences),
        sd=standard_deviation(differences),
        t_interval=t_interval(differences),
        bootstrap_interval=bootstrap_interval(differences),
        sign_flip_p=sign_flip_p(differences),
        wins=sum(difference < 0 for difference in differences),
        losses=sum(difference > 0 for difference in differences),
        ties=sum(difference == 0 for difference in differences),
        relative_perplexity_reduction=tuple(reductions),
        mean_relative_perplexity_reduction=_mean(reductions),
    )


def standard_deviation(differences: Sequence[float]) -> float | None:
    """The sample standard deviation (divisor n - 1); None with one seed."""
    _check(differences)
    if len(differences) == 1:
        return None
    mean = _mean(differences)
    return math.sqrt(math.fsum((difference - mean) ** 2 for difference in differences) / (len(differences) - 1))


def t_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """The two-sided 95 % Student-t interval of the mean difference, n - 1 degrees of freedom; None with one seed."""
    sd = standard_deviation(differences)
    if sd is None:
        return None
    from scipy.special import stdtrit  # a tenth of the import time of scipy.stats

    count = len(differences)
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * sd / math.sqrt(count)
    mean = _mean(differences)
    return mean - half, mean + half


def sign_flip_p(differences: Sequence[float]) -> float:
    """The two-sided sign-flip p: how often random signs give a mean at least as far from zero as the one seen.

    All 2^n sign patterns are counted up to 20 seeds, so the p is exact and never below 2 / 2^n: 0.0625 with 5 seeds, 0.03125 with 6.
    Means that are equal but for rounding count as equal. Beyond 20 seeds the p is (1 + hits) / (1 + 100,000) over that many
    fixed pseudo-random patterns.
    """
    import numpy as np

    _check(differences)
    values = np.asarray(differences, dtype=np.float64)
    # A sum of n terms in any order is within n roundings of the largest partial sum, which the sum of magnitudes bounds.
    tolerance = len(values) * np.finfo(np.float64).eps * np.abs(values).sum()
    if len(values) <= MOST_ENUMERATED_FLIPS:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate((sums + value, sums - value))
        return float(np.mean(np.abs(sums) >= abs(values.sum()) - tolerance))
    signs = np.random.default_rng(0).integers(0, 2, size=(DRAWS, len(values)), dtype=np.int8) * 2 - 1
    hits = int(np.sum(np.abs(signs @ values) >= abs(values.sum()) - tolerance))
    return (1 + hits) / (1 + DRAWS)


def bootstrap_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile interval of the mean over bootstrap resamples of the seeds.

    Up to 6 seeds all n^n resamples are enumerated, so there is no chance in it; beyond, 100,000 fixed pseudo-random resamples are drawn.
    The ends are quantiles of that discrete distribution (the inverse of its distribution function, averaged where it is flat), which
    mirrors when every difference changes its sign. With 5 seeds all of numpy's quantile definitions give the paper's intervals; they part
    with 2 and 3 seeds, where interpolation would narrow the interval.
    """
    import numpy as np

    _check(differences)
    values = np.asarray(differences, dtype=np.float64)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(_resampled_means(values), [tail, 1 - tail], method="averaged_inverted_cdf")
    return float(low), float(high)


def _resampled_means(values: numpy.ndarray) -> numpy.ndarray:
    import numpy as np

    count = len(values)
    if count <= MOST_ENUMERATED_RESAMPLES:
        picks = np.indices((count,) * count).reshape(count, -1).T
    else:
        picks = np.random.default_rng(0).integers(0, count, size=(DRAWS, count))
    means: numpy.ndarray = values[picks].mean(axis=1)
    return means


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _check(differences: Sequence[float]) -> None:
    if not differences:
        raise RequestError("there is no seed to compare; run at least one pair to its end.")
    for difference in differences:
        if not math.isfinite(difference):
            raise RequestError(f"a paired difference is {difference}; every NLL must be a finite number.")
