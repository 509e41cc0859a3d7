"""Main effects of a two-level factorial on a gap: which of several factors changes what an arm gains over its parent.

Conditions are runs of a design in which every factor is at its lower or its upper level, as often with either level of every other factor.
A full factorial is such a design, and so is a half of one (G. E. P. Box, J. S. Hunter and W. G. Hunter, "Statistics for Experimenters",
2005, chapters 5 and 6). What a fraction mixes into an effect is the design's to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from depthroute.common.errors import RequestError
from depthroute.study.statistics import CONFIDENCE


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How far a gap moves when a factor goes from `low` to `high`, over all conditions: nats per token, with its 95 % t interval."""

    factor: str
    low: float
    high: float
    effect: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One run of the design: the level of every factor, and the paired differences of its seeds, arm minus parent, nats per token."""

    levels: Mapping[str, float]
    differences: Sequence[float]


def main_effects(conditions: Sequence[Condition]) -> tuple[Effect, ...]:
    """The effect of every factor: the mean gap of the conditions in which it is high, minus that of the others.

    With K conditions of n_k seeds and the within-condition variance s^2 pooled over them, an effect has variance 4 s^2 / K^2 sum 1 / n_k
    and sum (n_k - 1) degrees of freedom. So the interval is about other seeds, in these conditions.

    Raises:
        RequestError: fewer than two conditions, one without a difference, factors that differ between conditions, a factor without two
            levels that are equally frequent, two factors that are not balanced against each other, or no condition with two seeds.
    """
    from scipy.special import stdtrit

    signs = _signs(conditions)
    counts = [len(condition.differences) for condition in conditions]
    freedom = sum(counts) - len(conditions)
    if min(counts) < 1 or freedom < 1:
        raise RequestError("effects need a difference in every condition, and two seeds or more in at least one.")
    means = [math.fsum(condition.differences) / len(condition.differences) for condition in conditions]
    squares = [(d - mean) ** 2 for condition, mean in zip(conditions, means, strict=True) for d in condition.differences]
    error = math.sqrt(4 * math.fsum(squares) / freedom * math.fsum(1 / count for count in counts)) / len(conditions)
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    found = []
    for factor, row in signs.items():
        effect = 2 * math.fsum(sign * mean for sign, mean in zip(row, means, strict=True)) / len(conditions)
        levels = [condition.levels[factor] for condition in conditions]
        found.append(Effect(factor=factor, low=min(levels), high=max(levels), effect=effect, interval=(effect - half, effect + half)))
    return tuple(found)


def _signs(conditions: Sequence[Condition]) -> dict[str, list[int]]:
    """Each factor's column of the design: -1 at its lower level, 1 at its upper one."""
    if len(conditions) < 2:
        raise RequestError(f"effects need two conditions or more, not {len(conditions)}.")
    factors = list(conditions[0].levels)
    signs: dict[str, list[int]] = {}
    for condition in conditions:
        if set(condition.levels) != set(factors):
            raise RequestError(f"every condition needs a level of {', '.join(factors)}; one has {', '.join(condition.levels)}.")
    for factor in factors:
        levels = [condition.levels[factor] for condition in conditions]
        if len(set(levels)) != 2 or 2 * levels.count(max(levels)) != len(levels):
            raise RequestError(f"the factor {factor} needs two levels, each in half of the conditions; it has {sorted(levels)}.")
        signs[factor] = [1 if level == max(levels) else -1 for level in levels]
    for one, other in combinations(factors, 2):
        if sum(a * b for a, b in zip(signs[one], signs[other], strict=True)):
            raise RequestError(f"the factors {one} and {other} are not balanced against each other, so their effects cannot be told apart.")
    return signs
