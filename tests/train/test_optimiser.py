"""Which parameters decay, and that each is optimised exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import parse_residual
from depthroute.train.config import RunConfig
from depthroute.train.initialise import initialise
from depthroute.train.optimiser import adamw, parameter_groups


@pytest.mark.parametrize("arm", ["prenorm", "block:2", "rd:2", "full,rank=8,keys=projected"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(shape: Callable[..., ModelConfig], arm: str, tied: bool) -> None:
    model = Decoder(shape(residual=parse_residual(arm), tied_embeddings=tied))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    in_groups = [names[id(parameter)] for group in (decayed, others) for parameter in group["params"]]
    assert sorted(in_groups) == sorted(names.values())
    assert all(parameter.ndim == 2 for parameter in decayed["params"])
    not_decayed = [names[id(parameter)] for parameter in others["params"]]
    assert all(name.rpartition(".")[2] in ("weight", "query", "value_query", "key_gain") for name in not_decayed)
    assert all(name in not_decayed for name in names.values() if name.endswith(("query", "key_gain")) and name.startswith("residual."))
    assert all(name in not_decayed for name in names.values() if "norm" in name)


def test_a_module_can_keep_a_matrix_of_queries_from_decaying() -> None:
    class Routes(nn.Module):
        no_decay = ("queries",)

        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.zeros(3, 4))
            self.projection = nn.Parameter(torch.zeros(3, 4))

    routes = Routes()
    decayed, others = parameter_groups(nn.ModuleDict({"residual": routes}), 0.1)
    assert decayed["params"] == [routes.projection]
    assert others["params"] == [routes.queries]


def test_a_frozen_parameter_is_not_optimised() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert group["params"] == [model.bias]


def test_a_step_is_the_update_of_the_adamw_paper(config: Callable[..., RunConfig]) -> None:
    """Decoupled decay (Loshchilov and Hutter, 2019, Algorithm 2), on the first step, from the definition."""
    settings = config(learning_rate=0.01, weight_decay=0.5).train
    model = nn.Linear(3, 2)
    initialise(model, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimiser = adamw(model, settings)
    optimiser.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        decay = 0.01 * 0.5 if name == "weight" else 0.0
        expected = before[name] * (1 - decay) - 0.01 * parameter.grad / (parameter.grad.abs() + settings.eps)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)
