"""A trained AttnRes run as one with low-rank keys: the same function of its tokens, without training (Low-Rank AttnRes, Appendix B).

The new run has the joint rank of its route queries, or a larger one, and keys that are divided by the full-width RMS. What happens to each
tensor is in rewrite.py. The run is written into a folder beside its place, checked there and renamed: it is there and right, or not there.

Memory: the weights stream through (streamed.py). The cross-entropies after that have one whole model in memory, then the other, which is
what any evaluation of these runs costs.

Shapes: B windows, T tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import new_folder, read_json_lines, refuse_filled, write_json, write_text
from depthroute.convert.rewrite import Rewrite
from depthroute.convert.streamed import Difference, write_checkpoint
from depthroute.convert.tensor_file import TensorReader
from depthroute.data import evaluation_windows
from depthroute.train import RunConfig, checkpoint, load_trained, recorded_config, train
from depthroute.train.config import Device
from depthroute.train.devices import autocast
from depthroute.train.run_data import run_data
from depthroute.train.run_folder import FORMAT as RUN_FORMAT

FORMAT = 1
TOKENS = 4_096  # of the cross-entropies
EXACT_TOKENS = 1_024  # of the float64 logits, rounded up to whole windows
ALLOWED = 1e-10  # of the largest logit; rounding is some 1e-15, and a wrong rewrite is of order one


def convert_low_rank(
    run: Path, out: Path, *, rank: int | None = None, data: Path | None = None, tokens: int = TOKENS, evaluate: bool = False
) -> dict[str, Any]:
    """Write the last checkpoint of `run` as a run folder `out` with low-rank keys, and return what its conversion.json says.

    `out` has the steps of the source, its metrics, and its evaluations before the checkpoint. An evaluation at the checkpoint and the
    result are to be measured on the converted weights: training `out` on does it, and so does `evaluate`. The state of the optimiser does
    not survive the change of basis, since AdamW works by coordinate: training that goes on starts it afresh, at the step and the learning
    rate where the source stopped.

    Args:
        run: a run folder with a checkpoint.
        out: a folder that is empty or not there.
        rank: of the keys; None is the smallest, the joint rank of the queries.
        data: token shards for the checks; None is those that the run names.
        tokens: validation tokens of the cross-entropies.
        evaluate: evaluate the converted run as its training does at its end, so that it is complete. For runs at their last step.

    Raises:
        RequestError: no run, an assumption of the conversion that fails, a rank below the joint rank, or a folder that is not empty.
        FailureError: a damaged checkpoint, a full disk, or logits that differ in float64 by more than 1e-10 of the largest.
    """
    config = recorded_config(run)
    if config is None:
        raise RequestError(f"{run} is not a run folder: it has no config.json.")
    found = checkpoint.latest(run)
    if found is None:
        raise RequestError(f"{run} has no checkpoint yet; train it first.")
    refuse_filled(out)
    state = checkpoint.verify(found)
    if evaluate and state["step"] < config.train.steps:
        raise RequestError(f"{run} is at step {state['step']} of {config.train.steps}: it is evaluated when its training has ended.")
    dataset = run_data(run, config, data)
    whole = -(-EXACT_TOKENS // config.model.context) * config.model.context
    batches = list(evaluation_windows(dataset.held_out(limit=whole).tokens, config.model.context))
    # a split of fewer tokens ends in a shorter window, which goes by itself or not at all
    windows = torch.cat([torch.from_numpy(batch) for batch in batches if batch.shape[1] == batches[0].shape[1]])
    rewrite = Rewrite(config.model, TensorReader(checkpoint.model_file(found)), rank)
    converted = dataclasses.replace(config, model=rewrite.target)
    with new_folder(out) as folder:
        difference = write_checkpoint(rewrite, windows[:, :-1], folder / "checkpoints" / found.name, state)
        _refuse(difference)
        _write_history(run, folder, converted, state["step"])
        facts = _described(rewrite, run, state) | {
            "data_fingerprint": dataset.fingerprint,
            "float64": {
                "tokens": windows[:, 1:].numel(), "logits_max_difference": difference.logits, "logits_max": difference.largest_logit,
                "weights_max_difference": difference.weights,
            },
            "cross_entropy": _cross_entropies(run, folder, dataset.held_out(limit=tokens).tokens),
        }  # fmt: skip
        write_json(folder / "conversion.json", facts)
    if evaluate:
        train(converted if data is None else dataclasses.replace(converted, data=str(data)), out, console=False)
    return facts


def _refuse(found: Difference) -> None:
    if not found.logits <= ALLOWED * found.largest_logit:
        raise FailureError(
            f"in float64 a logit differs by {found.logits:.1e}, where the largest is {found.largest_logit:.1e}; rounding would explain "
            f"{ALLOWED:.0e} of it at most. Nothing was written. The conversion is wrong: please report it with the run's config.json."
        )


def _described(rewrite: Rewrite, run: Path, state: dict[str, Any]) -> dict[str, Any]:
    source, basis = rewrite.config, rewrite.basis
    return {
        "format": FORMAT,
        "conversion": "low-rank",
        "source": {
            "run": str(run), "step": state["step"], "model_sha256": state["files"][checkpoint.MODEL]["sha256"],
            "residual": to_json(source.residual), "tied_embeddings": source.tied_embeddings,
        },
        "rank": rewrite.rank,
        "joint_rank": basis.joint_rank,
        "queries": rewrite.queries,
        "singular_values": basis.singular_values.tolist(),
        "singular_value_tolerance": basis.tolerance,
        "rotated": basis.rotation is not None,
        "head_untied": rewrite.unties_head,
        "optimiser": "fresh",
    }  # fmt: skip


def _write_history(run: Path, folder: Path, config: RunConfig, step: int) -> None:
    """What makes the folder a run that has come to `step` and has its evaluation there before it."""
    write_json(folder / "config.json", {"format": RUN_FORMAT, **to_json(config)})
    if (run / "environment.json").exists():
        shutil.copyfile(run / "environment.json", folder / "environment.json")
    for name, last in (("metrics.jsonl", step), ("evaluations.jsonl", step - 1)):
        lines = [line for line in read_json_lines(run / name) if line["step"] <= last]
        write_text(folder / name, "".join(json.dumps(line) + "\n" for line in lines))


def _cross_entropies(run: Path, folder: Path, held_out: np.ndarray) -> dict[str, Any]:
    """The losses of the same tokens under both models, as they are stored and in the precision of their training, in nats."""
    original, converted = _losses(run, held_out), _losses(folder, held_out)
    difference = converted - original
    if not math.isfinite(difference.sum().item()):
        raise FailureError("the loss of a token is not finite before or after the conversion. Nothing was written.")
    config = recorded_config(folder)
    assert config is not None
    return {
        "precision": config.train.precision, "tokens": len(original),
        "original": original.mean().item(), "converted": converted.mean().item(),
        "difference": difference.mean().item(), "largest_token_difference": difference.abs().max().item(),
    }  # fmt: skip


@torch.no_grad()
def _losses(run: Path, held_out: np.ndarray) -> Tensor:
    config, model = load_trained(run)
    settings = config.train
    device: Device = "cuda" if settings.device == "cuda" and torch.cuda.is_available() else "cpu"
    model.eval().to(device)
    parts = []
    for batch in evaluation_windows(held_out, config.model.context, sequences=settings.microbatch or settings.sequences):
        ids = torch.from_numpy(batch).to(device)
        with autocast(device, settings.precision):
            losses = model.token_nll(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        parts.append(losses.flatten().double().cpu())
    return torch.cat(parts)
