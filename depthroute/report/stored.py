"""A stored study, read for reporting: the plan, the paired statistics, and what every cell left in its run folder."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthroute.common.config import fingerprint
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, read_json_lines
from depthroute.report.theme import ARM_COLORS

FORMAT = 2  # of plan.json
CURVES = 8  # arms whose curves can still be told apart; no more than there are colours
POST_HOC = " (post hoc)"  # what was added after the plan carries this wherever it is named
PLAN_FIELDS = ("name", "arms", "comparisons", "seeds", "endpoint", "claims", "extensions")


@dataclass(frozen=True)
class Reference:
    """A published number, as the plan gives it: context, measured on other data at another size."""

    value: float
    source: str
    interval: tuple[float, float] | None
    unit: str


@dataclass(frozen=True)
class Cell:
    """One arm trained with one seed. `result` is None until the run is complete; `folder` holds its files, None where there are none.

    `reason` says why the statistics leave the cell out; a run that is complete can be left out too, as when it is not the planned one.
    `nll` is the last loss on the study's endpoint split, None until the run is complete.
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
    nll: float | None
    folder: Path | None

    def losses(self, split: str) -> list[tuple[int, float]]:
        """(step, NLL in nats) of every evaluation of a split that has a finite loss."""
        points = [(e["step"], e["nll"]) for e in self.evaluations if e.get("split", "validation") == split]
        return [(step, nll) for step, nll in points if nll is not None and math.isfinite(nll)]

    def validation(self) -> list[tuple[int, float]]:
        """`losses` of the validation split."""
        return self.losses("validation")

    def documents(self) -> tuple[Sequence[float], Sequence[int]] | None:
        """The NLL summed over each validation document and its predicted tokens, at the last evaluation; None where none were kept.

        Raises:
            FailureError: documents.npz is broken.
        """
        path = None if self.folder is None else self.folder / "documents.npz"
        if path is None or not path.is_file():
            return None
        import numpy as np

        try:
            with np.load(path, allow_pickle=False) as arrays:
                sums, counts = arrays["sums"].astype(np.float64).tolist(), arrays["counts"].astype(np.int64).tolist()
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise FailureError(f"{path} is broken ({error}); evaluate the run again.") from error
        return sums, counts


@dataclass(frozen=True)
class Arm:
    """One variant of the study. `index` names its panels and picks its colour; `post_hoc` arms were added after the plan.

    `plain` and `residual` are FLOPs per trained token of the decoder and of its residual method (`depthroute.study.compute`), `tokens`
    how many it trains on; None where the statistics do not hold them.
    """

    index: int
    name: str
    label: str
    config: Mapping[str, Any]
    seeds: Sequence[int]
    scale: str = ""
    factors: Mapping[str, float | str] = field(default_factory=dict)
    paper: Reference | None = None
    post_hoc: bool = False
    plain: float | None = None
    residual: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One arm against its parent: statistics.json's milestones that have a pair, oldest first, and the endpoint among them.

    `claim` is the planned or added sentence that it decides, as the ledger holds it. A comparison is `post_hoc` where it, or one of its
    arms, was added after the plan.
    """

    arm: Arm
    parent: Arm
    milestones: Sequence[Mapping[str, Any]]
    endpoint: Mapping[str, Any] | None
    endpoint_step: int | None
    post_hoc: bool
    claim: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """What is compared, marked where it was added after the plan and neither arm says so already."""
        marked = self.post_hoc and not (self.arm.post_hoc or self.parent.post_hoc)
        return f"{self.arm.label} against {self.parent.label}{POST_HOC if marked else ''}"


@dataclass(frozen=True)
class StoredStudy:
    """Everything the report is made from. `plan_intact` says whether the plan still has the hash written into it; None without one."""

    plan: Mapping[str, Any]
    arms: Sequence[Arm]
    seeds: Sequence[int]
    comparisons: Sequence[Comparison]
    claims: Sequence[Mapping[str, Any]]
    plan_intact: bool | None
    cells: Mapping[tuple[str, int], Cell]

    def complete(self, arm: Arm) -> list[Cell]:
        """The cells of one arm that enter the report's numbers, in the order of the seeds: finished, and not left out by the statistics."""
        return [cell for cell in self._cells_of(arm) if cell.result is not None and cell.reason is None]

    def missing(self) -> list[Cell]:
        """The cells that the statistics had to leave out, in the plan's order."""
        return [cell for arm in self.arms for cell in self._cells_of(arm) if cell.reason is not None]

    def seed_name(self, seed: int) -> str:
        """A seed, marked where it was added after the plan."""
        late = any(seed in extension["seeds"] for extension in self.plan["extensions"])
        return f"{seed}{POST_HOC if late else ''}"

    @property
    def endpoint_step(self) -> int | None:
        """The step of the endpoint where it is the same in every comparison."""
        steps = {comparison.endpoint_step for comparison in self.comparisons}
        return steps.pop() if len(steps) == 1 else None

    @property
    def endpoint(self) -> str:
        """The split whose loss is compared."""
        return str(self.plan["endpoint"])

    def parent_of(self, arm: Arm) -> Arm | None:
        """The parent of the first comparison in which the arm is the one under test."""
        return next((c.parent for c in self.comparisons if c.arm == arm), None)

    def _cells_of(self, arm: Arm) -> Iterator[Cell]:
        return (self.cells[arm.name, seed] for seed in arm.seeds)


def read_study(folder: Path) -> StoredStudy:
    """Read a study folder as docs/run-folder.md describes it; cells may be missing or unfinished.

    Raises:
        RequestError: the folder is no study, or its plan has another format, lacks a field, or names an arm that it does not hold.
        FailureError: a file in it is cut short.
    """
    plan = _read_plan(folder)
    path = folder / "statistics.json"
    statistics = read_json(path) if path.exists() else {}
    added: dict[str, list[Any]] = {what: [x for e in plan["extensions"] for x in e[what]] for what in ("arms", "comparisons", "claims")}
    compute = statistics.get("compute", {})
    numbered = zip(places(plan), plan["arms"], strict=True)
    arms = {entry["name"]: _arm(index, entry, entry["name"] in added["arms"], compute) for index, entry in numbered}
    for name in (name for pair in plan["comparisons"] for name in pair):
        if name not in arms:
            raise RequestError(f"{folder / 'plan.json'} compares the arm {name!r}, which it does not define.")
    claims = statistics.get("claims") or [
        {**claim, "evidence": {"sentence": "No statistics yet."}, "p": None, "holm_p": None, "verdict": "undecided",
         "post_hoc": claim["text"] in added["claims"]}
        for claim in plan["claims"]
    ]  # fmt: skip
    decided = {(claim["arm"], claim["parent"]): claim for claim in reversed(claims) if claim["kind"] != "saves"}
    paired = {(c["arm"], c["parent"]): c for c in statistics.get("comparisons", [])}

    def comparison(arm: str, parent: str) -> Comparison:
        entry = paired.get((arm, parent), {"milestones": []})
        measured = [m for m in entry["milestones"] if m["seeds"]]
        step = entry.get("endpoint_step") or _last_common(arms[arm], arms[parent])
        late = [arm, parent] in added["comparisons"] or arms[arm].post_hoc or arms[parent].post_hoc
        return Comparison(arms[arm], arms[parent], measured, _at(step, measured), step, late, decided.get((arm, parent)))

    reasons = {(m["arm"], m["seed"]): m["reason"].rstrip(".") for m in statistics.get("missing", [])}
    return StoredStudy(
        plan=plan,
        arms=list(arms.values()),
        seeds=plan["seeds"],
        comparisons=[comparison(arm, parent) for arm, parent in plan["comparisons"]],
        claims=claims,
        plan_intact=_intact(plan),
        cells={
            (arm.name, seed): _read_cell(
                folder / "runs" / arm.name / f"seed-{seed}", arm.name, seed, reasons.get((arm.name, seed)), plan["endpoint"]
            )
            for arm in arms.values()
            for seed in arm.seeds
        },
    )


def _read_plan(folder: Path) -> Mapping[str, Any]:
    path = folder / "plan.json"
    if not path.is_file():
        raise RequestError(f"{folder} is not a study folder: it holds no plan.json; give the folder that `depthroute study` wrote.")
    plan = read_json(path)
    if not isinstance(plan, dict):
        raise RequestError(f"{path} is no plan of a study: it holds no JSON object.")
    if plan.get("format", FORMAT) != FORMAT:
        raise RequestError(
            f"{path} has format {plan['format']!r}; this version of depthroute reads format {FORMAT}. "
            "Report it with the version that ran it, or run the study again."
        )
    for name in PLAN_FIELDS:
        if name not in plan:
            raise RequestError(f"{path} lacks the field {name!r}, so it is no plan of a study.")
    return plan


def mentioned(plan: Mapping[str, Any], room: int) -> list[str]:
    """The `room` arms of most weight: those of the headline, of claims, of the other comparisons, and the rest.

    A pair that does not fit whole is passed over: an arm without the one it is compared with would say nothing.
    """
    claims = [(claim["arm"], claim["parent"]) for claim in plan["claims"] if claim["kind"] != "saves"]
    pairs = [*plan["comparisons"][:1], *claims, *plan["comparisons"][1:]]
    found: dict[str, None] = {}
    for group in [*pairs, *((entry["name"],) for entry in plan["arms"])]:
        if len(found | dict.fromkeys(group)) <= room:
            found |= dict.fromkeys(group)
    return list(found)


def places(plan: Mapping[str, Any]) -> list[int]:
    """A number for each arm of the plan: its place; with more arms than colours, those that are drawn come first and share no colour."""
    names = [entry["name"] for entry in plan["arms"]]
    if len(names) <= ARM_COLORS:
        return list(range(len(names)))
    first = list(dict.fromkeys([*mentioned(plan, CURVES), *mentioned(plan, ARM_COLORS)]))[:ARM_COLORS]
    order = sorted(names, key=lambda name: name not in first)
    return [order.index(name) for name in names]


def _arm(index: int, entry: Mapping[str, Any], post_hoc: bool, compute: Mapping[str, Mapping[str, Any]]) -> Arm:
    flops = compute.get(entry["name"], {})
    return Arm(
        index=index,
        name=entry["name"],
        label=(entry.get("label") or entry["name"]) + (POST_HOC if post_hoc else ""),
        config=entry.get("config", {}),
        scale=entry.get("scale", ""),
        factors=entry.get("factors", {}),
        seeds=entry["seeds"],
        paper=reference(entry.get("paper")),
        post_hoc=post_hoc,
        plain=flops.get("plain"),
        residual=flops.get("residual"),
        tokens=flops.get("tokens"),
    )


def reference(value: Mapping[str, Any] | None) -> Reference | None:
    """A published number as it stands in a plan."""
    if value is None:
        return None
    bounds = value.get("interval")
    return Reference(
        value["value"], value["source"], None if bounds is None else (bounds[0], bounds[1]), value.get("unit", "nats per token")
    )


def _last_common(arm: Arm, parent: Arm) -> int | None:
    """The last milestone that both arms plan."""
    ours, theirs = (set((one.config.get("train") or {}).get("milestones") or ()) for one in (arm, parent))
    return max(ours & theirs, default=None)


def _intact(plan: Mapping[str, Any]) -> bool | None:
    hashed = {name: value for name, value in plan.items() if name not in ("hash", "written_at")}
    return fingerprint(hashed) == plan["hash"] if plan.get("hash") else None


def _at(step: int | None, milestones: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((m for m in milestones if m["step"] == step), None)


def _read_cell(folder: Path, arm: str, seed: int, reason: str | None, endpoint: str) -> Cell:
    def read(name: str) -> Any:
        return read_json(folder / name) if (folder / name).exists() else None

    result, metrics = read("result.json"), read_json_lines(folder / "metrics.jsonl")
    if result is None and reason is None:
        reason = f"stopped after step {metrics[-1]['step']:,}" if metrics else "not started"
    evaluations = read_json_lines(folder / "evaluations.jsonl")
    ends = [e["nll"] for e in evaluations if e.get("split", "validation") == endpoint]
    nll = None if result is None else ends[-1] if ends else result.get("nll")
    return Cell(
        arm=arm,
        seed=seed,
        result=result,
        environment=read("environment.json") or {},
        fingerprint=(read("config.json") or {}).get("data_fingerprint"),
        metrics=metrics,
        evaluations=evaluations,
        routing=read("routing.json"),
        reason=reason,
        folder=folder,
        nll=nll if nll is not None and math.isfinite(nll) else None,
    )
