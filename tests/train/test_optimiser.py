"""Which parameters decay, how fast routes learn, and that each parameter is optimised exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import parse_residual
from depthroute.train.config import RunConfig
from depthroute.train.initialise import initialise
from depthroute.train.optimiser import adamw, parameter_groups, set_learning_rate


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


@pytest.mark.parametrize("arm", ["rd:2", "full,rank=8,keys=projected"])
def test_routes_with_a_rate_of_their_own_are_in_groups_of_their_own(shape: Callable[..., ModelConfig], arm: str) -> None:
    model = Decoder(shape(residual=parse_residual(arm)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    before = [[names[id(parameter)] for parameter in group["params"]] for group in parameter_groups(model, 0.1)]
    groups = parameter_groups(model, 0.1, route_rate=3.0)
    found = {(group["rate"], group["weight_decay"]): [names[id(parameter)] for parameter in group["params"]] for group in groups}
    for decay, earlier in zip((0.1, 0.0), before, strict=True):
        assert found[1.0, decay] == [name for name in earlier if not name.startswith("residual.")]
        assert found.get((3.0, decay), []) == [name for name in earlier if name.startswith("residual.")]
    assert found[3.0, 0.0] and sum(map(len, found.values())) == len(names)


def test_a_method_without_parameters_has_the_same_two_groups_at_any_route_rate(shape: Callable[..., ModelConfig]) -> None:
    model = Decoder(shape(residual=parse_residual("prenorm")))
    one, three = (
        [[id(parameter) for parameter in group["params"]] for group in parameter_groups(model, 0.1, rate)] for rate in (1.0, 3.0)
    )
    assert one == three


def test_routes_move_by_their_rate_and_the_body_as_before(config: Callable[..., RunConfig]) -> None:
    """A first step of AdamW is the learning rate times a number that the gradient alone decides; decay is proportional to it too."""
    moved = {}
    for rate in (1.0, 4.0):
        settings = config(model={"residual": parse_residual("full,rank=8,keys=projected")}, route_rate=rate)
        model = Decoder(settings.model)
        initialise(model, 0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimiser = adamw(model, settings.train)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        set_learning_rate(optimiser, 2e-3)
        optimiser.step()
        moved[rate] = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    for name, once in moved[1.0].items():
        factor = 4.0 if name.startswith("residual.") else 1.0
        torch.testing.assert_close(moved[4.0][name], factor * once, rtol=1e-4, atol=1e-6 if factor != 1 else 0)


def test_a_route_rate_of_one_trains_bit_for_bit_as_two_groups_do(config: Callable[..., RunConfig]) -> None:
    """Against groups made here, without any rates: what an optimiser was before routes could have a rate of their own."""
    weights = []
    for ours in (True, False):
        settings = config(model={"residual": parse_residual("rd:2")})
        model = Decoder(settings.model)
        initialise(model, 0)
        if ours:
            optimiser = adamw(model, settings.train)
        else:
            matrices = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 2]
            others = [parameter for name, parameter in model.named_parameters() if parameter.ndim != 2]
            optimiser = torch.optim.AdamW(
                [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                lr=settings.train.learning_rate, betas=settings.train.betas, eps=settings.train.eps, fused=True,
            )
        tokens = torch.arange(32).view(2, 16)
        for step in range(3):
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * (step + 1)
            model.loss(tokens, tokens).objective.backward()
            optimiser.step()
            optimiser.zero_grad()
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


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
