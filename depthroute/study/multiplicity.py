"""Several arms against one parent: p values that hold for all of them together.

A study with ten arms that have no effect shows one of them below 0.05 four times in ten. Holm's procedure keeps the chance of any false
claim at the level, whatever the dependence between the arms; arms that share their parent's seeds do depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from depthroute.common.errors import RequestError
from depthroute.study.statistics import standard_deviation


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjusted p values, in the order of the arms given.

    With the m p values in rising order, the adjusted p of rank i (from 1) is max over j <= i of min(1, (m - j + 1) p_(j)). Equal p values
    get equal adjusted ones. An arm is claimed at level alpha when its adjusted p is at most alpha. (S. Holm, "A simple sequentially
    rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.)

    The smallest sign-flip p of n seeds is 2 / 2^n, and the first step multiplies it by m: with 6 seeds and two arms that test can claim
    nothing at 0.05, and 7 seeds serve three arms at most.

    Args:
        p_values: one p per arm. The family is all the arms that the plan names, not those that look good.

    Raises:
        RequestError: no arm, or a p outside 0 to 1.
    """
    if not p_values:
        raise RequestError("there is no p value to adjust; name at least one arm.")
    for arm, p in p_values.items():
        if not 0 <= p <= 1:
            raise RequestError(f"the p value of {arm} is {p}; a p value lies between 0 and 1.")
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, arm in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[arm]))
        adjusted[arm] = largest
    return {arm: adjusted[arm] for arm in p_values}


def paired_t_p(differences: Sequence[float]) -> float:
    """The two-sided p of the paired t test, n - 1 degrees of freedom: at most 0.05 where the 95 % t interval leaves zero out.

    t = mean / (sd / sqrt(n)). Differences that are all equal have no spread: p is then 1 if they are zero, and 0 otherwise.

    Raises:
        RequestError: fewer than two seeds, or a difference that is not finite.
    """
    sd = standard_deviation(differences)
    if sd is None:
        raise RequestError("a t test needs at least two seeds, not 1.")
    mean = math.fsum(differences) / len(differences)
    if mean == 0:
        return 1.0
    if sd == 0:
        return 0.0
    from scipy.special import stdtr

    return 2 * float(stdtr(len(differences) - 1, -abs(mean) / (sd / math.sqrt(len(differences)))))
