"""Sweeps: the loss over two factors as heat maps, one for each setting of the rest, with the best cell and those that may be it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthroute.common.errors import RequestError
from depthroute.report import canvas, numbers
from depthroute.report.document import Block, FigureBlock, Panel, Paragraph
from depthroute.report.numbers import NONE
from depthroute.report.stored import Arm, StoredStudy
from depthroute.report.theme import color
from depthroute.study.grid import BestCells, Cell, Run, best_cells
from depthroute.study.surface import response_surface

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHOD = "method"
Level = float | str
CELL_WIDTH, CELL_HEIGHT = 52.0, 26.0
LABELS, HEAD, FOOT = 74.0, 40.0, 8.0
WHITE_FROM = 0.8  # depth of the heat colour from which white reads better than ink, in both themes
DEEPEST = 0.95
HATCH = 7.0  # pixels between the strokes of a cell that may be the best


@dataclass(frozen=True)
class Grid:
    """The arms of one setting of the other factors, by their levels of the two axes (columns, rows); `setting` is () where there are "
    "none."""

    axes: tuple[str, str]
    setting: tuple[tuple[str, Level], ...]
    levels: tuple[Sequence[Level], Sequence[Level]]
    arms: Mapping[tuple[Level, Level], Arm]

    @property
    def title(self) -> str:
        """What the other factors are here."""
        parts = [str(value) if name in (METHOD, "scale") else f"{name}: {_level(value)}" for name, value in self.setting]
        return ", ".join(parts) or f"{self.axes[0]} and {self.axes[1]}".capitalize()


@dataclass(frozen=True)
class Ranking:
    """The lowest mean loss of a grid, and the cells that cannot be told from it; None where no spread of repeated runs is known."""

    best: tuple[Level, Level]
    contenders: frozenset[tuple[Level, Level]] | None
    runs: Sequence[Run]


def grids(study: StoredStudy) -> list[Grid]:
    """The grids of two factors with two levels each; more factors give one grid for each of their settings that spans both axes.

    Axes are the first two factors of the plan that have two levels, numbers before names. The factor "method" is never an axis.
    """
    names = dict.fromkeys(name for arm in study.arms for name in arm.factors if name != METHOD)
    values = {name: list(dict.fromkeys(arm.factors[name] for arm in study.arms if name in arm.factors)) for name in names}
    wide = sorted((name for name in names if len(values[name]) > 1), key=lambda name: any(isinstance(v, str) for v in values[name]))
    if len(wide) < 2:
        return []
    axes = (wide[0], wide[1])
    groups: dict[tuple[tuple[str, Level], ...], dict[tuple[Level, Level], Arm]] = {}
    for arm in study.arms:
        if all(axis in arm.factors for axis in axes):
            rest = {name: value for name, value in arm.factors.items() if name not in axes}
            rest |= {"scale": arm.scale} if arm.scale else {}
            groups.setdefault(tuple(rest.items()), {}).setdefault((arm.factors[axes[0]], arm.factors[axes[1]]), arm)
    found = []
    for setting, arms in groups.items():
        levels = tuple(sorted({place[axis] for place in arms}, key=_order) for axis in (0, 1))
        if all(len(level) > 1 for level in levels):
            first, second = (0, 1) if len(levels[0]) >= len(levels[1]) else (1, 0)
            turned = {(place[first], place[second]): arm for place, arm in arms.items()}
            found.append(Grid((axes[first], axes[second]), setting, (levels[first], levels[second]), turned))
    return found


def sweep_blocks(study: StoredStudy) -> list[Block]:
    """One figure of all grids in one colour scale, and what a fitted surface says of each."""
    found = [(grid, _losses(study, grid)) for grid in grids(study)]
    found = [(grid, losses) for grid, losses in found if losses]
    if not found:
        return []
    ranked = [(grid, losses, ranking(grid, losses)) for grid, losses in found]
    means = [value for _, losses, _ in ranked for cell in losses.values() for value in [_mean(list(cell.values()))]]
    limits = (min(means), max(means))
    panels = [_panel(index, grid, losses, rank, limits) for index, (grid, losses, rank) in enumerate(ranked)]
    blocks: list[Block] = [FigureBlock("The loss over the sweep.", _caption([rank for _, _, rank in ranked]), panels)]
    notes = [(grid, note) for grid, losses, rank in ranked for note in [surface_note(grid, rank)] if note]
    return blocks + [Paragraph(f"{grid.title}. {note}" if len(ranked) > 1 else note) for grid, note in notes]


def ranking(grid: Grid, losses: Mapping[tuple[Level, Level], Mapping[int, float]]) -> Ranking:
    """The best cell by its mean, and its rivals by `depthroute.study.grid.best_cells`."""
    places = {place: Cell(rank=_number(grid.levels[0], place[0]), blocks=_number(grid.levels[1], place[1])) for place in losses}
    runs = [Run(cell=places[place], seed=seed, loss=loss) for place, seeds in losses.items() for seed, loss in seeds.items()]
    names = {(cell.rank, cell.blocks): place for place, cell in places.items()}
    lowest = min(losses, key=lambda place: _mean(list(losses[place].values())))
    try:
        found: BestCells = best_cells(runs)
    except RequestError:  # seeds that do not connect the cells, or a single cell
        return Ranking(lowest, None, runs)
    order = [(names[entry.cell.rank, entry.cell.blocks], entry.contender) for entry in found.cells]
    known = all(contender is not None for _, contender in order)
    return Ranking(order[0][0], frozenset(place for place, contender in order if contender) if known else None, runs)


def surface_note(grid: Grid, rank: Ranking) -> str:
    """The fitted quadratic in a sentence; empty where an axis has names for levels or the runs do not hold six terms."""
    if any(isinstance(level, str) for levels in grid.levels for level in levels):
        return ""
    try:
        fitted = response_surface(rank.runs)
    except RequestError:
        return ""
    at, (columns, rows) = fitted.optimum, grid.axes
    place = "inside the grid" if at.place == "inside" else "at the border of the grid, beyond which it may be lower still"
    note = (
        f"A quadratic in the logarithms of {columns} and {rows} is lowest {place}, at {columns} {at.rank:.3g} (95 % interval "
        f"{at.rank_interval[0]:.3g} to {at.rank_interval[1]:.3g}) and {rows} {at.blocks:.3g} ({at.blocks_interval[0]:.3g} to "
        f"{at.blocks_interval[1]:.3g}), where it expects {numbers.nats(at.loss)} nats."
    )
    if fitted.lack_of_fit is None:
        return f"{note} No cell is repeated, so whether a quadratic fits is not tested."
    fits, rest = "What it misses is within what repeated runs spread", ""
    if fitted.lack_of_fit.p < 0.05:
        fits, rest = "It misses more than repeated runs spread", ", so take its lowest point as a summary and not as a place"
    return f"{note} {fits} (lack of fit, p {numbers.probability(fitted.lack_of_fit.p)}){rest}."


def _losses(study: StoredStudy, grid: Grid) -> dict[tuple[Level, Level], dict[int, float]]:
    found = {}
    for place, arm in grid.arms.items():
        seeds = {cell.seed: cell.nll for cell in study.complete(arm) if cell.nll is not None}
        if seeds:
            found[place] = seeds
    return found


def _caption(rankings: Sequence[Ranking]) -> str:
    caption = (
        "A cell is an arm, its number the mean loss over the complete seeds in nats per token; the stronger its colour the lower, on one "
        "scale in all panels. The thick frame is the lowest mean. "
    )
    if any(rank.contenders is not None for rank in rankings):
        caption += "Hatched cells cannot be told from it by what repeated runs spread; that the truly best is among them holds with 95 %. "
    if any(rank.contenders is None for rank in rankings):
        caption += "Without hatches no spread of repeated runs is known, and the lowest of many means is lower than its cell deserves."
    return caption.strip()


def _panel(
    index: int, grid: Grid, losses: Mapping[tuple[Level, Level], Mapping[int, float]], rank: Ranking, limits: tuple[float, float]
) -> Panel:
    columns, rows = grid.levels
    labels = max(LABELS, min(160.0, 14 + len(grid.axes[1]) * canvas.SMALL_SIZE * canvas.CHARACTER_WIDTH))
    cell = max(CELL_WIDTH, min(90.0, (canvas.WIDTH - labels) / len(columns)))
    width = max(canvas.WIDTH, labels + cell * len(columns) + canvas.MARGIN)
    height = canvas.heading_height(grid.title, width) + HEAD + CELL_HEIGHT * len(rows) + FOOT
    low, high = limits

    def paint(figure: Figure) -> None:
        from matplotlib.patches import Rectangle

        top = canvas.heading(figure, grid.title, "mean loss, nats per token") + HEAD
        corner_name = canvas.cut(grid.axes[1], labels - 12, canvas.SMALL_SIZE)
        canvas.text(figure, labels - 10, top - 8, corner_name, fontsize=canvas.SMALL_SIZE, color=color("muted"), ha="right")
        canvas.text(figure, labels, top - 24, grid.axes[0], fontsize=canvas.SMALL_SIZE, color=color("muted"))
        for column, level in enumerate(columns):
            shown = canvas.cut(_level(level), cell, canvas.SMALL_SIZE)
            canvas.text(figure, labels + cell * (column + 0.5), top - 8, shown, fontsize=canvas.SMALL_SIZE, ha="center")
        for row, second in enumerate(rows):
            y = top + CELL_HEIGHT * row
            shown = canvas.cut(_level(second), labels - 12, canvas.SMALL_SIZE)
            canvas.text(figure, labels - 10, y + 17.5, shown, fontsize=canvas.SMALL_SIZE, ha="right")
            for column, first in enumerate(columns):
                place = (first, second)
                if place not in grid.arms:
                    continue
                x, mean = labels + cell * column, _mean(list(losses[place].values())) if place in losses else None
                corner, size = (x + 1, height - y - CELL_HEIGHT + 1), (cell - 2, CELL_HEIGHT - 2)
                depth = 0.0 if mean is None else DEEPEST * ((high - mean) / (high - low) if high > low else 0.5)
                layers: list[dict[str, Any]] = [
                    {"facecolor": color("surface"), "edgecolor": color("rule"), "linewidth": 0.6},
                    {"facecolor": color("heat"), "alpha": depth, "linewidth": 0},
                ]
                for style in layers:
                    figure.add_artist(Rectangle(corner, *size, transform=None, **style))
                ink = color("on-heat" if depth >= WHITE_FROM else "ink")
                if rank.contenders is not None and place in rank.contenders and place != rank.best:
                    _hatch(figure, corner, size, ink)
                if place == rank.best:
                    figure.add_artist(Rectangle(corner, *size, transform=None, facecolor="none", edgecolor=color("ink"), linewidth=2.4))
                shown = NONE if mean is None else numbers.nats(mean)
                canvas.text(figure, x + cell / 2, y + 17.5, shown, fontsize=canvas.SMALL_SIZE, ha="center", color=ink)

    data: list[list[Any]] = [[*grid.axes, "arm", "seeds", "mean_nll", "best", "contender"]]
    for place, arm in grid.arms.items():
        if place in losses:
            rival = "" if rank.contenders is None else place in rank.contenders
            data.append([*place, arm.name, len(losses[place]), _mean(list(losses[place].values())), place == rank.best, rival])
    best = ", ".join(f"{axis} {_level(level)}" for axis, level in zip(grid.axes, rank.best, strict=True))
    lowest = numbers.nats(_mean(list(losses[rank.best].values())))
    words = f"Mean loss by {grid.axes[0]} and {grid.axes[1]}, {grid.title}. Lowest at {best}: {lowest} nats."
    return canvas.draw(f"sweep-{index}", words, paint, width=width, height=height, data=data)


def _hatch(figure: Figure, corner: tuple[float, float], size: tuple[float, float], ink: str) -> None:
    """Short strokes along the lower edge and the upper: a hatch over the whole cell would cross its number."""
    from matplotlib.lines import Line2D

    (x, y), (width, height) = corner, size
    for start in range(0, int(width - 4), int(HATCH)):
        for base in (y + 1, y + height - 5):
            stroke = Line2D([x + start + 1.5, x + start + 5.5], [base, base + 4], color=ink, linewidth=0.9, transform=None)
            figure.add_artist(stroke)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _number(levels: Sequence[Level], level: Level) -> float:
    """A level as a number: its own, or its place among levels that have names or are not positive."""
    if all(isinstance(other, int | float) and other > 0 for other in levels):
        return float(level)
    return 1.0 + list(levels).index(level)


def _order(level: Level) -> tuple[bool, float, str]:
    return (True, 0.0, level) if isinstance(level, str) else (False, float(level), "")


def _level(level: Level) -> str:
    return level if isinstance(level, str) else f"{level:,g}"
