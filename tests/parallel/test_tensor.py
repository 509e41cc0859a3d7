"""Tensor and sequence parallelism: processes that share sub-layers and tokens have the loss and all the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.model.config import PROJECTIONS
from depthroute.model.loss import cross_entropy_sums
from depthroute.parallel.tensor import check_tensor, shard_layer
from depthroute.residual import SPECIFICATIONS, Residual, parse_residual
from depthroute.train import initialise
from tests.parallel.world import World

METHODS = ("prenorm", "block:2", "rd:3", "full", "low-rank:2,rank=4", "hc", "muddformer", "denseformer", "laurel-lr,rank=4")
FORMS: dict[str, dict[str, Any]] = {
    "grouped queries": {"heads": 8},
    "qk norm": {"qk_norm": True},
    "biases": {"biases": PROJECTIONS},
    "post": {"norms": "post", "biases": ("output", "down")},
    "sandwich": {"norms": "sandwich", "tied_embeddings": False},
    "hybrid": {"norms": "hybrid", "residual": parse_residual("rd:3")},
    "hybrid, grouped queries": {"norms": "hybrid", "heads": 8, "biases": PROJECTIONS},
    "window": {"attention_window": 3, "windowed_layers": (1,)},
}
CASES = {name: {"residual": parse_residual(name)} for name in METHODS} | FORMS
# What every method is run with here beside what fits it; see tests/ops/test_parallel_citizen.py.
FITTED = {"mhar": ",heads=3", "mhar-block": ":2,heads=3", "laurel-lr": ",rank=4", "low-rank": ":2,rank=4", "delta-block": ":2"}
FITTED |= {"mrla-base": ",head_width=4", "mrla-light": ",head_width=4", "block-query": ":2", "denseformer-4x5": ",period=2", "block": ":2"}
INSIDE = {"value-residual", "value-residual-constant", "value-residual-learned", "svformer", "depth-attention"}


def shape(**changes: Any) -> ModelConfig:
    usual: dict[str, Any] = {"vocabulary": 17, "width": 12, "layers": 3, "heads": 4, "head_width": 4, "mlp_width": 20, "context": 8}
    return ModelConfig(**usual | {"key_value_heads": 4, "init_std": 0.4} | changes)


@pytest.mark.parametrize(("ranks", "cases"), [(2, [*CASES]), (4, ["rd:3", *FORMS])])
def test_loss_and_gradients_are_those_of_one_process(world: World, ranks: int, cases: list[str]) -> None:
    world.run(ranks, compare_all, cases)


def test_every_method_that_is_not_refused_agrees_with_one_process(world: World) -> None:
    world.run(2, compare_methods, [name + FITTED.get(name, "") for name in SPECIFICATIONS if name not in INSIDE])


def test_weights_may_come_after_sharding(world: World) -> None:
    world.run(2, fill_later)


def test_layers_are_run_again_in_the_backward_pass(world: World) -> None:
    world.run(2, compare_recomputed)


def test_inputs_are_gathered_once_and_outputs_scattered_once(world: World) -> None:
    world.run(2, count_messages)


def test_data_parallel_shards_of_shared_sub_layers(world: World) -> None:
    world.run(4, compare_in_two_dimensions)


def test_roles_that_share_a_read_are_gathered_once_behind_fsdp2(world: World) -> None:
    """It hands on the arguments of a module as new tensors, one for each role."""
    world.run(4, count_behind_fsdp2)


def test_no_asynchronous_tensor_gets_out(world: World) -> None:
    world.run(2, types_of_outputs)


def test_autocast_is_as_near_as_one_process(world: World) -> None:
    world.run(2, compare_autocast)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("heads = 3", {"heads": 3, "key_value_heads": 3}),
        ("key_value_heads = 1", {"key_value_heads": 1}),
        ("mlp_width = 21", {"mlp_width": 21}),
        ("context = 9", {"context": 9}),
    ],
)
def test_sizes_that_do_not_divide_are_refused(field: str, changes: dict[str, Any]) -> None:
    check_tensor(shape(**changes), 1)
    with pytest.raises(RequestError, match=rf"model\.{field} cannot be shared by 2 processes; it takes a multiple of 2"):
        check_tensor(shape(**changes), 2)


@pytest.mark.parametrize("name", ["full,rank=4,keys=projected", *sorted(INSIDE)])
def test_methods_that_look_inside_sub_layers_are_refused(name: str) -> None:
    config = shape(residual=parse_residual(name))
    check_tensor(config, 1)
    with pytest.raises(RequestError, match=f"residual method {config.residual.name}.* looks inside sub-layers"):
        check_tensor(config, 2)


def test_methods_that_look_across_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residual, "per_token", False)
    with pytest.raises(RequestError, match="residual method prenorm looks at several tokens at once"):
        check_tensor(shape(), 2)


def test_other_methods_are_not_refused() -> None:
    for name in SPECIFICATIONS.keys() - INSIDE:
        check_tensor(shape(residual=parse_residual(name + FITTED.get(name, ""))), 4)


def alone(config: ModelConfig) -> Decoder:
    """A decoder in float64 in which every parameter matters: none is still what it starts as."""
    model = Decoder(config)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("residual") or parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 2)
    return model.double()


def shared(config: ModelConfig, mesh: DeviceMesh) -> Decoder:
    check_tensor(config, mesh.size())
    model = alone(config)
    for layer in model.layers:
        shard_layer(layer, mesh)
    return model


def batch(rows: int = 2) -> Tensor:
    return torch.randint(17, (rows, 9), generator=torch.Generator().manual_seed(3))


def loss_of(model: Decoder, tokens: Tensor, rank: int = 0, ranks: int = 1) -> Tensor:
    """The summed loss of the tokens of one rank."""
    count = tokens.shape[1] - 1
    mine = slice(rank * count // ranks, (rank + 1) * count // ranks)
    inputs, targets = tokens[:, :-1][:, mine], tokens[:, 1:][:, mine]
    hidden = model.connect(model.embedded(inputs), model.sight(tokens[:, :-1]))
    return cross_entropy_sums(hidden.flatten(0, -2), model.head_weight, targets.flatten(), 0.0).objective


def over(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The sum over the processes of a mesh."""
    found = x.detach().clone()
    distributed.all_reduce(found, group=mesh.get_group())
    return found


def agree(config: ModelConfig, mesh: DeviceMesh, case: str, model: Decoder | None = None) -> None:
    one, many = alone(config), model or shared(config, mesh)
    tokens = batch()
    expected = loss_of(one, tokens)
    expected.backward()
    with torch.no_grad():
        idle = loss_of(many, tokens, mesh.get_local_rank(), mesh.size())
    found = loss_of(many, tokens, mesh.get_local_rank(), mesh.size())
    found.backward()
    for loss in (idle, found):
        torch.testing.assert_close(over(mesh, loss), expected.detach(), rtol=1e-12, atol=1e-12, msg=lambda text: f"{case}: {text}")
    wanted = dict(one.named_parameters())
    inside = 0
    for name, parameter in many.named_parameters():
        gradient = parameter.grad
        if gradient is None or wanted[name].grad is None:
            assert gradient is None and wanted[name].grad is None, f"{case}: {name}"
            continue
        if isinstance(gradient, DTensor):
            inside += 1
            assert isinstance(parameter, DTensor) and gradient.placements == parameter.placements, f"{case}: {name}"
            whole = gradient.full_tensor()
        else:
            assert ".attention." not in name and ".mlp." not in name, f"{case}: {name}"
            whole = over(mesh, gradient)
        says = f"{case}: {name}: "
        torch.testing.assert_close(whole, wanted[name].grad, rtol=1e-11, atol=1e-11, msg=lambda text, says=says: says + text)
    assert inside == sum(1 for name in wanted if ".attention." in name or ".mlp." in name)


def compare_all(cases: list[str]) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for case in cases:
        agree(shape(**CASES[case]), mesh, case)


def compare_methods(names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        agree(shape(layers=2, residual=parse_residual(name)), mesh, name)


def compare_recomputed() -> None:
    mesh, config = init_device_mesh("cpu", (2,)), shape(residual=parse_residual("rd:3"), qk_norm=True)
    model = shared(config, mesh)
    model.recompute = True
    agree(config, mesh, "recompute", model)


def fill_later() -> None:
    mesh, config = init_device_mesh("cpu", (2,)), shape(qk_norm=True, biases=PROJECTIONS)
    values = alone(config).state_dict()
    with torch.device("meta"), CommDebugMode() as messages:
        model = Decoder(config).double()
        for layer in model.layers:
            shard_layer(layer, mesh)
    with CommDebugMode() as more:  # nor is anything sent where the values are there
        shared(config, mesh)
    assert messages.get_total_counts() == more.get_total_counts() == 0
    model.to_empty(device="cpu")
    model.rotary.reset_buffers()
    for name, parameter in model.named_parameters():
        value: Tensor = values[name]
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(value)
    agree(config, mesh, "filled later", model)


def count_messages() -> None:
    mesh = init_device_mesh("cpu", (2,))
    functions = torch.ops.c10d_functional
    gather, scatter, reduce = functions.all_gather_into_tensor, functions.reduce_scatter_tensor, functions.all_reduce
    # three layers: an attention reads one tensor, or two with the roles of `rd` (the first site has none), or three
    for name, distinct in {"prenorm": 6, "rd:3": 8, "full,roles=separate": 10}.items():
        config = shape(residual=parse_residual(name), biases=PROJECTIONS, qk_norm=True)
        model, rank = shared(config, mesh), mesh.get_local_rank()
        with CommDebugMode() as forward:
            loss = loss_of(model, batch(), rank, 2)
        with CommDebugMode() as backward:
            loss.backward()
        counts = {op: count for op, count in forward.get_comm_counts().items() if count}
        assert counts == {gather: distinct, scatter: 6}, (name, counts)
        counts = {op: count for op, count in backward.get_comm_counts().items() if count}
        assert counts == {gather: 6, scatter: distinct, reduce: 6}, (name, counts)  # what is reduced: two gains a layer


def count_behind_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, distinct in {"prenorm": 6, "rd:3": 8, "full,roles=separate": 10}.items():
        model = shared(shape(residual=parse_residual(name)), mesh["tp"])
        for layer in model.layers:
            fully_shard(layer.attention, mesh=mesh["dp"])
            fully_shard(layer.mlp, mesh=mesh["dp"])
        with CommDebugMode() as messages:
            loss_of(model, batch(), mesh["tp"].get_local_rank(), 2)
        assert messages.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor] == distinct, name


def types_of_outputs() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = shared(shape(), mesh)
    seen: list[type] = []

    def look(module: nn.Module, inputs: Any, found: Any) -> None:
        assert found.output.shape == (2, 4, 12) and found.activation.shape[:2] == (2, 8)
        assert not found.output._is_view()
        seen.append(type(found.output))

    for layer in model.layers:
        layer.attention.register_forward_hook(look)
        layer.mlp.register_forward_hook(look)
    loss_of(model, batch(), mesh.get_local_rank(), 2)
    assert seen == [Tensor] * 6


def compare_in_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh["dp"], mesh["tp"]
    for case in ("rd:3", "hybrid, grouped queries", "muddformer"):
        config = shape(**CASES[case])
        one, many = alone(config), shared(config, tensor)
        for layer in many.layers:
            fully_shard(layer.attention, mesh=data)
            fully_shard(layer.mlp, mesh=data)
        tokens = batch(4)
        expected = loss_of(one, tokens)
        expected.backward()
        row, wanted = data.get_local_rank(), dict(one.named_parameters())
        for _ in range(2):  # gradients accumulate
            found = loss_of(many, tokens[2 * row : 2 * row + 2], tensor.get_local_rank(), 2)
            found.backward()
        torch.testing.assert_close(over(data, over(tensor, found)), expected.detach(), rtol=1e-12, atol=1e-12)
        for name, parameter in many.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            if isinstance(gradient, DTensor):
                assert gradient.device_mesh.ndim == 2 and gradient.placements == parameter.placements
                whole = gradient.full_tensor()  # FSDP2 averages over two
            else:
                whole = over(data, over(tensor, gradient)) / 2
            says = f"{case}: {name}: "
            torch.testing.assert_close(whole, wanted[name].grad, rtol=1e-11, atol=1e-11, msg=lambda text, says=says: says + text)


def compare_autocast() -> None:
    mesh = init_device_mesh("cpu", (2,))
    config = shape(residual=parse_residual("rd:3"), qk_norm=True, biases=PROJECTIONS)
    exact, one, many = alone(config), alone(config).float(), shared(config, mesh).float()
    losses, gradients = [], []
    for model, bf16 in ((exact, False), (one, True), (many, True)):
        rank, ranks = (mesh.get_local_rank(), 2) if model is many else (0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(model, batch(), rank, ranks)
        loss.backward()
        losses.append(over(mesh, loss) if model is many else loss.detach())
        found = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None and gradient.dtype == parameter.dtype
            if model is many:
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else over(mesh, gradient)
            found[name] = gradient.double()
        gradients.append(found)
    assert abs(losses[2] - losses[0]) < 2 * abs(losses[1] - losses[0]) + 1e-2 * losses[0]
    for name, right in gradients[0].items():
        usual, ours = (gradients[k][name].sub(right).norm() for k in (1, 2))
        assert ours < 2 * usual + 0.02 * right.norm(), f"{name}: {ours} against {usual}"
