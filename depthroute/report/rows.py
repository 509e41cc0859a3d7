"""A figure of rows: what is compared stands above its row, marks and intervals lie along a common axis, a number stands at the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from depthroute.report import canvas
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 46
INDENT = 20  # room for half of the first tick label


def row_height(rows: int) -> float:
    """The pixels of a figure of so many rows under a heading of one line."""
    return canvas.heading_height("one line") + ROW * rows + 46


def row_axes(figure: Figure, top: float, rows: int, right: float) -> Axes:
    """Axes with a row a unit, the first at the top; `right` pixels are left for values."""
    ax = canvas.axes(figure, left=INDENT, top=top + 10, right=right, bottom=34)
    ax.set_ylim(rows - 0.5, -0.75)
    ax.set_yticks([])
    ax.grid(axis="x", color=color("rule"), linewidth=0.8)
    return ax


def row_label(ax: Axes, y: float, label: str) -> None:
    """What a row is, above its line and cut to the panel."""
    ax.annotate(
        canvas.cut(label, canvas.WIDTH - 90, canvas.TEXT_SIZE),
        (0, y),
        (canvas.MARGIN - INDENT, 11),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=canvas.TEXT_SIZE,
        annotation_clip=False,
        zorder=3.5,
        bbox={"facecolor": color("paper"), "edgecolor": "none", "pad": 1.2, "alpha": 0.9},
    )


def row_value(ax: Axes, y: float, shown: str) -> None:
    """A number at the right of a row."""
    ax.annotate(
        shown,
        (1, y),
        (58, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=canvas.TEXT_SIZE,
        fontweight="bold",
        annotation_clip=False,
    )


def mean_mark(ax: Axes, x: float, y: float, index: int) -> None:
    """A mean, in the colour of an arm."""
    ax.plot([x], [y], "D", color=arm_color(index), markersize=8.5, markeredgecolor=color("paper"), markeredgewidth=1.5, zorder=4)


def row_limits(ax: Axes, values: Sequence[float]) -> None:
    """A common axis that holds all values."""
    low, high = min(values), max(values)
    pad = 0.08 * (high - low) or 0.01
    ax.set_xlim(low - pad, high + pad)
    ax.tick_params(axis="x", pad=5)
    canvas.decimal_ticks(ax.xaxis, low - pad, high + pad, ticks=4)
