"""From run folders to `statistics.json`: which cells are whole, and what their pairs say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthroute.common.config import to_json
from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.common.files import read_json, read_json_lines, write_json
from depthroute.data.order import ORDER
from depthroute.study.compute import arm_compute
from depthroute.study.ledger import ledger
from depthroute.study.plan import Cell, cell_config, cells, check_matched, common_milestones, differences, milestones, read_plan, run_folder
from depthroute.study.statistics import paired
from depthroute.train import RunConfig, recorded_config


def write_statistics(directory: Path, failures: Mapping[Cell, str]) -> dict[str, Any]:
    """Collect the cells of a study, write `directory/statistics.json`, and return what it holds.

    A cell counts when its run is complete, is the one that the plan describes (model, recipe, data fingerprint, seed) and was evaluated
    at every milestone. Every other cell is listed under `missing` with a reason: the one in `failures`, or what its folder shows. A pair
    needs both of its cells. A cell that counts but lacks the analysis of its source weights is listed under `unanalysed`.

    Args:
        failures: why cells that were tried did not end.

    Raises:
        RequestError: there is no plan, or its pairs are not matched.
        FailureError: the plan was changed after it was written, or the disk refuses the file.
    """
    statistics = collect(directory, failures)
    write_json(directory / "statistics.json", statistics)
    return statistics


def collect(directory: Path, failures: Mapping[Cell, str]) -> dict[str, Any]:
    """What `write_statistics` writes."""
    plan = read_plan(directory)
    check_matched(plan)
    evaluations: dict[Cell, dict[int, dict[str, Any]]] = {}
    missing, unanalysed = [], []
    for cell in cells(plan):
        entry = {"arm": cell[0], "seed": cell[1]}
        try:
            evaluations[cell] = _read_cell(directory, plan, cell)
        except DepthrouteError as error:
            missing.append({**entry, "reason": failures.get(cell, str(error))})
        else:
            if not is_complete(directory, plan, cell):
                unanalysed.append({**entry, "reason": failures.get(cell, "not analysed yet; run the study again.")})
    comparisons = [
        {
            "arm": arm, "parent": parent, "endpoint_step": common_milestones(plan, arm, parent)[-1],
            "milestones": _compare(plan, evaluations, arm, parent),
        }
        for arm, parent in plan["comparisons"]
    ]  # fmt: skip
    losses = {cell: found[milestones(plan, cell[0])[-1]]["nll"] for cell, found in evaluations.items()}
    compute = arm_compute(plan)
    claims = ledger(plan, comparisons, losses, compute)
    return {"comparisons": comparisons, "claims": claims, "compute": compute, "missing": missing, "unanalysed": unanalysed}


def is_complete(directory: Path, plan: Mapping[str, Any], cell: Cell) -> bool:
    """Whether a cell needs no more work: it has a result and, where its method has source weights, their analysis."""
    folder = run_folder(directory, *cell)
    if not (folder / "result.json").exists():
        return False
    return (folder / "routing.json").exists() or not _has_source_weights(cell_config(plan, *cell))


def check_order(directory: Path, plan: Mapping[str, Any]) -> None:
    """Refuse to train cells in this version's order of batches beside whole ones that read theirs in another: pairs would not be matched.

    Raises:
        RequestError: the cells that were trained in another order, or in one that was not recorded, and those that are to be trained.
    """
    lacking, others = [], []
    for arm, seed in cells(plan):
        path = run_folder(directory, arm, seed) / "result.json"
        if not path.exists():
            lacking.append(f"{arm} seed {seed}")
        elif (order := read_json(path).get("order")) != ORDER:
            others.append(f"{arm} seed {seed} ({order or 'none is recorded'})")
    if lacking and others:
        raise RequestError(
            f"{directory} has cells that read their batches in another order than this version's, {ORDER}: {', '.join(others)}. Not "
            f"trained yet: {', '.join(lacking)}. A study keeps one order, or its differences would not be on the same tokens in the same "
            "order; train it in a new folder."
        )


def check_complete(statistics: Mapping[str, Any]) -> None:
    """Refuse a study of which a cell is missing or not analysed; for the exit status of a command.

    Raises:
        FailureError: the cells that have no result or no routing.json, and why the first of each has none.
    """
    sentences = []
    for kind, lack in (("missing", "no result"), ("unanalysed", "a result but no routing.json")):
        found = statistics[kind]
        if found:
            names = ", ".join(f"{entry['arm']} seed {entry['seed']}" for entry in found)
            sentences.append(f"cells with {lack}: {len(found)} ({names}). The first: {found[0]['reason']}")
    if sentences:
        raise FailureError(" ".join(sentences))


def _has_source_weights(config: RunConfig) -> bool:
    import torch

    with torch.device("meta"):  # only the structure is asked for
        residual = config.model.residual.build(config.model.body)
    return bool(residual.source_names(config.model.body.sublayers))


def _compare(
    plan: Mapping[str, Any], evaluations: Mapping[Cell, Mapping[int, Mapping[str, Any]]], arm: str, parent: str
) -> list[dict[str, Any]]:
    seeds = [seed for seed in plan["seeds"] if (arm, seed) in evaluations and (parent, seed) in evaluations]
    if not seeds:
        return []
    found = []
    for step in common_milestones(plan, arm, parent):
        ours, theirs = ([evaluations[name, seed][step]["nll"] for seed in seeds] for name in (arm, parent))
        found.append({
            "step": step,
            "tokens": evaluations[arm, seeds[0]][step]["tokens"],
            "seeds": seeds,
            "arm_nll": ours,
            "parent_nll": theirs,
            **to_json(paired(ours, theirs)),
        })
    return found


def _read_cell(directory: Path, plan: Mapping[str, Any], cell: Cell) -> dict[int, dict[str, Any]]:
    """The validations of a whole cell by step; an error says why it does not count."""
    folder = run_folder(directory, *cell)
    ran = recorded_config(folder)
    if ran is None:
        raise FailureError("not started.")
    planned_config = to_json(cell_config(plan, *cell))
    # the fingerprint says which data
    for name, there, planned in differences({**to_json(ran), "data": ""}, {**planned_config, "data": ""}):
        raise FailureError(f"its run folder holds another run: {name} is {there} there and {planned} in the plan.")
    if not (folder / "result.json").exists():
        metrics = read_json_lines(folder / "metrics.jsonl")
        where = f"after step {metrics[-1]['step']}" if metrics else "before its first step ended"
        raise FailureError(f"stopped {where}; run the study again to go on.")
    split = plan["endpoint"]
    found = {line["step"]: line for line in read_json_lines(folder / "evaluations.jsonl") if line["split"] == split}
    for step in milestones(plan, cell[0]):
        if step not in found:
            raise FailureError(f"its evaluations.jsonl has no {split} at step {step}, a milestone of the plan.")
        if found[step]["nll"] is None or not math.isfinite(found[step]["nll"]):
            raise FailureError(f"its {split} NLL at step {step} is {found[step]['nll']}: it diverged.")
    return found
