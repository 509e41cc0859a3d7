"""How large the gradients were: the norm before clipping over the steps, per arm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.curve_plots import Line, smooth
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.featured import featured_cells, left_out
from depthroute.report.stored import Arm, Cell, StoredStudy
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOGARITHMIC_FROM = 10.0  # largest over smallest drawn norm from which a linear axis would hide the small ones


def gradient_figure(study: StoredStudy) -> FigureBlock | None:
    """The mean over seeds per arm, a trailing mean over steps as for the training loss."""
    cells, seeds = featured_cells(study)
    last = max((cell.metrics[-1]["step"] for _, done in cells for cell in done if cell.metrics), default=0)
    window = max(1, last // 50)
    lines = [(arm, _mean_line(done, window)) for arm, done in cells]
    drawn = [(arm, line) for arm, line in lines if len(line) > 1]
    if not drawn:
        return None
    clip = {(arm.config.get("train") or {}).get("gradient_clip") for arm, _ in drawn}
    limit = clip.pop() if len(clip) == 1 else None
    values = [norm for _, line in drawn for _, norm in line]
    logarithmic = max(values) > LOGARITHMIC_FROM * min(values) > 0
    caption = f"Norm of the whole gradient before clipping, mean over {seeds} and a trailing mean over {numbers.plural(window, 'step')}"
    caption += ", on a logarithmic axis" if logarithmic else ""
    caption += f". Gradients above {limit:g} (dashed) were scaled down to it." if limit is not None else "."
    caption += left_out(len(cells), len(study.arms), "arms")
    return FigureBlock("Gradient norms.", caption, [_panel(drawn, last, limit, logarithmic)])


def _mean_line(cells: Sequence[Cell], window: int) -> Line:
    """Steps at which every seed has a finite norm."""
    norms = [{m["step"]: float(m["gradient_norm"]) for m in cell.metrics if _finite(m.get("gradient_norm"))} for cell in cells]
    steps = sorted(set.intersection(*map(set, norms))) if norms else []
    return smooth([(step, math.fsum(seed[step] for seed in norms) / len(norms)) for step in steps], window)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _panel(drawn: Sequence[tuple[Arm, Line]], last: int, limit: float | None, logarithmic: bool) -> Panel:
    entries = [(arm.index, arm.label) for arm, _ in drawn]

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        top = canvas.legend(figure, canvas.heading(figure, "Gradient norm", "before clipping"), entries, markers=False)
        ax = canvas.axes(figure, left=46, top=top + 6)
        for arm, line in drawn:
            ax.plot(*zip(*line, strict=True), color=arm_color(arm.index), linewidth=2.0, linestyle=canvas.dashes(arm.index))
        values = [norm for _, line in drawn for _, norm in line]
        low, high = min(values), max(values)
        if logarithmic:
            ax.set_yscale("log")
            ax.set_ylim(low / 1.15, high * 1.15)
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        else:
            pad = 0.06 * (high - low) or 0.1 * high or 0.1
            ax.set_ylim(low - pad, high + pad)
            canvas.decimal_ticks(ax.yaxis, low - pad, high + pad)
        bottom, top_value = ax.get_ylim()
        if limit is not None and bottom < limit < top_value:
            ax.axhline(limit, color=color("muted"), linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        ax.set_xlim(left=0)
        canvas.step_axis(ax, last)

    data: list[list[Any]] = [["arm", "step", "gradient_norm"], *([arm.name, step, norm] for arm, line in drawn for step, norm in line)]
    words = "; ".join(f"{arm.label} ends at {line[-1][1]:.3g}" for arm, line in drawn)
    height = 240 + canvas.heading_height("one line") + canvas.legend_height([label for _, label in entries])
    return canvas.draw("gradient-norms", f"Gradient norm before clipping over optimiser steps. {words}.", paint, height=height, data=data)
