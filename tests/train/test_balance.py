"""Mixtures of experts are balanced by the loads of each step, and train like any other body: interrupted, in shards, from a trunk."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from depthroute.common.errors import FailureError
from depthroute.common.files import read_json_lines
from depthroute.data import TokenDataset
from depthroute.model import Decoder
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, branch_run, load_trained, on_one, train
from depthroute.train import checkpoint as checkpoints
from depthroute.train.balance import balance
from depthroute.train.initialise import initialise
from depthroute.train.on_one import OnOne
from tests.bodies import BODIES
from tests.train.test_resume import assert_same_run
from tests.train.test_sharded import to_shards

Config = Callable[..., RunConfig]
STATISTICS = {"expert_load_maximum", "expert_load_minimum"}


@pytest.fixture(scope="module")
def mixed(config: Config, data: Path) -> Config:
    """A short run of a body with experts, on packed documents."""
    end = TokenDataset.open(data).end

    def make(body: str = "kimi", **fields: Any) -> RunConfig:
        model = {**BODIES[body], "layers": 3, "document_end": end, "residual": parse_residual("rd:2")}
        return config(model=model, **{"steps": 6, "checkpoint_every": 2, "milestones": (3,), "microbatch": 4} | fields)

    return make


def biases(model: Decoder) -> dict[int, torch.Tensor]:
    return {layer: experts.router.bias.detach().clone() for layer, experts in model.experts.items()}


def test_the_loads_of_a_step_move_the_biases_and_are_told(config: Config) -> None:
    settings = config(model={**BODIES["kimi"], "layers": 3})
    model = Decoder(settings.model)
    initialise(model, 0)
    loads = {1: [4.0, 0.0, 2.0, 1.0, 3.0], 2: [2.0, 2.0, 2.0, 1.0, 3.0]}
    for layer, load in loads.items():
        model.experts[layer].load.copy_(torch.tensor(load))
    assert balance(settings.model, [model]) == {"expert_load_maximum": 2.0, "expert_load_minimum": 0.0}
    expected = {1: [-1, 1, 0, 1, -1], 2: [0, 0, 0, 1, -1]}
    for layer, bias in biases(model).items():
        assert torch.equal(bias, torch.tensor(expected[layer]) * 1e-3) and not model.experts[layer].load.any()


def test_a_model_without_experts_is_not_balanced(config: Config) -> None:
    settings = config()
    assert balance(settings.model, [Decoder(settings.model)]) == {}


def test_all_micro_batches_of_a_step_count_and_nothing_else_does(mixed: Config) -> None:
    settings = mixed()
    workers, order = OnOne(settings), torch.randint(0, 300, (8, 17), generator=torch.Generator().manual_seed(0))
    tokens = order[:, :-1]
    workers.network.loss(tokens, tokens)  # an evaluation is without gradients
    chosen = {layer: experts.load.clone() for layer, experts in workers.network.experts.items()}
    assert all(load.sum() == 8 * 16 * 2 for load in chosen.values())
    workers.balance()
    with torch.no_grad():
        workers.network.loss(tokens, tokens)
    assert not any(experts.load.any() for experts in workers.network.experts.values())
    before = biases(workers.network)
    workers.accumulate(order)
    for layer, experts in workers.network.experts.items():
        assert experts.load.sum() == 8 * 16 * 2
        moves = experts.moves(experts.load)
        before[layer] += moves
        assert moves.any()
    largest = max((experts.load / experts.load.mean()).max().item() for experts in workers.network.experts.values())
    assert workers.balance()["expert_load_maximum"] == pytest.approx(largest)
    assert all(torch.equal(before[layer], bias) for layer, bias in biases(workers.network).items())


def test_a_step_that_is_refused_moves_no_bias(tmp_path: Path, mixed: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OnOne] = []
    real, begin = on_one.accumulate_gradients, OnOne.__init__

    def broken(*arguments: Any) -> torch.Tensor:
        return real(*arguments) * math.nan

    def noted(self: OnOne, settings: RunConfig) -> None:
        begin(self, settings)
        made.append(self)

    monkeypatch.setattr(on_one, "accumulate_gradients", broken)
    monkeypatch.setattr(OnOne, "__init__", noted)
    with pytest.raises(FailureError, match="the loss is nan at step 1"):
        train(mixed(), tmp_path, console=False)
    assert not any(bias.any() for bias in biases(made[0].network).values())


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("body", ["kimi", "k3"])
def test_a_run_with_experts_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, mixed: Config, monkeypatch: pytest.MonkeyPatch, body: str, optimiser: str
) -> None:
    settings = mixed(body, optimiser=optimiser)
    result = train(settings, tmp_path / "whole", console=False)
    assert result["parameters"] == Decoder(settings.model).parameter_counts()
    for line in read_json_lines(tmp_path / "whole" / "metrics.jsonl"):
        assert line.keys() >= STATISTICS and line["expert_load_maximum"] > 1 > line["expert_load_minimum"] >= 0
    _, model = load_trained(tmp_path / "whole")
    assert all(0 < bias.abs().max() <= 6.1e-3 for bias in biases(model).values())
    real, calls = on_one.accumulate_gradients, 0

    def interrupted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(on_one, "accumulate_gradients", interrupted)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match="interrupted after step 3;"):
        train(settings, run, console=False)
    if optimiser == "muon":  # the same from shards
        to_shards(checkpoints.folder(run, 3))
    train(settings, run, console=False)
    assert_same_run(run, tmp_path / "whole")


@pytest.mark.parametrize("body", ["kimi", "k3"])
def test_a_branch_of_a_body_with_experts_is_the_run_trained_alone(tmp_path: Path, mixed: Config, body: str) -> None:
    wsd = {"schedule": "wsd", "warmup_fraction": None, "warmup_steps": 1, "decay_fraction": 0.5, "milestones": ()}
    trunk, branch = mixed(body, steps=6, keep_checkpoints=(2,), **wsd), mixed(body, steps=4, **wsd)
    train(trunk, tmp_path / "trunk", console=False)
    train(branch, tmp_path / "alone", console=False)
    assert branch_run(branch, tmp_path / "branch", tmp_path / "trunk") == 2
    train(branch, tmp_path / "branch", console=False)
    assert_same_run(tmp_path / "branch", tmp_path / "alone")


def test_recomputing_a_layer_does_not_change_the_balance(tmp_path: Path, mixed: Config) -> None:
    for recompute in (False, True):
        train(mixed(recompute=recompute, steps=3, milestones=()), tmp_path / str(recompute), console=False)
    assert_same_run(tmp_path / "True", tmp_path / "False")
