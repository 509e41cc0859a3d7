"""Controls: what claims to change nothing, against the margin that it was given before the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.rows import mean_mark, row_axes, row_height, row_label, row_value
from depthroute.report.stored import POST_HOC, StoredStudy
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = tuple[Mapping[str, Any], int, str]  # a claim, the index of its arm, and what is compared


def control_figure(study: StoredStudy) -> FigureBlock | None:
    """The claims of equivalence that have an interval, one row each."""
    names = {(c.arm.name, c.parent.name): c for c in study.comparisons}
    rows: list[Row] = []
    for claim in study.claims:
        comparison = names.get((claim["arm"], claim["parent"]))
        if claim["kind"] == "equivalent" and comparison is not None and claim["evidence"].get("interval"):
            late = claim["post_hoc"] and POST_HOC not in comparison.name
            rows.append((claim, comparison.arm.index, comparison.name + (POST_HOC if late else "")))
    if not rows:
        return None
    caption = (
        "The shaded band of a row is its margin, fixed in the plan: a difference inside it would not matter. The diamond is the mean over "
        "seeds, the bar its 90 % interval. Two losses are equivalent, at 5 % for each of two one-sided tests, where the whole bar lies "
        "inside the band; a bar that reaches out of it leaves the question open, and one wholly outside contradicts the claim."
    )
    return FigureBlock("Controls against their margins.", caption, [_panel(rows)])


def _panel(rows: Sequence[Row]) -> Panel:
    def paint(figure: Figure) -> None:
        from matplotlib.patches import Rectangle

        top = canvas.heading(figure, "Controls against their margins", "paired difference, nats per token; mean at the right")
        ax = row_axes(figure, top, len(rows), right=70)
        ax.axvline(0, color=color("ink"), linewidth=1.1, zorder=1)
        ends = [abs(end) for claim, _, _ in rows for end in (claim["margin"], *claim["evidence"]["interval"])]
        reach = 1.12 * max(ends)
        for y, (claim, index, name) in enumerate(rows):
            margin, interval = claim["margin"], claim["evidence"]["interval"]
            ax.add_patch(Rectangle((-margin, y - 0.22), 2 * margin, 0.44, facecolor=color("rule"), alpha=0.6, linewidth=0, zorder=0.5))
            for edge in (-margin, margin):
                ax.plot([edge, edge], [y - 0.22, y + 0.22], color=color("muted"), linewidth=1.2, zorder=1)
            row_label(ax, y, name)
            ax.plot(interval, [y, y], color=arm_color(index), linewidth=5, alpha=0.6, zorder=2)
            mean_mark(ax, claim["evidence"]["mean"], y, index)
            row_value(ax, y, numbers.difference(claim["evidence"]["mean"]))
        ax.set_xlim(-reach, reach)
        ax.tick_params(axis="x", pad=5)
        canvas.decimal_ticks(ax.xaxis, -reach, reach, ticks=4)

    data: list[list[Any]] = [["arm", "parent", "mean", "low", "high", "margin", "verdict"]]
    for claim, _, _ in rows:
        evidence = claim["evidence"]
        data.append([claim["arm"], claim["parent"], evidence["mean"], *evidence["interval"], claim["margin"], claim["verdict"]])
    words = "; ".join(
        f"{name}: {numbers.difference(claim['evidence']['mean'])}, 90 % interval {numbers.interval(claim['evidence']['interval'])}, margin "
        f"{claim['margin']:g}, {claim['verdict']}"
        for claim, _, name in rows
    )
    return canvas.draw("controls", f"Controls against their margins in nats. {words}.", paint, height=row_height(len(rows)), data=data)
