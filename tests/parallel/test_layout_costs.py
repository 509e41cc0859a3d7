"""What a layout is said to cost is what processes hold and send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from depthroute.cost.estimate import Device
from depthroute.cost.layouts import layout_cost
from depthroute.cost.shapes import shape_of
from depthroute.model import ModelConfig
from depthroute.parallel.layout import parse_layout
from depthroute.parallel.network import Network
from depthroute.parallel.stage import ChunkStage
from depthroute.parallel.world import meshes
from depthroute.residual import parse_residual
from depthroute.train import initialise
from tests.parallel.world import World

SEQUENCES, TOKENS = 8, 8


def model(residual: str, **fields: Any) -> ModelConfig:
    """A shape that 4 processes divide, so that nothing is padded."""
    given = {"vocabulary": 16, "width": 16, "layers": 4, "heads": 4, "mlp_width": 32, "context": TOKENS} | fields
    return ModelConfig(**given, residual=parse_residual(residual))


class Counted(TorchDispatchMode):
    """Bytes that a process sends in collectives, as rings, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name == "_allgather_base_":
            self.sent["gathers"] += bytes_of(args[0]) - bytes_of(args[1])
        elif func.namespace == "c10d" and name == "_reduce_scatter_base_":
            self.sent["gradients"] += bytes_of(args[1]) - bytes_of(args[0])
        elif func.namespace == "c10d" and name == "allreduce_":
            [tensor], size = args[0], distributed.ProcessGroup.unbox(args[1]).size()
            if tensor.numel() > 1:  # the loss is summed too
                self.sent["gradients"] += 2 * bytes_of(tensor) * (size - 1) // size
        elif func.namespace == "_c10d_functional" and name == "all_gather_into_tensor":
            self.sent["tensors"] += bytes_of(found) - bytes_of(args[0])
        elif func.namespace == "_c10d_functional" and name == "reduce_scatter_tensor":
            self.sent["tensors"] += bytes_of(args[0]) - bytes_of(found)
        return found


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def step(layout: str, microbatch: int, config: ModelConfig, precision: torch.dtype | None = None) -> tuple[int, dict[str, int]]:
    """Bytes of parameters here, and what was sent in a step."""
    world = meshes(parse_layout(layout), torch.device("cpu"))
    network = Network(
        config, world, sequences=SEQUENCES, microbatch=microbatch, precision=precision, fill=lambda module: initialise(module, 0)
    )  # fmt: skip
    held = sum(bytes_of(getattr(parameter, "_local_tensor", parameter.data)) for _, parameter in network.named)
    batch = torch.randint(16, (network.rows, TOKENS + 1))
    with Counted() as counted:
        network.accumulate(batch, 0.0)
    stages = network.pipeline.wire.total if network.pipeline is not None else 0
    return held, {"gathers": 0, "gradients": 0, "tensors": 0} | counted.sent | {"stages": stages}


def agrees(world: World, layout: str, microbatch: int, config: ModelConfig, precision: torch.dtype | None = None) -> None:
    plan, mixed = parse_layout(layout), precision is not None
    found = world.run(plan.processes, step, layout, microbatch, config, precision)
    cost = layout_cost(
        shape_of(config), Device(), plan, sequences=SEQUENCES, microbatch=microbatch, context=TOKENS, mixed=mixed
    )  # fmt: skip
    for rank, (held, sent) in enumerate(found):
        stage = rank // (plan.processes // plan.pp)
        assert held == cost.held[stage].parameters
        assert sent == {name: getattr(cost.sent[stage], name) for name in sent}


@pytest.mark.parametrize(
    ("layout", "microbatch"), [("fsdp:2", 8), ("fsdp:2", 2), ("tp:2", 4), ("pp:2,virtual=2", 8), ("pp:2,virtual=2,keeps=received", 8)]
)
def test_two_processes(world: World, layout: str, microbatch: int) -> None:
    agrees(world, layout, microbatch, model("block:3"))


@pytest.mark.parametrize(
    "layout", ["ddp:2,fsdp:2", "tp:2,fsdp:2", "tp:2,ddp:2", "pp:2,fsdp:2", "pp:2,virtual=2,fsdp:2", "pp:2,virtual=2,tp:2", "pp:2,ddp:2"]
)
def test_four_processes(world: World, layout: str) -> None:
    agrees(world, layout, 4, model("rd:4" if "tp" in layout else "block:4", qk_norm=True))


@pytest.mark.parametrize(
    ("layout", "microbatch"), [("ddp:2,fsdp:2", 1), ("tp:2,fsdp:2", 2), ("pp:2,fsdp:2", 2), ("pp:2,virtual=2,fsdp:2", 2)]
)
def test_four_processes_in_mixed_precision(world: World, layout: str, microbatch: int) -> None:
    """Sub-layers are gathered in half the bytes, norms in attention are not, and gradients are summed in float32."""
    agrees(world, layout, microbatch, model("block:4", qk_norm=True), torch.bfloat16)


def most_gathered(layout: str, config: ModelConfig) -> int:
    """Bytes of parameters that FSDP has whole behind a backward pass, at most; bf16."""
    network = Network(
        config, meshes(parse_layout(layout), torch.device("cpu")), sequences=SEQUENCES, microbatch=2, precision=torch.bfloat16,
        fill=lambda module: initialise(module, 0),
    )  # fmt: skip
    assert network.pipeline is not None
    stages, found = network.pipeline.stages, [0]
    for stage in stages:
        stage.backward_one_chunk = counting(stage.backward_one_chunk, stages, found)
    network.accumulate(torch.randint(16, (network.rows, TOKENS + 1)), 0.0)
    return max(found)


def counting(backward: Callable[..., Any], stages: Sequence[ChunkStage], found: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        result = backward(*arguments, **options)
        held = [parameter for stage in stages for parameter in stage.submod.parameters() if not isinstance(parameter, DTensor)]
        found.append(sum(map(bytes_of, held)))
        return result

    return counted


@pytest.mark.parametrize("layout", ["pp:2,fsdp:2", "pp:2,virtual=2,ddp:2"])
def test_what_a_pipeline_has_gathered(world: World, layout: str) -> None:
    config, plan = model("block:4", qk_norm=True), parse_layout(layout)
    cost = layout_cost(
        shape_of(config), Device(), plan, sequences=SEQUENCES, microbatch=2, context=TOKENS, mixed=True
    )  # fmt: skip
    for rank, found in enumerate(world.run(4, most_gathered, layout, config)):
        held = cost.held[rank // 2]
        assert found == held.gathered - (plan.fsdp * held.gradients if plan.fsdp > 1 else 0)  # which are whole too


def test_untied_embeddings_and_copies(world: World) -> None:
    agrees(world, "pp:2", 2, model("full", tied_embeddings=False))
    [(held, _), _] = world.run(2, step, "ddp:2", 8, model("block:4"))
    cost = layout_cost(
        shape_of(model("block:4")), Device(), parse_layout("ddp:2"), sequences=8, microbatch=8, context=TOKENS, mixed=False
    )  # fmt: skip
    assert cost.fullest.parameters == held and cost.busiest.gradients == held  # twice a half
