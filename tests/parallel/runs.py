"""A tiny run for tests of parallel training, and what two runs may differ in."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from depthroute.common.files import read_json, read_json_lines
from depthroute.data import PrepareConfig, prepare
from depthroute.model import ModelConfig
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, TrainConfig
from depthroute.train import checkpoint as checkpoints

VOCABULARY = 300
TIMES = ("seconds", "tokens_per_second", "training_seconds", "peak_memory_bytes")  # what differs from run to run


def prepare_tokens(folder: Path) -> Path:
    words = random.Random(0)
    lexicon = ["".join(words.choice("abcdefghijklmnop") for _ in range(5)) for _ in range(40)]
    documents = [" ".join(words.choice(lexicon) for _ in range(60)) for _ in range(120)]
    source = folder / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare(PrepareConfig.of(str(source), vocabulary=VOCABULARY, sample_one_in=1, validation_share=0.15), folder / "tokens")
    return folder / "tokens"


def tiny(data: Path, model: dict[str, Any] | None = None, **fields: Any) -> RunConfig:
    """Four layers, eight steps that clip, an evaluation in the middle."""
    shape = {"vocabulary": VOCABULARY, "width": 16, "layers": 4, "heads": 2, "mlp_width": 32, "context": 16}
    settings = {
        "steps": 8, "sequences": 8, "learning_rate": 3e-3, "precision": "float32", "device": "cpu", "threads": 1, "milestones": (4,),
        "evaluation_tokens": 250, "checkpoint_every": 3, "gradient_clip": 0.5,
    }
    whole = ModelConfig(**{"residual": parse_residual("block:4"), **shape, **(model or {})})
    return RunConfig(model=whole, train=TrainConfig(**settings | fields), data=str(data))


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    """Those of metrics.jsonl or evaluations.jsonl, without times."""
    return [_without_times(line) for line in read_json_lines(run / name)]


def assert_close(ours: Path, theirs: Path, relative: float, norms: float | None = None) -> None:
    """The same run up to differences: metrics, evaluations, documents.npz and result.json.

    `relative`: of losses. `norms`: of the norms of gradients; None is the same. A perplexity differs by as many times its logarithm.
    """
    bounds = {"gradient_norm": norms or relative, "mean": norms or relative, "maximum": norms or relative, "perplexity": 10 * relative}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        left, right = lines(ours, name), lines(theirs, name)
        assert [list(line) for line in left] == [list(line) for line in right] and left
        for one, other in zip(left, right, strict=True):
            _assert_close(one, other, relative, bounds, f"{name} of {ours}")
    left, right = (_without_times(read_json(run / "result.json")) for run in (ours, theirs))
    _assert_close(left, right, relative, bounds, f"result.json of {ours}")
    with np.load(ours / "documents.npz") as one, np.load(theirs / "documents.npz") as other:
        assert np.array_equal(one["counts"], other["counts"])
        np.testing.assert_allclose(one["sums"], other["sums"], rtol=2 * relative)


def assert_identical(ours: Path, theirs: Path) -> None:
    """The same run bit for bit, in metrics, evaluations, and the tensors of its last checkpoint."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert lines(ours, name) == lines(theirs, name)
    left, right = (tensors_of(run) for run in (ours, theirs))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def tensors_of(run: Path) -> dict[str, Tensor]:
    """Model and optimiser in the last checkpoint of a run folder, or in a checkpoint, whole."""
    checkpoint = run if run.parent.name == "checkpoints" else checkpoints.latest(run)
    assert checkpoint is not None
    state = checkpoints.verify(checkpoint)
    if checkpoints.is_sharded(state):
        return checkpoints.read_shards(checkpoint, state, checkpoints.shapes(checkpoint, state).keys())
    return {name: tensor for file in (checkpoints.MODEL, checkpoints.OPTIMISER) for name, tensor in load_file(checkpoint / file).items()}


def _without_times(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in TIMES}


def _assert_close(one: Any, other: Any, relative: float, bounds: dict[str, float], where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            _assert_close(one[name], other[name], bounds.get(name, relative), bounds, f"{name} in {where}")
    elif isinstance(one, float):
        assert abs(one - other) <= relative * abs(other), f"{where}: {one} and {other}, {abs(one - other) / abs(other):.2e} apart"
    else:
        assert one == other, where
