"""Initial values depend on the seed and the parameter's name, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import parse_residual
from depthroute.train.initialise import initialise, parameter_generator

Shape = Callable[..., ModelConfig]


@pytest.mark.parametrize("arm", ["block:2", "rd:2", "full,rank=8", "full,rank=8,keys=projected"])
def test_two_arms_share_every_common_initial_tensor(shape: Shape, arm: str) -> None:
    parent, routed = Decoder(shape()), Decoder(shape(residual=parse_residual(arm)))
    initialise(parent, 3)
    initialise(routed, 3)
    ours = dict(routed.named_parameters())
    for name, parameter in parent.named_parameters():
        assert torch.equal(parameter, ours.pop(name)), name
    assert ours and all(name.startswith("residual.") for name in ours)


def test_initial_values_do_not_depend_on_the_order_of_construction() -> None:
    def build(names: list[str]) -> nn.ModuleDict:
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        initialise(model, 0)
        return model

    forwards, backwards = build(["a", "b", "c"]), build(["c", "b", "a"])
    for name in "abc":
        assert torch.equal(forwards[name].weight, backwards[name].weight)
    assert not torch.equal(forwards["a"].weight, forwards["b"].weight)


def test_another_seed_gives_other_values_and_the_same_seed_the_same(shape: Shape) -> None:
    weights = []
    for seed in (0, 0, 1):
        model = Decoder(shape())
        initialise(model, seed)
        weights.append(model.embedding.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_generator_of_a_name_never_changes() -> None:
    # BLAKE2b-64 of "0:embedding.weight", so that runs of today can be repeated with later versions
    assert parameter_generator(0, "embedding.weight").initial_seed() == SEED_OF_THE_EMBEDDING


def test_every_kind_of_parameter_gets_the_values_it_should(shape: Shape) -> None:
    model = Decoder(shape(width=64, residual=parse_residual("rd:2")))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)  # a parameter that is skipped would show
    initialise(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith(("query", "value_query")) and name.startswith("residual."):
            assert torch.count_nonzero(parameter) == 0, name
        elif parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.002, name


def test_a_tied_parameter_is_filled_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)

    tied, untied = Tied(), Untied()
    initialise(tied, 0)
    initialise(untied, 0)
    assert torch.equal(tied.head.weight, untied.embedding.weight)


def test_a_parameter_of_which_nothing_says_how_it_starts_is_refused_by_name() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.amount = nn.Parameter(torch.zeros(3))

    with pytest.raises(RequestError, match=r"'inner\.amount'.*Scale a method initial_values"):
        initialise(nn.ModuleDict({"inner": Scale()}), 0)


SEED_OF_THE_EMBEDDING = 17301062793698161052
