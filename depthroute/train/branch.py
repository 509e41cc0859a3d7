"""Runs of several lengths from one trunk: the steps that they share are trained once.

With the schedule "wsd" and a warm-up in steps, a run of 1,000 steps takes the same steps as one of 4,000 until it decays. The longest
one is the trunk; it keeps checkpoints where the others part from it (`train.keep_checkpoints`), and each of them starts from one:

    trunk   |-- warm-up --|------------- stable -------------------|-- decay --|
    branch                            kept checkpoint o-- own --|-- decay --|

A branch's run folder then holds what it would hold had it been trained alone, bit for bit on the CPU, the seconds of the first steps
being the trunk's; `branched_from` in environment.json says how many those are, for whoever adds up what a study cost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, read_json_lines, write_text
from depthroute.data import TokenDataset
from depthroute.train import checkpoint
from depthroute.train.config import RunConfig
from depthroute.train.loop import for_data, resolve
from depthroute.train.run_folder import RunFolder, recorded_config
from depthroute.train.schedule import learning_rate

# Compared as what they come to, the learning rate of each step.
_RATE = ("steps", "learning_rate", "schedule", "warmup_fraction", "warmup_steps", "decay_fraction", "final_fraction")
# These change what is written down, and no weight.
_RECORD = ("milestones", "checkpoint_every", "keep_checkpoints")


def shared_steps(branch: RunConfig, trunk: RunConfig) -> int:
    """How many first steps two runs have in common: the same weights, losses and evaluations, bit for bit on the CPU.

    All that changes a step or an evaluation must be equal; a field that is not known to be harmless counts as one that does. Of the
    learning rate only its value at each step counts.
    """
    if _difference(branch, trunk):
        return 0
    steps = min(branch.train.steps, trunk.train.steps)
    return next((step for step in range(steps) if learning_rate(step, branch.train) != learning_rate(step, trunk.train)), steps)


def branch_step(branch: RunConfig, trunk: RunConfig) -> int:
    """The step at which `branch` parts from `trunk`: the last one shared, short of its own end, whose checkpoint the trunk keeps.

    Raises:
        RequestError: the two share no step, the trunk keeps no checkpoint among those they share, or up to there it does not evaluate
            or keep what the branch does.
    """
    difference = _difference(branch, trunk)
    if difference:
        raise RequestError(f"no step is shared with the trunk: {difference}. Make them equal, or declare no trunk.")
    shared = min(shared_steps(branch, trunk), branch.train.steps - 1)
    if shared < 1:
        raise RequestError(
            f"no step is shared with the trunk: the learning rate of step 1 is {learning_rate(0, branch.train)} and "
            f"{learning_rate(0, trunk.train)} in the trunk, or there is only one. Give both the same peak and the same train.warmup_steps."
        )
    kept = [step for step in (*trunk.train.keep_checkpoints, trunk.train.steps) if step <= shared]
    if not kept:
        raise RequestError(
            f"the first {shared} steps are the trunk's, and it keeps no checkpoint among them; its train.keep_checkpoints is "
            f"{list(trunk.train.keep_checkpoints)}: add {shared}."
        )
    step = kept[-1]
    for name, has in (("milestones", {*trunk.train.milestones, trunk.train.steps}), ("keep_checkpoints", {*kept})):
        lacking = [wanted for wanted in getattr(branch.train, name) if wanted <= step and wanted not in has]
        if lacking:
            raise RequestError(
                f"train.{name} holds {lacking[0]}, and the trunk, whose first {step} steps are taken over, does not have it in its own: "
                "add it there, or leave it out here."
            )
    return step


def started(directory: Path) -> bool:
    """Whether a run folder holds steps that would be lost: a result or a checkpoint."""
    return (directory / "result.json").exists() or checkpoint.latest(directory) is not None


def branch_run(config: RunConfig, directory: Path, trunk: Path) -> int:
    """Let the run of `config` in `directory` start from the run folder `trunk`; return the step that `train` then goes on from.

    The folder gets the trunk's metrics and evaluations of the shared steps, its checkpoint, those that `config` keeps as well, and its
    environment.json with `branched_from`. The checkpoints come last and at once: a folder in which this was killed is one without a
    step, which this function fills again and `train` trains from its first step.

    Raises:
        RequestError: the two do not fit (see `branch_step`), the folder has started, or holds another run, or the trunk was trained by an
            earlier version, in another order of batches.
        FailureError: the trunk has not come so far, or was changed by hand; the disk is full.
    """
    directory = Path(directory)
    theirs = recorded_config(trunk)
    if theirs is None:
        raise FailureError(f"{trunk} holds no run to start from; train it first.")
    config = for_data(resolve(config, recorded_config(directory)), TokenDataset.open(Path(config.data)))
    step = branch_step(config, theirs)
    metrics, evaluations = _records(trunk, step, config)
    kept = [checkpoint.folder(trunk, taken) for taken in sorted({*config.train.keep_checkpoints, step}) if taken <= step]
    for source in kept:
        try:
            checkpoint.verify(source)
        except FailureError as error:
            raise FailureError(f"{directory} cannot start from {trunk}: {error}") from error
    checkpoint.refuse_other_order(kept[-1], config.train.steps)
    environment = read_json(trunk / "environment.json")
    environment.pop("workers", None)  # of the trunk's study; the branch's own is written when it ends
    environment["branched_from"] = {"folder": os.path.relpath(trunk, directory), "step": step}
    with RunFolder(directory).claimed(config, environment):
        if started(directory):
            raise RequestError(f"{directory} has already started, and a branch begins without steps; choose another folder, or delete it.")
        write_text(directory / "metrics.jsonl", metrics)
        write_text(directory / "evaluations.jsonl", evaluations)
        checkpoint.copy(kept, directory)
    return step


def _records(trunk: Path, step: int, config: RunConfig) -> tuple[str, str]:
    """The lines of metrics.jsonl and evaluations.jsonl that the branch takes over: of its own milestones, not of the trunk's."""
    metrics = [line for line in read_json_lines(trunk / "metrics.jsonl") if line["step"] <= step]
    if [line["step"] for line in metrics] != list(range(1, step + 1)):
        raise FailureError(f"{trunk / 'metrics.jsonl'} does not hold the first {step} steps, each once; train {trunk} first, or again.")
    milestones = {milestone for milestone in config.train.milestones if milestone <= step}
    evaluations = [line for line in read_json_lines(trunk / "evaluations.jsonl") if line["step"] in milestones]
    lacking = milestones - {line["step"] for line in evaluations}
    if lacking:
        raise FailureError(f"{trunk / 'evaluations.jsonl'} lacks step {min(lacking)}; train {trunk} first, or again.")
    first, second = ("".join(json.dumps(line) + "\n" for line in lines) for lines in (metrics, evaluations))
    return first, second


def _difference(branch: RunConfig, trunk: RunConfig) -> str | None:
    """The first field in which two runs differ so that no step is the same, with both values."""
    left, right = to_json(branch), to_json(trunk)
    for value in (left, right):
        if value["data_fingerprint"]:
            value["data"] = ""  # where the data lies is not what it is
        for name in (*_RATE, *_RECORD):
            del value["train"][name]
    return _first(left, right, "")


def _first(left: Any, right: Any, path: str) -> str | None:
    if isinstance(left, dict) and isinstance(right, dict):
        found = (_first(left.get(name), right.get(name), f"{path}.{name}" if path else name) for name in left | right)
        return next(filter(None, found), None)
    return None if left == right else f"{path} is {left!r}, and {right!r} in the trunk"
