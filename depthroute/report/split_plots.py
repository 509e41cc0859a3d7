"""Evaluation splits beside the endpoint's: the paired gap on each, and accuracies where they were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.document import Block, Details, FigureBlock, Panel, Paragraph, Table
from depthroute.report.featured import featured_comparisons, left_out
from depthroute.report.numbers import NO_BREAK, NONE
from depthroute.report.rows import mean_mark, row_axes, row_height, row_label, row_value
from depthroute.report.stored import Cell, Comparison, StoredStudy
from depthroute.report.theme import arm_color, color
from depthroute.study.statistics import t_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SplitGap:
    """One comparison on one split, at the last step that all its pairs have in common there."""

    split: str
    step: int
    seeds: Sequence[int]
    differences: Sequence[float]
    mean: float
    interval: tuple[float, float] | None


def split_blocks(study: StoredStudy, few: int) -> list[Block]:
    """The gaps and the accuracies; nothing where the runs were evaluated on one split alone."""
    names = splits(study)
    if len(names) < 2:
        return []
    compared = [(c, [gap for split in names for gap in [split_gap(study, c, split)] if gap is not None]) for c in study.comparisons]
    compared = [(c, gaps) for c, gaps in compared if len(gaps) > 1]
    blocks: list[Block] = [Paragraph(f"The runs were also evaluated on {numbers.listed([n for n in names if n != study.endpoint])}.")]
    if compared:
        caption = (
            "Small marks are single seeds, the diamond their mean, the bar its 95 % t interval; left of zero the arm is better. A split "
            "with fewer tokens is noisier. None of these intervals is adjusted for there being several."
        )
        shown = featured_comparisons(study)
        drawn = [(c, gaps) for c, gaps in compared if c in shown]
        caption += left_out(len(drawn), len(compared), "comparisons")
        figure: Block = FigureBlock("The gap by split.", caption, [_panel(c, gaps) for c, gaps in drawn])
        table: Block = _gap_table(compared)
        blocks += [figure, table] if len(compared) <= few else [Details("The gap by split, every comparison", [figure, table])]
    table_of_accuracy = _accuracy_table(study, names)
    if table_of_accuracy is not None:
        crowded = len(study.arms) > 2 * few
        blocks.append(Details("Accuracy of every arm", [table_of_accuracy]) if crowded else table_of_accuracy)
    return blocks


def splits(study: StoredStudy) -> list[str]:
    """The splits that complete cells were evaluated on, in the order in which they stand there."""
    every = (line.get("split", "validation") for arm in study.arms for cell in study.complete(arm) for line in cell.evaluations)
    return list(dict.fromkeys(every))


def split_gap(study: StoredStudy, comparison: Comparison, split: str) -> SplitGap | None:
    """The paired differences on one split; None without a pair that was evaluated there at a common step."""
    ours, theirs = ({cell.seed: dict(cell.losses(split)) for cell in study.complete(arm)} for arm in (comparison.arm, comparison.parent))
    pairs = [(seed, ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    steps = set.intersection(*(set(left) & set(right) for _, left, right in pairs)) if pairs else set()
    if not steps:
        return None
    step = max(steps)
    differences = [left[step] - right[step] for _, left, right in pairs]
    mean = math.fsum(differences) / len(differences)
    return SplitGap(split, step, [seed for seed, _, _ in pairs], differences, mean, t_interval(differences))


def _gap_table(compared: Sequence[tuple[Comparison, Sequence[SplitGap]]]) -> Table:
    groups: list[tuple[str, list[list[str]], list[list[str]]]] = [
        (
            comparison.name,
            [[gap.split, str(len(gap.seeds)), numbers.difference(gap.mean), numbers.interval(gap.interval)] for gap in gaps],
            [],
        )
        for comparison, gaps in compared
    ]
    caption = "Paired differences by evaluation split at the last evaluation, arm minus parent in nats per token."
    return Table(caption, ["Split", "Seeds", "Mean", f"95{NO_BREAK}% t interval"], groups)


def _accuracy_table(study: StoredStudy, names: Sequence[str]) -> Table | None:
    found = {(arm.name, split): [_accuracy(cell, split) for cell in study.complete(arm)] for arm in study.arms for split in names}
    measured = [split for split in names if any(value is not None for arm in study.arms for value in found[arm.name, split])]
    if not measured:
        return None
    rows = [[arm.label, *(_mean_accuracy(found[arm.name, split]) for split in measured)] for arm in study.arms if study.complete(arm)]
    caption = "Share of targets that the model finds likeliest, at the last evaluation: mean and, in brackets, sd over seeds."
    return Table(caption, ["Arm", *measured], [(None, rows, [])])


def _accuracy(cell: Cell, split: str) -> float | None:
    values = [line.get("accuracy") for line in cell.evaluations if line.get("split") == split]
    return values[-1] if values and isinstance(values[-1], int | float) and math.isfinite(values[-1]) else None


def _mean_accuracy(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return f"{100 * mean:.2f}{NO_BREAK}%"
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1))
    return f"{100 * mean:.2f} ({100 * sd:.2f}){NO_BREAK}%".replace(" ", NO_BREAK)


def _panel(comparison: Comparison, gaps: Sequence[SplitGap]) -> Panel:
    index = comparison.arm.index

    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, comparison.name, "paired difference by split, nats; mean at the right")
        ax = row_axes(figure, top, len(gaps), right=70)
        ax.axvline(0, color=color("ink"), linewidth=1.1, zorder=1)
        for y, gap in enumerate(gaps):
            row_label(ax, y, gap.split)
            if gap.interval is not None:
                ax.plot(gap.interval, [y, y], color=arm_color(index), linewidth=7, alpha=0.3, zorder=2)
            ax.plot(gap.differences, [y] * len(gap.differences), canvas.marker(index), color=arm_color(index), markersize=6.5, alpha=0.75,
                    markeredgewidth=0, zorder=3)  # fmt: skip
            if len(gap.differences) > 1:
                mean_mark(ax, gap.mean, y, index)
            row_value(ax, y, numbers.difference(gap.mean))
        values = [0.0, *(d for gap in gaps for d in gap.differences)]
        reach = 0.8 * (max(values) - min(values))
        ends = [end for gap in gaps for end in gap.interval or ()]
        low, high = max(min(values) - reach, min([*values, *ends])), min(max(values) + reach, max([*values, *ends]))
        pad = 0.08 * (high - low) or 0.012
        ax.set_xlim(low - pad, high + pad)
        ax.tick_params(axis="x", pad=5)
        canvas.decimal_ticks(ax.xaxis, low - pad, high + pad, ticks=4)

    data: list[list[Any]] = [["split", "step", "quantity", "seed", "nats"]]
    for gap in gaps:
        data += [[gap.split, gap.step, "difference", seed, value] for seed, value in zip(gap.seeds, gap.differences, strict=True)]
        low, high = gap.interval or (None, None)
        data += [[gap.split, gap.step, quantity, "", value]
                 for quantity, value in (("mean", gap.mean), ("t_low", low), ("t_high", high)) if value is not None]  # fmt: skip
    words = "; ".join(f"{gap.split}: {numbers.difference(gap.mean)}" for gap in gaps)
    height = row_height(len(gaps)) + canvas.heading_height(comparison.name) - canvas.heading_height("one line")
    name = f"splits-{comparison.arm.index}-{comparison.parent.index}"
    return canvas.draw(name, f"Paired differences by split, {comparison.name}. {words}.", paint, height=height, data=data)
