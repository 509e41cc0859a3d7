"""Runs side by side as Attention Residuals shows them (Fig. 5): validation loss in training, and at its end how large what the layers hand
on is, and its gradient, by depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthroute.analysis.magnitudes import magnitudes, output_gradients
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json_lines, write_json
from depthroute.data import evaluation_windows
from depthroute.train import load_trained
from depthroute.train.run_data import run_data
from depthroute.train.run_folder import root_of

FORMAT = 1


def dynamics(
    runs: Sequence[Path], out: Path, *, data: Path | None = None, tokens: int = 16_384, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure runs on the same held-out text and write `out/dynamics.json`; return what it holds (docs/analysis.md names its fields).

    Args:
        runs: run folders with a checkpoint, or checkpoint folders of them. data: the folder of their token shards; None is the one that
        each names. tokens: validation tokens that magnitudes and gradients are averaged over.

    Raises:
        RequestError: no run, one twice, or runs on other data or of another context, whose losses say nothing about each other.
        FailureError: a truncated checkpoint or shard, or a disk that refuses the file.
    """
    if not runs:
        raise RequestError("there is no run; give one or more run folders.")
    names = _names(runs)
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"two of the runs are called {name!r}; each is given once, and folders have different names.")
    found: list[dict[str, Any]] = []
    first: tuple[str, int] | None = None
    for name, run in zip(names, runs, strict=True):
        report(name)
        config, model = load_trained(run)
        model.eval()
        dataset, context = run_data(run, config, data), config.model.context
        first = first or (dataset.fingerprint, context)
        if (dataset.fingerprint, context) != first:
            raise RequestError(f"{run} has other data or another context than {runs[0]}; their losses cannot be shown side by side.")
        windows = list(evaluation_windows(dataset.held_out(limit=tokens).tokens, context, sequences=8))
        rows = magnitudes(model, _tensors(windows)).summary(output_gradients(model, _tensors(windows)))
        found.append({
            "name": name, "residual": config.model.residual.describe(), "layers": config.model.layers, "validation": _validation(run),
            "carried": [row["carried_rms"] for row in rows[2::2]], "gradient": [row["output_gradient_rms"] for row in rows[1::2]],
        })  # fmt: skip
    measured = sum(window[:, 1:].size for window in windows)
    result = {"format": FORMAT, "tokens": measured, "runs": found}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "dynamics.json", result)
    return result


def _names(runs: Sequence[Path]) -> list[str]:
    """What runs are called: their folders, with the one around them where that tells them apart, as the arms of a study."""
    roots = [root_of(run).resolve() for run in runs]
    alike = len({root.name for root in roots}) < len(set(roots))
    names = [f"{root.parent.name}/{root.name}" if alike else root.name for root in roots]
    return [name if root_of(run) == run else f"{name} {run.name}" for name, run in zip(names, runs, strict=True)]


def _tensors(windows: Sequence[np.ndarray]) -> Iterator[Tensor]:
    return (torch.from_numpy(window) for window in windows)


def _validation(run: Path) -> list[tuple[int, float]]:
    """Step and validation loss in nats per token."""
    path = root_of(run) / "evaluations.jsonl"
    lines = read_json_lines(path) if path.exists() else []
    return [(line["step"], line["nll"]) for line in lines if line["split"] == "validation"]
