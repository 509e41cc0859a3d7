"""The figures of the outcome: endpoints per seed, paired differences, and the gap over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.featured import featured_comparisons, left_out
from depthroute.report.rows import mean_mark, row_axes, row_height, row_label, row_limits, row_value
from depthroute.report.stored import Comparison, StoredStudy
from depthroute.report.theme import arm_color, color
from depthroute.report.trajectories import followed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAND_SEEDS = 3  # a t interval of two seeds is nine standard deviations to each side: as a band it would show nothing but itself


def endpoints_figure(study: StoredStudy) -> FigureBlock | None:
    """Per arm every seed's NLL at the endpoint, and per comparison every seed's difference with the mean and its t interval."""
    every = [(arm, {cell.seed: cell.nll for cell in study.complete(arm) if cell.nll is not None}) for arm in study.arms]
    arms = [(arm, values) for arm, values in every if values]
    compared = [c for c in study.comparisons if c.endpoint is not None]
    panels = []
    if arms:
        rows = [(arm.label, arm.index, arm.scale, values) for arm, values in arms]
        panels.append(_endpoint_panel(rows, study.seeds))
    if compared:
        panels.append(_difference_panel(compared))
    if not panels:
        return None
    several = any(len(values) > 1 for _, values in arms)
    with_interval = any(c.endpoint is not None and c.endpoint["t_interval"] for c in compared)
    caption = "Further left is better. Small marks are single seeds"
    if several:
        across = "the arms of one scale" if len({arm.scale for arm, _ in arms}) > 1 else "arms"
        caption += f"; a thin line joins the same seed across {across}, since it has the same initial weights and the same batches in each"
    caption += ". Diamonds are means, bars their 95 % t intervals." if with_interval else ". With one seed there is no interval."
    return FigureBlock("Endpoints, seed by seed.", caption, panels)


def gap_figure(study: StoredStudy) -> FigureBlock | None:
    """The paired difference at every milestone, one panel a comparison, all on the same vertical axis."""
    compared = [c for c in featured_comparisons(study) if len(c.milestones) > 1]
    if not compared:
        return None
    lines = [d for c in compared for m in c.milestones for d in m["differences"]]
    bands = [band for c in compared for m in c.milestones for band in [_band(m)] if band]
    low, high = min([0.0, *lines]), max([0.0, *lines])
    room = 0.6 * (high - low)
    low, high = max(low - room, min([low, *(b[0] for b in bands)])), min(high + room, max([high, *(b[1] for b in bands)]))
    pad = 0.07 * (high - low) or 0.01
    counts = {len(m["seeds"]) for c in compared for m in c.milestones}
    caption = "Below zero the arm is ahead of its parent. The thick line is the mean of the seeds, thin lines are single seeds. "
    caption += _band_words(counts)
    clipped = any(b[0] < low - pad or b[1] > high + pad for b in bands)
    caption += " The band runs out of the panel where it is wider than the panel." if clipped else ""
    caption += left_out(len(compared), sum(len(c.milestones) > 1 for c in study.comparisons), "comparisons")
    panels = [_gap_panel(c, (low - pad, high + pad)) for c in compared]
    return FigureBlock("The gap over training.", caption, panels)


def _endpoint_panel(rows: Sequence[tuple[str, int, str, dict[int, float]]], seeds: Sequence[int]) -> Panel:
    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, "Validation loss at the endpoint", "nats per token; mean at the right")
        ax = row_axes(figure, top, len(rows), right=70)
        for seed, scale in product(seeds, dict.fromkeys(scale for _, _, scale, _ in rows)):
            places = [(values.get(seed, math.nan), y) for y, (_, _, of, values) in enumerate(rows) if of == scale]
            ax.plot(*zip(*places, strict=True), color=color("muted"), linewidth=0.9, alpha=0.65, zorder=2)
        for y, (label, index, _, values) in enumerate(rows):
            mean = math.fsum(values.values()) / len(values)
            row_label(ax, y, label)
            ax.plot(
                list(values.values()),
                [y] * len(values),
                canvas.marker(index),
                color=arm_color(index),
                markersize=6.5,
                alpha=0.75,
                markeredgewidth=0,
                zorder=3,
            )
            if len(values) > 1:
                mean_mark(ax, mean, y, index)
            row_value(ax, y, numbers.nats(mean))
        row_limits(ax, [v for *_, values in rows for v in values.values()])

    words = "; ".join(f"{label}: " + ", ".join(numbers.nats(v) for v in values.values()) for label, *_, values in rows)
    return canvas.draw("endpoints", f"Validation NLL at the endpoint per arm and seed. {words}.", paint, height=row_height(len(rows)))


def _difference_panel(compared: Sequence[Comparison]) -> Panel:
    ends = [c.endpoint for c in compared if c.endpoint is not None]

    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, "Paired difference at the endpoint", "nats per token, arm minus parent; mean at the right")
        ax = row_axes(figure, top, len(compared), right=70)
        ax.axvline(0, color=color("ink"), linewidth=1.1, zorder=1)
        for y, (comparison, end) in enumerate(zip(compared, ends, strict=True)):
            index = comparison.arm.index
            row_label(ax, y, comparison.name)
            if end["t_interval"]:
                ax.plot(end["t_interval"], [y, y], color=arm_color(index), linewidth=7, alpha=0.3, zorder=2)
            ax.plot(
                end["differences"],
                [y] * len(end["differences"]),
                canvas.marker(index),
                color=arm_color(index),
                markersize=6.5,
                alpha=0.75,
                markeredgewidth=0,
                zorder=3,
            )
            if len(end["differences"]) > 1:
                mean_mark(ax, end["mean"], y, index)
            row_value(ax, y, numbers.difference(end["mean"]))
        row_limits(ax, [0.0, *[x for end in ends for x in (*end["differences"], *(end["t_interval"] or ()))]])

    words = "; ".join(
        f"{c.name}: mean {numbers.difference(e['mean'])}"
        + (f", 95 % t interval {numbers.interval(e['t_interval'])}" if e["t_interval"] else "")
        for c, e in zip(compared, ends, strict=True)
    )
    return canvas.draw("differences", f"Paired differences at the endpoint in nats. {words}.", paint, height=row_height(len(compared)))


def _gap_panel(comparison: Comparison, limits: tuple[float, float]) -> Panel:
    milestones, index = comparison.milestones, comparison.arm.index
    steps = [m["step"] for m in milestones]

    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, comparison.name, "difference of losses, nats")
        ax = canvas.axes(figure, left=58, top=top + 2, right=64)
        ax.axhline(0, color=color("ink"), linewidth=1.1, zorder=2)
        bands = [(m["step"], *band) for m in milestones for band in [_band(m)] if band]
        if bands:
            at, lower, upper = zip(*bands, strict=True)
            ax.fill_between(at, lower, upper, color=arm_color(index), alpha=0.2, linewidth=0)
        for side in simultaneous_band(comparison):
            ax.plot(*zip(*side, strict=True), color=arm_color(index), linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.8)
        for seed in sorted({seed for m in milestones for seed in m["seeds"]}):
            line = [(m["step"], d) for m in milestones for s, d in zip(m["seeds"], m["differences"], strict=True) if s == seed]
            ax.plot([x for x, _ in line], [y for _, y in line], color=arm_color(index), linewidth=0.9, alpha=0.65)
        ax.plot(steps, [m["mean"] for m in milestones], color=arm_color(index), linewidth=2.4, marker=canvas.marker(index), markersize=5.5)
        ax.set_ylim(limits)
        canvas.decimal_ticks(ax.yaxis, *limits)
        canvas.step_axis(ax, steps[-1])
        ax.annotate(
            numbers.difference(milestones[-1]["mean"]),
            (steps[-1], milestones[-1]["mean"]),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=canvas.TEXT_SIZE,
            fontweight="bold",
            annotation_clip=False,
        )

    words = ", ".join(f"step {m['step']:,}: {numbers.difference(m['mean'])}" for m in milestones)
    name = f"gap-{comparison.arm.index}-{comparison.parent.index}"
    height = 220 + canvas.heading_height(comparison.name)
    return canvas.draw(name, f"Mean difference over training, {comparison.name}. {words}.", paint, height=height)


def _band(m: Mapping[str, Any]) -> tuple[float, float] | None:
    """The t interval from three seeds on, one standard deviation to each side with two, nothing with one."""
    if len(m["seeds"]) >= BAND_SEEDS and m["t_interval"]:
        return m["t_interval"][0], m["t_interval"][1]
    return (m["mean"] - m["sd"], m["mean"] + m["sd"]) if m["sd"] is not None and len(m["seeds"]) > 1 else None


def simultaneous_band(comparison: Comparison) -> list[list[tuple[int, float]]]:
    """Lower and upper (step, nats) of the band that holds all milestones at once; empty with fewer than three seeds."""
    path = followed(comparison)
    if path is None or path.seeds < BAND_SEEDS:
        return []
    steps = {m["tokens"]: m["step"] for m in comparison.milestones}
    return [[(steps[point.tokens], point.band[side]) for point in path.points if point.band is not None] for side in (0, 1)]


def _band_words(counts: set[int]) -> str:
    """What the bands of comparisons with these numbers of seeds are."""
    several, two = any(count >= BAND_SEEDS for count in counts), 2 in counts
    words = []
    if several:
        words.append("The band is the 95 % t interval of the mean at each milestone" + (", but with two seeds" if two else "."))
        words[-1] += "" if two else " Between the dashed lines lie all milestones at once, with 95 % (Bonferroni)."
    if two:
        words.append("one standard deviation to each side" if several else "The band is one standard deviation to each side")
        words[-1] += ": there a t interval would fill the panel." if several else ": with two seeds a t interval would fill the panel."
    if 1 in counts:
        words.append("With one seed there is no band.")
    return " ".join(words)
