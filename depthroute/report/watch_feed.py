"""What the live page draws, read from a study's growing files a piece at a time.

A curve has at most POINTS points, on a grid of steps that its length alone decides: a point does not change when more steps come, a page
asks for those it has not had, and runs of one length have their points at the same steps, so that pairs can be subtracted. The value at a
step is the mean of the losses of the last steps, as in the report's curves, and the difference of two such means is the mean of the
paired differences.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthroute.common.files import read_json_lines
from depthroute.report.canvas import dashes
from depthroute.report.stored import places
from depthroute.report.theme import ARM_COLORS
from depthroute.study.live import Live, parsed_lines, read_live
from depthroute.study.plan import Cell, cells, read_plan, run_folder

POINTS = 300
WINDOW = 50  # a point is the mean over this share of the steps: one in fifty, as in the report
REFRESH_SECONDS = 1.0  # however many pages ask, the files are looked at no more often
READ_SECONDS = 0.4  # of one answer; a large study arrives in pieces, and the page draws what has come
CHUNK_BYTES = 1 << 18
Have = Sequence[tuple[int, int, int]]  # of each cell: the reading it comes from, and how many points and validations of it


class Feed:
    """The live state and the curves of one study; safe to ask from several threads.

    Raises:
        RequestError: there is no plan, or it has a format that this version does not read.
        FailureError: the plan was changed after it was written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._plan_stamp: tuple[int, int] | None = None
        self._refreshed_at = -math.inf
        self._plan: dict[str, Any] = {}
        self._live: Live | None = None
        self._curves: dict[Cell, _Curve] = {}
        self._more = False
        self._refresh()

    def answer(self, plan_hash: str, have: Have) -> dict[str, Any]:
        """All that a page has not had yet. A page that holds another plan, or none, gets everything.

        Returns:
            `plan` (its hash), `study` (None where the page has it), `live`, `curves` (a list per cell of the reading it comes from, the
            place of the first point, points as [step, loss], the place of the first validation, and validations as [step, NLL]) and
            `more`: whether there is more to be had at once.
        """
        with self._lock:
            if time.monotonic() - self._refreshed_at >= REFRESH_SECONDS or self._more:
                self._refresh()
            assert self._live is not None
            known = plan_hash == self._plan["hash"] and len(have) == len(self._curves)
            parts = have if known else [(-1, 0, 0)] * len(self._curves)
            return {
                "plan": self._plan["hash"],
                "study": None if known else _described(self._plan),
                "live": _live_facts(self._live),
                "curves": [curve.after(*part) for curve, part in zip(self._curves.values(), parts, strict=True)],
                "more": self._more,
            }

    def _refresh(self) -> None:
        found = (self._directory / "plan.json").stat() if (self._directory / "plan.json").exists() else None
        stamp = (found.st_ino, found.st_mtime_ns) if found else None
        if stamp is None or stamp != self._plan_stamp:
            self._take(read_plan(self._directory))
            self._plan_stamp = stamp
        self._live = read_live(self._directory, self._plan, self._live)
        until = time.monotonic() + READ_SECONDS
        self._more = any([curve.read(until) for curve in self._curves.values()])  # a list: every curve is read
        self._refreshed_at = time.monotonic()

    def _take(self, plan: dict[str, Any]) -> None:
        if plan["hash"] == self._plan.get("hash"):
            return
        self._plan, self._live = plan, None
        steps = {arm["name"]: arm["config"]["train"]["steps"] for arm in plan["arms"]}
        self._curves = {cell: _Curve(run_folder(self._directory, *cell), steps[cell[0]]) for cell in cells(plan)}


class _Curve:
    """The curve of one cell, read as far as its files go."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._every = math.ceil(steps / POINTS)
        self._window = max(1, steps // WINDOW)
        self._evaluations_stamp: tuple[int, int] | None = None
        self._inode: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._reading = time.time_ns() // 1000  # another one each time, and after a restart of the server too
        self._offset = 0
        self._sums = array("d", [0.0])
        self.points: list[tuple[int, float]] = []
        self.validations: list[tuple[int, float]] = []

    def after(self, reading: int, points: int, validations: int) -> list[Any]:
        if reading != self._reading:
            points = validations = 0
        return [self._reading, points, self.points[points:], validations, self.validations[validations:]]

    def read(self, until: float) -> bool:
        """Take what the files have more than before, and return whether the time was too short for all of it."""
        self._read_evaluations()
        return self._read_metrics(until)

    def _read_metrics(self, until: float) -> bool:
        try:
            file = (self._folder / "metrics.jsonl").open("rb")
        except OSError:
            return False
        with file:
            found = os.fstat(file.fileno())
            # A run that continues writes its files again, cut back to its checkpoint.
            if self._inode is not None and (found.st_ino != self._inode or found.st_size < self._offset):
                self._begin()
                self._evaluations_stamp = None
                self._read_evaluations()
            self._inode = found.st_ino
            while self._offset < found.st_size:
                if time.monotonic() > until:
                    return True
                file.seek(self._offset)
                whole, _, _ = file.read(CHUNK_BYTES).rpartition(b"\n")
                if not whole:
                    break
                self._offset += len(whole) + 1
                for line in parsed_lines(whole.split(b"\n")):
                    self._add(line)
        return False

    def _add(self, line: Mapping[str, Any]) -> None:
        step, loss = line.get("step"), line.get("loss")
        if not isinstance(step, int) or not isinstance(loss, float) or not math.isfinite(loss):
            return
        self._sums.append(self._sums[-1] + loss)
        if step % self._every == 0 or step == self._steps:
            first = max(0, len(self._sums) - 1 - self._window)
            mean = (self._sums[-1] - self._sums[first]) / (len(self._sums) - 1 - first)
            self.points.append((step, round(mean, 6)))

    def _read_evaluations(self) -> None:
        path = self._folder / "evaluations.jsonl"
        try:
            found = path.stat()
        except OSError:
            return
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp == self._evaluations_stamp:
            return
        lines = [line for line in read_json_lines(path) if line.get("split") == "validation" and line.get("nll") is not None]
        values = [(line["step"], round(line["nll"], 6)) for line in lines]
        if values[: len(self.validations)] != self.validations:
            self._begin()  # the metrics are read again as well, so that one number says what a page has had
        self.validations, self._evaluations_stamp = values, stamp


def _described(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What of a plan the page needs; colours are the report's."""
    steps = {arm["name"]: arm["config"]["train"]["steps"] for arm in plan["arms"]}
    return {
        "name": plan["name"],
        "question": plan["question"],
        "arms": [
            {"name": arm["name"], "label": arm["label"], "color": f"var(--arm-{index % ARM_COLORS})", "dashes": _dashes(index)}
            for index, arm in zip(places(plan), plan["arms"], strict=True)
        ],
        "comparisons": [{"arm": arm, "parent": parent} for arm, parent in plan["comparisons"]],
        "seeds": plan["seeds"],
        "cells": [{"arm": arm, "seed": seed, "steps": steps[arm]} for arm, seed in cells(plan)],
    }


def _dashes(index: int) -> str:
    """An arm's line style as SVG has it."""
    style = dashes(index)
    return "" if style == "-" else " ".join(map(str, style[1]))


def _live_facts(live: Live) -> dict[str, Any]:
    facts = {field.name: getattr(live, field.name) for field in dataclasses.fields(live) if field.name not in ("name", "question", "cells")}
    hidden = ("arm", "label", "seed", "steps", "seconds_per_step")
    names = [field.name for field in dataclasses.fields(live.cells[0]) if field.name not in hidden] if live.cells else []
    return facts | {"cells": [{name: getattr(cell, name) for name in names} for cell in live.cells]}
