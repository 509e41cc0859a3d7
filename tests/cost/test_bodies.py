"""What layers with other mixers and experts count, against models that run and against published totals."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthroute.common.config import to_json
from depthroute.cost.body_words import body_facts
from depthroute.cost.memory import training_activations
from depthroute.cost.shapes import published, shape_of
from depthroute.cost.summary import parameter_parts, routing_percent
from depthroute.cost.work import routing_work
from depthroute.model import Decoder, ModelConfig
from depthroute.model import layer_work as layers
from depthroute.ops.delta_rule import delta_rule_by_token
from depthroute.residual import parse_residual
from depthroute.study.compute import token_compute
from tests.bodies import BODIES, K3, KIMI

TOKENS = 64


def model(body: dict[str, Any], residual: str = "prenorm", **fields: Any) -> ModelConfig:
    given = {"vocabulary": 50, "width": 24, "layers": 4, "heads": 4, "head_width": 10, "mlp_width": 34, "context": TOKENS} | body | fields
    return ModelConfig(**given, residual=parse_residual(residual))


def mixtures() -> list[dict[str, Any]]:
    """Every option of one body in the other, one mixer and experts at a time."""
    found = []
    for kda, mla, experts, layer in product(*([KIMI[name], K3[name]] for name in ("kda", "mla", "experts")), ("kda", "mla")):
        found.append({"mixers": (layer,), layer: kda if layer == "kda" else mla, "experts": experts})
    return [*found, {"mixers": ("softmax", "kda"), "kda": KIMI["kda"]}, *BODIES.values()]


@pytest.mark.parametrize("body", mixtures(), ids=lambda body: "-".join(body.get("mixers", ("dense",))))
@pytest.mark.parametrize("tied", [True, False])
def test_products_are_the_weights_that_a_token_meets(body: dict[str, Any], tied: bool) -> None:
    """The rest of the active parameters has one axis: gains, biases, rates; and what of a convolution is a row is a product."""
    config = model(body, tied_embeddings=tied)
    decoder = Decoder(config)
    shape = shape_of(config)
    assert shape.parameters == sum(parameter.numel() for parameter in decoder.parameters())
    rows = sum(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 1)
    assert shape.active == layers.body_products(config) + config.vocabulary * config.width + rows
    routed = sum(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 3)
    assert shape.routed == routed == layers.routed_parameters(config)
    assert parameter_parts(config)["total"] == shape.parameters


@pytest.mark.parametrize("name", ["kimi", "k3"])
def test_a_pass_multiplies_what_is_counted(name: str) -> None:
    """What runs inside a custom operator (delta rules, routed experts) and element-wise products (convolutions) are beside it."""
    config = model(BODIES[name])
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        Decoder(config).logits(torch.zeros(1, TOKENS, dtype=torch.int64))
    counted = sum(counter.get_flop_counts()["Global"].values()) / 2 / TOKENS
    kda = sum(config.mixer(layer) == "kda" for layer in range(4))
    beside = 3 * config.kda.convolution * 40 * kda + 3 * config.experts.chosen * layers.expert_parameters(config)
    latent = 4 - kda
    padded = latent * config.heads * config.mla.shared_key * TOKENS  # a CPU's values are made as wide as the keys
    assert counted == layers.body_products(config) - beside + padded + 50 * 24 + shape_of(config).attended * TOKENS


def test_a_state_is_three_products_a_token() -> None:
    by_head, strength = (torch.rand(1, 4, TOKENS, 10) for _ in range(4)), torch.rand(1, 4, TOKENS)
    with FlopCounterMode(display=False) as counter:
        delta_rule_by_token(*by_head, strength)
    outer = 4 * 10 * 10  # element by element
    assert counter.get_total_flops() / 2 / TOKENS + outer == layers.state_products(model(KIMI), 0, chunked=False)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("name", "residual"), [("kimi", "prenorm"), ("k3", "prenorm"), ("kimi", "rd:2,phases=false"), ("k3", "hc")])
def test_activations_are_what_autograd_saves(name: str, residual: str, mixed: bool) -> None:
    """Of a token: what grows with the sequence. Squares are the weights of attention's definition, which fused kernels do not keep."""
    config = model(BODIES[name], residual, context=3 * 128)
    decoder = Decoder(config)
    decoder.train()
    sizes = []
    for length in (128, 256, 384):
        tokens, alive = torch.randint(0, 50, (1, length)), []

        def pack(tensor: Tensor, alive: list[Tensor] = alive) -> Tensor:
            alive.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            alive.append(decoder(tokens))
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in alive}
        storages.pop(tokens.untyped_storage()._cdata, None)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
    once, twice, thrice = sizes
    saved = (2 * (twice - once) - 3 * (thrice - 2 * twice + once)) / 256
    lse = 4 * 4 * 2  # of two latent attentions, kept by a fused kernel alone
    counted = training_activations(config, mixed=mixed, on_cpu=True).total
    if mixed:  # the definition of attention rounds and widens more on a real CPU
        assert 0.95 * saved < counted < saved + lse
    else:
        assert counted == saved + lse


def test_a_decoded_token_updates_states_and_meets_latent_vectors() -> None:
    config = model(KIMI)
    shape = shape_of(config)
    assert (shape.state, shape.cache) == (2 * (4 * 10 * 10 + 3 * 2 * 40), 2 * (10 + 4))
    assert (shape.attended, shape.attended_cached) == (2 * 4 * (2 * 10 + 4), 2 * 4 * (2 * 10 + 4))  # the latent is as wide as a head
    assert shape.updates == 2 * 3 * 4 * 10 * 10
    assert shape_of(model(KIMI, "rd:2")).cache == 2 * (2 * 10 + 4)
    assert shape_of(model(KIMI, "value-residual")).cache == 2 * 4 * (2 * 10 + 4)
    wide = replace(KIMI["mla"], latent=30)
    assert shape_of(model(KIMI, mla=wide)).attended_cached == 2 * 4 * (2 * 30 + 4)


def test_projected_keys_are_of_what_experts_feed_their_output() -> None:
    config = model(KIMI, "low-rank:2,rank=6,keys=projected")
    with torch.device("meta"):
        matrices = [p for name, p in Decoder(config).residual.named_parameters() if p.ndim > 1 and "key" in name]
    assert routing_work(config).projection == sum(matrix.numel() for matrix in matrices)
    assert routing_percent(config) == 100 * routing_work(config).total / layers.body_products(config)


def test_what_is_trained() -> None:
    config = model(K3)
    shape = shape_of(config)
    rows = 50 * 24 + shape.updates_chunked + shape.attended * (TOKENS + 1) / 2
    assert token_compute(config)["plain"] == 6 * (layers.body_products(config) + rows)


@pytest.mark.parametrize(("name", "parameters", "active"), [("kimi-linear-48b", 48e9, 3e9), ("kimi-k3", 2.78e12, 104e9)])
def test_published_totals_come_out_of_the_count(name: str, parameters: float, active: float) -> None:
    """Reports round: 48B is 49.1B with embedding and head, 3B is 3.1B with the head; 2.78T and 104B are met to a part in 500."""
    shape = published(name)
    near = 0.04 if name == "kimi-linear-48b" else 0.002
    assert shape.parameters == pytest.approx(parameters, rel=near) and shape.active == pytest.approx(active, rel=near)


def test_a_body_in_words() -> None:
    assert body_facts(to_json(published("kimi-k3").body)) == {
        "mixers": "3 KDA : 1 MLA, last MLA",
        "experts": "16 of 896 + 2 shared x 3,072 in a latent width of 3,584, behind 1 dense",
        "activation": "situ",
    }
    assert body_facts(to_json(model({}, document_end=0))) == {"documents": "do not see each other"}
