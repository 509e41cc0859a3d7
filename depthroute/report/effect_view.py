"""A crossed study: which factor moves the gap between two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from depthroute.common.errors import RequestError
from depthroute.report import canvas, numbers
from depthroute.report.document import Block, FigureBlock, Panel, Table
from depthroute.report.numbers import NO_BREAK
from depthroute.report.rows import mean_mark, row_axes, row_height, row_label, row_limits, row_value
from depthroute.report.scaling_plots import without_scale
from depthroute.report.stored import Comparison, StoredStudy
from depthroute.report.theme import arm_color, color
from depthroute.study.curves import METHOD
from depthroute.study.effects import Condition, Effect, main_effects

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Crossing:
    """One pair of methods over all conditions, and what each factor does to its gap."""

    name: str
    index: int
    mean: float
    effects: Sequence[Effect]
    combinations: int  # of levels that were run; all there are would be 2 to the number of factors


def effect_blocks(study: StoredStudy) -> list[Block]:
    """Table and figure of the main effects, where the scales of a study are the conditions of a two-level design."""
    found = crossings(study)
    if not found:
        return []
    caption = (
        "Two levels of each factor are crossed. An effect is the mean gap of the conditions with the upper level minus that of the others, "
        "in nats: negative means that the upper level favours the arm. Intervals are over seeds, from the spread within conditions."
    )
    caption += _mixed(found)
    groups: list[tuple[str | None, list[list[str]], list[list[str]]]] = [
        (
            f"{crossing.name}: mean gap {numbers.difference(crossing.mean)}",
            [
                [effect.factor, f"{effect.low:g} to {effect.high:g}", numbers.difference(effect.effect), numbers.interval(effect.interval)]
                for effect in crossing.effects
            ],
            [],
        )
        for crossing in found
    ]
    table = Table(caption, ["Factor", "Levels", "Effect on the gap", f"95{NO_BREAK}% interval"], groups, text_columns=2)
    panels = [_panel(number, crossing) for number, crossing in enumerate(found)]
    return [table, FigureBlock("Which factor moves the gap.", "The diamond is an effect, the bar its 95 % interval.", panels)]


def crossings(study: StoredStudy) -> list[Crossing]:
    """Pairs of methods that are compared in every condition of a balanced two-level design."""
    alike: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in study.comparisons:
        arm, parent = comparison.arm, comparison.parent
        if METHOD in arm.factors and arm.scale and arm.scale == parent.scale and comparison.endpoint is not None:
            alike.setdefault((str(arm.factors[METHOD]), str(parent.factors.get(METHOD))), []).append(comparison)
    found = []
    for comparisons in alike.values():
        conditions = [
            Condition(
                levels={name: float(level) for name, level in c.arm.factors.items() if name != METHOD and not isinstance(level, str)},
                differences=c.endpoint["differences"],
            )
            for c in comparisons
            if c.endpoint is not None
        ]
        if not conditions[0].levels:
            continue
        try:
            effects = main_effects(conditions)
        except RequestError:  # no two-level design, or not enough of it yet
            continue
        means = [sum(condition.differences) / len(condition.differences) for condition in conditions]
        combinations = len({tuple(sorted(condition.levels.items())) for condition in conditions})
        sides = [[c.arm for c in comparisons], [c.parent for c in comparisons]]
        names = [_common([without_scale(one.label, one.scale) for one in side]) for side in sides]
        index, mean = comparisons[0].arm.index, sum(means) / len(means)
        found.append(Crossing(f"{names[0]} against {names[1]}", index, mean, effects, combinations))
    return found


def _mixed(found: Sequence[Crossing]) -> str:
    """What an effect holds beside the factor's own: nothing in a full factorial, interactions in a fraction of one."""
    run, every = min(crossing.combinations for crossing in found), 2 ** len(found[0].effects)
    if run == every:
        return " Every combination of levels was run, so that no interaction is mixed into an effect."
    return (
        f" {run} of the {every} combinations of levels were run: an effect cannot be told from the interactions of other factors that this "
        "choice mixes into it."
    )


def _common(labels: Sequence[str]) -> str:
    """What labels that end in the levels of their condition share: `RD-AttnRes, routes x 1` and `RD-AttnRes, routes x 8` are RD-AttnRes."""
    parts = [label.split(", ") for label in labels]
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return ", ".join(column[0] for column in shared) or labels[0]


def _panel(number: int, crossing: Crossing) -> Panel:
    effects = crossing.effects

    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, crossing.name, "effect on the gap, nats per token; low to high level")
        ax = row_axes(figure, top, len(effects), right=70)
        ax.axvline(0, color=color("ink"), linewidth=1.1, zorder=1)
        for y, effect in enumerate(effects):
            row_label(ax, y, f"{effect.factor}, {effect.low:g} to {effect.high:g}")
            ax.plot(effect.interval, [y, y], color=arm_color(crossing.index), linewidth=5, alpha=0.5, zorder=2)
            mean_mark(ax, effect.effect, y, crossing.index)
            row_value(ax, y, numbers.difference(effect.effect))
        row_limits(ax, [0.0, *(end for effect in effects for end in effect.interval)])

    data: list[list[Any]] = [["factor", "low", "high", "effect", "t_low", "t_high"]]
    data += [[effect.factor, effect.low, effect.high, effect.effect, *effect.interval] for effect in effects]
    words = "; ".join(f"{effect.factor}: {numbers.difference(effect.effect)}" for effect in effects)
    description = f"What each factor does to the gap of {crossing.name}, in nats. {words}."
    return canvas.draw(f"effects-{number}", description, paint, height=row_height(len(effects)), data=data)
