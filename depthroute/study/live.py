"""Where the cells of a study stand now, read from its folder alone: nothing is written, and of growing files only the end is read.

Whether a cell is being trained is seen without touching its lock, for even a shared lock held for a moment could make a trainer that
starts at that moment believe that the folder is taken. Linux lists the locks that are held in /proc/locks; elsewhere, and for a study
that another machine runs, a file that changed a short while ago says the same.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from depthroute.common.config import from_json
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json
from depthroute.cost.work import body_work
from depthroute.study.plan import Cell, cells, read_plan, run_folder
from depthroute.train import RunConfig, branch_step

Lock = tuple[int, int, int]  # a file by the major and minor number of its device, and its inode
State = Literal["waiting", "running", "stopped", "failed", "complete"]
# A run writes at least once a second and a step; a step may take long, and so may an evaluation.
FRESH_SECONDS = 30.0
FRESH_STEPS = 5
TAIL_BYTES = 8192  # some thirty lines of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class CellLive:
    """One cell of a study as its run folder shows it.

    Attributes:
        state: "waiting" has not begun; "running" is being trained, or was a moment ago; "stopped" begun, can go on, and nobody is at it;
            "failed" ended with an error; "complete" has its result.json.
        step: Optimiser steps done, of `steps`.
        loss: The training loss of the last step, nats per token.
        nll: The validation loss of the last evaluation, nats per token.
        tokens_per_second: The median over the last steps, over all steps of a complete cell.
        seconds_per_step: The same as a time.
        seconds_left: What the steps and evaluations that are left take at this pace. None where nothing was measured; 0 when complete.
        peak_memory_bytes: The largest resident set (CPU) or allocation (CUDA) so far, where it is known: of the process where it runs on
            this machine's processor, else of the last checkpoint or the result.
        reason: Why it failed or stopped, or what it still lacks; empty where there is nothing to say.
        changed_at: Unix time of the last change of its files. None before the first.
    """

    arm: str
    label: str
    seed: int
    state: State
    step: int
    steps: int
    loss: float | None
    nll: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    seconds_left: float | None
    peak_memory_bytes: int | None
    reason: str
    changed_at: float | None


@dataclass(frozen=True, kw_only=True)
class Live:
    """A study at one moment.

    Attributes:
        running: A cell is being trained, or a process holds the study.
        cells: In the order of training.
        taken_over: By arm, the first steps of each of its cells that its trunk trains.
        steps_done: Over all cells, of `steps_total`; steps that are taken over count once, in the trunk.
        seconds_left: An estimate of the wall-clock time to the end, with as many cells at once as run now. An arm that has not begun is
            taken to need time in proportion to its multiplications. None where nothing runs or nothing was measured; 0 at the end.
        memory_total_bytes, memory_available_bytes: Of this machine. None where the system does not say.
        read_at: Unix time.
    """

    name: str
    question: str
    running: bool
    cells: tuple[CellLive, ...]
    taken_over: Mapping[str, int]
    steps_done: int
    steps_total: int
    seconds_left: float | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    read_at: float

    def count(self, state: State) -> int:
        """How many cells are in a state."""
        return sum(cell.state == state for cell in self.cells)


def read_live(directory: Path, plan: Mapping[str, Any] | None = None, before: Live | None = None) -> Live:
    """Read where every cell of the study in `directory` stands.

    Args:
        plan: What `read_plan` returned, to save reading it again.
        before: What this function returned last for this plan: what is complete in it is not looked at again.

    Raises:
        RequestError: there is no plan, or it has a format that this version does not read.
        FailureError: the plan was changed after it was written.
    """
    directory = Path(directory)
    plan = plan or read_plan(directory)
    now = time.time()
    held = _held_locks()
    missing, unanalysed = _statistics(directory)
    arms = {arm["name"]: arm for arm in plan["arms"]}
    ended = {(cell.arm, cell.seed): cell for cell in before.cells if cell.state == "complete"} if before else {}
    states = tuple(
        replace(ended[cell], reason=unanalysed.get(cell, ""))
        if cell in ended
        else _read_cell(directory, arms[cell[0]], cell, held, missing.get(cell), unanalysed.get(cell), now)
        for cell in cells(plan)
    )
    taken = before.taken_over if before else _taken_over(arms)
    own = [(max(0, cell.step - taken.get(cell.arm, 0)), cell.steps - taken.get(cell.arm, 0)) for cell in states]
    total, available = _machine_memory()
    return Live(
        name=plan["name"],
        question=plan["question"],
        running=any(cell.state == "running" for cell in states) or _lock_owner(directory / ".lock", held) is not None,
        cells=states,
        taken_over=taken,
        steps_done=sum(done for done, _ in own),
        steps_total=sum(steps for _, steps in own),
        seconds_left=_study_seconds_left(states, arms, taken),
        memory_total_bytes=total,
        memory_available_bytes=available,
        read_at=now,
    )


def tail_lines(path: Path, limit_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON lines within its last `limit_bytes`, oldest first; none where there is no file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - limit_bytes))
            lines = file.read(limit_bytes).split(b"\n")
    except OSError:
        return []
    # What follows the last line break is being written; what the reading began in the middle of is no line.
    return list(parsed_lines(lines[1 if size > limit_bytes else 0 : -1]))


def parsed_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of some lines; a broken line is left out, for what shows a running study must outlive one."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _read_cell(
    directory: Path, arm: Mapping[str, Any], cell: Cell, held: Mapping[Lock, int], missing: str | None, unanalysed: str | None, now: float
) -> CellLive:
    folder, train = run_folder(directory, *cell), arm["config"]["train"]
    steps, per_step = train["steps"], train["sequences"] * arm["config"]["model"]["context"]
    metrics = [line for line in tail_lines(folder / "metrics.jsonl") if {"step", "loss", "seconds"} <= line.keys()]
    evaluations = [line for line in tail_lines(folder / "evaluations.jsonl") if line.get("split") == "validation"]
    step = metrics[-1]["step"] if metrics else 0
    seconds = statistics.median(line["seconds"] for line in metrics) if metrics else None
    changed = max(filter(None, (_changed_at(folder / name) for name in ("metrics.jsonl", "evaluations.jsonl", "log.txt"))), default=None)
    result = _optional_json(folder / "result.json")
    owner = _lock_owner(folder / "log.txt", held)
    patience = max(FRESH_SECONDS, FRESH_STEPS * (seconds or 0.0))
    said = _said_last(folder.with_suffix(".output.txt"))
    state: State = "waiting"
    reason = ""
    if result:
        state, reason = "complete", unanalysed or ""
        seconds = per_step / result["tokens_per_second"]["median"]
    elif owner is not None:
        state = "running"
    elif missing is not None and not missing.startswith(("not started", "stopped")):
        state, reason = "failed", missing
    elif changed is not None and now - changed < patience:
        state = "running"
    elif said:
        state, reason = "failed", said
    elif changed is not None:
        state, reason = "stopped", f"stopped after step {step}" if step else "stopped before its first step ended"
    left = 0.0 if result else _cell_seconds_left(step, steps, seconds, evaluations, train["milestones"])
    return CellLive(
        arm=cell[0],
        label=arm["label"],
        seed=cell[1],
        state=state,
        step=steps if result else step,
        steps=steps,
        loss=_finite(metrics[-1]["loss"]) if metrics else None,
        nll=_finite(result["nll"] if result else evaluations[-1].get("nll") if evaluations else None),
        tokens_per_second=per_step / seconds if seconds else None,
        seconds_per_step=seconds,
        seconds_left=left,
        peak_memory_bytes=result.get("peak_memory_bytes") if result else _peak_memory(folder, owner, train.get("device")),
        reason=reason,
        changed_at=changed,
    )


def _cell_seconds_left(
    step: int, steps: int, seconds: float | None, evaluations: Sequence[Mapping[str, Any]], milestones: Sequence[int]
) -> float | None:
    if seconds is None:
        return None
    measured = [line["seconds"] for line in evaluations if "seconds" in line]
    due = sum(milestone > step for milestone in {*milestones, steps})
    return (steps - step) * seconds + (due * statistics.mean(measured) if measured else 0.0)


def _taken_over(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    taken = {}
    for name, arm in arms.items():
        if arm["trunk"] is not None:
            with suppress(RequestError):  # by another version's rules: the study says so when it comes to this cell
                branch, trunk = (from_json(RunConfig, entry["config"]) for entry in (arm, arms[arm["trunk"]]))
                taken[name] = branch_step(branch, trunk)
    return taken


def _study_seconds_left(
    states: Sequence[CellLive], arms: Mapping[str, Mapping[str, Any]], taken: Mapping[str, int]
) -> float | None:
    if all(cell.state == "complete" for cell in states):
        return 0.0
    measured = [(cell, cell.seconds_per_step) for cell in states if cell.seconds_per_step]
    at_once = sum(cell.state == "running" for cell in states)
    if not measured or not at_once:
        return None
    try:
        work = {name: _multiplications(arm["config"]) for name, arm in arms.items()}
    except RequestError:  # a method that this process does not know: how long its cells take cannot be said before one is measured
        return None
    per_work = statistics.median(seconds / work[cell.arm] for cell, seconds in measured)
    pace = {
        name: statistics.median([seconds for cell, seconds in measured if cell.arm == name] or [work[name] * per_work]) for name in arms
    }
    left = [
        cell.seconds_left if cell.seconds_left is not None else (cell.steps - max(cell.step, taken.get(cell.arm, 0))) * pace[cell.arm]
        for cell in states
        if cell.state not in ("complete", "failed")
    ]
    # No schedule ends before its longest cell.
    return max(sum(left) / at_once, *left)


def _multiplications(config: Mapping[str, Any]) -> float:
    """Multiplications of one step up to a constant: the weights of the body and of the head, without attention over the context."""
    run = from_json(RunConfig, config)
    return float(run.tokens_per_step * (body_work(run.model) + run.model.vocabulary * run.model.width))


def _statistics(directory: Path) -> tuple[dict[Cell, str], dict[Cell, str]]:
    """What statistics.json says of cells without a result, and of those without their analysis."""
    found = _optional_json(directory / "statistics.json") or {}
    missing, unanalysed = (
        {(entry["arm"], entry["seed"]): str(entry["reason"]) for entry in found.get(kind, ())} for kind in ("missing", "unanalysed")
    )
    return missing, unanalysed


def _said_last(output: Path) -> str:
    """The last line a cell's process printed, kept where it failed; empty without one."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def _peak_memory(folder: Path, owner: int | None, device: str | None) -> int | None:
    if owner and device == "cpu":
        try:
            for line in Path(f"/proc/{owner}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
    try:
        saved = sorted(entry for entry in (folder / "checkpoints").iterdir() if entry.name.startswith("step-"))
    except OSError:
        return None
    state = _optional_json(saved[-1] / "state.json") if saved else None
    peak = (state or {}).get("peak_memory_bytes")
    return int(peak) if peak else None


def _held_locks() -> dict[Lock, int]:
    """The files under an exclusive lock, and the process that holds each; empty where the system does not say.

    A line of /proc/locks is `1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END`, major and minor in hexadecimal (proc_locks(5)).
    """
    held = {}
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE":
            major, minor, inode = words[5].split(":")
            held[int(major, 16), int(minor, 16), int(inode)] = int(words[4])
    return held


def _lock_owner(path: Path, held: Mapping[Lock, int]) -> int | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return held.get((os.major(found.st_dev), os.minor(found.st_dev), found.st_ino))


def _machine_memory() -> tuple[int | None, int | None]:
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return tuple(int(facts[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        return None, None


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _optional_json(path: Path) -> Any:
    return read_json(path) if path.exists() else None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
