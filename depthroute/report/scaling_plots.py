"""Scaling: every method's loss over training FLOPs with its fitted power law, and the compute that one method saves another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthroute.common.errors import RequestError
from depthroute.report import canvas, numbers
from depthroute.report.document import Block, FigureBlock, Panel, Paragraph, Table
from depthroute.report.numbers import NO_BREAK, NONE
from depthroute.report.stored import StoredStudy
from depthroute.report.theme import arm_color, color
from depthroute.study.curves import METHOD, SCALES, Points, advantage_of, curve_of, law_band, scaling_points
from depthroute.study.scaling import Fit, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = 40  # places at which a law is drawn


@dataclass(frozen=True)
class Method:
    """One curve: its runs by scale, its law, and the arm whose colour it has."""

    name: str
    label: str
    index: int
    points: Points
    fit: Fit
    band: Sequence[tuple[float, float, float]]


def scaling_blocks(study: StoredStudy) -> list[Block]:
    """The curves, the laws and the advantages; nothing where fewer than two methods are complete at three scales."""
    found = methods(study)
    if len(found) < 2:
        return []
    caption = (
        "Marks are single seeds, both axes logarithmic. A line is the power law loss = scale x FLOPs^-exponent fitted to a method's runs, "
        "its band the 95 % interval by leaving out one scale at a time"
        + (f"; {SCALES} scales leave one degree of freedom, and a band may run out of the panel" if _fewest(found) == SCALES else "")
        + ". FLOPs are those of the whole training, by closed formulas."
    )
    blocks: list[Block] = [FigureBlock("Loss over compute.", caption, [_panel(found)]), _laws(found)]
    words = (
        "A compute advantage is how many times the method's own budget the baseline needs for the same loss, at the largest budget that "
        "both reach; above 1 the method saves compute. Laws fitted over so short a range of compute say nothing far beyond it."
    )
    return [*blocks, _advantages(found), Paragraph(words)]


def methods(study: StoredStudy) -> list[Method]:
    """The values of the factor "method" that are complete at three scales, in the plan's order."""
    losses = {cell: found.nll for cell, found in study.cells.items() if found.nll is not None and found.reason is None}
    compute = {arm.name: {"plain": arm.plain, "residual": arm.residual, "tokens": arm.tokens} for arm in study.arms}
    found = []
    for name in dict.fromkeys(str(arm.factors[METHOD]) for arm in study.arms if METHOD in arm.factors):
        points = scaling_points(study.plan, name, losses, compute)
        if len({point[0] for point in points.values()}) < SCALES:
            continue
        curve = curve_of(points, list(points))
        try:
            law = fit(curve)
            ends = [math.log(value) for value in (min(curve.compute), max(curve.compute))]
            at = [math.exp(ends[0] + (ends[1] - ends[0]) * i / (GRID - 1)) for i in range(GRID)]
            band = [(x, *bounds) for x, bounds in zip(at, law_band(curve, at), strict=True)]
        except RequestError:
            continue
        first = next(arm for arm in study.arms if str(arm.factors.get(METHOD)) == name)
        found.append(Method(name, without_scale(first.label, first.scale), first.index, points, law, band))
    return found


def without_scale(label: str, scale: str) -> str:
    """The label of an arm without the scale at its end: `RD-AttnRes, S` is `RD-AttnRes`."""
    for ending in (f", {scale}", f" ({scale})", f" at {scale}", f" {scale}"):
        if scale and label.endswith(ending):
            return label.removesuffix(ending)
    return label


def _fewest(found: Sequence[Method]) -> int:
    return min(len(method.points) for method in found)


def _laws(found: Sequence[Method]) -> Table:
    rows = []
    for method in found:
        low, high = method.fit.exponent_interval
        rows.append([
            method.label,
            str(len(method.points)),
            f"{method.fit.law.exponent:.4f}".replace("-", numbers.MINUS),
            f"{low:.4f} to {high:.4f}".replace("-", numbers.MINUS).replace(" ", NO_BREAK),
            f"{max(map(abs, method.fit.residuals)):.4f}",
        ])  # fmt: skip
    columns = ["Method", "Scales", "Exponent", f"95{NO_BREAK}% interval", "Largest miss, log loss"]
    return Table("The fitted power laws. Intervals by leaving out one scale at a time.", columns, [(None, rows, [])])


def _advantages(found: Sequence[Method]) -> Table:
    """Every method against the first."""
    baseline, rows = found[0], []
    for method in found[1:]:
        try:
            advantage = advantage_of(method.points, baseline.points)
        except RequestError:
            rows.append([method.label, NONE, NONE, NONE])
            continue
        low, high = advantage.interval
        interval = f"{low:.3f} to {high:.3f}".replace(" ", NO_BREAK)
        rows.append([method.label, f"{advantage.factor:.3f}", interval, f"{advantage.budget:.3g}"])
    caption = f"The compute advantage over {baseline.label} at the largest budget that both reach."
    return Table(caption, ["Method", "Factor", f"95{NO_BREAK}% interval", "Budget, FLOPs"], [(None, rows, [])])


def _panel(found: Sequence[Method]) -> Panel:
    entries = [(method.index, method.label) for method in found]
    width = 620.0

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, LogFormatterSciNotation, NullFormatter, NullLocator

        top = canvas.heading(figure, "Loss over training compute", "nats per token, logarithmic")
        ax = canvas.axes(figure, left=56, top=canvas.legend(figure, top, entries, markers=True) + 8, right=20, bottom=48)
        ax.set_xscale("log")
        ax.set_yscale("log")
        losses = [loss for method in found for _, runs in method.points.values() for loss in runs]
        low, high = min(losses), max(losses)
        pad = (high / low) ** 0.08 if high > low else 1.01
        for method in found:
            hue, xs = arm_color(method.index), [x for x, _, _ in method.band]
            lower, upper = ([max(low / pad**2, min(high * pad**2, b[side])) for b in method.band] for side in (1, 2))
            ax.fill_between(xs, lower, upper, color=hue, alpha=0.13, linewidth=0)
            ax.plot(xs, [method.fit.law.loss(x) for x in xs], color=hue, linewidth=1.8, linestyle=canvas.dashes(method.index))
            at = [(flops, loss) for flops, runs in method.points.values() for loss in runs]
            marker = canvas.marker(method.index)
            ax.plot([x for x, _ in at], [y for _, y in at], marker, color=hue, markersize=6.5, markeredgewidth=0, alpha=0.85)
        ax.set_ylim(low / pad, high * pad)
        canvas.decimal_ticks(ax.yaxis, low / pad, high * pad)
        ax.yaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_minor_formatter(NullFormatter())
        flops = sorted({x for method in found for x, _ in method.points.values()})
        if math.log10(flops[-1] / flops[0]) < 2:  # a decade alone would carry one tick
            spread = [flops[0] * (flops[-1] / flops[0]) ** (i / 3) for i in range(4)]
            ax.xaxis.set_major_locator(FixedLocator(spread))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}".replace("e+", "e")))
            ax.xaxis.set_minor_locator(NullLocator())
        else:
            ax.xaxis.set_major_formatter(LogFormatterSciNotation())
        ax.set_xlabel("training FLOPs", color=color("muted"), fontsize=canvas.TEXT_SIZE, labelpad=3)

    data: list[list[Any]] = [["method", "quantity", "scale", "flops", "value"]]
    for method in found:
        data += [[method.name, "loss", scale, flops, loss] for scale, (flops, runs) in method.points.items() for loss in runs]
        for x, lower, upper in method.band:
            data += [[method.name, quantity, "", x, value]
                     for quantity, value in (("law", method.fit.law.loss(x)), ("law_low", lower), ("law_high", upper))]  # fmt: skip
    words = "; ".join(f"{m.label}: exponent {m.fit.law.exponent:.3f} over {len(m.points)} scales" for m in found)
    height = 300 + canvas.heading_height("one line", width) + canvas.legend_height([label for _, label in entries], width)
    words = f"Loss over training FLOPs with fitted power laws. {words}."
    return canvas.draw("scaling", words, paint, width=width, height=height, data=data)
