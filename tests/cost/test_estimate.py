"""Estimates against the papers' numbers, against counts, and against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthroute.common.errors import RequestError
from depthroute.cost.estimate import Device, bank, decoding, prefilling, serving_memory, staged, training, training_memory
from depthroute.cost.memory import training_activations
from depthroute.cost.parameters import decoder_parameters
from depthroute.cost.recorded import carried_numbers
from depthroute.cost.shapes import Shape, published, shape_of
from depthroute.cost.sheet import Workload, cost_sheet, method_sheet
from depthroute.cost.summary import parameter_parts, residual_parameters
from depthroute.cost.traffic import least_traffic
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import SPECIFICATIONS, AttnResConfig, block_ends, parse_residual

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "attention_residuals.json").read_text(encoding="utf-8"))
DEVICE = Device(bandwidth=1_000.0, flops=100.0, efficiency=0.5, memory=1.0, link=10.0)


def small(text: str = "block:4", **fields: object) -> ModelConfig:
    shape = {"vocabulary": 50, "width": 24, "layers": 6, "heads": 4, "key_value_heads": 2, "mlp_width": 34, "context": 32, **fields}
    return ModelConfig(**shape, residual=parse_residual(text, AttnResConfig(block=4, rank=6)))


def test_parameters_by_part_are_the_closed_formula() -> None:
    model = small("rd:4", qk_norm=True, tied_embeddings=False)
    parts = parameter_parts(model)
    assert parts["embedding"] == 2 * 50 * 24
    assert parts["attention"] == 6 * (2 * 24 * 24 + 2 * 24 * 12)
    assert parts["mlp"] == 6 * 3 * 24 * 34
    assert parts["norms"] == 13 * 24 + 6 * 2 * 6
    assert parts["residual"] == residual_parameters(model) == 24 * (2 * 12 + 5)
    shape = {"layers": 6, "width": 24, "mlp_width": 34, "vocabulary": 50, "tied": False, "key_value_width": 12, "qk_norm_width": 6}
    assert parts["total"] - parts["residual"] == decoder_parameters(**shape) == shape_of(model).parameters


@pytest.mark.parametrize("tied", [True, False])
def test_active_parameters_are_what_a_token_is_multiplied_with(tied: bool) -> None:
    model = small("prenorm", tied_embeddings=tied)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        Decoder(model).logits(torch.zeros(1, 32, dtype=torch.int64))
    products = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    norms = parameter_parts(model)["norms"]
    assert products["aten.mm"] / 2 == 32 * (shape_of(model).active - norms)
    assert products["aten.bmm"] / 2 == 32 * 32 * shape_of(model).attended


def test_the_paper_s_long_prefill() -> None:
    held = bank(published("kimi-k3"), batch=1, tokens=131_072, size=2, devices=8, chunk=16_384)
    assert held.rows == GOLDEN["kimi_k3"]["blocks"]
    assert round(held.whole / 1e9) == 15
    assert round(held.sharded / 1e9, 1) == 1.9
    assert 0.2 < held.chunked / 1e9 < 0.3


def test_published_shapes_route_as_their_reports_say() -> None:
    k3, linear = published("kimi-k3").body, published("kimi-linear-48b").body
    facts = GOLDEN["kimi_k3"]
    assert (k3.layers, k3.width) == (facts["layers"], facts["width"])
    stored = replace(k3, residual=parse_residual("block,layers_per_block=12,first_read=true"))
    assert residual_parameters(stored) == facts["routing_parameters"]
    assert len(k3.residual.block_ends(2 * k3.layers)) == facts["final_sources"] - 1
    assert len(linear.residual.block_ends(54)) == 9 and linear.residual.block_ends(54) == block_ends(54, block=6)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_experts_that_a_batch_needs(tokens: int) -> None:
    number, chosen = 4, 2
    draws = list(product(combinations(range(number), chosen), repeat=tokens))
    needed = sum(len(set().union(*draw)) for draw in draws) / len(draws)
    shape = replace(shape_of(small()), active=100 + chosen * 1_000, routed=number * 1_000, experts=(number, chosen))
    assert shape.weights_read(tokens) == round(100 + needed * 1_000)


def test_a_prompt_is_as_many_products_as_its_tokens_decoded_in_turn() -> None:
    shape = shape_of(small())
    one_by_one = sum(decoding(shape, DEVICE, batch=3, context=context, size=2).multiply_adds for context in range(20))
    assert prefilling(shape, DEVICE, batch=3, tokens=20, size=2).multiply_adds == one_by_one
    trained = training(shape, DEVICE, tokens=60, context=20, size=2)
    assert trained.multiply_adds == 3 * one_by_one


def test_a_decoded_token_reads_weights_and_cache_once() -> None:
    shape = shape_of(small())
    bill = decoding(shape, DEVICE, batch=1, context=1_000, size=2)
    assert bill.weights == 2 * shape.active
    assert bill.cache == 2 * 1_000 * 6 * 2 * 12
    assert bill.residual == 2 * least_traffic(shape.body).total
    assert bill.plain == 2 * 3 * 12 * 24
    assert bill.seconds == pytest.approx((bill.weights + bill.cache + bill.residual) / 1e12)
    assert bill.overhead == pytest.approx((bill.residual - bill.plain) / (bill.weights + bill.cache + bill.plain))
    faster = decoding(shape, replace(DEVICE, bandwidth=2_000.0), batch=1, context=1_000, size=2)
    assert faster.seconds == pytest.approx(bill.seconds / 2)


def test_a_long_prompt_is_bound_by_arithmetic_and_chunks_read_the_weights_again() -> None:
    shape = replace(shape_of(small()), parameters=10**9, active=10**9)
    whole, parts = (prefilling(shape, DEVICE, batch=1, tokens=4_096, size=2, chunk=chunk) for chunk in (None, 1_000))
    assert parts.weights == 5 * whole.weights and parts.multiply_adds == whole.multiply_adds
    assert whole.seconds == pytest.approx(2 * whole.multiply_adds / (100e12 * 0.5), rel=1e-3)
    assert prefilling(shape, replace(DEVICE, number=4), batch=1, tokens=4_096, size=2).seconds == pytest.approx(whole.seconds / 4)


def test_plain_streams_have_no_overhead() -> None:
    shape = shape_of(small("prenorm"))
    for bill in (
        decoding(shape, DEVICE, batch=2, context=10, size=2),
        prefilling(shape, DEVICE, batch=2, tokens=10, size=2),
        training(shape, DEVICE, tokens=20, context=10, size=2),
    ):
        assert bill.overhead == 0


def test_serving_memory_adds_up() -> None:
    shape = shape_of(small())
    found = serving_memory(shape, DEVICE, batch=3, context=500, size=2, chunk=100)
    assert found.weights == 2 * sum(parameter.numel() for parameter in Decoder(shape.body).parameters())
    assert found.cache == 2 * 3 * 500 * 6 * 2 * 12
    assert found.depth == 2 * 3 * 100 * carried_numbers(shape.body)
    assert found.total == found.weights + found.cache + found.depth and found.fits
    assert serving_memory(shape, replace(DEVICE, number=4), batch=3, context=500, size=2, chunk=100).total == found.total / 4
    k3 = published("kimi-k3")
    fits = [serving_memory(k3, Device(number=number), batch=1, context=1 << 20, size=2, chunk=16_384).fits for number in (64, 128)]
    assert fits == [False, True]


def test_training_memory_adds_up() -> None:
    shape = shape_of(small())
    found = training_memory(shape, DEVICE, tokens=100)
    assert found.weights == 16 * sum(parameter.numel() for parameter in Decoder(shape.body).parameters())
    assert found.activations == 100 * training_activations(shape.body, mixed=True).total
    assert found.total == found.weights + found.activations and found.fits
    assert training_memory(shape, DEVICE, tokens=100, checkpointed=True).activations < found.activations
    assert not training_memory(shape, DEVICE, tokens=10**9).fits


@pytest.mark.parametrize(
    ("text", "widths"),
    [("prenorm", 1), ("full", 13), ("block:4,phases=false", 4), ("window", 9), ("linear-depth", 5), ("hc-static", 4), ("denseformer", 7),
     ("mrla-base,head_width=4", 13), ("mrla-light,head_width=4", 2), ("x0", 2), ("delta", 14), ("static", 13)],
)  # fmt: skip
def test_what_is_carried(text: str, widths: int) -> None:
    carried = carried_numbers(small(text))
    assert carried == widths * 24


def test_reads_ahead_are_carried() -> None:
    """At the second site of the last block: three closed sources, the partial sum, and three reads with two statistics each."""
    assert carried_numbers(small("block:4")) == (3 + 1 + 3) * 24 + 3 * 2


def test_a_pipeline_in_bytes() -> None:
    found = staged(shape_of(small("block:1")), DEVICE, stages=2, virtual=1, microbatches=4, tokens=10, size=2, keeps="received")
    assert (found.blocks, found.embeddings, found.partials, found.largest) == (6, 1, 0, 7)
    assert found.bytes == 7 * 10 * 24 * 2 and found.seconds_of_largest == pytest.approx(found.bytes / 10e9)
    with pytest.raises(RequestError, match="'prenorm' has no blocks to send"):
        staged(shape_of(small("prenorm")), DEVICE, stages=2, virtual=1, microbatches=4, tokens=10, size=2, keeps="received")


def sheet(shape: Shape, **fields: object) -> dict:
    return cost_sheet(shape, DEVICE, Workload(**{"sequence": 32, **fields}))


def test_a_sheet_of_any_method_is_json() -> None:
    for text in ("hc", "rd", "full", "delta-block", "svformer"):
        found = json.loads(json.dumps(sheet(shape_of(small(text)))))
        assert found["traffic"]["widths"] == least_traffic(small(text)).total / 12 / 24
        assert found["parameters"]["total"] == parameter_parts(small(text))["total"]
    assert "pipeline" in sheet(shape_of(small()), stages=2) and "pipeline" not in found


def test_a_published_shape_of_a_million_tokens() -> None:
    found = sheet(published("kimi-k3"), sequence=1 << 20, chunk=16_384, stages=4, virtual=2, microbatches=8)
    assert found["parameters"]["active"] == published("kimi-k3").active and found["activations"]["bytes"] > 0
    assert found["bank"]["whole_bytes"] == 8 * (1 << 20) * 7_168 * 2
    assert 0 < found["prefill"]["overhead_percent"] < 2  # the paper's bound on inference latency


def test_reading_ahead_pays_with_many_blocks() -> None:
    found = sheet(published("kimi-k3"))["traffic"]
    assert found["widths"] < found["widths_without_phases"]
    assert found["table_widths"] == pytest.approx(8 / (186 / 8) + 5)
    assert "table_widths" not in sheet(shape_of(small("rd:4")))["traffic"]


def test_methods_side_by_side_leave_none_out() -> None:
    found = method_sheet(shape_of(small(width=48, layers=8)))
    assert set(found) == set(SPECIFICATIONS)
    assert found["prenorm"] == {"parameters": 0, "multiply_adds_percent": 0, "traffic_widths": 3, "carried_widths": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"bandwidth": 0.0}, "bandwidth = 0.0"), ({"efficiency": 1.5}, "more than 0 and at most 1"), ({"number": 0}, "number = 0")],
)
def test_wrong_devices_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Device(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"sequence": 0}, "sequence = 0"), ({"sequence": 1, "stages": 1}, "2 or more"), ({"sequence": 1, "dtype": "int8"}, "int8.*bfloat16")],
)
def test_wrong_workloads_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Workload(**fields)
