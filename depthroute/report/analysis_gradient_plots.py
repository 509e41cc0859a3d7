"""The gradient norms of a whole run, with the norm at which they were clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.analysis_depth_plots import PLOT_HEIGHT, finite, log_axis, short
from depthroute.report.document import Block, FigureBlock, Panel, Paragraph
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HUE = 2
BUCKETS = 300  # of the series: each is drawn by its smallest and its largest norm, so that no spike is lost


def gradient_blocks(norms: Mapping[str, Any]) -> list[Block]:
    """The statistics in one sentence, and the norms over steps."""
    steps, clip, above = (finite(norms.get(name)) for name in ("steps", "clip", "above_clip"))
    mean, variance = finite(norms.get("mean")), finite(norms.get("variance"))
    words = f"Over {numbers.count(steps)} steps" if steps is not None else "Over the run"
    words += f" the gradient's norm before clipping has mean {mean:.4g}" if mean is not None else " the gradient's norm was recorded"
    words += f" and variance {variance:.4g}" if mean is not None and variance is not None else ""
    words += f"; {100 * above:.1f}{numbers.NO_BREAK}% of the steps were clipped" if above is not None else ""
    words += f", at norm {clip:g}" if above is not None and clip is not None else ""
    found: list[Block] = [Paragraph(words + ".")]
    series = _points(norms.get("series") or [], steps)
    if series:
        found.append(
            FigureBlock(
                "Gradient norms over the run.",
                "The norm of the whole gradient at each step, before it was clipped, on a logarithmic axis."
                + (" The dashed line is the clip." if clip is not None else "")
                + (" Of a group of neighbouring steps the smallest and the largest norm are drawn." if len(series) > 2 * BUCKETS else ""),
                [_panel(thinned(series), clip)],
            )
        )
    return found


def thinned(series: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 2 BUCKETS points: of each bucket the smallest and the largest, in their order."""
    if len(series) <= 2 * BUCKETS:
        return list(series)
    bounds = [round(i * len(series) / BUCKETS) for i in range(BUCKETS + 1)]
    found = []
    for start, end in pairwise(bounds):
        bucket = sorted(range(start, end), key=lambda i: series[i][1])
        found += [series[i] for i in sorted({bucket[0], bucket[-1]})]
    return found


def _points(series: Sequence[Any], steps: float | None) -> list[tuple[float, float]]:
    """(step, norm) of what is a positive number; norms alone are spread evenly over the steps."""
    found = []
    for index, value in enumerate(series, start=1):
        step, norm = value if isinstance(value, list) and len(value) == 2 else (index * (steps or len(series)) / len(series), value)
        at, size = finite(step), finite(norm)
        if at is not None and size is not None and size > 0:
            found.append((at, size))
    return found


def _panel(series: Sequence[tuple[float, float]], clip: float | None) -> Panel:
    title = "Gradient norm by step"

    def paint(figure: Figure) -> None:
        ax = canvas.axes(figure, left=58, top=canvas.heading(figure, title, "norm of the whole gradient") + 6)
        ax.plot(*zip(*series, strict=True), color=arm_color(HUE), linewidth=1.1)
        if clip is not None and clip > 0:
            ax.axhline(clip, color=color("ink"), linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
            ax.annotate(
                f"clip {short(clip)}",
                (1, clip),
                (0, 5),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                fontsize=canvas.SMALL_SIZE,
                zorder=5,
                bbox={"facecolor": color("paper"), "edgecolor": "none", "pad": 1.2, "alpha": 0.9},
            )
        log_axis(ax, [norm for _, norm in series] + ([clip] if clip is not None and clip > 0 else []))
        canvas.step_axis(ax, round(series[-1][0]))

    ends = f"{short(series[0][1])} at the start, {short(series[-1][1])} at the end, at most {short(max(norm for _, norm in series))}"
    height = PLOT_HEIGHT + canvas.heading_height(title)
    return canvas.draw("gradient-norms", f"Norm of the gradient over optimiser steps: {ends}.", paint, height=height)
