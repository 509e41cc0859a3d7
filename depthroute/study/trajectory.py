"""The gap along training: bands over milestones, and whether it closes.

A gap is arm minus parent at one milestone, in nats per token: negative is better. All milestones of a seed belong to one run, so that
their errors go up and down together; what changes along training is therefore taken within each seed first, and over seeds then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from depthroute.common.errors import RequestError
from depthroute.study.statistics import CONFIDENCE, standard_deviation, t_interval

Verdict = Literal["closing", "widening", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The gap at one milestone over seeds.

    `t_interval` holds the mean in 95 % of studies at this milestone alone; `band` is this milestone's part of a band that holds all of
    them at once in 95 %. With `sd` they are None with one seed.
    """

    tokens: float
    mean: float
    sd: float | None
    t_interval: tuple[float, float] | None
    band: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the gap along training: its value in each seed, their mean, and the 95 % t interval (None with one seed)."""

    differences: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How the gap changes with tokens.

    `first_to_last` is the gap at the last milestone less that at the first. `slope` is nats per doubling of tokens. `size_slope` is the
    same with the sign of the gap taken out, so that it is negative where the gap shrinks towards zero, whichever arm is ahead; None where
    the mean gap is exactly zero. `side` is the gap's mean over milestones, and `verdict` is "undecided" unless its interval leaves zero out
    (the gap has a side it could close from) and the interval of `size_slope` does too.
    """

    first_to_last: Change
    slope: Change
    size_slope: Change | None
    side: Change
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The gap at each milestone, and its trend: None with one milestone."""

    seeds: int
    points: tuple[Point, ...]
    trend: Trend | None


def trajectory(tokens: Sequence[float], differences: Sequence[Sequence[float]]) -> Trajectory:
    """Follow the gap over milestones.

    The band is Bonferroni's: with m milestones each t interval has confidence 1 - 0.05 / m and n - 1 degrees of freedom. It holds
    whatever the correlation of milestones, which a narrower max-t band would have to estimate: from three seeds at four milestones such a
    band covered 86 % of simulated studies, from five 93 %. Milestones that move together make Bonferroni's wider than it need be, covering
    up to 97 %.

    A seed's slope is the least-squares line of its gap against log2 of tokens. The verdict's sign is that of the mean gap over seeds and
    milestones; it is one sign for all seeds, since the size of each seed's own gap would call noise around zero a gap.

    Args:
        tokens: consumed at each milestone, rising.
        differences: one row a seed, one entry a milestone.

    Raises:
        RequestError: no milestone or seed, rows of another length than tokens, tokens that are not positive, finite and rising, or a
            difference that is not finite.
    """
    _check(tokens, differences)
    columns = list(zip(*differences, strict=True))
    points = tuple(_point(at, column, len(tokens)) for at, column in zip(tokens, columns, strict=True))
    return Trajectory(seeds=len(differences), points=points, trend=_trend(tokens, differences) if len(tokens) > 1 else None)


def _point(tokens: float, column: Sequence[float], milestones: int) -> Point:
    sd = standard_deviation(column)
    mean = math.fsum(column) / len(column)
    band = None
    if sd is not None:
        from scipy.special import stdtrit

        half = float(stdtrit(len(column) - 1, 1 - (1 - CONFIDENCE) / (2 * milestones))) * sd / math.sqrt(len(column))
        band = (mean - half, mean + half)
    return Point(tokens=tokens, mean=mean, sd=sd, t_interval=t_interval(column), band=band)


def _trend(tokens: Sequence[float], differences: Sequence[Sequence[float]]) -> Trend:
    doublings = [math.log2(at / tokens[0]) for at in tokens]
    centre = math.fsum(doublings) / len(doublings)
    square = math.fsum((doubling - centre) ** 2 for doubling in doublings)
    slopes = [math.fsum((at - centre) * gap for at, gap in zip(doublings, row, strict=True)) / square for row in differences]
    side = _change([math.fsum(row) / len(row) for row in differences])
    slope = _change(slopes)
    size_slope = _change([math.copysign(1.0, side.mean) * value for value in slopes]) if side.mean != 0 else None
    verdict: Verdict = "undecided"
    if size_slope is not None and size_slope.interval is not None and side.interval is not None:
        has_side = side.interval[0] > 0 or side.interval[1] < 0
        if has_side and size_slope.interval[1] < 0:
            verdict = "closing"
        elif has_side and size_slope.interval[0] > 0:
            verdict = "widening"
    first_to_last = _change([row[-1] - row[0] for row in differences])
    return Trend(first_to_last=first_to_last, slope=slope, size_slope=size_slope, side=side, verdict=verdict)


def _change(values: Sequence[float]) -> Change:
    return Change(differences=tuple(values), mean=math.fsum(values) / len(values), interval=t_interval(values))


def _check(tokens: Sequence[float], differences: Sequence[Sequence[float]]) -> None:
    if not tokens:
        raise RequestError("there is no milestone; give the tokens of at least one.")
    if not differences:
        raise RequestError("there is no seed to follow; run at least one pair to its end.")
    last = 0.0
    for at in tokens:
        if not (math.isfinite(at) and at > last):
            raise RequestError(f"tokens of milestones must be positive, finite and rising, not {list(tokens)}.")
        last = at
    for row in differences:
        if len(row) != len(tokens):
            raise RequestError(f"each seed needs one difference for each of {len(tokens)} milestones, not {len(row)}.")
