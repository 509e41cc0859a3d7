"""Two run folders, or two study folders, held against each other: where they part, what was set differently, how far apart they end.

Files are read and nothing is trained. A gap is b minus a, in nats per token: negative means that b is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, read_json_lines
from depthroute.study.plan import HISTORY, arm_entry, differences, milestones, read_plan, run_folder
from depthroute.study.statistics import paired

OTHER_DATA = "a and b have different data fingerprints: their losses are of different tokens, and a gap says nothing about the models."
OTHER_ORDER = "a and b read their batches in different orders, by different versions: the losses of a step are of different tokens."
OTHER_VOCABULARY = "a and b have different vocabularies: a loss per token is then of different units of text."


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Compare two runs with `compare_runs`, or two studies with `compare_studies`, whichever the folders are.

    Raises:
        RequestError: a folder is neither a run nor a study, or one is a run and the other a study.
        FailureError: a file in one of them is broken, or a plan was changed after it was written.
    """
    kinds = {path: _kind(path) for path in (a, b)}
    if kinds[a] != kinds[b]:
        raise RequestError(f"{a} is a {kinds[a]} folder and {b} a {kinds[b]} folder; compare two of a kind (a cell of a study is a run).")
    return compare_studies(a, b) if kinds[a] == "study" else compare_runs(a, b)


def compare_runs(a: Path, b: Path) -> dict[str, Any]:
    """Where two runs part.

    Returns:
        `kind` ("runs"), `a` and `b` (the folders), `notes` (what limits the comparison), `config`: list of {`field` (dotted), `a`, `b`}
        with the values as text, `steps`: {`a`, `b` (last step), `common`}, `first_difference`: {`step`, `a`, `b` (training losses)} or null
        where no common step differs, `evaluations`: list of {`step`, `split`, `tokens`: [a, b], `a`, `b`, `gap`} for every evaluation that
        both have, and `end`: {`step`: [a, b], `tokens`: [a, b], `a`, `b`, `gap`} from both results, or null where a run is not complete.
        A loss that is not finite is null, and so is its gap.
    """
    configs = [_config(path) for path in (a, b)]
    losses = [{line["step"]: _finite(line["loss"]) for line in read_json_lines(path / "metrics.jsonl")} for path in (a, b)]
    common = sorted(losses[0].keys() & losses[1].keys())
    first = next((step for step in common if losses[0][step] != losses[1][step]), None)
    return {
        "kind": "runs",
        "a": str(a),
        "b": str(b),
        "notes": _run_notes(*configs) + _order_notes(a, b),
        "config": [{"field": field, "a": one, "b": other} for field, one, other in _config_differences(*configs)],
        "steps": {"a": max(losses[0], default=0), "b": max(losses[1], default=0), "common": len(common)},
        "first_difference": None if first is None else {"step": first, "a": losses[0][first], "b": losses[1][first]},
        "evaluations": _common_evaluations(a, b),
        "end": _end(a, b),
    }


def compare_studies(a: Path, b: Path) -> dict[str, Any]:
    """What two studies planned differently, how far each common arm is apart, and what each comparison that both make found in each.

    Gaps are between the runs of one arm and seed in a and in b, at the last milestone that both plans have of the arm. A cell
    counts when it has a result and its study's statistics.json does not leave it out.

    Returns:
        `kind` ("studies"), `a`, `b`, `notes`, `plan`: list of {`field`, `a`, `b`} beside the arms' configurations, `config`: list of
        {`field`, `a`, `b`, `arms` (which of the common arms)}, `arms_only_in`: {`a`, `b`: names}, `arms`: list of {`arm`, `step`, `seeds`,
        `a`, `b`, `paired` (statistics.json's, with b as the arm and a as its parent; null without a seed), `left_out`: list of {`study`,
        `seed`, `reason`}}, and `comparisons`: list of {`arm`, `parent`, `a`, `b`}, both {`step`,
        `seeds`, `differences` (arm minus parent), `mean`, `t_interval`} of that study's endpoint, null where its statistics.json has none.
    """
    plans = [read_plan(path) for path in (a, b)]
    arms = [{arm["name"]: arm for arm in plan["arms"]} for plan in plans]
    common = [name for name in arms[0] if name in arms[1]]
    steps = {name: max(set(milestones(plans[0], name)) & set(milestones(plans[1], name)), default=None) for name in common}
    return {
        "kind": "studies",
        "a": str(a),
        "b": str(b),
        "notes": _study_notes(plans, steps),
        "plan": [{"field": field, "a": one, "b": other} for field, one, other in differences(_outline(plans[0]), _outline(plans[1]))],
        "config": _arm_differences(common, *arms),
        "arms_only_in": {"a": [name for name in arms[0] if name not in common], "b": [name for name in arms[1] if name not in common]},
        "arms": [_arm_gaps((a, b), plans, name, step) for name, step in steps.items() if step is not None],
        "comparisons": _common_comparisons((a, b), plans),
    }


def _kind(path: Path) -> str:
    if (path / "plan.json").is_file():
        return "study"
    if (path / "config.json").is_file():
        return "run"
    what = "is neither a run folder (config.json) nor a study folder (plan.json)" if path.is_dir() else "is not a folder"
    raise RequestError(f"{path} {what}.")


def _config(run: Path) -> dict[str, Any]:
    config = read_json(run / "config.json")
    if not isinstance(config, dict):
        raise FailureError(f"{run / 'config.json'} holds no object; it was changed by hand.")
    return {name: value for name, value in config.items() if name != "format"}


def _config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The fields that differ; where the data lies is none of them while the fingerprint says that it is the same data."""
    fingerprint = a.get("data_fingerprint")
    same_data = fingerprint and fingerprint == b.get("data_fingerprint")
    yield from differences({**a, "data": ""}, {**b, "data": ""}) if same_data else differences(dict(a), dict(b))


def _run_notes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    notes = [OTHER_DATA] if a.get("data_fingerprint") != b.get("data_fingerprint") else []
    sizes = [config.get("model", {}).get("vocabulary") for config in (a, b)]
    return notes + ([OTHER_VOCABULARY] if sizes[0] != sizes[1] else [])


def _order_notes(a: Path, b: Path) -> list[str]:
    paths = [path / "result.json" for path in (a, b)]
    orders = [read_json(path).get("order") for path in paths if path.is_file()]
    return [OTHER_ORDER] if len(orders) == 2 and orders[0] != orders[1] else []


def _common_evaluations(a: Path, b: Path) -> list[dict[str, Any]]:
    ours, theirs = ({(line["step"], line["split"]): line for line in read_json_lines(path / "evaluations.jsonl")} for path in (a, b))
    return [
        {"step": step, "split": split, "tokens": [line.get("tokens") for line in (ours[step, split], theirs[step, split])]}
        | _gap(ours[step, split]["nll"], theirs[step, split]["nll"])
        for step, split in sorted(ours.keys() & theirs.keys())
    ]


def _end(a: Path, b: Path) -> dict[str, Any] | None:
    if not all((path / "result.json").is_file() for path in (a, b)):
        return None
    results = [read_json(path / "result.json") for path in (a, b)]
    reached = {name: [result.get(name) for result in results] for name in ("step", "tokens")}
    return reached | _gap(results[0]["nll"], results[1]["nll"])


def _gap(a: float | None, b: float | None) -> dict[str, float | None]:
    one, other = _finite(a), _finite(b)
    return {"a": one, "b": other, "gap": None if one is None or other is None else other - one}


def _finite(value: float | None) -> float | None:
    """A diverged loss as null: JSON has no NaN, and two NaN would count as different."""
    return value if value is not None and math.isfinite(value) else None


def _study_notes(plans: Sequence[Mapping[str, Any]], steps: Mapping[str, int | None]) -> list[str]:
    notes = [OTHER_DATA] if plans[0]["data_fingerprint"] != plans[1]["data_fingerprint"] else []
    without = [name for name, step in steps.items() if step is None]
    if without:
        notes.append(f"a and b have no milestone of {', '.join(without)} in common, so no gap can be taken there.")
    ends: dict[tuple[int, int, int], list[str]] = {}
    for name, step in steps.items():
        last = [milestones(plan, name)[-1] for plan in plans]
        if step is not None and last != [step, step]:
            ends.setdefault((last[0], last[1], step), []).append(name)
    for (one, other, step), names in ends.items():
        notes.append(f"{', '.join(names)} end at steps {one} and {other}; the gaps are at step {step}, the last milestone of both.")
    return notes


def _outline(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan without what two of them always differ in, and with the arms by name only."""
    kept = {name: value for name, value in plan.items() if name not in HISTORY}
    return kept | {"arms": [arm["name"] for arm in plan["arms"]]}


def _arm_differences(common: Sequence[str], a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the common arms were given differently; a change that several arms share is one entry."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in common:
        ours, theirs = ({"label": arm["label"], **arm["config"]} for arm in (a[name], b[name]))
        for difference in _config_differences(ours, theirs):
            found.setdefault(difference, []).append(name)
    return [{"field": field, "a": one, "b": other, "arms": names} for (field, one, other), names in found.items()]


def _arm_gaps(folders: Sequence[Path], plans: Sequence[Mapping[str, Any]], arm: str, step: int) -> dict[str, Any]:
    reasons = [_left_out(folder) for folder in folders]
    found: dict[int, list[float]] = {}
    left_out = []
    seeds = [arm_entry(plan, arm)["seeds"] for plan in plans]
    for seed in (seed for seed in seeds[0] if seed in seeds[1]):
        values = []
        for study, folder, given in zip(("a", "b"), folders, reasons, strict=True):
            value, reason = _cell_loss(run_folder(folder, arm, seed), step, plans[0]["endpoint"], given.get((arm, seed)))
            if value is None:
                left_out.append({"study": study, "seed": seed, "reason": reason})
            else:
                values.append(value)
        if len(values) == len(folders):
            found[seed] = values
    ours, theirs = ([values[index] for values in found.values()] for index in (0, 1))
    statistics = to_json(paired(theirs, ours)) if found else None
    return {"arm": arm, "step": step, "seeds": list(found), "a": ours, "b": theirs, "paired": statistics, "left_out": left_out}


def _common_comparisons(folders: Sequence[Path], plans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    ends = [_endpoints(folder) for folder in folders]
    pairs = [(arm, parent) for arm, parent in plans[0]["comparisons"] if [arm, parent] in plans[1]["comparisons"]]
    return [{"arm": pair[0], "parent": pair[1], "a": ends[0].get(pair), "b": ends[1].get(pair)} for pair in pairs]


def _endpoints(study: Path) -> dict[tuple[str, str], dict[str, Any]]:
    statistics = _statistics(study)
    return {
        (comparison["arm"], comparison["parent"]): {
            name: milestone[name] for name in ("step", "seeds", "differences", "mean", "t_interval")
        }
        for comparison in statistics.get("comparisons", [])
        for milestone in comparison["milestones"]
        if milestone["step"] == comparison["endpoint_step"]
    }


def _left_out(study: Path) -> dict[tuple[str, int], str]:
    return {(entry["arm"], entry["seed"]): entry["reason"] for entry in _statistics(study).get("missing", [])}


def _statistics(study: Path) -> dict[str, Any]:
    path = study / "statistics.json"
    found: dict[str, Any] = read_json(path) if path.exists() else {}
    return found


def _cell_loss(run: Path, step: int, split: str, reason: str | None) -> tuple[float | None, str]:
    """The NLL of a whole cell on a split at a step, or None and why there is none."""
    if reason is not None or not (run / "result.json").is_file():
        return None, reason or "it has no result."
    lines = read_json_lines(run / "evaluations.jsonl")
    value = next((line["nll"] for line in lines if line["step"] == step and line["split"] == split), None)
    return _finite(value), f"it has no finite {split} NLL at step {step}."
