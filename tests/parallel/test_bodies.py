"""The Kimi bodies and packed documents on several processes have the losses and gradients of one, and balance their experts together."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn

from depthroute.common.errors import RequestError
from depthroute.model import Decoder
from depthroute.model.experts import Router
from depthroute.model.kda import Decay
from depthroute.model.layers import Layer
from depthroute.model.linear import Projection
from depthroute.parallel import cut
from depthroute.parallel.cut import products
from depthroute.parallel.layout import parse_layout
from depthroute.parallel.network import Network
from depthroute.parallel.sharding import put
from depthroute.parallel.tensor import check_tensor
from depthroute.parallel.world import meshes
from depthroute.residual import RMSNorm
from depthroute.train import initialise
from depthroute.train.balance import balance
from tests.bodies import BODIES, K3, KIMI
from tests.parallel.test_network import ROWS, TOKENS, agrees, fill, residual_of, rounds, shape, tokens, whole
from tests.parallel.world import World

METHODS = ["block", "rd", "full,rank=5,keys=projected"]
PACKED = {"document_end": 3}


def test_documents_begin_inside_the_sequences_of_these_tests() -> None:
    ends = tokens()[:, :-2] == PACKED["document_end"]
    assert ends[: ROWS // 2].any() and ends[ROWS // 2 :].any()


TWO = [("kimi", "fsdp"), ("kimi", "pp"), ("k3", "ddp"), ("k3", "pp,virtual=2")]
ALSO = [("kimi", "ddp"), ("kimi", "pp,virtual=2"), ("k3", "fsdp"), ("k3", "pp")]
FOUR = ["ddp:2,fsdp:2", "fsdp:4", "pp:2,fsdp:2", "pp:2,virtual=2,ddp:2"]


@pytest.mark.parametrize(("body", "layout"), [*TWO, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALSO)])
def test_two_processes(world: World, body: str, layout: str) -> None:
    world.run(2, agrees, layout, METHODS, BODIES[body] | PACKED, 2, body == "k3")


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
@pytest.mark.parametrize("body", ["kimi", "k3"])
def test_four_processes(world: World, body: str, layout: str) -> None:
    world.run(4, agrees, layout, METHODS, BODIES[body] | PACKED, 2)


def test_documents_where_processes_share_their_tokens(world: World) -> None:
    """Every process attends to all tokens of a sequence, of which it has a part."""
    world.run(2, agrees, "tp", ["block", "rd"], PACKED, 2)


def test_half_precision_rounds_as_one_process_does(world: World) -> None:
    """Routers above all: a rounded one sends tokens elsewhere."""
    world.run(2, rounds, "fsdp:2", KIMI | PACKED)


def dtypes() -> dict[str, set[torch.dtype]]:
    """What the parameters of some modules are when they run in bf16."""
    world = meshes(parse_layout("fsdp:2"), torch.device("cpu"))
    network = Network(
        shape(residual_of("block"), **K3), world, sequences=ROWS, microbatch=ROWS, precision=torch.bfloat16,
        fill=lambda module: initialise(module, 0),
    )  # fmt: skip
    found: dict[str, set[torch.dtype]] = {}

    def look(module: nn.Module, arguments: Any) -> None:
        found.setdefault(type(module).__name__.removeprefix("FSDP"), set()).update(parameter.dtype for parameter in module.parameters())

    for layer in network.parts[0].layers:
        for module in (*layer.attention.modules(), *layer.mlp.modules()):
            if isinstance(module, Router | Decay | RMSNorm | Projection):
                module.register_forward_pre_hook(look)
    network.accumulate(tokens()[world.share * ROWS // 2 :][: ROWS // 2], 0.0)
    return found


def test_what_must_be_exact_is_gathered_in_float32(world: World) -> None:
    exact, half = {torch.float32}, {torch.bfloat16}
    for found in world.run(2, dtypes):
        assert found == {"Router": exact, "Decay": exact, "RMSNorm": exact, "Projection": half}


def fill_with_biases(module: nn.Module) -> None:
    """Routers that are biased, as after some steps."""
    fill(module)
    for name, parameter in module.named_parameters():
        if name.endswith("router.bias"):
            layer = int(name.split(".")[1])
            put(torch.linspace(-0.2, 0.3, len(parameter), dtype=torch.float64).roll(layer), parameter)


def balances(layout: str, number: int) -> None:
    """Losses with biased routers, the loads that processes count, and the biases behind a balancing step."""
    experts = replace(KIMI["experts"], number=number)
    config = shape(residual_of("block"), **KIMI | PACKED | {"experts": experts})
    batch = tokens()
    alone = Decoder(config)
    fill_with_biases(alone)
    sums = alone.loss(batch[:, :-1], batch[:, 1:])
    loads = {layer: one.load.clone() for layer, one in alone.experts.items()}
    world = meshes(parse_layout(layout), torch.device("cpu"))
    network = Network(config, world, sequences=ROWS, microbatch=2, precision=None, fill=fill_with_biases, dtype=torch.float64)
    rows = world.layout.rows(ROWS)
    network.token_nll(batch[:, :-1], batch[:, 1:])  # which is not counted
    found = network.accumulate(batch[world.share * rows : (world.share + 1) * rows], 0.0)
    assert abs(found.item() / sums.nll.item() - 1) < 1e-11
    for part in network.parts:
        here = [layer for layer, module in enumerate(part.layers) if isinstance(module, Layer)]
        assert [*part.experts] == [layer for layer in here if config.has_experts(layer)]
    counted = torch.zeros(config.layers, number, dtype=torch.float64)
    for part in network.parts:
        for layer, one in part.experts.items():
            counted[layer] = one.load
    distributed.all_reduce(counted)
    for layer, load in loads.items():
        assert torch.equal(counted[layer], load.double()), f"{layout}, layer {layer}: {counted[layer]} {load}"
    assert balance(config, network.parts, distributed.all_reduce) == balance(config, [alone])
    named = dict(network.named)
    for part in network.parts:
        for layer, one in part.experts.items():
            bias = one.router.bias
            assert bias is named[f"layers.{layer}.mlp.router.bias"], "a bias that was gathered is thrown away"
            assert torch.equal(whole(bias), alone.experts[layer].router.bias) and not one.load.any()


@pytest.mark.parametrize(("layout", "number"), [("ddp:2", 5), ("fsdp:2", 5), ("pp:2,virtual=2", 5), ("fsdp:4", 3), ("pp:2,fsdp:2", 5)])
def test_experts_are_balanced_by_the_loads_of_all_processes(world: World, layout: str, number: int) -> None:
    """Three experts on four processes: one process has none of each matrix."""
    world.run(4 if "4" in layout or "pp:2,f" in layout else 2, balances, layout, number)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (KIMI, "layer 0 of model.mixers is 'kda', and tensor parallelism shares 'softmax' attention alone; leave tp out"),
        ({"mixers": ("softmax", "mla"), "mla": KIMI["mla"]}, "layer 1 of model.mixers is 'mla'"),
        ({"experts": KIMI["experts"]}, "layer 1 has model.experts, and tensor parallelism shares dense MLPs alone; leave tp out"),
    ],
)
def test_what_tensor_parallelism_cannot_share_is_refused(fields: dict[str, Any], says: str) -> None:
    config = shape(residual_of("prenorm"), **fields)
    check_tensor(config, 1)
    with pytest.raises(RequestError, match=re.escape(says)):
        check_tensor(config, 2)


def test_products_of_layers_that_differ() -> None:
    """Width 12, two heads of 6, convolutions of 3 tokens, a latent vector of 10 beside 4, two of five experts of 7 and a shared one."""
    config = shape(residual_of("prenorm"), **KIMI)
    kda = 4 * 12 * 12 + 3 * 12 * 3 + 12 * 2 + 2 * (12 * 6 + 6 * 12) + 2 * (3 * 6 * 6 + 2 * 64 * 6)
    mla = 12 * 2 * 10 + 12 * (10 + 4) + 2 * 10 * 12 + 12 * 12 + TOKENS * 2 * (10 + 6) // 2
    experts = 5 * 12 + 3 * 12 * 7 * (2 + 1)
    assert [products(config, layer) for layer in range(4)] == [kda + 3 * 12 * 20, mla + experts, kda + experts, mla + experts]


def test_the_longest_chunk_is_as_short_as_it_can_be() -> None:
    """Against all ways to cut layers that weigh differently."""
    generator = random.Random(0)
    for _ in range(60):
        count = generator.randint(2, 8)
        config, chunks = shape(residual_of("prenorm"), layers=count, vocabulary=generator.choice((1, 90))), generator.randint(2, count)
        weights, head = [generator.choice((100, 200, 500, 2000)) for _ in range(count)], config.vocabulary * config.width

        def longest(ends: Sequence[int], weights: list[int] = weights, head: int = head) -> int:
            return max(
                sum(weights[start:stop]) + head * (stop == len(weights)) for start, stop in pairwise([0, *ends, len(weights)])
            )  # fmt: skip

        with mock.patch.object(cut, "products", lambda config, layer, weights=weights: weights[layer]):
            found = cut.layers_of_chunks(config, chunks)
        assert [layer for chunk in found for layer in chunk] == list(range(count)) and all(map(len, found))
        assert longest([chunk.stop for chunk in found[:-1]]) == min(map(longest, combinations(range(1, count), chunks - 1)))
