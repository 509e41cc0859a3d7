"""The decoder's parameters, its head and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.recipes import recipe
from depthroute.residual import AttnResConfig, PreNormConfig
from depthroute.train import initialise

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "role_decoupled_attnres.json").read_text(encoding="utf-8"))["models"]


def shape(**fields: Any) -> ModelConfig:
    settings = {"vocabulary": 17, "width": 12, "layers": 3, "heads": 2, "mlp_width": 20, "context": 8}
    return ModelConfig(**settings | fields)


@pytest.mark.parametrize("scale", ["S", "M"])
@pytest.mark.parametrize(("method", "count"), [("block", "parent_parameters"), ("rd", "role_decoupled_parameters")])
def test_parameter_counts_of_the_role_decoupled_paper(scale: str, method: str, count: str) -> None:
    with torch.device("meta"):
        counts = Decoder(recipe(f"rd-{scale.lower()}").resolve(method)).parameter_counts()
    model = GOLDEN[scale]
    assert counts["total"] == model[count]
    assert counts["embedding"] == model["vocabulary"] * model["width"]
    sites, layers = 2 * model["layers"] + 1, model["layers"]
    assert counts["residual"] == (2 * sites + (layers if method == "rd" else 0)) * model["width"]


def test_a_tied_head_is_the_embedding() -> None:
    model, tokens = Decoder(shape()), torch.randint(17, (2, 8))
    assert model.head is None and model.head_weight is model.embedding.weight
    torch.testing.assert_close(model.logits(tokens), F.linear(model(tokens), model.embedding.weight))
    untied = Decoder(shape(tied_embeddings=False))
    assert untied.head is not None and untied.head_weight.data_ptr() != untied.embedding.weight.data_ptr()
    assert untied.parameter_counts()["total"] - model.parameter_counts()["total"] == 17 * 12
    assert untied.parameter_counts()["embedding"] == 2 * 17 * 12


def test_losses_are_those_of_the_logits() -> None:
    model, tokens = Decoder(shape(residual=AttnResConfig(block=2))), torch.randint(17, (2, 9))
    logits = model.logits(tokens[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, 8)
    torch.testing.assert_close(model.token_nll(tokens[:, :-1], tokens[:, 1:]), expected.detach())
    sums = model.loss(tokens[:, :-1], tokens[:, 1:], z_loss=0.5)
    torch.testing.assert_close(sums.nll, expected.sum().detach())
    torch.testing.assert_close(sums.objective.detach(), (expected.sum() + 0.5 * logits.logsumexp(-1).square().sum()).detach())
    assert sums.tokens == 16


def test_logits_are_float32_under_autocast_and_float64_in_float64() -> None:
    model, tokens = Decoder(shape()), torch.randint(17, (1, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.logits(tokens).dtype == torch.float32
    assert model.double().logits(tokens).dtype == torch.float64


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(RequestError, match=r"a sequence of 9 tokens is longer than model.context = 8"):
        Decoder(shape())(torch.zeros(1, 9, dtype=torch.int64))


def test_every_site_is_observed_once_in_order() -> None:
    seen: list[int] = []
    Decoder(shape())(torch.zeros(1, 2, dtype=torch.int64), observe=lambda site, memory: seen.append(site))
    assert seen == list(range(7))


def test_arms_share_every_parameter_of_the_body_bit_for_bit() -> None:
    plain, routed = Decoder(shape()), Decoder(shape(residual=AttnResConfig(roles="decoupled", rank=4, keys="projected")))
    for model in (plain, routed):
        initialise(model, 7)
    body = {name: parameter for name, parameter in routed.named_parameters() if not name.startswith("residual.")}
    assert body.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(body[name], parameter) for name, parameter in plain.named_parameters())


def test_initial_values_have_the_models_spread() -> None:
    model = Decoder(shape(vocabulary=2_000, width=64, mlp_width=256, init_std=0.1, tied_embeddings=False))
    for again in (False, True):
        if again:
            initialise(model, 3)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                assert parameter.std().item() == pytest.approx(0.1, rel=0.05), name
            else:
                assert torch.equal(parameter, torch.ones_like(parameter)), name
    routed = Decoder(shape(residual=AttnResConfig()))
    initialise(routed, 3)
    assert all(not site.query.any() and site.key_gain.eq(1).all() for site in routed.residual.sites.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
@pytest.mark.parametrize(
    "residual",
    [PreNormConfig(), AttnResConfig(block=3, roles="decoupled"), AttnResConfig(num_blocks=2, rank=5, keys="projected", phases=False)],
    ids=["prenorm", "attnres", "per site"],
)
def test_the_whole_decoder_compiles_as_one_graph(residual: Any) -> None:
    """Forward and backward."""
    model, tokens = Decoder(shape(residual=residual)), torch.randint(17, (2, 8))
    initialise(model, 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    upstream = torch.randn(2, 8, 12)
    expected, found = (torch.autograd.grad(go(tokens), list(model.parameters()), upstream) for go in (model, compiled))
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"layers": 0}, "model.layers = 0 is not allowed; it takes 1 or more"),
        ({"context": -1}, "model.context = -1 is not allowed"),
        ({"key_value_heads": 0}, "model.key_value_heads = 0 is not allowed"),
        ({"heads": 5}, "model.heads = 5 does not divide model.width = 12; set model.head_width"),
        ({"heads": 4}, "the head width 3 is odd; rotary positions need an even one"),
        ({"heads": 6, "key_value_heads": 4}, "model.key_value_heads = 4 does not divide model.heads = 6"),
        ({"norm_eps": 0.0}, "model.norm_eps = 0.0 is not allowed; it must be positive"),
        ({"init_std": float("nan")}, "model.init_std = nan is not allowed"),
        ({"rope_base": -1.0}, "model.rope_base = -1.0 is not allowed"),
    ],
)
def test_wrong_shapes_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        shape(**fields)


def test_a_head_width_frees_the_heads_from_the_width() -> None:
    config = shape(heads=5, head_width=4)
    assert (config.resolved_head_width, config.resolved_key_value_heads, config.body.attention_activation) == (4, 5, 20)
    assert Decoder(config)(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 12)
