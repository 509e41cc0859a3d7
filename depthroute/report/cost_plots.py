"""Loss against added FLOPs: what every arm's routing costs in arithmetic, and what it buys, both against the plain arm of its scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.featured import featured_arms
from depthroute.report.stored import Arm, StoredStudy
from depthroute.report.theme import arm_color, color
from depthroute.study.statistics import t_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 10  # with more arms only featured ones and those on the front have a name and a colour


@dataclass(frozen=True)
class Bought:
    """An arm against the plain arm at the end of its chain of parents: added FLOPs as a fraction, and the mean paired difference in
    nats."""

    arm: Arm
    root: Arm
    added: float
    difference: float
    interval: tuple[float, float] | None
    seeds: int


def cost_figure(study: StoredStudy) -> FigureBlock | None:
    """One panel; nothing where the statistics hold no FLOPs, or no arm adds to another."""
    found = bought(study)
    if not found:
        return None
    caption = (
        "Both axes compare with the arm that an arm descends from through its comparisons ("
        f"{numbers.listed(list(dict.fromkeys(b.root.label for b in found)))}): to the right it computes more, below zero its loss is "
        "lower. FLOPs are those of forward and backward by closed formulas, attention scores and the output head included, norms and "
        "softmaxes not; they say nothing of memory traffic, which is what depth routing takes most of on a GPU. Bars are 95 % t "
        "intervals over seeds. A line joins the arms of one scale that no other one beats in both."
    )
    featured = featured_arms(study)
    return FigureBlock("Loss against added arithmetic.", caption, [_panel(found, [b for b in found if b.arm in featured])])


def bought(study: StoredStudy) -> list[Bought]:
    """Every arm that has a parent, in the plan's order."""
    found = []
    for arm in study.arms:
        root = _root(study, arm)
        ours, theirs = _flops(arm), _flops(root)
        if root == arm or ours is None or theirs is None:
            continue
        left, right = ({cell.seed: cell.nll for cell in study.complete(one) if cell.nll is not None} for one in (arm, root))
        differences = [left[seed] - right[seed] for seed in left if seed in right]
        if differences:
            mean = numbers.mean(differences) or 0.0
            found.append(Bought(arm, root, ours / theirs - 1, mean, t_interval(differences), len(differences)))
    return found


def fronts(found: Sequence[Bought]) -> list[list[Bought]]:
    """For each plain arm, the arms compared with it that no other beats in both, cheapest first."""
    kept: dict[str, list[Bought]] = {}
    for one in sorted(found, key=lambda b: (b.added, b.difference)):
        front = kept.setdefault(one.root.name, [])
        if not front or one.difference < front[-1].difference:
            front.append(one)
    return list(kept.values())


def _root(study: StoredStudy, arm: Arm) -> Arm:
    """The end of the chain of parents; a chain that comes back to itself ends there."""
    seen = [arm]
    while (parent := study.parent_of(seen[-1])) is not None and parent not in seen and parent.scale == arm.scale:
        seen.append(parent)
    return seen[-1]


def _flops(arm: Arm) -> float | None:
    return None if arm.plain is None or arm.residual is None else arm.plain + arm.residual


def _panel(found: Sequence[Bought], featured: Sequence[Bought]) -> Panel:
    lines = fronts(found)
    best = [one for line in lines for one in line]
    named = found if len(found) <= NAMED else [b for b in found if b in featured or b in best][:NAMED]
    entries = [(b.arm.index, b.arm.label) for b in named]
    width = 620.0

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        top = canvas.heading(figure, "Loss against added FLOPs", "difference of losses, nats per token")
        ax = canvas.axes(figure, left=62, top=canvas.legend(figure, top, entries, markers=True) + 8, right=20, bottom=48)
        ax.axhline(0, color=color("ink"), linewidth=1.1, zorder=1)
        for line in lines:
            ax.plot([100 * b.added for b in line], [b.difference for b in line], color=color("muted"), linewidth=1.1, zorder=1.5)
        for one in found:
            shown = one in named
            hue = arm_color(one.arm.index) if shown else color("muted")
            if one.interval is not None:
                ax.vlines(100 * one.added, *one.interval, color=hue, linewidth=5, alpha=0.25, zorder=2)
            style: dict[str, Any] = {"marker": "o", "markersize": 5, "alpha": 0.7}
            style = {"marker": canvas.marker(one.arm.index), "markersize": 8} if shown else style
            ax.plot([100 * one.added], [one.difference], color=hue, markeredgecolor=color("paper"), markeredgewidth=0.8, zorder=3, **style)
        values = [0.0, *(b.difference for b in found)]
        low, high = min(values), max(values)
        reach = 0.6 * (high - low) or 0.01  # an interval of two seeds would leave no room for anything else
        ends = [end for b in found for end in b.interval or ()]
        low, high = max(low - reach, min([low, *ends])), min(high + reach, max([high, *ends]))
        pad = 0.06 * (high - low)
        ax.set_ylim(low - pad, high + pad)
        canvas.decimal_ticks(ax.yaxis, low - pad, high + pad)
        right = max(100 * b.added for b in found)
        left = min(0.0, *(100 * b.added for b in found))
        ax.set_xlim(left - 0.04 * (right - left), right + 0.06 * (right - left) or 1.0)
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %".replace("-", numbers.MINUS)))
        ax.set_xlabel("added FLOPs per token", color=color("muted"), fontsize=canvas.TEXT_SIZE, labelpad=3)

    data: list[list[Any]] = [["arm", "against", "added_flops_fraction", "seeds", "mean_difference", "t_low", "t_high", "on_front"]]
    data += [[b.arm.name, b.root.name, b.added, b.seeds, b.difference, *(b.interval or (None, None)), b in best] for b in found]
    words = "; ".join(f"{b.arm.label}: {numbers.percent(b.added)} FLOPs, {numbers.difference(b.difference)} nats" for b in named)
    height = 280 + canvas.heading_height("one line", width) + canvas.legend_height([label for _, label in entries], width)
    return canvas.draw("added-flops", f"Difference of losses against added FLOPs. {words}.", paint, width=width, height=height, data=data)
