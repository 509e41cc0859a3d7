"""Run folders of tiny decoders whose queries, gains and matrices are random, and what is stored in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from depthroute.common.config import to_json
from depthroute.common.files import write_json
from depthroute.data import TokenDataset
from depthroute.data.order import ORDER
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig
from depthroute.train import RunConfig, TrainConfig, checkpoint, initialise, recorded_config
from depthroute.train.optimiser import build_optimiser

MakeRun = Callable[..., Path]


def shape(**fields: Any) -> ModelConfig:
    tiny: dict[str, Any] = {"vocabulary": 300, "width": 12, "layers": 3, "heads": 2, "mlp_width": 20, "context": 16, "init_std": 0.3}
    return ModelConfig(**{**tiny, "residual": AttnResConfig(block=2), **fields})


@torch.no_grad()
def scatter(model: Decoder, seed: int) -> None:
    """Queries of size one half and gains around one, so that no factor could be forgotten unseen."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.startswith("residual.") and name.endswith("query"):
            parameter.copy_(0.5 * normal)
        elif name.endswith("count_prior"):
            parameter.copy_(normal)
        elif name.endswith(".bias"):
            parameter.copy_(0.3 * normal)
        elif name.endswith(("norm.weight", "key_gain")) and not name.endswith("output_norm.weight"):
            parameter.copy_(1 + 0.4 * normal)


def write_run(
    folder: Path, tokens: Path, model: ModelConfig, *, seed: int = 0, change: Callable[[Decoder], None] | None = None,
    dtype: torch.dtype = torch.float64, precision: str = "float32",
) -> None:  # fmt: skip
    """A run at the second of four steps, its weights random and then changed."""
    settings: dict[str, Any] = {
        "steps": 4, "sequences": 4, "microbatch": 4, "learning_rate": 1e-3, "precision": precision, "device": "cpu", "threads": 1,
        "evaluation_tokens": 64,
    }  # fmt: skip
    fingerprint = TokenDataset.open(tokens).fingerprint
    config = RunConfig(model=model, train=TrainConfig(**settings), data=str(tokens), data_fingerprint=fingerprint)
    decoder = Decoder(model)
    initialise(decoder, seed)
    decoder.to(dtype)
    scatter(decoder, seed)
    if change is not None:
        with torch.no_grad():
            change(decoder)
    folder.mkdir()
    write_json(folder / "config.json", {"format": 1, **to_json(config)})
    write_json(folder / "environment.json", {"processor": "the first"})
    line = {"loss": 5.0, "learning_rate": 1e-3, "gradient_norm": 1.0, "seconds": 0.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "tokens": 64 * n, **line}) + "\n" for n in (1, 2)))
    checkpoint.save(folder, 2, decoder, build_optimiser(decoder, config.train), {"order": ORDER, "tokens": 128, "peak_memory_bytes": 1})


def loaded(folder: Path) -> Decoder:
    """The model of a run folder with its weights in float64."""
    config, found = recorded_config(folder), checkpoint.latest(folder)
    assert config is not None and found is not None
    model = Decoder(config.model).double().eval()
    checkpoint.load_model(found, model)
    return model


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of the last checkpoint as they are stored."""
    found = checkpoint.latest(folder)
    assert found is not None
    return load_file(found / checkpoint.MODEL)
