"""Which parameters decay, how fast routes learn, which are Muon's, and that each parameter is optimised exactly once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from depthroute.common.errors import FailureError
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import SPECIFICATIONS, parse_residual
from depthroute.train import checkpoint as checkpoints
from depthroute.train import train
from depthroute.train.config import RunConfig
from depthroute.train.initialise import initialise
from depthroute.train.muon import Muon, orthogonalised
from depthroute.train.optimiser import Optimiser, build_optimiser, decays, parameter_groups, set_learning_rate
from tests.bodies import BODIES

PROJECTIONS = ("attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate", "mlp.up", "mlp.down")
BIASES = tuple(name.partition(".")[2] for name in PROJECTIONS)


def with_gradients(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def muon_names(model: nn.Module, optimiser: Optimiser) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [part for part in optimiser.optimisers if isinstance(part, Muon)]
    return sorted(names[id(parameter)] for part in found for group in part.param_groups for parameter in group["params"])


@pytest.mark.parametrize("arm", ["prenorm", "block:2", "rd:2", "full,rank=8,keys=projected"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(shape: Callable[..., ModelConfig], arm: str, tied: bool) -> None:
    model = Decoder(shape(residual=parse_residual(arm), tied_embeddings=tied))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    in_groups = [names[id(parameter)] for group in (decayed, others) for parameter in group["params"]]
    assert sorted(in_groups) == sorted(names.values())
    assert all(parameter.ndim == 2 for parameter in decayed["params"])
    not_decayed = [names[id(parameter)] for parameter in others["params"]]
    assert all(name.rpartition(".")[2] in ("weight", "query", "value_query", "key_gain") for name in not_decayed)
    assert all(name in not_decayed for name in names.values() if name.endswith(("query", "key_gain")) and name.startswith("residual."))
    assert all(name in not_decayed for name in names.values() if "norm" in name)


@pytest.mark.parametrize("arm", ["rd:2", "full,rank=8,keys=projected"])
def test_routes_with_a_rate_of_their_own_are_in_groups_of_their_own(shape: Callable[..., ModelConfig], arm: str) -> None:
    model = Decoder(shape(residual=parse_residual(arm)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    before = [[names[id(parameter)] for parameter in group["params"]] for group in parameter_groups(model, 0.1)]
    groups = parameter_groups(model, 0.1, route_rate=3.0)
    found = {(group["rate"], group["weight_decay"]): [names[id(parameter)] for parameter in group["params"]] for group in groups}
    for decay, earlier in zip((0.1, 0.0), before, strict=True):
        assert found[1.0, decay] == [name for name in earlier if not name.startswith("residual.")]
        assert found.get((3.0, decay), []) == [name for name in earlier if name.startswith("residual.")]
    assert found[3.0, 0.0] and sum(map(len, found.values())) == len(names)


def test_a_method_without_parameters_has_the_same_two_groups_at_any_route_rate(shape: Callable[..., ModelConfig]) -> None:
    model = Decoder(shape(residual=parse_residual("prenorm")))
    one, three = (
        [[id(parameter) for parameter in group["params"]] for group in parameter_groups(model, 0.1, rate)] for rate in (1.0, 3.0)
    )
    assert one == three


def test_routes_move_by_their_rate_and_the_body_as_before(config: Callable[..., RunConfig]) -> None:
    """A first step of AdamW is the learning rate times a number that the gradient alone decides; decay is proportional to it too."""
    moved = {}
    for rate in (1.0, 4.0):
        settings = config(model={"residual": parse_residual("full,rank=8,keys=projected")}, route_rate=rate)
        model = Decoder(settings.model)
        initialise(model, 0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimiser = build_optimiser(model, settings.train)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        set_learning_rate(optimiser, 2e-3)
        optimiser.step()
        moved[rate] = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    for name, once in moved[1.0].items():
        factor = 4.0 if name.startswith("residual.") else 1.0
        torch.testing.assert_close(moved[4.0][name], factor * once, rtol=1e-4, atol=1e-6 if factor != 1 else 0)


def test_a_route_rate_of_one_trains_bit_for_bit_as_two_groups_do(config: Callable[..., RunConfig]) -> None:
    """Against groups made here, without any rates: what an optimiser was before routes could have a rate of their own."""
    weights = []
    for ours in (True, False):
        settings = config(model={"residual": parse_residual("rd:2")})
        model = Decoder(settings.model)
        initialise(model, 0)
        if ours:
            optimiser = build_optimiser(model, settings.train)
        else:
            matrices = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 2]
            others = [parameter for name, parameter in model.named_parameters() if parameter.ndim != 2]
            optimiser = torch.optim.AdamW(
                [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                lr=settings.train.learning_rate, betas=settings.train.betas, eps=settings.train.eps, fused=True,
            )
        tokens = torch.arange(32).view(2, 16)
        for step in range(3):
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * (step + 1)
            model.loss(tokens, tokens).objective.backward()
            optimiser.step()
            optimiser.zero_grad()
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_module_can_keep_a_matrix_of_queries_from_decaying() -> None:
    class Routes(nn.Module):
        no_decay = ("queries",)

        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.zeros(3, 4))
            self.projection = nn.Parameter(torch.zeros(3, 4))

    routes = Routes()
    decayed, others = parameter_groups(nn.ModuleDict({"residual": routes}), 0.1)
    assert decayed["params"] == [routes.projection]
    assert others["params"] == [routes.queries]


def test_a_frozen_parameter_is_not_optimised() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert group["params"] == [model.bias]


def test_a_step_is_the_update_of_the_adamw_paper(config: Callable[..., RunConfig]) -> None:
    """Decoupled decay (Loshchilov and Hutter, 2019, Algorithm 2), on the first step, from the definition."""
    settings = config(learning_rate=0.01, weight_decay=0.5).train
    model = nn.Linear(3, 2)
    initialise(model, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimiser = build_optimiser(model, settings)
    optimiser.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        decay = 0.01 * 0.5 if name == "weight" else 0.0
        expected = before[name] * (1 - decay) - 0.01 * parameter.grad / (parameter.grad.abs() + settings.eps)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("arm", ["prenorm", "block:2", "rd:2", "full,rank=8,keys=projected"])
@pytest.mark.parametrize("tied", [True, False])
def test_muon_has_the_matrices_of_the_layers_and_nothing_else(config: Callable[..., RunConfig], arm: str, tied: bool) -> None:
    settings = config(
        model={"residual": parse_residual(arm), "tied_embeddings": tied, "biases": BIASES, "qk_norm": True}, optimiser="muon",
        route_rate=2.0, matrix_rate=3.0, weight_decay=0.2, momentum=0.9,
    )
    model = Decoder(settings.model)
    optimiser = build_optimiser(model, settings.train)
    assert any(name.endswith("bias") for name, _ in model.named_parameters())
    assert muon_names(model, optimiser) == sorted(f"layers.{layer}.{name}.weight" for layer in range(2) for name in PROJECTIONS)
    assert sorted(map(id, optimiser.parameters)) == sorted(map(id, model.parameters()))
    assert [(group["rate"], group["weight_decay"]) for group in optimiser.param_groups] == [
        (1.0, 0.2), (1.0, 0.0), *((2.0, decay) for decay in (0.2, 0.0) if arm != "prenorm" and (decay == 0.0 or "projected" in arm)),
        (3.0, 0.2),
    ]
    assert [group["lr"] for group in optimiser.param_groups] == pytest.approx([3e-3 * group["rate"] for group in optimiser.param_groups])
    assert optimiser.param_groups[-1]["momentum"] == 0.9


def body(name: str, **fields: object) -> dict[str, object]:
    return {**BODIES[name], "layers": 3, "residual": parse_residual("rd:2"), **fields}


@pytest.mark.parametrize("name", ["kimi", "k3"])
def test_muon_has_the_matrices_of_experts_and_not_what_stands_beside_them(config: Callable[..., RunConfig], name: str) -> None:
    settings = config(model=body(name), optimiser="muon")
    model = Decoder(settings.model)
    optimiser = build_optimiser(model, settings.train)
    found = set(muon_names(model, optimiser))
    assert {f"layers.{layer}.mlp.{part}.weight" for layer in (1, 2) for part in ("gate", "up", "down", "shared.gate")} <= found
    assert not [one for one in found if re.search("router|convolution|norm|decay[.]|residual|embedding|bias", one)]
    trained = {one for one, parameter in model.named_parameters() if parameter.requires_grad}
    rest = trained - found
    assert all(re.search("router.weight|convolution|norm|decay[.]|residual|embedding|bias", one) for one in rest)
    assert len(optimiser.parameters) == len(trained) == len(dict(model.named_parameters())) - 2  # the routers' biases


@pytest.mark.parametrize("name", ["kimi", "k3"])
def test_of_the_new_bodies_matrices_decay_and_gates_of_decay_do_not(config: Callable[..., RunConfig], name: str) -> None:
    model = Decoder(config(model=body(name)).model)
    decayed = {
        f"{path}.{local}" for path, owner in model.named_modules() for local, parameter in owner.named_parameters(recurse=False)
        if decays(owner, local, parameter)
    }
    assert {"layers.1.mlp.router.weight", "layers.1.mlp.down.weight", "layers.0.attention.decay_up.weight"} <= decayed
    assert not decayed & {"layers.0.attention.decay.log_rate", "layers.0.attention.decay.bias", "layers.1.mlp.router.bias"}


def test_each_matrix_of_a_stack_is_orthogonalised_by_itself() -> None:
    for shape in ((3, 24, 40), (3, 40, 24), (2, 2, 8, 8), (0, 4, 6)):
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        stack *= torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))  # of different norms
        found = orthogonalised(stack)
        assert found.shape == stack.shape
        for one, alone in zip(found.flatten(0, -3), stack.flatten(0, -3), strict=True):
            torch.testing.assert_close(one, orthogonalised(alone), rtol=0.02, atol=0.02)


def test_a_stack_moves_as_its_matrices_do(config: Callable[..., RunConfig]) -> None:
    generator = torch.Generator().manual_seed(0)
    stack, gradient = (torch.randn(12, 6, 10, generator=generator) for _ in range(2))
    together, apart = nn.Parameter(stack.clone()), [nn.Parameter(matrix.clone()) for matrix in stack]
    together.grad = gradient
    for matrix, its in zip(apart, gradient, strict=True):
        matrix.grad = its
    Muon([{"params": [together]}], lr=0.02, weight_decay=0.3, momentum=0.9).step()
    Muon([{"params": apart}], lr=0.02, weight_decay=0.3, momentum=0.9).step()
    expected = torch.stack([matrix.detach() for matrix in apart])
    torch.testing.assert_close(together.detach(), expected, rtol=0, atol=0.02 * 0.2 * 10**0.5 * 0.02)


def test_a_matrix_of_a_layer_that_is_no_linear_map_is_not_muons(config: Callable[..., RunConfig]) -> None:
    model = Decoder(config().model)
    model.layers[1].table = nn.Embedding(3, 16)
    optimiser = build_optimiser(model, config(optimiser="muon").train)
    assert "layers.1.table.weight" not in muon_names(model, optimiser)
    assert any(parameter is model.layers[1].table.weight for parameter in optimiser.parameters)


FITTED = {"mhar": ",heads=4", "mhar-block": ":2,heads=4", "laurel-lr": ",rank=4", "low-rank": ":2,rank=4", "delta-block": ":2"}
FITTED |= {"mrla-base": ",head_width=4", "mrla-light": ",head_width=4", "block-query": ":2", "denseformer-4x5": ",period=2", "block": ":2"}


@pytest.mark.parametrize("method", SPECIFICATIONS)
def test_muon_has_nothing_of_a_residual_method(config: Callable[..., RunConfig], method: str) -> None:
    settings = config(model={"residual": parse_residual(method + FITTED.get(method, ""))}, optimiser="muon")
    model = Decoder(settings.model)
    optimiser = build_optimiser(model, settings.train)
    assert muon_names(model, optimiser) == sorted(name for name, _ in model.named_parameters() if muon_matrix(name))
    assert sorted(map(id, optimiser.parameters)) == sorted(map(id, model.parameters()))


def test_adamw_is_one_optimiser_with_the_groups_of_a_model(config: Callable[..., RunConfig]) -> None:
    settings = config(model={"residual": parse_residual("rd:2")}, route_rate=2.0)
    model = Decoder(settings.model)
    (only,) = build_optimiser(model, settings.train).optimisers
    expected = parameter_groups(model, 0.1, 2.0)
    assert type(only) is torch.optim.AdamW
    assert [list(map(id, group["params"])) for group in only.param_groups] == [list(map(id, group["params"])) for group in expected]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parts_with_the_names_of_the_whole_are_optimised_as_the_whole_is(config: Callable[..., RunConfig], name: str) -> None:
    settings = config(model={"residual": parse_residual("rd:2"), "tied_embeddings": True}, route_rate=2.0, optimiser=name)
    model = Decoder(settings.model)

    def part(layer: int) -> nn.Module:
        """One layer with its number in the model, and what both ends of a tied model have."""
        held = nn.Module()
        held.layers = nn.ModuleDict({str(layer): model.layers[layer]})
        held.embedding, held.norm, held.residual = model.embedding, model.norm, model.residual
        return held

    def treatment(optimiser: Optimiser) -> dict[int, tuple[object, ...]]:
        return {
            id(parameter): (type(inner), group["rate"], group["weight_decay"])
            for inner in optimiser.optimisers for group in inner.param_groups for parameter in group["params"]
        }

    whole, parts = build_optimiser(model, settings.train), build_optimiser([part(0), part(1)], settings.train)
    assert treatment(parts) == treatment(whole) and len(parts.parameters) == len(whole.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_is_that_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((7, 12), (12, 7), (8, 8), (1, 5))]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimisers = (
        Muon([{"params": ours}], lr=0.02, weight_decay=0.3, momentum=0.9),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=dtype)
            other.grad = one.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_an_orthogonal_matrix_keeps_the_directions_and_evens_out_the_sizes(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalised(matrix.bfloat16()).double()
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    sizes = (u.T @ found @ v.T).diagonal()
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ v).flatten(), dim=0) > 0.98


def test_muon_is_for_matrices_only() -> None:
    with pytest.raises(ValueError, match=r"not for a parameter of shape \[3\]"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))]}], lr=0.1, weight_decay=0.0, momentum=0.9)


def test_matrices_move_by_their_rate_and_the_rest_as_before(config: Callable[..., RunConfig]) -> None:
    moved = {}
    for rate in (1.0, 4.0):
        settings = config(optimiser="muon", matrix_rate=rate)
        model = Decoder(settings.model)
        initialise(model, 0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimiser = build_optimiser(model, settings.train)
        with_gradients(model)
        optimiser.step()
        moved[rate] = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
        optimiser.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    for name, once in moved[1.0].items():
        factor = 4.0 if muon_matrix(name) else 1.0
        torch.testing.assert_close(moved[4.0][name], factor * once, rtol=1e-4, atol=1e-6 if factor != 1 else 0)
        if factor != 1:  # about 0.2 learning rates, as a step of AdamW is
            assert 0.12 < once.square().mean().sqrt() / 3e-3 < 0.28, name


def muon_matrix(name: str) -> bool:
    return name.startswith("layers.") and name.removesuffix(".weight").partition(".")[2].partition(".")[2] in PROJECTIONS


@pytest.mark.parametrize("arm", ["prenorm", "rd:2"])
def test_a_run_with_muon_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, config: Callable[..., RunConfig], arm: str) -> None:
    settings = config(model={"residual": parse_residual(arm)}, optimiser="muon", keep_checkpoints=(6,))
    run, end = tmp_path / "run", "step-00000012"
    train(settings, run, console=False)
    whole = {name: load_file(run / "checkpoints" / end / name) for name in ("model.safetensors", "optimizer.safetensors")}
    assert "layers.1.mlp.up.weight.momentum_buffer" in whole["optimizer.safetensors"]
    assert "layers.1.mlp.up.weight.exp_avg" not in whole["optimizer.safetensors"]
    shutil.rmtree(run / "checkpoints" / end)
    (run / "result.json").unlink()
    train(settings, run, console=False)
    for file, tensors in whole.items():
        again = load_file(run / "checkpoints" / end / file)
        assert again.keys() == tensors.keys() and all(torch.equal(value, again[name]) for name, value in tensors.items())


def test_the_state_of_another_optimiser_is_refused(tmp_path: Path, config: Callable[..., RunConfig]) -> None:
    model = Decoder(config().model)
    optimisers = {name: build_optimiser(model, config(optimiser=name).train) for name in ("adamw", "muon")}
    with_gradients(model)
    for step, (name, optimiser) in enumerate(optimisers.items(), start=1):
        optimiser.step()
        path = checkpoints.save(tmp_path / name, step, model, optimiser, {})
        other = optimisers["muon" if name == "adamw" else "adamw"]
        with pytest.raises(FailureError, match=r"optimizer.safetensors has 'layers\..*', which the optimiser of this run does not"):
            checkpoints.load(path, model, other)
        checkpoints.load(path, model, optimiser)


def test_a_state_of_no_parameter_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimiser = Optimiser(torch.optim.AdamW(model.parameters()))
    path = checkpoints.save(tmp_path, 1, model, optimiser, {})
    state = checkpoints.verify(path)
    save_file({"wieght.exp_avg": torch.zeros(2, 4)}, path / "optimizer.safetensors")
    checkpoints.write_state(path, state)
    with pytest.raises(FailureError, match=r"optimizer.safetensors has 'wieght.exp_avg', which the optimiser of this run does not"):
        checkpoints.load(path, model, optimiser)


def test_a_state_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    paths = []
    for outputs in (2, 3):
        model = nn.Linear(4, outputs, bias=False)
        optimiser = Optimiser(torch.optim.AdamW(model.parameters()))
        with_gradients(model)
        optimiser.step()
        paths.append(checkpoints.save(tmp_path / str(outputs), 1, model, optimiser, {}))
    shutil.copy(paths[0] / "optimizer.safetensors", paths[1])
    state = checkpoints.verify(paths[0])
    checkpoints.write_state(paths[1], state)
    with pytest.raises(FailureError, match=r"'weight.exp_avg' is \[2, 4\] there and \[3, 4\] in the optimiser"):
        checkpoints.load(paths[1], model, optimiser)


def test_the_state_that_is_made_is_what_is_asked_for(config: Callable[..., RunConfig]) -> None:
    settings = config(optimiser="muon")
    model = Decoder(settings.model)
    optimiser = build_optimiser(model, settings.train)
    assert not optimiser.state_tensors(model.named_parameters())
    with_gradients(model)
    optimiser.step()
    before = optimiser.state_tensors(model.named_parameters())
    forms = {name: (value.shape, value.dtype, value.device) for name, value in before.items()}
    asked = {*before, "layers.7.mlp.up.weight.momentum_buffer"}  # of a layer that another rank holds
    made = optimiser.make_state(model.named_parameters(), asked)
    assert {name: (value.shape, value.dtype, value.device) for name, value in made.items()} == forms
    assert not any(value.any() or value.requires_grad for value in made.values())
    kept = optimiser.state_tensors(model.named_parameters())
    assert kept.keys() == made.keys() and all(kept[name] is value for name, value in made.items())
    few = {"norm.weight.step", "norm.weight.exp_avg", "norm.weight.exp_avg_sq"}
    optimiser.make_state(model.named_parameters(), few)
    assert optimiser.state_tensors(model.named_parameters()).keys() == few
    for wrong in ("norm.weight.momentum_buffer", "layers.0.mlp.up.weight.exp_avg", "norm.weight.max_exp_avg_sq"):
        with pytest.raises(KeyError, match=wrong):
            optimiser.make_state(model.named_parameters(), [wrong])


def test_there_is_no_state_of_a_frozen_parameter() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    optimiser = Optimiser(torch.optim.AdamW(parameter_groups(model, 0.1), fused=True))
    with_gradients(model)
    optimiser.step()
    assert optimiser.state_tensors(model.named_parameters()).keys() == {"bias.step", "bias.exp_avg", "bias.exp_avg_sq"}
    with pytest.raises(KeyError, match=r"weight\.exp_avg"):
        optimiser.make_state(model.named_parameters(), ["weight.exp_avg"])
