"""What a running study shows: bars on a terminal, and a line when a cell ends anywhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from depthroute.common.duration import duration
from depthroute.common.files import read_json
from depthroute.common.say import say
from depthroute.study.live import tail_lines
from depthroute.study.plan import Cell, cells, run_folder

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

REFRESH_SECONDS = 0.5
# Without a terminal a line stays for good, so there are few.
LINE_SECONDS = 30.0
LONGEST_METRICS_LINE = 1024  # bytes


class Progress:
    """Progress across the cells of a study, read from their run folders. `visible` false shows nothing."""

    def __init__(self, plan: Mapping[str, Any], directory: Path, *, visible: bool) -> None:
        steps = {arm["name"]: arm["config"]["train"]["steps"] for arm in plan["arms"]}
        self._steps: dict[Cell, int] = {cell: steps[cell[0]] for cell in cells(plan)}
        self._directory = directory
        self._visible = visible
        self._bars: Bars | None = None
        self._tasks: dict[Cell | None, TaskID] = {}
        self._begun_at = time.perf_counter()
        self._shown_at = self._begun_at
        self._begun_with = self._done()

    def __enter__(self) -> Progress:
        if self._visible and sys.stdout.isatty():
            self._start_bars()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        elif self._visible:
            say(text)

    def ended(self, cell: Cell, reason: str | None) -> None:
        """Tell how a cell ended."""
        if self._bars is not None and cell in self._tasks:
            self._bars.remove_task(self._tasks.pop(cell))
        folder = run_folder(self._directory, *cell)
        whole = sum((run_folder(self._directory, *other) / "result.json").exists() for other in self._steps)
        head = f"[{whole}/{len(self._steps)}] {_name(cell)}"
        if reason is not None:
            trained = (folder / "result.json").exists()
            self.say(f"{head}: {'trained, but its source weights were not analysed' if trained else 'no result'}: {reason}")
            return
        result = read_json(folder / "result.json")
        self.say(
            f"{head}: validation NLL {result['nll']:.4f}, {result['tokens_per_second']['median']:,.0f} tokens/s, "
            f"{duration(result['training_seconds'])} of training"
        )

    def update(self, running: Sequence[Cell]) -> None:
        """Show where the running cells are, if it is time to."""
        now = time.perf_counter()
        if not self._visible or now - self._shown_at < (LINE_SECONDS if self._bars is None else REFRESH_SECONDS):
            return
        self._shown_at = now
        done, total = self._done(), sum(self._steps.values())
        pace = (now - self._begun_at) / max(done - self._begun_with, 1)
        left = f"{duration(pace * (total - done))} left" if done > self._begun_with else ""
        states = {cell: _last_metrics(run_folder(self._directory, *cell)) for cell in running}
        if self._bars is None:
            cells_now = ", ".join(f"{_name(cell)} step {line['step']}/{self._steps[cell]}{_loss(line)}" for cell, line in states.items())
            self.say(f"{100 * done // total} % of the study  {cells_now}  {left}".rstrip())
            return
        self._bars.update(self._tasks[None], completed=done, status=left)
        for cell, line in states.items():
            if cell not in self._tasks:
                self._tasks[cell] = self._bars.add_task(_name(cell), total=self._steps[cell], status="")
            self._bars.update(self._tasks[cell], completed=line["step"], status=_loss(line).strip())
        self._bars.refresh()

    def _done(self) -> int:
        return sum(last_step(self._directory, cell) for cell in self._steps)

    def _start_bars(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        terminal = Console()
        if terminal.is_dumb_terminal:
            return
        text = [TextColumn(field, markup=False) for field in ("{task.description}", "{task.fields[status]}")]
        # drawn from the study's own loop: a drawing thread would take time from the cells for nothing
        self._bars = Bars(text[0], BarColumn(bar_width=24), MofNCompleteColumn(), text[1], console=terminal, auto_refresh=False)
        self._tasks[None] = self._bars.add_task("all cells", total=sum(self._steps.values()), completed=self._begun_with, status="")
        self._bars.start()


def last_step(directory: Path, cell: Cell) -> int:
    """The last step that a cell has written down; 0 before the first."""
    return int(_last_metrics(run_folder(directory, *cell))["step"])


def _name(cell: Cell) -> str:
    return f"{cell[0]} seed {cell[1]}"


def _loss(line: Mapping[str, Any]) -> str:
    return f" loss {line['loss']:.3f}" if "loss" in line else ""


def _last_metrics(folder: Path) -> Mapping[str, Any]:
    """The last whole line of metrics.jsonl, of which a study that looks twice a second reads the end only; step 0 without one."""
    return next(reversed(tail_lines(folder / "metrics.jsonl", 2 * LONGEST_METRICS_LINE)), {"step": 0})
