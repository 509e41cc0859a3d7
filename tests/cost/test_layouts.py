"""What layouts cost, against counts by hand; tests/parallel/test_layout_costs.py holds it to running processes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from depthroute.cli.main import main
from depthroute.common.errors import RequestError
from depthroute.cost.estimate import Device, training
from depthroute.cost.layouts import LayoutCost, layout_cost
from depthroute.cost.memory import training_activations
from depthroute.cost.pipeline import bubble, timed
from depthroute.cost.shapes import published, shape_of
from depthroute.model import ModelConfig
from depthroute.parallel.layout import parse_layout
from depthroute.residual import parse_residual

TOKENS, WIDTH, LAYERS = 16, 32, 8
DEVICE = Device(bandwidth=1_000.0, flops=100.0, efficiency=0.5, link=10.0)


def model(residual: str = "block:4", **fields: Any) -> ModelConfig:
    given = {"vocabulary": 64, "width": WIDTH, "layers": LAYERS, "heads": 4, "mlp_width": 64, "context": TOKENS} | fields
    return ModelConfig(**given, residual=parse_residual(residual))


def cost(layout: str, config: ModelConfig | None = None, *, sequences: int = 16, microbatch: int = 2, mixed: bool = False) -> LayoutCost:
    return layout_cost(
        shape_of(config or model()), DEVICE, parse_layout(layout), sequences=sequences, microbatch=microbatch, context=TOKENS,
        mixed=mixed,
    )  # fmt: skip


def test_copies_hold_everything_and_send_every_gradient_almost_twice() -> None:
    found = cost("ddp:4")
    numbers = sum((64 * WIDTH, LAYERS * (4 * WIDTH**2 + 3 * WIDTH * 64), (2 * LAYERS + 1) * WIDTH, 2 * 2 * LAYERS * WIDTH))
    held, sent = found.fullest, found.busiest
    assert (held.parameters, held.gradients, held.optimiser) == (4 * numbers, 4 * numbers, 8 * numbers)
    assert held.gathered == held.received == 0
    assert held.activations == 2 * TOKENS * training_activations(model()).total
    assert (sent.gradients, sent.total) == (4 * numbers * 2 * 3 / 4,) * 2
    assert (found.processes, found.microbatches, found.microbatch, found.bubble) == (4, 2, 2, 0)


def test_shards_divide_what_copies_hold() -> None:
    whole, found, copies = cost("ddp:4"), cost("fsdp:4"), cost("ddp:2,fsdp:2")
    for name in ("parameters", "gradients", "optimiser"):
        assert getattr(found.fullest, name) == getattr(whole.fullest, name) / 4
        assert getattr(copies.fullest, name) == getattr(whole.fullest, name) / 2
    assert found.fullest.activations == whole.fullest.activations
    assert cost("fsdp:4", microbatch=4).fullest.gathered == found.fullest.gathered  # no gradient waits whole for the next micro-batch


def test_shards_are_summed_behind_every_micro_batch_and_copies_behind_the_last() -> None:
    for layout, shards, copies in (("fsdp:4", 4, 1), ("ddp:2,fsdp:2", 2, 2), ("ddp:4", 1, 4)):
        numbers = 4 * cost("ddp:4").fullest.parameters / 4
        for microbatch in (1, 2, 4):
            scattered, copied = numbers * (shards - 1) / shards, 2 * numbers / shards * (copies - 1) / copies
            assert cost(layout, microbatch=microbatch).busiest.gradients == 4 / microbatch * scattered + copied


def test_what_is_gathered_in_the_precision_of_autocast() -> None:
    """Matrices of sub-layers; not norms in them, nor anything outside, nor gradients."""
    matrices, outside = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * 64), 64 * WIDTH + (2 * LAYERS + 1) * WIDTH + 2 * 2 * LAYERS * WIDTH
    norms, largest = LAYERS * 2 * 8, 3 * WIDTH * 64
    for mixed, size in ((False, 4), (True, 2)):
        one, pipe, copies = (cost(layout, model(qk_norm=True), mixed=mixed) for layout in ("fsdp:4", "pp:2,fsdp:4", "pp:2,ddp:4"))
        assert one.busiest.gathers == 2 * 3 / 4 * (2 * (size * matrices + 4 * norms) + 4 * outside)
        assert one.fullest.gathered == largest * (3 * size + 4) + 2 * 4 * outside
        rest = 4 * (outside + 64 * WIDTH)  # over both stages; they share the embedding
        whole = sum(held.gathered for held in copies.held)
        assert whole == size * matrices + 4 * norms + rest  # copies of what has no shards
        assert sum(held.gathered for held in pipe.held) == whole + 4 * (matrices + norms) + rest


@pytest.mark.parametrize(("stages", "virtual", "in_flight"), [(4, 1, (4, 3, 2, 1)), (2, 2, (5, 3))])
def test_micro_batches_between_their_passes(stages: int, virtual: int, in_flight: tuple[int, ...]) -> None:
    """1F1B holds as many as there are stages behind; interleaved its warm-up and one more, each of a chunk."""
    found = cost(f"pp:{stages},virtual={virtual},microbatch=1")
    one = TOKENS * training_activations(model()).total / (stages * virtual)
    assert [held.activations for held in found.held] == [pytest.approx(count * one) for count in in_flight]
    assert cost(f"pp:{stages},schedule=gpipe,microbatch=1").held[-1].activations == pytest.approx(
        16 * TOKENS * training_activations(model()).total / stages
    )


def test_sources_that_were_sent_are_held_until_their_chunk_is_through() -> None:
    tensor = TOKENS * WIDTH * 4
    found = cost("pp:4,microbatch=1")  # a block in each chunk: 2, 3 and 4 sources arrive, with the embedding
    assert [held.received for held in found.held] == [0, 3 * 2 * tensor, 2 * 3 * tensor, 4 * tensor]
    assert [sent.stages for sent in found.sent] == [16 * tensor * number for number in (2, 2 + 3, 3 + 4, 4)]
    nothing, received, everything = (cost(f"pp:2,virtual=2,microbatch=1,keeps={keeps}") for keeps in ("none", "received", "all"))
    for name in ("received", "stages"):
        amounts = [
            sum(getattr(one, name) for one in (found.held if name == "received" else found.sent))
            for found in (nothing, received, everything)
        ]
        assert amounts[0] > amounts[1] > amounts[2] > 0


def test_mixed_precision_sends_sources_in_the_memorys_dtype() -> None:
    plain, lower = (cost("pp:2,microbatch=1", model(memory_dtype=kind), mixed=True) for kind in ("parameter", "compute"))
    assert plain.busiest.stages == 2 * lower.busiest.stages
    assert cost("pp:2,microbatch=1", model("hc"), mixed=True).busiest.stages > 0  # a method without a bank


def test_tensor_shares_keep_what_sub_layers_read_whole() -> None:
    alone, shared = cost("fsdp:2", sequences=4), cost("tp:2", sequences=2)
    read = 2 * TOKENS * 2 * LAYERS * WIDTH * 4
    assert shared.fullest.activations == pytest.approx(read + (alone.fullest.activations - read) / 2)
    twice, thrice = (cost("tp:2", model(name)).busiest.tensors for name in ("block:4", "rd:4"))
    assert thrice / twice == (2 * (2 + 1) + 2 * 2 - 2 * (0 + 1) / LAYERS) / (2 * 2 + 2 * 2)  # the first read is one for all roles


def test_time_is_work_over_processes_and_bubble_and_what_is_not_hidden() -> None:
    whole = training(shape_of(model()), DEVICE, tokens=16 * TOKENS, context=TOKENS, size=4).seconds
    assert cost("fsdp:4").computing == pytest.approx(whole / 4)
    found = cost("pp:4,microbatch=1")
    assert found.computing == pytest.approx(whole / 4 / (1 - found.bubble))
    assert found.bubble > 3 / 19  # of even chunks; the last has the head
    slow, fast = (
        layout_cost(
            shape_of(model()), Device(link=link), parse_layout("ddp:2"), sequences=16, microbatch=8, context=TOKENS, mixed=False
        )
        for link in (1e-3, 1e9)
    )
    assert fast.communicating == 0 and slow.communicating == pytest.approx(slow.busiest.total / 1e6 - 2 / 3 * slow.computing)
    assert found.communicating == pytest.approx((found.busiest.stages + max(sent.gradients for sent in found.sent)) / 10e9, rel=1e-6)


def test_gathers_and_sums_share_the_link_that_they_are_hidden_on() -> None:
    found = cost("fsdp:2", microbatch=8)
    assert found.busiest.gathers > found.busiest.gradients > 0
    assert found.communicating == pytest.approx((found.busiest.gathers + found.busiest.gradients) / 10e9 - found.computing)


def test_sums_are_hidden_behind_the_backward_pass_that_makes_them() -> None:
    def found(layout: str, link: float) -> LayoutCost:
        return layout_cost(
            shape_of(model()), replace(DEVICE, link=link), parse_layout(layout), sequences=16, microbatch=2, context=TOKENS, mixed=False,
        )  # fmt: skip

    for layout, parts in (("fsdp:2", 1), ("ddp:2", 1 / 4)):  # of four micro-batches
        slow = found(layout, 1e-3)
        sent = slow.busiest.gathers + slow.busiest.gradients
        behind = slow.computing if slow.busiest.gathers else 2 / 3 * slow.computing * parts
        assert slow.communicating == pytest.approx(sent / 1e6 - behind, rel=1e-9)
    slow = found("fsdp:2", 1e-3)
    enough = (slow.busiest.gathers + slow.busiest.gradients) / 1e9 / (0.9 * slow.computing)
    assert found("fsdp:2", enough).communicating == 0  # more than one backward pass could hide


def test_a_head_that_weighs_leaves_its_chunk_fewer_layers() -> None:
    found = cost("pp:4,microbatch=1", model(vocabulary=1_000))  # three layers and the rest of one: 3, 2, 2 and 1 of them
    even = bubble(timed([2.0, 2.0, 2.0, 2.0 + 2.9], 4, 16, "1f1b"), 4)
    assert 0 < found.bubble < even


def test_refusals() -> None:
    for layout, message in (
        ("fsdp", "give every axis a size, such as fsdp:8"),
        ("pp:16", "16 chunks .* need as many layers, and model.layers = 8"),
        ("tp:3", "model.heads = 4 cannot be shared by 3 processes"),
        ("fsdp:3", "16 does not divide into the 3 shares"),
    ):
        with pytest.raises(RequestError, match=message):
            cost(layout)


def test_a_published_shape_has_its_parameters() -> None:
    shape = published("kimi-linear-48b")
    found = layout_cost(
        shape, Device(), parse_layout("pp:3,fsdp:2"), sequences=12, microbatch=1, context=1024, mixed=True
    )  # fmt: skip
    residual = sum(held.parameters for held in found.held) * 2 / 4 - shape.parameters
    assert 0 < residual < 1e6 and found.fullest.activations > 0


def test_layouts_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ["--parallel", "pp:2,virtual=2,fsdp:2", "--parallel", "ddp:8"]
    assert main(["cost", "small", *layouts, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layout"]
    assert list(found) == ["pp:2,virtual=2,fsdp:2", "ddp:8"]
    assert [facts["processes"] for facts in found.values()] == [4, 8]
    assert main(["cost", "small", *layouts, "--batch", "16", "--set", "train.microbatch=1"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["layout"] == list(found) and rows["microbatches"] == ["8", "2"] and rows["fits"] == ["yes", "yes"]
    assert "sent_tensors_bytes" not in rows
    for arguments, message in (
        (["kimi-k3"], "--parallel needs --batch"),
        (["small", "--dtype", "float8"], "float8.*mixed precision"),
        (["small", "--batch", "7"], "7 does not divide"),
    ):
        assert main(["cost", *arguments, *layouts]) == 2
        error = capsys.readouterr().err
        assert all(part in error for part in message.split(".*")), error
