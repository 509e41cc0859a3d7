"""Where methods start: at their authors' values, however they are built, and with the body that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.model import Decoder
from depthroute.residual import SPECIFICATIONS, Body, PreNormConfig, ResidualConfig, parse_residual
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.layerscale import LayerScaleConfig
from depthroute.residual.postnorm import PostNormConfig
from depthroute.train import initialise
from depthroute.train.optimiser import parameter_groups

Make = Callable[..., Decoder]
BODY = Body(width=64, layers=6, attention_activation=64, mlp_activation=96)


def values(specification: str, seed: int | None = None) -> dict[str, Tensor]:
    """The parameters of a method at first: as `build` leaves them, or as training fills them from a seed."""
    residual = parse_residual(specification).build(BODY)
    if seed is not None:
        initialise(residual, seed)
    return {name: parameter.detach() for name, parameter in residual.named_parameters()}


# Specification: (part of a parameter's name, what it starts at).
FIXED: dict[str, list[tuple[str, float]]] = {
    "rezero": [("scales", 0.0)],
    "layerscale": [("gains", 0.1)],
    "layerscale,initial=1e-4": [("gains", 1e-4)],
    "highway": [("weight", 0.0), ("bias", -2.0)],
    "highway,coupled=false,bias=-3": [("gates.0.bias", -3.0), ("carries.0.bias", 3.0)],
    "laurel-rw": [("weights", 0.0)],
    "laurel-lr": [("up", 0.0)],
    "laurel-pa": [("previous", 0.0)],
    "x0": [("stream", 1.0), ("x0", 0.0)],
    "unet": [("unet", 1.0)],
    "muddformer": [("output", 0.0)],
    "muddformer-prepost": [("bias", 0.0), ("pre_gains", 1.0), ("post_gains", 1e-3)],
    "hc": [("write", 1.0), ("dynamic_mix", 0.0), ("read_scale", 0.01), ("write_scale", 0.01)],
    "mhc": [("bias", 0.0), ("scale", 0.01)],
    "rd:4": [("query", 0.0), ("key_gain", 1.0)],
    "count-prior:4,count_prior=0.5": [("count_prior", 0.5)],
    "static": [("logits", 0.0)],
    "static-raw": [("logits", 1.0)],
    "dynamic-query": [("weight", 0.0)],
    "dynamic-query,query_rank=4": [("up", 0.0)],
    "linear-depth": [("query", 0.0)],
    "delta,gate=sigmoid": [("query", 0.0), ("key_gain", 1.0), ("gate", -2.0)],
    "delta,gate=alpha": [("gate", 0.0)],
}


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("specification", FIXED)
def test_what_starts_at_one_value(specification: str, seed: int | None) -> None:
    found = values(specification, seed)
    for part, expected in FIXED[specification]:
        named = [parameter for name, parameter in found.items() if part in (name, *name.split("."))]
        assert named and all(torch.equal(parameter, torch.full_like(parameter, expected)) for parameter in named)


@pytest.mark.parametrize("seed", [None, 5])
def test_what_starts_at_more_than_one_value(seed: int | None) -> None:
    for name, weights in values("denseformer", seed).items():
        assert torch.equal(weights, torch.eye(len(weights))[-1]), name
    mudd = values("muddformer", seed)
    for name, bias in mudd.items():
        if name.endswith("bias"):
            assert torch.equal(bias, torch.eye(bias.shape[1])[-1].expand_as(bias))
    for site in range(12):
        hyper = values("hc", seed)
        assert torch.equal(hyper[f"sites.{site}.read"], torch.eye(4)[site % 4])
        assert torch.equal(hyper[f"sites.{site}.mix"], torch.eye(4))
    down = values("laurel-lr,rank=16", seed)["sites.0.down"]
    torch.testing.assert_close(down.T @ down, torch.eye(16) / 16**2)
    learned = values("value-residual-learned,first=0.25,own=2", seed)
    assert all(torch.equal(pair, torch.tensor([0.25, 2.0])) for pair in learned.values())
    diagonal = values("mhc,diagonal=4", seed)["sites.3.bias"][8:].view(4, 4)
    assert torch.equal(diagonal, 4 * torch.eye(4))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    ("specification", "part", "std"),
    [
        ("muddformer", "hidden", 64**-0.5),
        ("mhc", "projection", 0.02),
        ("highway,gate=full", "weight", 0.02),
        ("dynamic-query,query_rank=32", "down", 0.02),
        ("full,rank=32,keys=projected", "key_projections", 0.02),
        ("mrla-light", "decay", 1.0),
        ("mrla-base", "value", 1 / 3 / 3**0.5),  # uniform up to a third
    ],
)
def test_what_starts_random(specification: str, part: str, std: float, seed: int | None) -> None:
    torch.manual_seed(0)
    named = torch.cat([parameter.flatten() for name, parameter in values(specification, seed).items() if part in name])
    assert named.std().item() == pytest.approx(std, rel=0.1) and abs(named.mean().item()) < 0.15 * std
    assert len(named.unique()) > 0.9 * len(named)


@pytest.mark.parametrize(("layers", "expected"), [(18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layerscale_starts_lower_in_deeper_models(layers: int, expected: float) -> None:
    residual = LayerScaleConfig().build(Body(width=4, layers=layers, attention_activation=4, mlp_activation=4))
    assert all(torch.equal(gain, torch.full((4,), expected)) for gain in residual.parameters())


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        (PostNormConfig(deep=True), dict.fromkeys(("value", "output", "gate", "up", "down"), (8 * 3) ** -0.25)),
        (HyperConnectionsConfig(streams=4, scale_outputs=True), {"output": 2.0, "down": 2.0}),
        (HyperConnectionsConfig(streams=4), {}),
        (PostNormConfig(), {}),
    ],
    ids=str,
)
def test_a_method_may_scale_what_its_body_starts_from(
    decoder: Make, body: dict[str, Any], config: ResidualConfig, scales: dict[str, float]
) -> None:
    """The same random numbers, times a factor by the name of the matrix; what gates an attention is of its queries' kind."""
    plain, found = (dict(decoder(one, **body).named_parameters()) for one in (PreNormConfig(), config))
    for name, weight in plain.items():
        part = name.replace("attention.gate", "attention.query").replace("latent_up", "down").split(".")[-2]
        factor = scales.get(part, 1.0) if name.startswith("layers") else 1.0
        if "norm" not in name:
            torch.testing.assert_close(found[name], factor * weight, rtol=1e-6, atol=0, msg=name)


# What is decayed of a residual method: matrices that make coefficients from a token, as their authors have it, and projected keys.
DECAYED = {
    "muddformer": ("hidden", "output"),
    "muddformer-prepost": ("hidden", "output"),
    "hc": ("dynamic_read", "dynamic_mix", "dynamic_write"),
    "mhc": ("projection",),
}


@pytest.mark.parametrize("name", [*SPECIFICATIONS, "full,rank=8,keys=projected"])
def test_only_the_maps_that_their_authors_decay_are(decoder: Make, name: str) -> None:
    specification = {"low-rank": "low-rank,rank=4", "laurel-lr": "laurel-lr,rank=4", "block": "block:2"}.get(name, name)
    model = decoder(parse_residual(specification), scattered=False, width=16, layers=5)
    names = {id(parameter): one for one, parameter in model.named_parameters()}
    decayed, _ = parameter_groups(model, 0.1)
    found = {names[id(p)].rpartition(".")[2] for p in decayed["params"] if names[id(p)].startswith("residual.")}
    expected: Any = DECAYED.get("mhc" if name.startswith("mhc") else name, ("weight",) if "projected" in name else ())
    assert found == set(expected)
