"""An optimiser over shards takes the step of one process: matrices are made orthogonal whole, not shard by shard, those of experts where
they lie. Their routers are balanced by what all processes have seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import parse_residual
from depthroute.train import TrainConfig
from depthroute.train.balance import balance
from depthroute.train.initialise import initialise
from depthroute.train.muon import Muon, orthogonalised
from depthroute.train.optimiser import Optimiser, build_optimiser
from tests.bodies import BODIES
from tests.parallel.world import World

RATE = 0.02


def settings(optimiser: str) -> TrainConfig:
    return TrainConfig(steps=10, sequences=8, learning_rate=RATE, weight_decay=0.5, route_rate=2.0, optimiser=optimiser)  # type: ignore[arg-type]


def model_of() -> Decoder:
    """In float64, with rows that 2 or 3 ranks do not share evenly: 15, 10 and 7, and 2, of which the third rank has none."""
    shape: dict[str, Any] = {"vocabulary": 11, "width": 15, "layers": 2, "heads": 5, "head_width": 2, "key_value_heads": 1, "mlp_width": 7}
    model = Decoder(ModelConfig(**shape, context=8, residual=parse_residual("full,rank=5,keys=projected"))).double()
    initialise(model, 0)
    return model


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64) for name, parameter in model.named_parameters()}


def spread(values: Tensor, like: Tensor) -> Tensor:
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None) if isinstance(like, DTensor) else values


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def take_steps(model: nn.Module, optimiser: Optimiser, steps: range) -> None:
    for step in steps:
        given = gradients(model, step)
        for name, parameter in model.named_parameters():
            parameter.grad = spread(given[name], parameter)
        optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_on_shards_are_those_of_one_process(world: World, ranks: int, optimiser: str) -> None:
    world.run(ranks, compare_steps, optimiser, "one mesh")


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_shards_of_several_meshes_and_whole_parameters_go_together(world: World, optimiser: str) -> None:
    world.run(4, compare_steps, optimiser, "several")


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_the_state_of_shards_is_taken_and_made_again(world: World, optimiser: str) -> None:
    world.run(3, compare_states, optimiser)


def test_a_shard_by_itself_would_take_another_direction(world: World) -> None:
    for ranks in (2, 3):
        for ours, alone in world.run(ranks, directions):
            assert ours > 0.9999 and alone < 0.97


def test_a_step_gathers_each_matrix_once(world: World) -> None:
    assert world.run(2, collectives) == [14, 14]


@pytest.mark.parametrize("style", ["columns", "rows"])
def test_matrices_split_by_tensor_parallelism_and_shards_at_once(world: World, style: str) -> None:
    world.run(4, compare_split_twice, style)


@pytest.mark.parametrize(("ranks", "experts"), [(2, 5), (3, 2)])
def test_experts_in_shards_step_as_on_one_process_without_being_gathered(world: World, ranks: int, experts: int) -> None:
    """Stacks that the ranks do not share evenly, and of which one has nothing."""
    assert world.run(ranks, compare_experts, experts) == [0] * ranks


def test_biases_move_by_the_loads_of_all_processes(world: World) -> None:
    """Two stages of two copies, each of the copies in two shards or whole."""
    world.run(4, compare_balance)


def sharded(form: str) -> Decoder:
    model = model_of()
    if form == "one mesh":
        fully_shard(model)
    else:  # one layer over all ranks, one over pairs of them with copies, the rest whole
        fully_shard(model.layers[0])
        fully_shard(model.layers[1], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    return model


def compare_steps(optimiser: str, form: str) -> None:
    plain, split = model_of(), sharded(form)
    optimisers = [build_optimiser(model, settings(optimiser)) for model in (plain, split)]
    if form == "several":
        assert len(optimisers[1].param_groups) > len(optimisers[0].param_groups)
    assert any(isinstance(parameter, DTensor) and parameter.to_local().shape != parameter.shape for parameter in split.parameters())
    for model, own in zip((plain, split), optimisers, strict=True):
        take_steps(model, own, range(3))
    same(plain, split)


def same(plain: nn.Module, split: nn.Module) -> None:
    for (name, ours), theirs in zip(plain.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(whole(theirs), ours.detach(), rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")


def compare_states(optimiser: str) -> None:
    plain, first, second = model_of(), sharded("one mesh"), sharded("one mesh")
    own = [build_optimiser(model, settings(optimiser)) for model in (plain, first, second)]
    take_steps(plain, own[0], range(4))
    take_steps(first, own[1], range(2))
    taken = own[1].state_tensors(first.named_parameters())
    assert taken.keys() == own[0].state_tensors(plain.named_parameters()).keys()
    made = own[2].make_state(second.named_parameters(), taken.keys())
    assert made.keys() == taken.keys()
    for name, value in made.items():
        assert isinstance(value, DTensor) == (not name.endswith(".step")) and not whole(value).any(), name
        if isinstance(value, DTensor):
            theirs = taken[name]
            assert isinstance(theirs, DTensor) and value.placements == theirs.placements
            assert value.to_local().shape == theirs.to_local().shape
        value.copy_(taken[name])
    with torch.no_grad():
        for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
            ours.copy_(theirs)
    take_steps(second, own[2], range(2, 4))
    same(plain, second)


def directions() -> list[float]:
    """Cosines to the update of one process: of ours, and of what a rank would do with its shard alone."""
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(13, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    linear = nn.Linear(9, 13, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(value)
    fully_shard(linear)
    linear.weight.grad = spread(gradient, linear.weight)
    Muon([{"params": [linear.weight]}], lr=RATE, weight_decay=0.0, momentum=0.0).step()
    expected = orthogonalised(gradient.bfloat16()).double()
    alone = DTensor.from_local(
        orthogonalised(linear.weight.grad.to_local().bfloat16()).double(), linear.weight.device_mesh, linear.weight.placements,
        shape=gradient.shape, stride=gradient.stride(),
    ).full_tensor()
    moved = value - whole(linear.weight)
    return [torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0).item() for found in (moved, alone)]


def collectives() -> int:
    model = sharded("one mesh")
    optimiser = build_optimiser(model, settings("muon"))
    for name, parameter in model.named_parameters():
        parameter.grad = spread(gradients(model, 0)[name], parameter)
    with CommDebugMode() as counted:
        optimiser.step()
    return counted.get_total_counts()


def mixed(experts: int, layers: int = 2) -> Decoder:
    fields = BODIES["k3"] | {"experts": dataclasses.replace(BODIES["k3"]["experts"], number=experts, chosen=2)}
    shape: dict[str, Any] = {"vocabulary": 11, "width": 12, "layers": layers, "heads": 2, "mlp_width": 8, "context": 8}
    model = Decoder(ModelConfig(**shape, **fields)).double()
    initialise(model, 0)
    return model


def compare_experts(experts: int) -> int:
    """Collectives of a step of Muon over the stacks alone."""
    plain, split = mixed(experts), mixed(experts)
    fully_shard(split)
    for model in (plain, split):
        take_steps(model, build_optimiser(model, settings("muon")), range(3))
    same(plain, split)
    stacks = [parameter for parameter in split.parameters() if parameter.ndim == 3]
    assert len(stacks) == 3
    for stack in stacks:
        stack.grad = torch.ones_like(stack)
    with CommDebugMode() as counted:
        Muon([{"params": stacks}], lr=RATE, weight_decay=0.5, momentum=0.9).step()
    return counted.get_total_counts()


def compare_balance() -> None:
    """Layer 1 is on the ranks 0 and 1, layer 2 on 2 and 3; layer 0, which has no experts, anywhere. Rank r gives expert x of layer l
    (r x + l) mod 4 tokens."""
    rank, number = distributed.get_rank(), torch.arange(5.0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shares"))["shares"]
    plain, part = mixed(5, layers=3), mixed(5, layers=3)
    own = 1 + rank // 2
    part.layers[3 - own] = nn.Identity()
    if own == 1:
        fully_shard(part.layers[own], mesh=mesh)
    for layer in (1, 2):
        for one in (2 * layer - 2, 2 * layer - 1):
            plain.experts[layer].load += (one * number + layer) % 4
    part.experts[own].load += (rank * number + own) % 4
    expected = balance(plain.config, [plain])
    assert balance(part.config, [part], distributed.all_reduce) == expected and expected["expert_load_maximum"] > 1
    bias = part.experts[own].router.bias
    assert isinstance(bias, DTensor) == (own == 1) and bias.detach().any()
    assert torch.equal(whole(bias), plain.experts[own].router.bias) and not part.experts[own].load.any()
    none = mixed(5, layers=3)  # a stage without experts, where one of the others has them
    none.layers[1] = none.layers[2] = nn.Identity()
    part.experts[own].load.fill_(1.0)
    both = rank == 0
    told = balance(part.config, [part if own == 2 or both else none], distributed.all_reduce)
    assert told == {"expert_load_maximum": 1.0, "expert_load_minimum": 1.0}


def compare_split_twice(style: str) -> None:
    """A matrix split over two ranks by its columns or rows and sharded over two more, with the gradient of a backward pass."""
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(10, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tp"))
    linear = nn.Linear(6, 10, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(value)
    parallelize_module(linear, mesh["tp"], ColwiseParallel() if style == "columns" else RowwiseParallel())
    fully_shard(linear, mesh=mesh["shards"])
    own = mesh["tp"].get_local_rank()
    inputs = torch.eye(6, dtype=torch.float64)
    wanted = gradient.T if style == "rows" else gradient.T.chunk(2, 1)[own]
    (linear(inputs if style == "columns" else inputs.chunk(2, 1)[own]) * wanted).sum().backward()
    torch.testing.assert_close(whole(linear.weight.grad), gradient, rtol=0, atol=0)
    plain = nn.Parameter(value.clone())
    plain.grad = gradient
    for parameter in (plain, linear.weight):
        Muon([{"params": [parameter]}], lr=RATE, weight_decay=0.5, momentum=0.9).step()
    torch.testing.assert_close(whole(linear.weight), plain.detach(), rtol=1e-12, atol=1e-14)
