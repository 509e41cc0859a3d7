"""What a person sees of a run: a live line on a terminal, a plain line a while elsewhere and in log.txt."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from depthroute.common.duration import duration
from depthroute.common.files import explain_os_errors
from depthroute.common.say import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
REFRESH_SECONDS = 0.25


class Console:
    """Progress of one run. `visible` false writes `log` only; None is no log.

    The live line is rich's and appears only where standard output is a terminal; rich honours NO_COLOR.
    """

    def __init__(self, log: Path | None, *, label: str, steps: int, first_step: int, visible: bool) -> None:
        self._log = log
        self._steps = steps
        self._visible = visible
        self._seconds_per_step: float | None = None
        self._line_at = self._refresh_at = time.perf_counter()
        self._live: Progress | None = None
        self._task: TaskID | None = None
        if visible and sys.stdout.isatty():
            self._start_live(label, first_step)

    def line(self, text: str) -> None:
        """One line for the log and the screen."""
        self._write(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        elif self._visible:
            say(text)

    def step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Take note of a step. Most calls do nothing more: a line is due every ten seconds, a refresh four times a second."""
        before = self._seconds_per_step
        self._seconds_per_step = seconds if before is None else before + 0.05 * (seconds - before)
        now = time.perf_counter()
        if self._live is not None and (now - self._refresh_at >= REFRESH_SECONDS or step == self._steps):
            self._refresh_at = now
            assert self._task is not None
            self._live.update(self._task, completed=step, status=self._status(step, loss, tokens), refresh=True)
        if now - self._line_at >= LINE_SECONDS or step == self._steps:
            self._line_at = now
            text = f"step {step:>{len(str(self._steps))}}/{self._steps}  {self._status(step, loss, tokens)}"
            if self._live is None:
                self.line(text)
            else:  # the live line already shows it
                self._write(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write(self, text: str) -> None:
        if self._log is not None:
            with explain_os_errors(self._log, "writing"), self._log.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def _status(self, step: int, loss: float, tokens: int) -> str:
        assert self._seconds_per_step is not None
        rate = tokens / self._seconds_per_step
        return f"loss {loss:7.4f}  {rate:>9,.0f} tokens/s  {duration((self._steps - step) * self._seconds_per_step):>7} left"

    def _start_live(self, label: str, first_step: int) -> None:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        terminal = Terminal()
        if terminal.is_dumb_terminal:
            return
        # refreshed from the loop: a thread that draws would compete with a step of a few milliseconds
        self._live = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False), console=terminal, auto_refresh=False,
        )
        self._task = self._live.add_task(label, total=self._steps, completed=first_step, status="")
        self._live.start()
