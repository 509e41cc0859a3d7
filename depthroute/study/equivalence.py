"""Equivalence of an arm and its parent: evidence for no difference that matters, which a large p is not.

A control that claims to change nothing states a margin before the study: the largest difference in nats per token that would not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from depthroute.common.errors import RequestError
from depthroute.study.statistics import standard_deviation

ALPHA = 0.05

Verdict = Literal["equivalent", "better", "worse", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Two one-sided t tests of paired differences against a margin.

    `p_above_lower` tests mean <= -margin, `p_below_upper` tests mean >= margin, and `p` is the larger. `interval` has confidence
    1 - 2 alpha. `verdict`: "equivalent" when the interval lies inside the margin, which is when p < alpha; "better" when it lies wholly
    below -margin and "worse" when wholly above it (a lower NLL is better); "undecided" otherwise. "Equivalent" does not say that the
    difference is zero: with many seeds a small difference is both equivalent and clearly not zero.
    """

    seeds: int
    margin: float
    alpha: float
    mean: float
    p_above_lower: float
    p_below_upper: float
    p: float
    interval: tuple[float, float]
    verdict: Verdict


def equivalence(differences: Sequence[float], margin: float, *, alpha: float = ALPHA) -> Equivalence:
    """Paired TOST: is the mean difference inside (-margin, margin)?

    With se = sd / sqrt(n) and n - 1 degrees of freedom, p_above_lower = P(T >= (mean + margin) / se) and
    p_below_upper = P(T <= (mean - margin) / se); the interval is mean -+ t(1 - alpha) se, 90 % at alpha 0.05. (D. J. Schuirmann, "A
    comparison of the two one-sided tests procedure and the power approach", J. Pharmacokinetics and Biopharmaceutics 15, 1987.)

    Args:
        differences: arm minus parent in nats per token, one per seed.
        margin: in nats per token, stated before the differences were seen.
        alpha: the level of each one-sided test, and of the claim.

    Raises:
        RequestError: fewer than two seeds, a difference that is not finite, a margin that is not positive and finite, or an alpha not
            between 0 and 0.5.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise RequestError(f"margin is {margin}; it must be positive, in nats per token.")
    if not 0 < alpha < 0.5:
        raise RequestError(f"alpha is {alpha}; it must lie between 0 and 0.5.")
    sd = standard_deviation(differences)
    if sd is None:
        raise RequestError("equivalence needs at least two seeds, not 1.")
    from scipy.special import stdtrit

    count = len(differences)
    mean = math.fsum(differences) / count
    error = sd / math.sqrt(count)
    half = float(stdtrit(count - 1, 1 - alpha)) * error
    interval = (mean - half, mean + half)
    p_above_lower = _lower_tail(-(mean + margin), error, count - 1)
    p_below_upper = _lower_tail(mean - margin, error, count - 1)
    p = max(p_above_lower, p_below_upper)
    verdict: Verdict = "undecided"
    if p < alpha:
        verdict = "equivalent"
    elif interval[1] < -margin:
        verdict = "better"
    elif interval[0] > margin:
        verdict = "worse"
    return Equivalence(
        seeds=count,
        margin=margin,
        alpha=alpha,
        mean=mean,
        p_above_lower=p_above_lower,
        p_below_upper=p_below_upper,
        p=p,
        interval=interval,
        verdict=verdict,
    )


def _lower_tail(distance: float, error: float, freedom: int) -> float:
    """P(T <= distance / error). Without spread the side alone decides, and a mean on the margin is no evidence either way."""
    if error == 0:
        return 0.5 if distance == 0 else float(distance > 0)
    from scipy.special import stdtr

    return float(stdtr(freedom, distance / error))
