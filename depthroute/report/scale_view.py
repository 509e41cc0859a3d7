"""One comparison at several scales: its gap at each, over them, and what they say of a scale that was not studied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, facts, numbers
from depthroute.report.document import Block, Bullets, Details, FigureBlock, Panel, Table, Text
from depthroute.report.numbers import NO_BREAK, NONE
from depthroute.report.scaling_plots import without_scale
from depthroute.report.stored import Comparison, StoredStudy
from depthroute.report.theme import arm_color, color
from depthroute.study.scales import AcrossScales, across_scales

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Group:
    """One comparison made at several scales: the comparison of each, smallest first where sizes are known."""

    name: str
    comparisons: Mapping[str, Comparison]
    view: AcrossScales


def scale_blocks(study: StoredStudy, few: int) -> list[Block]:
    """Table and figure of the comparisons that are made at two scales or more; of more than `few`, all but the first are folded away."""
    found = groups(study)
    if not found:
        return []
    caption = (
        "A mark is the mean gap at one scale, the bar its 95 % t interval over seeds. The line and its band are the mean over these "
        "scales and its 95 % interval, each scale weighing the same: it is about the scales at hand, not about others."
    )
    panels = [_panel(index, group) for index, group in enumerate(found)]
    shown = len(found) if len(found) <= few else 1
    blocks: list[Block] = [_table(found[:shown]), FigureBlock("The gap over scales.", caption, panels[:shown])]
    if shown < len(found):
        rest: list[Block] = [_table(found[shown:]), FigureBlock("The other gaps over scales.", caption, panels[shown:])]
        blocks.append(Details("Every other comparison over scales", rest))
    notes: list[Text] = [f"{group.name}: {sentence}" for group in found for sentence in group.view.unknown]
    return blocks + ([Bullets(notes)] if notes and len(notes) <= 2 * few else [])


def groups(study: StoredStudy) -> list[Group]:
    """Comparisons within one scale whose two arms are alike in everything that the plan names but the scale."""
    alike: dict[Any, dict[str, Comparison]] = {}
    for comparison in study.comparisons:
        arm, parent = comparison.arm, comparison.parent
        if arm.scale and arm.scale == parent.scale and comparison.endpoint is not None:
            key = tuple((tuple(sorted(one.factors.items())), without_scale(one.label, one.scale)) for one in (arm, parent))
            alike.setdefault(key, {}).setdefault(arm.scale, comparison)
    found = []
    for comparisons in alike.values():
        if len(comparisons) < 2:
            continue
        sizes = {scale: _parameters(study, comparison) for scale, comparison in comparisons.items()}
        known = {scale: size for scale, size in sizes.items() if size is not None}
        differences = {scale: c.endpoint["differences"] for scale, c in comparisons.items() if c.endpoint is not None}
        view = across_scales(differences, known if len(known) == len(differences) else None)
        first = next(iter(comparisons.values()))
        names = [without_scale(one.label, one.scale) for one in (first.arm, first.parent)]
        found.append(Group(f"{names[0]} against {names[1]}", comparisons, view))
    return found


def _parameters(study: StoredStudy, comparison: Comparison) -> float | None:
    """The parent's size, which is the scale's."""
    sizes = [facts.dig(cell.result, "parameters", "total") for cell in study.complete(comparison.parent)]
    return next((float(size) for size in sizes if isinstance(size, int | float)), None)


def _table(found: Sequence[Group]) -> Table:
    groups_of_rows = []
    for group in found:
        view, another, equal = group.view, group.view.another_scale, group.view.equal_gaps
        rows = [
            [gap.scale, numbers.scaled(gap.parameters), str(gap.seeds), numbers.difference(gap.mean), numbers.interval(gap.t_interval)]
            for gap in view.scales
        ]
        closing = [["Mean of scales", "", "", numbers.difference(view.mean.value), numbers.interval(view.mean.interval)]]
        slope = view.slope_per_doubling
        if slope is not None:
            closing.append(["Per doubling of parameters", "", "", numbers.difference(slope.value), numbers.interval(slope.interval)])
        if another is not None:
            closing.append(["Another scale (prediction)", "", "", numbers.difference(another.mean),
                            numbers.interval(another.prediction_interval)])  # fmt: skip
        if equal is not None:
            closing.append(["Same gap at all, p", "", "", numbers.probability(equal.p), NONE])
        groups_of_rows.append((group.name, rows, closing))
    caption = (
        "The paired gap at every scale, arm minus parent in nats, and over them. Parameters are the parent's. Intervals of means and "
        "slope are over seeds."
    )
    if any(group.view.another_scale is not None for group in found):
        caption += " That of another scale is a 95 % prediction interval over scales, were these a random sample."
    if any(group.view.equal_gaps is not None for group in found):
        caption += " The last p is Welch's, of one gap at all scales."
    return Table(caption, ["Scale", "Parameters", "Seeds", "Gap", f"95{NO_BREAK}% interval"], groups_of_rows)


def _panel(index: int, group: Group) -> Panel:
    view = group.view
    first = next(iter(group.comparisons.values()))
    hue_index = first.arm.index

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FixedFormatter, FixedLocator

        top = canvas.heading(figure, group.name, "gap, nats per token")
        ax = canvas.axes(figure, left=62, top=top + 6, right=16)
        hue, count = arm_color(hue_index), len(view.scales)
        ax.axhline(0, color=color("ink"), linewidth=1.1, zorder=1)
        if view.mean.interval is not None:
            low, high = view.mean.interval
            ax.fill_between([-0.5, count - 0.25], [low] * 2, [high] * 2, color=hue, alpha=0.13, linewidth=0)
        ax.plot([-0.5, count - 0.25], [view.mean.value] * 2, color=hue, linewidth=1.2, linestyle=(0, (4, 3)))
        for place, gap in enumerate(view.scales):
            if gap.t_interval is not None:
                ax.plot([place, place], gap.t_interval, color=hue, linewidth=6, alpha=0.3)
            ax.plot([place], [gap.mean], canvas.marker(hue_index), color=hue, markersize=8, markeredgecolor=color("paper"), zorder=3)
            ax.annotate(numbers.difference(gap.mean), (place, gap.mean), (10, 0), textcoords="offset points", va="center",
                        fontsize=canvas.SMALL_SIZE, zorder=4,
                        bbox={"facecolor": color("paper"), "edgecolor": "none", "pad": 1.0, "alpha": 0.85})  # fmt: skip
        values = [0.0, *(gap.mean for gap in view.scales)]
        reach = 1.2 * (max(values) - min(values)) or 0.01
        ends = [end for gap in view.scales for end in gap.t_interval or ()]
        low = max(min(values) - reach, min([*values, *ends]))
        high = min(max(values) + reach, max([*values, *ends]))
        pad = 0.08 * (high - low) or 0.01
        ax.set_ylim(low - pad, high + pad)
        canvas.decimal_ticks(ax.yaxis, low - pad, high + pad)
        ax.set_xlim(-0.5, count - 0.25)
        names = [gap.scale + ("" if gap.parameters is None else f"\n{_short(gap.parameters)}") for gap in view.scales]
        ax.xaxis.set_major_locator(FixedLocator(list(range(count))))
        ax.xaxis.set_major_formatter(FixedFormatter(names))

    data: list[list[Any]] = [["scale", "parameters", "seeds", "quantity", "nats"]]
    for gap in view.scales:
        low, high = gap.t_interval or (None, None)
        values = {"mean": gap.mean, "t_low": low, "t_high": high}
        data += [[gap.scale, gap.parameters, gap.seeds, quantity, value] for quantity, value in values.items() if value is not None]
    low, high = view.mean.interval or (None, None)
    values = {"mean": view.mean.value, "t_low": low, "t_high": high}
    data += [["all", None, None, quantity, value] for quantity, value in values.items() if value is not None]
    words = ", ".join(f"{gap.scale}: {numbers.difference(gap.mean)}" for gap in view.scales)
    height = 236 + canvas.heading_height(group.name)
    return canvas.draw(f"scales-{index}", f"Gap by scale, {group.name}. {words}.", paint, height=height, data=data)


def _short(parameters: float) -> str:
    """A size under a tick: `1.2M`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{letter}"
    return f"{parameters:.0f}"
