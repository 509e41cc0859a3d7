"""Tiny decoders in float64: three layers of width 12, every parameter from its name, route queries scattered on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import ResidualConfig
from depthroute.train import initialise
from depthroute.train.initialise import parameter_generator

LAYERS, WIDTH, VOCABULARY = 3, 12, 17

Make = Callable[..., Decoder]


def scatter(model: Decoder, std: float = 1.0) -> None:
    """Random route queries, gains and projected keys, the same for the same name."""
    with torch.no_grad():
        for name, parameter in model.residual.named_parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=parameter_generator(5, name))
            parameter.copy_(1 + 0.3 * noise if name.endswith("key_gain") else std * noise)


@pytest.fixture(scope="session")
def decoder() -> Make:
    """`decoder(residual, scattered=True, **model fields)`; large initial values, so that no sub-layer is negligible."""

    def make(residual: ResidualConfig, *, scattered: bool = True, dtype: torch.dtype = torch.float64, **fields: Any) -> Decoder:
        shape = {"vocabulary": VOCABULARY, "width": WIDTH, "layers": LAYERS, "heads": 2, "mlp_width": 20, "context": 8, "init_std": 0.4}
        model = Decoder(ModelConfig(**shape | fields, residual=residual))
        initialise(model, 0)
        if scattered:
            scatter(model)
        return model.to(dtype)

    return make


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    """[2, 9]: inputs and targets of two sequences."""
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def run(tokens: Tensor) -> Callable[[Decoder], tuple[Tensor, dict[str, Tensor]]]:
    """Logits and the loss's gradient by parameter name."""

    def go(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        return model.logits(tokens[:, :-1]).detach(), gradients

    return go
