"""The plan of a study: resolved, written and hashed before its first step, and what may be added to it afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from depthroute.common.config import fingerprint, from_json, to_json
from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.common.files import read_json, write_json
from depthroute.data import TokenDataset
from depthroute.study.design import Arm as Arm
from depthroute.study.design import Claim as Claim
from depthroute.study.design import Reference as Reference
from depthroute.study.design import Study as Study
from depthroute.train import RunConfig, branch_step
from depthroute.train import resolve as resolve_run

FORMAT = 2
# Arms exist to differ here; anything else a pair differs in must be declared.
ALWAYS_DIFFERS = ("model.residual",)
# Pairs that differ in one of these are not pairs: they would not see the same batches in the same order.
NEVER_DIFFERS = ("data_fingerprint", "train.seed", "train.sequences", "train.evaluation_tokens", "model.context")
UNHASHED = ("written_at", "hash")
HISTORY = (*UNHASHED, "extensions")
# What an extension may make longer, and by what its entries are known; everything else of a plan stays.
GROWS: dict[str, Callable[[Any], Any]] = {
    "arms": lambda arm: arm["name"], "seeds": int, "comparisons": tuple, "claims": lambda claim: claim["text"],
}  # fmt: skip

Cell = tuple[str, int]  # the name of an arm, and a seed


def plan_of(study: Study, written: Mapping[str, Any] | None = None, *, here: bool = True) -> dict[str, Any]:
    """The plan of a study as `plan.json` holds it, but for `written_at` and `hash`.

    Nothing is left to choose: "auto" becomes what this machine takes, or what `written`, a plan to be gone on with, says. An empty data
    fingerprint becomes that of the data. With `here` false the cells are trained on other machines, and "cuda" needs no GPU in this one.

    Raises:
        RequestError: what `Study.check` refuses, milestones beyond an arm's steps, a trunk that an arm cannot branch from, a device or a
            precision that cannot be had or chosen here, an endpoint that evaluations on the data do not have, or a pair that differs where
            the study does not declare it.
    """
    study.check()
    configs = {name: study.config_of(name) for name in study.arms}
    for name, arm in study.arms.items():
        if arm.trunk is not None:
            try:
                branch_step(configs[name], configs[arm.trunk])
            except RequestError as error:  # here, not after hours of training the trunk
                raise RequestError(f"{name} cannot branch from {arm.trunk}: {error}") from error
    data_fingerprint = study.base.data_fingerprint or _data_of(study).fingerprint
    before = {arm["name"]: from_json(RunConfig, arm["config"]) for arm in written["arms"]} if written else {}
    plan = {
        "format": FORMAT,
        "name": study.name,
        "question": study.question,
        "arms": [
            {
                "name": name,
                "label": arm.label,
                "scale": arm.scale,
                "factors": dict(arm.factors),
                "seeds": list(study.seeds_of(name)),
                "trunk": arm.trunk,
                "paper": to_json(arm.paper),
                "config": to_json(_resolved(configs[name], data_fingerprint, before.get(name), here)),
            }
            for name, arm in study.arms.items()
        ],
        "comparisons": [list(pair) for pair in study.comparisons],
        "differs": list(study.differs),
        "seeds": list(study.seeds),
        "endpoint": study.endpoint,
        "claims": [to_json(claim) for claim in study.claims],
        "stopping": study.stopping,
        "data_fingerprint": data_fingerprint,
        "extensions": [],
    }
    check_matched(plan)
    return plan


def write_plan(
    study: Study,
    directory: Path,
    *,
    extend: bool = False,
    here: bool = True,
    check: Callable[[Mapping[str, Any]], object] = lambda plan: None,
) -> dict[str, Any]:
    """Write `directory/plan.json` with its hash, or find the same plan there; return the plan that is there now.

    With `extend`, a study that holds everything of the plan that is there, and more arms, seeds, comparisons or claims, is added to it.
    What is added is written down with the time, the plan's hash before, and how many cells had a result by then: it was decided by
    somebody who could have seen them, so reports call it post hoc. An arm that is there gets no more of the seeds that are there, and
    what is there keeps its words: the study's name and question, and where its claims end, which `boundary` may say in numbers of seeds.

    Args:
        here: as in `plan_of`.
        check: called with a plan before it is written; it refuses one with which its caller could not go on.

    Raises:
        RequestError: the study is refused (see `plan_of`), or the directory holds another plan, or runs without one.
        FailureError: the plan that is there was changed after it was written.
    """
    path = directory / "plan.json"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if path.exists():
        written = read_plan(directory)
        plan = plan_of(study, written, here=here)
        grown, added = _with_additions(written, plan)
        changed = next(_changes(written, grown if extend else plan, growing=extend), None)
        if changed is not None:
            name, old, new = changed
            grows = not extend and next(_changes(written, grown, growing=True), None) is None
            what_then = "Add to the plan that is there with --extend" if grows else "Run the plan that is there"
            raise RequestError(f"{path} holds another plan: {name} is {old} there and {new} here. {what_then}, or choose another folder.")
        if not any(added.values()):
            return written
        plan = grown
        complete = sum((run_folder(directory, *cell) / "result.json").exists() for cell in cells(written))
        entry = {"written_at": now, **added, "complete_cells": complete, "previous_hash": written["hash"]}
        plan |= {"extensions": [*written["extensions"], entry], "written_at": written["written_at"]}
    else:
        if (directory / "runs").exists():
            raise RequestError(f"{directory} holds runs but no plan.json; a plan comes before its runs. Choose another folder.")
        plan = plan_of(study, here=here) | {"written_at": now}
    check(plan)
    plan["hash"] = plan_hash(plan)
    write_json(path, plan)
    return plan


def read_plan(directory: Path) -> dict[str, Any]:
    """Read `directory/plan.json` and verify its hash.

    Raises:
        RequestError: there is no plan, or it has a format that this version does not read.
        FailureError: it is not valid JSON, or was changed after it was written.
    """
    path = directory / "plan.json"
    if not path.is_file():
        raise RequestError(f"{directory} is not a study folder: it holds no plan.json.")
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise RequestError(f"{path} is not a plan of format {FORMAT}, the one this version of depthroute reads.")
    if plan_hash(plan) != plan.get("hash"):
        raise FailureError(f"{path} was changed after it was written: its hash does not fit. Put it back, or plan a new study elsewhere.")
    return plan


def plan_hash(plan: Mapping[str, Any]) -> str:
    """SHA-256 of everything in a plan but when it was written."""
    return fingerprint({name: value for name, value in plan.items() if name not in UNHASHED})


def cells(plan: Mapping[str, Any]) -> list[Cell]:
    """Every (arm, seed) in the order of training: all arms of the first seed, then all of the next.

    A study that is stopped then holds complete pairs, and a machine that slows down slows every arm.
    """
    return [(arm["name"], seed) for seed in plan["seeds"] for arm in plan["arms"] if seed in arm["seeds"]]


def arm_entry(plan: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """What a plan says of one arm.

    Raises:
        RequestError: the plan holds no such arm.
    """
    entries: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in plan["arms"]}
    if arm not in entries:
        raise RequestError(choose("arm", arm, entries))
    return entries[arm]


def milestones(plan: Mapping[str, Any], arm: str) -> list[int]:
    """The steps at which an arm is evaluated; the last one is its last step."""
    found: list[int] = arm_entry(plan, arm)["config"]["train"]["milestones"]
    return found


def common_milestones(plan: Mapping[str, Any], arm: str, parent: str) -> list[int]:
    """The steps at which both arms of a pair are evaluated; the last one is where they are compared."""
    return [step for step in milestones(plan, arm) if step in milestones(plan, parent)]


def cell_config(plan: Mapping[str, Any], arm: str, seed: int) -> RunConfig:
    """The configuration that one cell trains.

    Raises:
        RequestError: the plan holds no such cell.
    """
    entry = arm_entry(plan, arm)
    if seed not in entry["seeds"]:
        raise RequestError(f"seed {seed} is not in the plan, which has {', '.join(map(str, entry['seeds']))}.")
    config = from_json(RunConfig, entry["config"])
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))


def run_folder(directory: Path, arm: str, seed: int) -> Path:
    """Where a cell's run folder is."""
    return directory / "runs" / arm / f"seed-{seed}"


def check_matched(plan: Mapping[str, Any]) -> None:
    """Refuse a plan in which a pair differs in more than it declares.

    Raises:
        RequestError: the first undeclared field, with both values.
    """
    configs = {arm["name"]: arm["config"] for arm in plan["arms"]}
    for arm, parent in plan["comparisons"]:
        if not common_milestones(plan, arm, parent):
            raise RequestError(
                f"{arm} and {parent} have no milestone in common, so they cannot be compared: "
                f"{milestones(plan, arm)} and {milestones(plan, parent)}."
            )
    allowed = (*ALWAYS_DIFFERS, *plan["differs"])
    for arm, parent in plan["comparisons"]:
        for name, left, right in differences(configs[arm], configs[parent]):
            if not any(_within(name, prefix) for prefix in allowed):
                raise RequestError(
                    f"{arm} and {parent} are not a matched pair: {name} is {left} in {arm} and {right} in {parent}. "
                    f"Make them equal, or declare {name!r} in the study's `differs`."
                )
            if any(_within(name, prefix) for prefix in NEVER_DIFFERS):
                raise RequestError(
                    f"{arm} and {parent} cannot be a pair: {name} is {left} in {arm} and {right} in {parent}. Make them equal."
                )


def differences(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Every place where two JSON values differ: its dotted path, and both values as text ("absent" where there is none)."""
    if isinstance(left, dict) and isinstance(right, dict):
        pairs = [(f"{path}.{name}" if path else name, name) for name in left | right]
        for dotted, name in pairs:
            yield from differences(left.get(name, _ABSENT), right.get(name, _ABSENT), dotted)
    elif isinstance(left, list) and isinstance(right, list):
        for index in range(max(len(left), len(right))):
            one, other = (value[index] if index < len(value) else _ABSENT for value in (left, right))
            yield from differences(one, other, f"{path}[{index}]")
    elif left != right or type(left) is not type(right):
        yield path, _text(left), _text(right)


_ABSENT = object()


def _text(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith((f"{prefix}.", f"{prefix}["))


def _data_of(study: Study) -> TokenDataset:
    """The data, which must have the split that the study compares: after hours of training it would be too late to find that out."""
    data = TokenDataset.open(Path(study.base.data))
    splits = ("validation", *(marker.name for marker in data.manifest.markers))
    if study.endpoint not in splits:
        raise RequestError(f"endpoint: {choose('split', study.endpoint, splits)}")
    return data


def _resolved(config: RunConfig, data_fingerprint: str, before: RunConfig | None, here: bool) -> RunConfig:
    return resolve_run(dataclasses.replace(config, data_fingerprint=config.data_fingerprint or data_fingerprint), before, here=here)


def _with_additions(there: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """`here` in the order of `there` with what is new at the end and the words of old (see `write_plan`); and what is new."""
    merged = {**here, "name": there["name"], "question": there["question"]}
    added: dict[str, list[Any]] = {}
    for name, key in GROWS.items():
        old, new = ({key(entry): entry for entry in plan[name]} for plan in (there, here))
        merged[name] = [new[entry] for entry in old if entry in new]
        merged[name] += [entry for found, entry in new.items() if found not in old]
        added[name] = [list(found) if isinstance(found, tuple) else found for found in new if found not in old]
    ends = {claim["text"]: claim["boundary"] for claim in there["claims"]}
    merged["claims"] = [{**claim, "boundary": ends.get(claim["text"], claim["boundary"])} for claim in merged["claims"]]
    return merged, added


def _changes(there: Mapping[str, Any], here: Mapping[str, Any], *, growing: bool) -> Iterator[tuple[str, str, str]]:
    """Where two plans differ beside their history. `growing` overlooks what `here` has at the end in addition."""
    left, right = ({name: value for name, value in plan.items() if name not in HISTORY} for plan in (there, here))
    # a plan of an earlier version lacks fields that have come since; they have their defaults
    left["arms"] = [{**arm, "config": to_json(from_json(RunConfig, arm["config"]))} for arm in left["arms"]]
    if growing:
        right |= {name: right[name][: len(left[name])] for name in GROWS}
        right["arms"] = [
            {**new, "seeds": [seed for seed in new["seeds"] if seed in left["seeds"]]} if old["name"] == new["name"] else new
            for old, new in zip(left["arms"], right["arms"], strict=False)
        ]
    for name, old, new in differences(left, right):
        if not name.endswith("].config.data"):  # where the data lies is not what it is; the fingerprint says that
            yield name, old, new
