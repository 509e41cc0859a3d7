"""A stored study, read for reporting: the plan, the paired statistics, and what every cell left in its run folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.common.config import fingerprint
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, read_json_lines

PLAN_FIELDS = ("name", "arms", "comparisons", "seeds")


@dataclass(frozen=True)
class Cell:
    """One arm trained with one seed. `result` is None until the run is complete.

    `reason` says why the statistics leave the cell out; a run that is complete can be left out too, as when it is not the planned one.
    """

    arm: str
    seed: int
    result: Mapping[str, Any] | None
    environment: Mapping[str, Any]
    fingerprint: str | None
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    routing: Mapping[str, Any] | None
    reason: str | None

    def validation(self) -> list[tuple[int, float]]:
        """(step, NLL in nats) of every validation that has a finite loss."""
        points = [(e["step"], e["nll"]) for e in self.evaluations if e.get("split", "validation") == "validation"]
        return [(step, nll) for step, nll in points if nll is not None and math.isfinite(nll)]


@dataclass(frozen=True)
class Arm:
    """One variant of the study. `index` is its place in the plan and picks its colour."""

    index: int
    name: str
    label: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One arm against its parent: statistics.json's milestones that have a pair, oldest first, and the endpoint among them."""

    arm: Arm
    parent: Arm
    milestones: Sequence[Mapping[str, Any]]
    endpoint: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.arm.label} against {self.parent.label}"


@dataclass(frozen=True)
class StoredStudy:
    """Everything the report is made from. `plan_intact` says whether the plan still has the hash written into it; None without one."""

    plan: Mapping[str, Any]
    arms: Sequence[Arm]
    seeds: Sequence[int]
    comparisons: Sequence[Comparison]
    endpoint_step: int | None
    plan_intact: bool | None
    cells: Mapping[tuple[str, int], Cell]

    def complete(self, arm: Arm) -> list[Cell]:
        """The cells of one arm that enter the report's numbers, in the order of the seeds: finished, and not left out by the statistics."""
        return [cell for cell in self._cells_of(arm) if cell.result is not None and cell.reason is None]

    def missing(self) -> list[Cell]:
        """The cells that the statistics had to leave out, in the plan's order."""
        return [cell for arm in self.arms for cell in self._cells_of(arm) if cell.reason is not None]

    def parent_of(self, arm: Arm) -> Arm | None:
        """The parent of the first comparison in which the arm is the one under test."""
        return next((c.parent for c in self.comparisons if c.arm == arm), None)

    def _cells_of(self, arm: Arm) -> Iterator[Cell]:
        return (self.cells[arm.name, seed] for seed in self.seeds)


def read_study(folder: Path) -> StoredStudy:
    """Read a study folder as docs/run-folder.md describes it; cells may be missing or unfinished.

    Raises:
        RequestError: the folder is no study, or its plan lacks a field or names an arm that it does not hold.
        FailureError: a file in it is cut short.
    """
    if not (folder / "plan.json").is_file():
        raise RequestError(f"{folder} is not a study folder: it holds no plan.json; give the folder that `depthroute study` wrote.")
    plan = read_json(folder / "plan.json")
    lacking = [name for name in PLAN_FIELDS if not isinstance(plan, dict) or name not in plan]
    if lacking:
        raise RequestError(f"{folder / 'plan.json'} lacks the field {lacking[0]!r}, so it is no plan of a study.")
    if plan.get("format", 1) != 1:
        raise RequestError(f"{folder / 'plan.json'} has format {plan['format']!r}; this version of depthroute reads format 1.")
    arms = {
        arm["name"]: Arm(index=i, name=arm["name"], label=arm.get("label") or arm["name"], config=arm.get("config", {}))
        for i, arm in enumerate(plan["arms"])
    }
    for name in (name for pair in plan["comparisons"] for name in pair):
        if name not in arms:
            raise RequestError(f"{folder / 'plan.json'} compares the arm {name!r}, which it does not define.")
    path = folder / "statistics.json"
    statistics = read_json(path) if path.exists() else {}
    reasons = {(m["arm"], m["seed"]): m["reason"].rstrip(".") for m in statistics.get("missing", [])}
    milestones = {(c["arm"], c["parent"]): [m for m in c["milestones"] if m["seeds"]] for c in statistics.get("comparisons", [])}
    endpoint_step = statistics.get("endpoint_step") or max(plan.get("milestones") or [0]) or None
    return StoredStudy(
        plan=plan,
        arms=list(arms.values()),
        seeds=plan["seeds"],
        comparisons=[
            Comparison(arms[a], arms[p], milestones.get((a, p), []), _at(endpoint_step, milestones.get((a, p), [])))
            for a, p in plan["comparisons"]
        ],
        endpoint_step=endpoint_step,
        plan_intact=_intact(plan),
        cells={
            (arm, seed): _read_cell(folder / "runs" / arm / f"seed-{seed}", arm, seed, reasons.get((arm, seed)))
            for arm in arms
            for seed in plan["seeds"]
        },
    )


def _intact(plan: Mapping[str, Any]) -> bool | None:
    hashed = {name: value for name, value in plan.items() if name not in ("hash", "written_at")}
    return fingerprint(hashed) == plan["hash"] if plan.get("hash") else None


def _at(step: int | None, milestones: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((m for m in milestones if m["step"] == step), None)


def _read_cell(folder: Path, arm: str, seed: int, reason: str | None) -> Cell:
    def read(name: str) -> Any:
        return read_json(folder / name) if (folder / name).exists() else None

    result, metrics = read("result.json"), read_json_lines(folder / "metrics.jsonl")
    if result is None and reason is None:
        reason = f"stopped after step {metrics[-1]['step']:,}" if metrics else "not started"
    return Cell(
        arm=arm,
        seed=seed,
        result=result,
        environment=read("environment.json") or {},
        fingerprint=(read("config.json") or {}).get("data_fingerprint"),
        metrics=metrics,
        evaluations=read_json_lines(folder / "evaluations.jsonl"),
        routing=read("routing.json"),
        reason=reason,
    )
