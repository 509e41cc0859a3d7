"""The methods of a scaling study as curves of loss against training FLOPs: which arms are one curve, and what one saves another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.study.scaling import LARGEST_LOG, Advantage, Curve, fit_advantage, power_law
from depthroute.study.statistics import CONFIDENCE

SCALES = 3  # fewer give a fitted law no interval

Losses = Mapping[tuple[str, int], float]
Compute = Mapping[str, Mapping[str, float | None]]
Points = dict[str, tuple[float, tuple[float, ...]]]

METHOD = "method"
"""The factor by which a study over scales names what is one curve."""


def scaling_points(plan: Mapping[str, Any], method: str, losses: Losses, compute: Compute) -> Points:
    """By scale: the training FLOPs and the losses of the seeds of a method's arm. Of several arms of one method at one scale (as when its
    learning rate is tuned) the one with the lowest mean loss stands for it; scales come in the plan's order."""
    found: Points = {}
    for arm in plan["arms"]:
        flops = training_flops(compute[arm["name"]]) if arm["name"] in compute else None
        ends = tuple(losses[arm["name"], seed] for seed in arm["seeds"] if (arm["name"], seed) in losses)
        if str(arm["factors"].get(METHOD)) != method or flops is None or not ends:
            continue
        best = found.get(arm["scale"])
        if best is None or math.fsum(ends) / len(ends) < math.fsum(best[1]) / len(best[1]):
            found[arm["scale"]] = (flops, ends)
    return found


def curve_of(points: Points, scales: Sequence[str]) -> Curve:
    """The runs of one method as a curve, one size a scale."""
    runs = [(points[scale][0], loss, scale) for scale in scales for loss in points[scale][1]]
    return Curve(compute=tuple(c for c, _, _ in runs), loss=tuple(loss for _, loss, _ in runs), sizes=tuple(s for _, _, s in runs))


def advantage_of(arm: Points, parent: Points) -> Advantage:
    """The compute advantage over the scales that both have, at the largest budget that both reach.

    Raises:
        RequestError: fewer than three scales, or a baseline that never reaches the arm's loss.
    """
    common = [scale for scale in arm if scale in parent]
    if len(common) < SCALES:
        raise RequestError(f"a compute advantage needs {SCALES} scales, not {len(common)}.")
    budget = min(max(points[scale][0] for scale in common) for points in (arm, parent))
    return fit_advantage(curve_of(arm, common), curve_of(parent, common), budget)


def law_band(curve: Curve, compute: Sequence[float]) -> list[tuple[float, float]]:
    """The 95 % interval of a fitted law's loss at each compute, by the delete-one jackknife over sizes of the law's log loss.

    t(0.975, g - 2) with g sizes, as the intervals of `depthroute.study.scaling.fit`. With three sizes that is one degree of freedom, and a
    band that shows little but how few three are.

    Raises:
        RequestError: fewer than three sizes.
    """
    from scipy.special import stdtrit

    sizes = list(dict.fromkeys(curve.labels))
    if len(sizes) < SCALES:
        raise RequestError(f"the band of a law needs {SCALES} sizes, not {len(sizes)}.")
    law, others = power_law(curve), [power_law(curve.without(size)) for size in sizes]
    quantile, count = float(stdtrit(len(sizes) - 2, (1 + CONFIDENCE) / 2)), len(sizes)
    band = []
    for at in compute:
        middle, logs = math.log(law.loss(at)), [math.log(other.loss(at)) for other in others]
        mean = math.fsum(logs) / count
        half = quantile * math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in logs))
        band.append((math.exp(middle - half), math.exp(middle + half) if middle + half < LARGEST_LOG else math.inf))
    return band


def training_flops(compute: Mapping[str, float | None]) -> float | None:
    """All FLOPs of an arm's training, from one entry of `arm_compute`; None where its residual method has no formula."""
    plain, residual, tokens = compute["plain"], compute["residual"], compute["tokens"]
    return None if plain is None or residual is None or tokens is None else (plain + residual) * tokens
