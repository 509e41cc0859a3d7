"""Lets tests import `stored_runs`, and has what they share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.data import TokenDataset
from depthroute.model import ModelConfig

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing by itself


@pytest.fixture(scope="session")
def tokens(trained_run: Path) -> Path:
    """Token shards with a vocabulary of 300."""
    return trained_run.parent / "tokens"


@pytest.fixture(scope="session")
def held_out(tokens: Path) -> Tensor:
    """Token ids [7, 16] that no conversion compares here: the end of the validation split."""
    return torch.from_numpy(TokenDataset.open(tokens).tokens("validation")[-7 * 16 :].astype("int64")).view(7, 16)


@pytest.fixture
def make_run(tmp_path: Path, tokens: Path) -> Callable[..., Path]:
    """Writes a run folder of a model; see `stored_runs.write_run`."""

    def make(model: ModelConfig, *, name: str = "run", **settings: Any) -> Path:
        from stored_runs import write_run

        write_run(tmp_path / name, tokens, model, **settings)
        return tmp_path / name

    return make
