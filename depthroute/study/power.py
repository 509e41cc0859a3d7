"""How many seeds a paired comparison needs, for a difference or for equivalence, from the spread of a pilot's differences.

The pilot's mean plays no part: powering a study for the effect that a few seeds happened to show promises too much. The effect is a
margin, the smallest difference worth finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from depthroute.common.errors import RequestError
from depthroute.study.statistics import standard_deviation

ALPHA = 0.05
POWER = 0.8
# How sure the cautious number of seeds is of reaching the power, given that the pilot's spread is itself an estimate.
ASSURANCE = 0.8
MOST_SEEDS = 100_000
# Standard deviations of a normal variable; less than 3e-19 of its mass is beyond.
MASS_REACH = 9.0


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


@dataclass(frozen=True, kw_only=True)
class EquivalenceSeeds:
    """Seeds for a claim of equivalence within a margin, if the true difference is `true`. The other fields are those of `SeedsNeeded`."""

    margin: float
    true: float
    alpha: float
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
    if not (math.isfinite(margin) and margin != 0):
        raise RequestError(f"margin is {margin}; it must be a difference other than zero.")
    _check_power(power, alpha)
    sd, cautious_sd = _spreads(pilot)

    def reached(seeds: int, spread: float) -> float:
        return paired_t_power(seeds, margin, spread, alpha=alpha, two_sided=two_sided)

    seeds, found = _fewest(reached, sd, power)
    cautious_seeds, cautious_found = _fewest(reached, cautious_sd, power)
    return SeedsNeeded(
        margin=margin,
        alpha=alpha,
        two_sided=two_sided,
        pilot_seeds=len(pilot),
        sd=sd,
        seeds=seeds,
        power=found,
        cautious_sd=cautious_sd,
        cautious_seeds=cautious_seeds,
        cautious_power=cautious_found,
    )


def equivalence_power(seeds: int, margin: float, sd: float, *, true: float = 0.0, alpha: float = ALPHA) -> float:
    """The chance that the paired TOST of so many seeds concludes equivalence within `margin`, if the true difference is `true`.

    With n seeds, t = t(1 - alpha, n - 1), reach = margin sqrt(n) / sd and shift = true sqrt(n) / sd, the tests conclude it where
    |z + shift| + t u < reach, z being standard normal and u^2 chi-square over its n - 1 degrees of freedom. So the power is the integral of
    phi(z) P(chi2 < (n - 1) ((reach - |z + shift|) / t)^2) over |z + shift| < reach. Owen's Q functions give the same. (K. F. Phillips,
    "Power of the two one-sided tests procedure in bioequivalence", J. Pharmacokinetics and Biopharmaceutics 18, 1990.)

    Args:
        seeds: pairs, at least 2.
        margin: in nats per token.
        sd: standard deviation of the paired differences.
        true: the true difference; at or beyond the margin the result is the chance of a false claim, at most alpha.
        alpha: the level of each one-sided test.

    Raises:
        RequestError: fewer than two seeds, an sd or margin that is not positive and finite, a `true` that is not finite, or an alpha not
            between 0 and 0.5.
    """
    if seeds < 2:
        raise RequestError(f"seeds is {seeds}; a t test needs at least 2.")
    for name, value in (("sd", sd), ("margin", margin)):
        if not (math.isfinite(value) and value > 0):
            raise RequestError(f"{name} is {value}; it must be positive and finite.")
    if not math.isfinite(true):
        raise RequestError(f"true is {true}; it must be finite.")
    if not 0 < alpha < 0.5:
        raise RequestError(f"alpha is {alpha}; it must lie between 0 and 0.5.")
    from scipy.integrate import quad
    from scipy.special import chdtr, stdtrit

    freedom = seeds - 1
    critical = float(stdtrit(freedom, 1 - alpha))
    reach, shift = margin * math.sqrt(seeds) / sd, true * math.sqrt(seeds) / sd

    def density(z: float) -> float:
        room = max(0.0, reach - abs(z + shift))
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * float(chdtr(freedom, freedom * (room / critical) ** 2))

    low, high = max(-MASS_REACH, -reach - shift), min(MASS_REACH, reach - shift)
    if low >= high:
        return 0.0
    # The kink of |z + shift|, and on both sides of it the step of the chi-square part (`_noncentral_upper_tail`).
    width = critical / math.sqrt(2 * freedom)
    steps = [reach - critical + times * width for times in (-6, -2, 0, 2, 6)]
    points = [point for point in (-shift, *(sign * step - shift for step in steps if step > 0 for sign in (-1, 1))) if low < point < high]
    return min(1.0, float(quad(density, low, high, points=points or None, epsabs=1e-12, epsrel=1e-10, limit=200)[0]))


def seeds_for_equivalence(
    pilot: Sequence[float], margin: float, *, true: float = 0.0, power: float = POWER, alpha: float = ALPHA
) -> EquivalenceSeeds:
    """The fewest seeds whose paired TOST concludes equivalence with chance `power`, if the true difference is `true`.

    A true difference of exactly zero is the easiest case: half a margin off, almost three times as many seeds are needed. The cautious sd
    is that of `seeds_needed`.

    Args:
        pilot: paired differences, arm minus parent in nats per token, one per seed. They say how far seeds spread, nothing else.
        margin: the largest difference that would not matter, in nats per token, as given to `equivalence`.
        true: the true difference, inside the margin.
        power: the chance of concluding equivalence.
        alpha: the level of each one-sided test.

    Raises:
        RequestError: fewer than two pilot seeds, differences without spread or not finite, a margin that is not positive, a true difference
            not inside it, a power that is not above alpha and below 1, or more than 100,000 seeds needed.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise RequestError(f"margin is {margin}; it must be positive, in nats per token.")
    if not abs(true) < margin:
        raise RequestError(f"true is {true}; arms that differ by the margin ({margin}) or more are not equivalent, so no seeds show that.")
    _check_power(power, alpha)
    sd, cautious_sd = _spreads(pilot)

    def reached(seeds: int, spread: float) -> float:
        return equivalence_power(seeds, margin, spread, true=true, alpha=alpha)

    seeds, found = _fewest(reached, sd, power)
    cautious_seeds, cautious_found = _fewest(reached, cautious_sd, power)
    return EquivalenceSeeds(
        margin=margin,
        true=true,
        alpha=alpha,
        pilot_seeds=len(pilot),
        sd=sd,
        seeds=seeds,
        power=found,
        cautious_sd=cautious_sd,
        cautious_seeds=cautious_seeds,
        cautious_power=cautious_found,
    )


def _check_power(power: float, alpha: float) -> None:
    if not 0 < alpha < power < 1:
        raise RequestError(f"power is {power} and alpha {alpha}; they must satisfy 0 < alpha < power < 1.")


def _spreads(pilot: Sequence[float]) -> tuple[float, float]:
    """The pilot's sd and its upper confidence bound."""
    sd = standard_deviation(pilot)
    if sd is None:
        raise RequestError("a pilot needs at least two seeds, not 1: one difference has no spread.")
    if sd == 0:
        raise RequestError("all of the pilot's differences are equal; without spread it cannot say how many seeds are needed.")
    from scipy.special import chdtri

    freedom = len(pilot) - 1
    return sd, sd * math.sqrt(freedom / float(chdtri(freedom, ASSURANCE)))


def _fewest(reached: Callable[[int, float], float], sd: float, power: float) -> tuple[int, float]:
    """Bisection: the chance reached with a number of seeds and an sd rises with the seeds.

    That of equivalence first falls from two seeds on where the sd is large, but only below alpha, and a power is above alpha.
    """
    few, enough = 1, 2
    while reached(enough, sd) < power:
        few, enough = enough, 2 * enough
        if few >= MOST_SEEDS:
            raise RequestError(f"this margin needs more than {MOST_SEEDS} seeds where the sd is {sd:.3g}; state a larger margin.")
    while enough - few > 1:
        middle = (few + enough) // 2
        if reached(middle, sd) < power:
            few = middle
        else:
            enough = middle
    return enough, reached(enough, sd)


def _noncentral_upper_tail(critical: float, freedom: int, shift: float) -> float:
    """P(T > critical) of noncentral t, critical > 0: the integral of phi(z) P(chi2 < freedom ((z + shift) / critical)^2) over z > -shift.

    scipy's own distribution function is nan at some noncentralities beyond 3 and off by 1e-7 in the wrong tail (`nctdtr`, scipy 1.17.1).
    """
    from scipy.integrate import quad
    from scipy.special import chdtr

    def density(z: float) -> float:
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * float(chdtr(freedom, freedom * ((z + shift) / critical) ** 2))

    low = max(-MASS_REACH, -shift)
    if low >= MASS_REACH:
        return 0.0
    # With many degrees of freedom the chi-square part is a steep step, which the integration would not see by itself.
    width = critical / math.sqrt(2 * freedom)
    points = [point for point in (critical - shift + times * width for times in (-6, -2, 0, 2, 6)) if low < point < MASS_REACH]
    return float(quad(density, low, MASS_REACH, points=points or None, epsabs=1e-12, epsrel=1e-10, limit=200)[0])
