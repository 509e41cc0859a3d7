"""Loss curves: training and validation, the whole run and its second half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from depthroute.report import canvas, numbers
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.featured import featured_cells, left_out
from depthroute.report.stored import Arm, StoredStudy
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = Sequence[tuple[int, float]]
PLOT_HEIGHT = 240
FEW, SOME = 4, 6  # arms whose single seeds can still be seen in the training and in the validation loss
POINTS = 240  # how many points of a training curve are drawn: more than a panel has pixels to show them with


@dataclass(frozen=True)
class Curves:
    """One arm's losses over steps: one line per complete seed, and their mean where all of them have a value."""

    arm: Arm
    seeds: Sequence[Line]
    mean: Line


def curves_figure(study: StoredStudy, entropy: float | None) -> FigureBlock | None:
    """Training loss (smoothed) and validation loss per arm; the unigram entropy in nats is a reference line where it is known."""
    cells, seeds = featured_cells(study)
    last = max((cell.metrics[-1]["step"] for _, done in cells for cell in done if cell.metrics), default=0)
    window = max(1, last // 50)
    training = [_curves(arm, [smooth([(m["step"], m["loss"]) for m in cell.metrics], window) for cell in done]) for arm, done in cells]
    validation = [_curves(arm, [cell.validation() for cell in done]) for arm, done in cells]
    panels = []
    for name, curves, markers in (("training", training, False), ("validation", validation, True)):
        title, drawn = f"{name.capitalize()} loss", [c for c in curves if len(c.mean) > 1]
        if drawn:
            end = max(c.mean[-1][0] for c in drawn)
            panels.append(_panel(f"{name}-whole", title, drawn, 0, end, entropy, markers))
            panels.append(_panel(f"{name}-late", f"{title}, second half", drawn, end // 2, end, None, markers))
    if not panels:
        return None
    panels.sort(key=lambda panel: panel.name.endswith("late"))
    drawn_arms = len([arm for arm, done in cells if done])
    caption = f"Thick lines are means over {seeds}, thin lines single seeds"
    if drawn_arms > SOME:
        caption = f"Lines are means over {seeds}. "
    else:
        caption += " (left out of the training loss, where they would hide each other). " if drawn_arms > FEW else ". "
    caption += f"Training loss is a trailing mean over {numbers.plural(window, 'step')}. "
    if entropy is not None:
        caption += (
            f"The dashed line is the unigram entropy of the corpus, {numbers.nats(entropy)} nats: what knowing the token frequencies alone "
            "would reach. "
        )
    caption += "The panels of the second half have vertical axes of their own."
    caption += left_out(len(cells), len(study.arms), "arms")
    return FigureBlock("Loss curves.", caption, panels)


def smooth(line: Line, window: int) -> Line:
    """The trailing mean over `window` points (fewer at the start); points that are not finite are left out. At most POINTS remain."""
    points = [(step, loss) for step, loss in line if loss is not None and math.isfinite(loss)]
    sums = [0.0, *accumulate(loss for _, loss in points)]
    means = [(step, (sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1)) for i, (step, _) in enumerate(points)]
    stride = max(1, math.ceil(len(means) / POINTS))
    return means[::-1][::stride][::-1]


def _curves(arm: Arm, seeds: Sequence[Line]) -> Curves:
    seeds = [line for line in seeds if line]
    by_step = [dict(line) for line in seeds]
    steps = sorted(set.intersection(*(set(values) for values in by_step))) if by_step else []
    return Curves(arm, seeds, [(step, math.fsum(values[step] for values in by_step) / len(by_step)) for step in steps])


def _panel(name: str, title: str, curves: Sequence[Curves], first: int, last: int, entropy: float | None, markers: bool) -> Panel:
    entries = [(c.arm.index, c.arm.label) for c in curves]
    low, high = _limits(curves, first, entropy)

    def paint(figure: Figure) -> None:
        top = canvas.legend(figure, canvas.heading(figure, title, "nats per token"), entries, markers=markers)
        ax = canvas.axes(figure, left=46, top=top + 6)
        if entropy is not None and low < entropy < high:
            ax.axhline(entropy, color=color("muted"), linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            ax.annotate(
                f"unigram entropy {entropy:.2f}",
                (1, entropy),
                (0, 5),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                fontsize=canvas.SMALL_SIZE,
                color=color("muted"),
                zorder=5,
                bbox={"facecolor": color("paper"), "edgecolor": "none", "pad": 1.2, "alpha": 0.9},
            )
        for c in curves:
            hue = arm_color(c.arm.index)
            for line in c.seeds if len(c.seeds) > 1 and len(curves) <= (SOME if markers else FEW) else ():
                ax.plot(*_from(line, first), color=hue, linewidth=0.8, alpha=0.4)
        for c in curves:
            ax.plot(
                *_from(c.mean, first),
                color=arm_color(c.arm.index),
                linewidth=2.1,
                linestyle=canvas.dashes(c.arm.index),
                marker=canvas.marker(c.arm.index) if markers else None,
                markersize=4.5,
            )
        ax.set_ylim(low, high)
        ax.set_xlim(left=first)
        canvas.step_axis(ax, last)
        canvas.decimal_ticks(ax.yaxis, low, high)

    ends = "; ".join(f"{c.arm.label} ends at {numbers.nats(c.mean[-1][1])}" for c in curves)
    height = PLOT_HEIGHT + canvas.heading_height(title) + canvas.legend_height([label for _, label in entries])
    return canvas.draw(name, f"{title} in nats per token over optimiser steps. {ends}.", paint, height=height)


def _limits(curves: Sequence[Curves], first: int, entropy: float | None) -> tuple[float, float]:
    """The vertical range: everything from `first` on, but of the steep first steps only what leads to the entropy line."""
    values = [loss for c in curves for line in (c.mean, *c.seeds) for step, loss in line if step >= first]
    low, high = min(values), max(values)
    if first == 0 and entropy is not None:
        high = max(min(high, entropy + 0.35 * (entropy - low)), entropy + 0.04 * abs(entropy - low)) if entropy > low else high
    pad = 0.05 * (high - low) or 0.01
    return low - pad, high + pad


def _from(line: Line, first: int) -> tuple[list[int], list[float]]:
    kept = [(step, loss) for step, loss in line if step >= first]
    return [step for step, _ in kept], [loss for _, loss in kept]
