"""What a study is, and the plan that is written and hashed before its first step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from depthroute.common.config import fingerprint, from_json, to_json
from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.common.files import read_json, write_json
from depthroute.data import TokenDataset
from depthroute.train import RunConfig
from depthroute.train import resolve as resolve_run

ENDPOINT = "validation NLL at the last milestone"
# Arms exist to differ here; anything else a pair differs in must be declared.
ALWAYS_DIFFERS = ("model.residual",)
# Pairs that differ in one of these are not pairs: they would not see the same batches in the same order.
NEVER_DIFFERS = ("data_fingerprint", "train.seed")
UNHASHED = ("written_at", "hash")

Cell = tuple[str, int]  # the name of an arm, and a seed


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant: what reports call it, and its configuration, whole or as a change to the base."""

    label: str
    config: RunConfig | Callable[[RunConfig], RunConfig]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A paired experiment.

    `arms` are in the order in which they are trained and reported; `comparisons` are (arm, parent) by name, the headline first. Every
    cell is an arm with a seed, evaluated at the `milestones` (steps), the last of which is the endpoint; both replace what the
    configurations say. Arms may differ in `model.residual`, and in the dotted fields that `differs` declares (`"train.learning_rate"`),
    a name standing for everything below it.
    """

    name: str
    question: str
    base: RunConfig
    arms: Mapping[str, Arm]
    comparisons: tuple[tuple[str, str], ...]
    seeds: tuple[int, ...]
    milestones: tuple[int, ...]
    differs: tuple[str, ...] = ()


def plan_of(study: Study, written: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plan of a study as `plan.json` holds it, but for `written_at` and `hash`.

    Nothing is left to choose: "auto" becomes what this machine takes, or what `written`, a plan to be gone on with, says. An empty data
    fingerprint becomes that of the data.

    Raises:
        RequestError: a comparison of an unknown arm or of an arm with itself, no, repeated or negative seeds, milestones that do not rise
            within the training steps, an arm name that is no folder name, or a pair that differs where the study does not declare it.
    """
    _check_names(study)
    _check_seeds(study.seeds)
    data_fingerprint = study.base.data_fingerprint or TokenDataset.open(Path(study.base.data)).fingerprint
    before = {arm["name"]: from_json(RunConfig, arm["config"]) for arm in written["arms"]} if written else {}
    configs = {name: _resolve_arm(study, name, data_fingerprint, before.get(name)) for name in study.arms}
    plan = {
        "format": 1,
        "name": study.name,
        "question": study.question,
        "arms": [{"name": name, "label": study.arms[name].label, "config": to_json(config)} for name, config in configs.items()],
        "comparisons": [list(pair) for pair in study.comparisons],
        "differs": list(study.differs),
        "seeds": list(study.seeds),
        "milestones": list(study.milestones),
        "endpoint": ENDPOINT,
        "data_fingerprint": data_fingerprint,
    }
    check_matched(plan)
    return plan


def write_plan(study: Study, directory: Path) -> dict[str, Any]:
    """Write `directory/plan.json` with its hash, or find the same plan there; return the plan that is there now.

    Raises:
        RequestError: the study is refused (see `plan_of`), or the directory holds another plan, or runs without one.
        FailureError: the plan that is there was changed after it was written.
    """
    path = directory / "plan.json"
    if path.exists():
        written = read_plan(directory)
        there, here = ({k: v for k, v in plan.items() if k not in UNHASHED} for plan in (written, plan_of(study, written)))
        for name, old, new in differences(there, here):
            if not name.endswith("].config.data"):  # where the data lies is not what it is; the fingerprint says that
                raise RequestError(
                    f"{path} holds another plan: {name} is {old} there and {new} here. "
                    "Choose another folder, or run the plan that is there."
                )
        return written
    if (directory / "runs").exists():
        raise RequestError(f"{directory} holds runs but no plan.json; a plan comes before its runs. Choose another folder.")
    plan = plan_of(study)
    plan |= {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), "hash": fingerprint(plan)}
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
    if not isinstance(plan, dict) or plan.get("format") != 1:
        raise RequestError(f"{path} is not a plan of format 1, the one this version of depthroute reads.")
    if fingerprint({name: value for name, value in plan.items() if name not in UNHASHED}) != plan.get("hash"):
        raise FailureError(f"{path} was changed after it was written: its hash does not fit. Put it back, or plan a new study elsewhere.")
    return plan


def cells(plan: Mapping[str, Any]) -> list[Cell]:
    """Every (arm, seed) in the order of training: all arms of the first seed, then all of the next.

    A study that is stopped then holds complete pairs, and a machine that slows down slows every arm.
    """
    return [(arm["name"], seed) for seed in plan["seeds"] for arm in plan["arms"]]


def cell_config(plan: Mapping[str, Any], arm: str, seed: int) -> RunConfig:
    """The configuration that one cell trains.

    Raises:
        RequestError: the plan holds no such cell.
    """
    configs = {entry["name"]: entry["config"] for entry in plan["arms"]}
    if arm not in configs:
        raise RequestError(choose("arm", arm, configs))
    if seed not in plan["seeds"]:
        raise RequestError(f"seed {seed} is not in the plan, which has {', '.join(map(str, plan['seeds']))}.")
    config = from_json(RunConfig, configs[arm])
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


def _resolve_arm(study: Study, name: str, data_fingerprint: str, before: RunConfig | None) -> RunConfig:
    given = study.arms[name].config
    config = given if isinstance(given, RunConfig) else given(study.base)
    steps = config.train.steps
    rising = all(left < right for left, right in pairwise(study.milestones))
    if not study.milestones or not rising or study.milestones[0] < 1 or study.milestones[-1] > steps:
        raise RequestError(f"milestones = {study.milestones} are not allowed; they rise within the {steps} steps that {name} trains.")
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, milestones=study.milestones),
        data_fingerprint=config.data_fingerprint or data_fingerprint,
    )
    return resolve_run(config, before)


def _check_names(study: Study) -> None:
    for name in study.arms:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise RequestError(f"arm name {name!r} is not allowed; it names a folder: letters, digits, '.', '_' and '-'.")
    if not study.comparisons:
        raise RequestError("comparisons is empty; a study compares at least one arm with a parent.")
    for pair in study.comparisons:
        for name in pair:
            if name not in study.arms:
                raise RequestError(f"comparisons: {choose('arm', name, study.arms)}")
        if pair[0] == pair[1]:
            raise RequestError(f"comparisons: {pair[0]!r} cannot be its own parent.")


def _check_seeds(seeds: tuple[int, ...]) -> None:
    if not seeds:
        raise RequestError("seeds is empty; give at least one.")
    for seed in seeds:
        if seed < 0:
            raise RequestError(f"seeds holds {seed}; a seed is 0 or more.")
        if seeds.count(seed) > 1:
            raise RequestError(f"seeds holds {seed} more than once; every pair needs a seed of its own.")
