"""Tiny decoders in float64 as models of transformers, and an exported run. Nothing here asks the network."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

pytest.importorskip("transformers")

from transformers.utils import logging

from depthroute.hf import DepthrouteConfig, DepthrouteForCausalLM
from depthroute.hf.export import around, export_hf
from depthroute.model import Decoder, ModelConfig
from depthroute.report.model_card import model_card
from depthroute.residual import parse_residual
from depthroute.train import initialise
from depthroute.train.initialise import parameter_generator

logging.disable_progress_bar()

MakeModel = Callable[..., DepthrouteForCausalLM]
FAST = ("prenorm", "block:2", "rd:2", "low-rank:2,rank=4", "hc:2", "value-residual", "muddformer", "delta")
SIZED = {"block": "block:2", "low-rank": "low-rank:2,rank=4"}  # methods that need a size
PAD, EOS = 0, 3


@pytest.fixture(scope="session")
def decoder() -> Callable[..., Decoder]:
    """`decoder(method, **model fields)`: three layers of width 12, large random values everywhere, and no two gains alike."""

    def make(method: str = "block:2", *, dtype: torch.dtype = torch.float64, **fields: Any) -> Decoder:
        shape = {"vocabulary": 23, "width": 12, "layers": 3, "heads": 2, "mlp_width": 20, "context": 32, "init_std": 0.4}
        model = Decoder(ModelConfig(**shape | fields, residual=parse_residual(method)))
        initialise(model, 0)
        model.to(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, dtype=torch.float64, generator=parameter_generator(5, name))
                if name.startswith("residual.") and name.endswith("query"):
                    parameter.copy_(noise)
                elif name.startswith("residual.") or name.endswith("norm.weight"):
                    parameter.add_(0.3 * noise)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def make(decoder: Callable[..., Decoder]) -> MakeModel:
    """The same as a model of transformers."""

    def wrapped(*given: Any, **fields: Any) -> DepthrouteForCausalLM:
        model = around(decoder(*given, **fields), pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS)
        model.config.dtype = next(model.parameters()).dtype
        return model

    return wrapped


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    """[2, 9], none of them special."""
    return torch.randint(4, 23, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def exported(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that all tests share, exported."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    export_hf(trained_run, folder, card=model_card(trained_run))
    return folder


@pytest.fixture(scope="session")
def config() -> DepthrouteConfig:
    residual = parse_residual("rd:2,rank=4")
    model = ModelConfig(
        vocabulary=30, width=12, layers=4, heads=2, key_value_heads=1, mlp_width=20, context=16, attention_window=5,
        windowed_layers=(0, 2), biases=("query", "down"), tied_embeddings=False, residual=residual,
    )  # fmt: skip
    return DepthrouteConfig(model, pad_token_id=PAD, eos_token_id=EOS)
