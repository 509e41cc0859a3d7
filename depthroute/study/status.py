"""Where a study stands, as a table of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from depthroute.common.duration import duration
from depthroute.study.budget import gigabytes
from depthroute.study.live import CellLive, Live

HEAD = ("arm", "seed", "state", "step", "loss", "validation", "tokens/s", "memory", "left", "")
LEFT_ALIGNED = (0, 2, 9)
# What is of interest now comes first where not every cell can be shown.
URGENCY = ("running", "failed", "stopped", "waiting", "complete")


def status_lines(live: Live, *, width: int | None = None, height: int | None = None) -> list[str]:
    """One line about the study, and one for every cell in the order of training.

    Args:
        width: of a line in characters; a longer one is cut. None: any.
        height: lines in all. Where there are more cells, those that run, failed or stopped are shown, and as many others as fit.
    """
    shown = live.cells
    if height is not None and len(shown) > max(height - 3, 1):
        ranked = sorted(range(len(shown)), key=lambda index: (URGENCY.index(shown[index].state), index))
        shown = tuple(shown[index] for index in sorted(ranked[: max(height - 3, 1)]))
    lines = aligned([HEAD, *map(_row, shown)], left=LEFT_ALIGNED)
    if len(shown) < len(live.cells):
        lines.append(f"and {len(live.cells) - len(shown)} more cells")
    return [line if width is None else line[:width] for line in (_summary(live), *lines)]


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Rows of a table in plain text, a line each; the columns in `left` align left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{word:{'<' if column in left else '>'}{widths[column]}}" for column, word in enumerate(row)).rstrip() for row in rows
    ]


def _summary(live: Live) -> str:
    states = [f"{live.count(state)} {state}" for state in URGENCY if live.count(state)]  # type: ignore[arg-type]
    parts = [live.name, ", ".join(states), f"{100 * live.steps_done // max(live.steps_total, 1)} % of all steps"]
    if live.seconds_left:
        parts.append(f"about {duration(live.seconds_left)} left")
    return "; ".join(parts)


def _row(cell: CellLive) -> tuple[str, ...]:
    return (
        cell.arm,
        str(cell.seed),
        cell.state,
        f"{cell.step}/{cell.steps}",
        "" if cell.loss is None else f"{cell.loss:.3f}",
        "" if cell.nll is None else f"{cell.nll:.4f}",
        "" if cell.tokens_per_second is None else f"{cell.tokens_per_second:,.0f}",
        "" if cell.peak_memory_bytes is None else gigabytes(cell.peak_memory_bytes),
        duration(cell.seconds_left) if cell.seconds_left else "",
        cell.reason,
    )
