"""A data folder of a few thousand tokens, and a configuration that trains on it in a second."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from depthroute.data import PrepareConfig, prepare
from depthroute.model import ModelConfig
from depthroute.train import RunConfig, TrainConfig

VOCABULARY = 300


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = random.Random(0)
    lexicon = ["".join(words.choice("abcdefghijklmnop") for _ in range(5)) for _ in range(40)]
    documents = [" ".join(words.choice(lexicon) for _ in range(60)) for _ in range(120)]
    source = folder / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    settings = PrepareConfig.of(str(source), vocabulary=VOCABULARY, sample_one_in=1, validation_share=0.15)
    prepare(settings, folder / "tokens")
    return folder / "tokens"


@pytest.fixture(scope="session")
def shape() -> Callable[..., ModelConfig]:
    """A tiny decoder, with any field replaced."""

    def make(**fields: Any) -> ModelConfig:
        tiny = {"vocabulary": VOCABULARY, "width": 16, "layers": 2, "heads": 2, "mlp_width": 32, "context": 16}
        return ModelConfig(**tiny | fields)

    return make


@pytest.fixture(scope="session")
def config(data: Path, shape: Callable[..., ModelConfig]) -> Callable[..., RunConfig]:
    """A run of the tiny decoder, with fields of the training replaced, or of the model by `model={...}`."""

    def make(model: dict[str, Any] | None = None, **fields: Any) -> RunConfig:
        settings = {
            "steps": 12, "sequences": 8, "learning_rate": 3e-3, "precision": "float32", "device": "cpu", "threads": 1,
            "evaluation_tokens": 64, "checkpoint_every": 3,
        }
        return RunConfig(model=shape(**model or {}), train=TrainConfig(**settings | fields), data=str(data))

    return make
