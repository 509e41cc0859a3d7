"""How many seeds a paired comparison needs, from the spread of a pilot's differences.

The pilot's mean plays no part: powering a study for the effect that a few seeds happened to show promises too much. The effect is a
margin, the smallest difference worth finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from depthroute.common.errors import RequestError
from depthroute.study.statistics import standard_deviation

ALPHA = 0.05
POWER = 0.8
# How sure the cautious number of seeds is of reaching the power, given that the pilot's spread is itself an estimate.
ASSURANCE = 0.8
MOST_SEEDS = 100_000


@dataclass(frozen=True, kw_only=True)
class SeedsNeeded:
    """Seeds for a margin at a power.

    `seeds` takes the pilot's `sd` at its word. `cautious_seeds` takes `cautious_sd`, the upper 80 % confidence bound of the sd: with
    five pilot seeds that is 1.56 times the sd, and 2.4 times the seeds. `power` and `cautious_power` are what those seeds reach, each
    if its sd is the true one.
    """

    margin: float
    alpha: float
    two_sided: bool
    pilot_seeds: int
    sd: float
    seeds: int
    power: float
    cautious_sd: float
    cautious_seeds: int
    cautious_power: float


def paired_t_power(seeds: int, margin: float, sd: float, *, alpha: float = ALPHA, two_sided: bool = True) -> float:
    """The chance that the paired t test of so many seeds finds a true difference of `margin`.

    t is noncentral t with n - 1 degrees of freedom and noncentrality margin sqrt(n) / sd. One-sided: P(t > t(1 - alpha)). Two-sided:
    P(|t| > t(1 - alpha / 2)), the wrong side included, so that it is alpha at a margin of zero. (J. Cohen, "Statistical Power Analysis
    for the Behavioral Sciences", 1988, chapter 2.)

    Args:
        seeds: pairs, at least 2.
        margin: the true difference in nats per token; only its size counts.
        sd: standard deviation of the paired differences.

    Raises:
        RequestError: fewer than two seeds, an sd that is not positive and finite, a margin that is not finite, or an alpha not between
            0 and 0.5.
    """
    if seeds < 2:
        raise RequestError(f"seeds is {seeds}; a t test needs at least 2.")
    if not (math.isfinite(sd) and sd > 0):
        raise RequestError(f"sd is {sd}; it must be positive and finite.")
    if not math.isfinite(margin):
        raise RequestError(f"margin is {margin}; it must be finite.")
    if not 0 < alpha < 0.5:
        raise RequestError(f"alpha is {alpha}; it must lie between 0 and 0.5.")
    from scipy.special import stdtrit

    freedom = seeds - 1
    shift = abs(margin) * math.sqrt(seeds) / sd
    critical = float(stdtrit(freedom, 1 - alpha / (2 if two_sided else 1)))
    found = _noncentral_upper_tail(critical, freedom, shift)
    if two_sided:
        found += _noncentral_upper_tail(critical, freedom, -shift)
    return min(1.0, found)


def seeds_needed(
    pilot: Sequence[float], margin: float, *, power: float = POWER, alpha: float = ALPHA, two_sided: bool = True
) -> SeedsNeeded:
    """The fewest seeds whose paired t test finds a difference of `margin` with chance `power`.

    The cautious sd is sd sqrt((n - 1) / chi2), chi2 the 20 % quantile of the chi-square distribution with n - 1 degrees of freedom: the
    true sd is below it in four of five pilots, and the cautious seeds then have the power. (R. H. Browne, "On the use of a pilot sample
    for sample size determination", Statistics in Medicine 14, 1995.)

    Args:
        pilot: paired differences, arm minus parent in nats per token, one per seed. They say how far seeds spread, nothing else.
        margin: the smallest difference worth finding, in nats per token.
        power: the chance of finding it.
        alpha, two_sided: of the t test.

    Raises:
        RequestError: fewer than two pilot seeds, differences without spread or not finite, a margin of zero, a power that is not above
            alpha and below 1, or more than 100,000 seeds needed.
    """
    sd = standard_deviation(pilot)
    if sd is None:
        raise RequestError("a pilot needs at least two seeds, not 1: one difference has no spread.")
    if sd == 0:
        raise RequestError("all of the pilot's differences are equal; without spread it cannot say how many seeds are needed.")
    if not (math.isfinite(margin) and margin != 0):
        raise RequestError(f"margin is {margin}; it must be a difference other than zero.")
    if not 0 < alpha < power < 1:
        raise RequestError(f"power is {power} and alpha {alpha}; they must satisfy 0 < alpha < power < 1.")
    from scipy.special import chdtri

    freedom = len(pilot) - 1
    cautious_sd = sd * math.sqrt(freedom / float(chdtri(freedom, ASSURANCE)))
    seeds, reached = _fewest(margin, sd, power, alpha, two_sided)
    cautious_seeds, cautious_reached = _fewest(margin, cautious_sd, power, alpha, two_sided)
    return SeedsNeeded(
        margin=margin,
        alpha=alpha,
        two_sided=two_sided,
        pilot_seeds=len(pilot),
        sd=sd,
        seeds=seeds,
        power=reached,
        cautious_sd=cautious_sd,
        cautious_seeds=cautious_seeds,
        cautious_power=cautious_reached,
    )


def _fewest(margin: float, sd: float, power: float, alpha: float, two_sided: bool) -> tuple[int, float]:
    """Bisection: power rises with the seeds."""

    def reached(seeds: int) -> float:
        return paired_t_power(seeds, margin, sd, alpha=alpha, two_sided=two_sided)

    few, enough = 1, 2
    while reached(enough) < power:
        few, enough = enough, 2 * enough
        if few >= MOST_SEEDS:
            raise RequestError(f"a margin of {margin} needs more than {MOST_SEEDS} seeds where the sd is {sd:.3g}; state a larger margin.")
    while enough - few > 1:
        middle = (few + enough) // 2
        if reached(middle) < power:
            few = middle
        else:
            enough = middle
    return enough, reached(enough)


def _noncentral_upper_tail(critical: float, freedom: int, shift: float) -> float:
    """P(T > critical) of noncentral t, critical > 0: the integral of phi(z) P(chi2 < freedom ((z + shift) / critical)^2) over z > -shift.

    scipy's own distribution function is nan at some noncentralities beyond 3 and off by 1e-7 in the wrong tail (`nctdtr`, scipy 1.17.1).
    """
    from scipy.integrate import quad
    from scipy.special import chdtr

    def density(z: float) -> float:
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * float(chdtr(freedom, freedom * ((z + shift) / critical) ** 2))

    reach = 9.0  # standard deviations; less than 3e-19 of the mass is beyond
    low = max(-reach, -shift)
    if low >= reach:
        return 0.0
    # With many degrees of freedom the chi-square part is a steep step, which the integration would not see by itself.
    width = critical / math.sqrt(2 * freedom)
    points = [point for point in (critical - shift + times * width for times in (-6, -2, 0, 2, 6)) if low < point < reach]
    return float(quad(density, low, reach, points=points or None, epsabs=1e-12, epsrel=1e-10, limit=200)[0])
