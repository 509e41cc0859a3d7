"""What a training configuration refuses, and that it survives JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from depthroute.common.config import from_json, override, to_json
from depthroute.common.errors import RequestError
from depthroute.train import RunConfig, TrainConfig, resolve
from depthroute.train.config import ParameterGroup
from depthroute.train.devices import resolve_device

MUON = (ParameterGroup(parameters="layers[.].*", optimiser="muon", rate=2.0), ParameterGroup(parameters=".*", weight_decay=0.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "train.steps must be a whole number of at least 1, not 0"),
        ({"sequences": -1}, "train.sequences must be a whole number of at least 1, not -1"),
        ({"seed": -1}, "train.seed must be a whole number of at least 0"),
        ({"microbatch": 3}, "8 sequences cannot be split into microbatches of 3"),
        ({"microbatch": 0}, "train.microbatch must be a whole number of at least 1, or none, not 0"),
        ({"learning_rate": 0.0}, "train.learning_rate must be above 0, not 0.0"),
        ({"learning_rate": float("inf")}, "train.learning_rate must be above 0, not inf"),
        ({"learning_rate": float("nan")}, "train.learning_rate must be above 0, not nan"),
        ({"eps": 0.0}, "train.eps must be above 0"),
        ({"weight_decay": -0.1}, "train.weight_decay must be 0 or above"),
        ({"z_loss": -1e-4}, "train.z_loss must be 0 or above"),
        ({"route_rate": 0.0}, "train.route_rate must be above 0, not 0.0"),
        ({"optimiser": "moun"}, "perhaps you meant 'muon'"),
        ({"optimiser": "muon", "matrix_rate": 0.0}, "train.matrix_rate must be above 0, not 0.0"),
        ({"optimiser": "muon", "momentum": 1.0}, "train.momentum must be at least 0 and below 1, not 1.0"),
        ({"matrix_rate": 2.0}, "train.matrix_rate = 2.0 is of Muon's matrices, and train.optimiser = 'adamw' has none: leave it at 1, or"),
        ({"momentum": 0.9}, "and train.optimiser = 'adamw' has none: leave it at 0.95, or set train.optimiser=muon."),
        ({"groups": MUON, "optimiser": "muon"}, "train.optimiser = 'muon' does not go with train.groups, of which each has its own"),
        ({"groups": MUON, "matrix_rate": 2.0}, "train.matrix_rate = 2.0 does not go with train.groups"),
        ({"groups": MUON, "route_rate": 2.0}, "train.route_rate = 2.0 does not go with train.groups"),
        ({"groups": MUON[1:], "momentum": 0.9}, "and no group of train.groups is Muon's: leave it at 0.95, or give it a group."),
        ({"warmup_fraction": 1.0}, "train.warmup_fraction must be at least 0 and below 1, or none, not 1.0"),
        ({"warmup_steps": 5}, "train.warmup_fraction = 0.02 and train.warmup_steps = 5: give one of the two"),
        ({"warmup_fraction": None}, "train.warmup_fraction = None and train.warmup_steps = None: give one of the two"),
        ({"warmup_fraction": None, "warmup_steps": -1}, "train.warmup_steps must be a whole number of at least 0, or none, not -1"),
        ({"warmup_fraction": None, "warmup_steps": 101}, "the warm-up of 101 steps do not fit into train.steps = 100"),
        ({"schedule": "wds"}, "perhaps you meant 'wsd'"),
        ({"schedule": "wsd"}, "train.decay_fraction = None does not go with train.schedule = 'wsd': give a share"),
        ({"decay_fraction": 0.1}, "train.decay_fraction = 0.1 does not go with train.schedule = 'cosine'"),
        ({"schedule": "wsd", "decay_fraction": 1.5}, "train.decay_fraction must be from 0 to 1, not 1.5"),
        ({"schedule": "wsd", "decay_fraction": 1.0}, "the warm-up of 2 steps and the decay of 100 do not fit into train.steps = 100"),
        ({"final_fraction": 1.5}, "train.final_fraction must be from 0 to 1, not 1.5"),
        ({"gradient_clip": 0.0}, "train.gradient_clip must be above 0, or none"),
        ({"betas": (0.9, 1.0)}, "train.betas must be two numbers"),
        ({"betas": (0.9,)}, "train.betas must be two numbers"),
        ({"precision": "bf61"}, "perhaps you meant 'bf16'"),
        ({"device": "tpu"}, "train.device: unknown value 'tpu'"),
        ({"milestones": (5, 101)}, "between 1 and the 100 steps of the run, not 101"),
        ({"milestones": (0,)}, "between 1 and the 100 steps of the run, not 0"),
        ({"milestones": (20, 10)}, "train.milestones must be ascending"),
        ({"milestones": (10, 10)}, "different from each other"),
        ({"evaluation_tokens": 0}, "train.evaluation_tokens must be a whole number of at least 1, or none"),
        ({"keep_checkpoints": (50, 101)}, "train.keep_checkpoints must lie between 1 and the 100 steps of the run, not 101; set"),
        ({"keep_checkpoints": (50, 20)}, "train.keep_checkpoints must be ascending"),
        ({"checkpoint_every": -1}, "train.checkpoint_every must be a whole number of at least 0"),
        ({"threads": 0}, "train.threads must be a whole number of at least 1, or none"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        TrainConfig(**{"steps": 100, "sequences": 8, "learning_rate": 1e-3} | changes)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parameters": "layers[.("}, "train.groups: of 'layers[.(', parameters is no regular expression: unterminated character set"),
        ({"optimiser": "moun"}, "perhaps you meant 'muon'"),
        ({"rate": 0.0}, "train.groups: of '.*', rate must be above 0, not 0.0"),
        ({"weight_decay": -0.1}, "train.groups: of '.*', weight_decay must be 0 or above, or none, not -0.1"),
    ],
)
def test_a_wrong_group_is_refused_by_its_expression(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        ParameterGroup(**{"parameters": ".*"} | fields)
    assert words in str(refusal.value)


def test_groups_survive_json_and_are_given_as_text(config: Callable[..., RunConfig]) -> None:
    full = config(groups=MUON, momentum=0.9)
    assert from_json(RunConfig, json.loads(json.dumps(to_json(full)))) == full
    text = '[{"parameters": "layers[.].*", "optimiser": "muon", "rate": 2}, {"parameters": ".*", "weight_decay": 0.0}]'
    assert override(config(), {"train.groups": text}).train.groups == MUON
    with pytest.raises(RequestError, match=r"train.groups\[0\]: unknown field 'parameter'; perhaps you meant 'parameters'"):
        override(config(), {"train.groups": '[{"parameter": ".*"}]'})


def test_a_configuration_survives_json(config: Callable[..., RunConfig]) -> None:
    full = config(
        milestones=(1, 2), gradient_clip=None, threads=1, route_rate=2.0, schedule="wsd", warmup_fraction=None, warmup_steps=3,
        decay_fraction=0.25, keep_checkpoints=(4, 8), optimiser="muon", matrix_rate=0.5, momentum=0.9,
    )
    assert from_json(RunConfig, json.loads(json.dumps(to_json(full)))) == full


def test_an_override_is_validated_too(config: Callable[..., RunConfig]) -> None:
    assert override(config(), {"train.gradient_clip": "none", "train.microbatch": "2"}).train.microbatch == 2
    with pytest.raises(RequestError, match="microbatch"):
        override(config(), {"train.microbatch": "3"})


def test_resolving_leaves_nothing_to_choose_and_follows_the_recorded_run(config: Callable[..., RunConfig]) -> None:
    wanted = config(precision="auto", device="auto", microbatch=None)
    settings = resolve(wanted).train
    assert settings.precision in ("float32", "bf16") and settings.device in ("cpu", "cuda") and settings.microbatch == settings.sequences
    for precision in ("float32", "bf16"):
        assert resolve(wanted, resolve(config(precision=precision))).train.precision == precision
    assert resolve(config(precision="bf16"), resolve(config(precision="float32"))).train.precision == "bf16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="torch sees no GPU here"):
        resolve_device("cuda")
