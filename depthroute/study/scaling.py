"""Power laws of loss against compute: fits, intervals, and the compute that one arm saves another.

Intervals are by the delete-one jackknife over sizes: a law is refitted without each size in turn. Runs of one size share its shape, its
tuned learning rate and its horizon, so the size is what varies independently, not the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthroute.common.errors import RequestError
from depthroute.study.statistics import CONFIDENCE

if TYPE_CHECKING:
    import numpy

# Where the search for the irreducible loss starts, as fractions of the lowest loss.
FLOOR_STARTS = (0.0, 0.4, 0.8, 0.97)
# With an irreducible term a steeper law is not told from a step; FLOPs to this power still fit a float.
STEEPEST = 10.0
LARGEST_LOG = math.log(sys.float_info.max)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The runs of one arm: compute in any unit, loss in nats per token, and a label of each run's size.

    Without labels, runs of equal compute are one size. Arms that differ in compute at a size need labels to be compared. Other groups
    can stand in for sizes: labelled by seed, the jackknife leaves out seeds.

    Raises:
        RequestError: unequal lengths, or a compute or loss that is not positive and finite.
    """

    compute: tuple[float, ...]
    loss: tuple[float, ...]
    sizes: tuple[Hashable, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.compute) != len(self.loss) or (self.sizes is not None and len(self.sizes) != len(self.compute)):
            raise RequestError("a curve needs one compute, one loss and one size label for each run.")
        for name, values in (("compute", self.compute), ("loss", self.loss)):
            for value in values:
                if not (math.isfinite(value) and value > 0):
                    raise RequestError(f"a {name} is {value}; it must be positive and finite.")

    @property
    def labels(self) -> tuple[Hashable, ...]:
        return self.compute if self.sizes is None else self.sizes

    def without(self, size: Hashable) -> Curve:
        """The curve with all runs of one size left out."""
        kept = [index for index, label in enumerate(self.labels) if label != size]
        return Curve(
            compute=tuple(self.compute[index] for index in kept),
            loss=tuple(self.loss[index] for index in kept),
            sizes=tuple(self.labels[index] for index in kept),
        )


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """loss = floor + scale compute^-exponent. `floor` is the irreducible loss, 0 where it was not fitted."""

    scale: float
    exponent: float
    floor: float = 0.0

    def loss(self, compute: float) -> float:
        return float(self.floor + self.scale * compute**-self.exponent)

    def compute_for(self, loss: float) -> float:
        """The compute at which the law reaches a loss.

        Raises:
            RequestError: the law never reaches it, does not fall, or falls so slowly that no number holds the compute.
        """
        if self.exponent <= 0:
            raise RequestError(f"the exponent is {self.exponent:.3g}: the law does not fall with compute, so it has no compute for a loss.")
        if loss <= self.floor:
            raise RequestError(f"the law never reaches a loss of {loss:.4g}: its irreducible loss is {self.floor:.4g}.")
        log_compute = (math.log(self.scale) - math.log(loss - self.floor)) / self.exponent
        if log_compute > LARGEST_LOG:
            raise RequestError(f"the exponent is {self.exponent:.3g}: the compute for a loss of {loss:.4g} is too large for a number.")
        return math.exp(log_compute)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted law with 95 % jackknife intervals of its parameters; `floor_interval` is None where the floor was not fitted.

    `residuals` are the runs' log losses less the law's.
    """

    law: PowerLaw
    scale_interval: tuple[float, float]
    exponent_interval: tuple[float, float]
    floor_interval: tuple[float, float] | None
    residuals: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """How many times the arm's budget the baseline needs for the arm's loss; above 1 the arm saves compute. With its 95 % interval."""

    budget: float
    factor: float
    interval: tuple[float, float]


def power_law(curve: Curve, *, irreducible: bool = False) -> PowerLaw:
    """The least-squares law of log loss.

    Without an irreducible term it is the straight line of log loss against log compute. With it, the sum over runs of
    (log(floor + scale C^-exponent) - log loss)^2 is minimised over 0 <= floor < lowest loss, so a floor of zero gives the plain fit's
    criterion. Few sizes over a decade of compute hardly determine a floor; its interval says so.

    Raises:
        RequestError: fewer than two sizes by compute, or three with an irreducible term.
    """
    import numpy as np

    needed = 3 if irreducible else 2
    distinct = len(set(curve.compute))
    if distinct < needed:
        form = "a power law with an irreducible term" if irreducible else "a power law"
        raise RequestError(f"{form} needs {needed} sizes of compute, not {distinct}.")
    log_compute, loss = np.log(curve.compute), np.asarray(curve.loss, dtype=np.float64)
    if not irreducible:
        return _line(log_compute, loss, 0.0)

    from scipy.optimize import least_squares

    lowest, middle = float(loss.min()), float(log_compute.mean())
    centred = log_compute - middle  # level and exponent then hardly depend on each other, and no step overflows

    def misses(parameters: numpy.ndarray) -> numpy.ndarray:
        level, exponent, share = parameters
        predicted: numpy.ndarray = np.log(share * lowest + np.exp(level - exponent * centred)) - np.log(loss)
        return predicted

    best, best_cost = None, math.inf
    for share in FLOOR_STARTS:
        start = _line(log_compute, loss, share * lowest)
        parameters = [math.log(start.scale) - start.exponent * middle, start.exponent, share]
        if share == 0:  # the search stays inside its bounds and would only come near a floor of zero
            best, best_cost = start, 0.5 * float(np.sum(misses(np.asarray(parameters)) ** 2))
        found = least_squares(
            misses,
            np.clip(parameters, [-np.inf, -STEEPEST, 0], [np.inf, STEEPEST, 1]),
            bounds=([-np.inf, -STEEPEST, 0], [np.inf, STEEPEST, 1]),
            x_scale=[1, 0.1, 0.1],
            xtol=1e-12,
            ftol=1e-12,
            gtol=1e-12,
        )
        if float(found.cost) < best_cost:
            level, exponent, floor = (float(value) for value in found.x)
            best = PowerLaw(scale=math.exp(level + exponent * middle), exponent=exponent, floor=floor * lowest)
            best_cost = float(found.cost)
    assert best is not None  # the first start is a law
    return best


def fit(curve: Curve, *, irreducible: bool = False) -> Fit:
    """`power_law` with jackknife intervals.

    With g sizes and estimates t_(i) without size i, se^2 = (g - 1) / g sum (t_(i) - mean)^2, and the interval is
    t -+ t(0.975, g - p) se with p parameters fitted, or g - 1 degrees of freedom where the labels are seeds that each run at several
    sizes. The scale's is taken of its logarithm. (B. Efron and C. Stein, "The jackknife estimate of variance", Annals of Statistics 9,
    1981; the degrees of freedom are ours, because g - 1 covers 94 % with five sizes and 93 % with three where g - 2 covers 95 to 97 %.)
    With an irreducible term the intervals err on the wide side.

    Raises:
        RequestError: too few sizes: three are needed, and four with an irreducible term.
    """
    law = power_law(curve, irreducible=irreducible)
    sizes, freedom = _groups([curve], irreducible)
    others = [power_law(curve.without(size), irreducible=irreducible) for size in sizes]
    low, high = _interval(math.log(law.scale), [math.log(other.scale) for other in others], freedom)
    floor_low, floor_high = _interval(law.floor, [other.floor for other in others], freedom)
    return Fit(
        law=law,
        scale_interval=(math.exp(low), math.exp(high) if high < LARGEST_LOG else math.inf),
        exponent_interval=_interval(law.exponent, [other.exponent for other in others], freedom),
        floor_interval=(max(0.0, floor_low), floor_high) if irreducible else None,
        residuals=tuple(math.log(loss) - math.log(law.loss(compute)) for compute, loss in zip(curve.compute, curve.loss, strict=True)),
    )


def compute_advantage(arm: PowerLaw, baseline: PowerLaw, budget: float) -> float:
    """C' / budget, where the baseline's law reaches at C' the loss that the arm's law has at the budget.

    Raises:
        RequestError: a budget that is not positive and finite, or the baseline never reaches that loss.
    """
    if not (math.isfinite(budget) and budget > 0):
        raise RequestError(f"budget is {budget}; it must be positive and finite, in the unit of the curves' compute.")
    return baseline.compute_for(arm.loss(budget)) / budget


def fit_advantage(arm: Curve, baseline: Curve, budget: float, *, irreducible: bool = False) -> Advantage:
    """The compute advantage of fitted laws with its jackknife interval, taken of its logarithm.

    A size is left out of both arms at once, so what they share at a size (data order, tuned learning rate) does not widen the interval.
    Scaling all compute and the budget by one factor changes nothing.

    Raises:
        RequestError: arms with different sizes, too few sizes, or a baseline that never reaches the arm's loss, also without one size.
    """

    def log_factor(one: Curve, other: Curve) -> float:
        return math.log(compute_advantage(power_law(one, irreducible=irreducible), power_law(other, irreducible=irreducible), budget))

    estimate = log_factor(arm, baseline)
    sizes, freedom = _groups([arm, baseline], irreducible)
    low, high = _interval(estimate, [log_factor(arm.without(size), baseline.without(size)) for size in sizes], freedom)
    return Advantage(budget=budget, factor=math.exp(estimate), interval=(math.exp(low), math.exp(high) if high < LARGEST_LOG else math.inf))


def _line(log_compute: numpy.ndarray, loss: numpy.ndarray, floor: float) -> PowerLaw:
    import numpy as np

    log_rest = np.log(loss - floor)
    centred = log_compute - log_compute.mean()
    slope = float(centred @ log_rest / (centred @ centred))
    return PowerLaw(scale=math.exp(float(log_rest.mean() - slope * log_compute.mean())), exponent=-slope, floor=floor)


def _groups(curves: Sequence[Curve], irreducible: bool) -> tuple[list[Hashable], int]:
    """The labels to leave out in turn, and the degrees of freedom of what they say."""
    labels = list(dict.fromkeys(curves[0].labels))
    if any(set(curve.labels) != set(labels) for curve in curves):
        raise RequestError("the arms have different sizes; label runs of one size alike in both arms, and leave out what only one arm has.")
    # Seeds that each run at every size repeat the whole fit, and sizes are the points of one fit.
    repeats = all(len(set(zip(curve.labels, curve.compute, strict=True))) > len(set(curve.compute)) for curve in curves)
    fitted = 1 if repeats else 3 if irreducible else 2
    if len(labels) <= fitted:
        raise RequestError(f"intervals need {fitted + 1} sizes (2 seeds where seeds are left out), not {len(labels)}.")
    return labels, len(labels) - fitted


def _interval(estimate: float, without: Sequence[float], freedom: int) -> tuple[float, float]:
    from scipy.special import stdtrit

    count = len(without)
    mean = math.fsum(without) / count
    error = math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in without))
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return estimate - half, estimate + half
