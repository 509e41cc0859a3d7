"""A decoder on several processes has the losses and gradients of one process, however it is laid out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from depthroute.model import Decoder, ModelConfig
from depthroute.parallel.layout import parse_layout
from depthroute.parallel.network import Network
from depthroute.parallel.sharding import put
from depthroute.parallel.world import meshes
from depthroute.residual import SPECIFICATIONS, ResidualConfig, parse_residual
from depthroute.train import TrainConfig, initialise
from depthroute.train.optimiser import build_optimiser
from tests.parallel.world import World

ROWS, TOKENS = 8, 8
FITTED = {"mhar": ",heads=3", "mhar-block": ":2,heads=3", "laurel-lr": ",rank=4", "low-rank": ":3,rank=4", "delta-block": ":3"}
FITTED |= {"mrla-base": ",head_width=4", "mrla-light": ",head_width=4", "block-query": ":3", "denseformer-4x5": ",period=2"}
FITTED |= {"block": ":3", "rd": ":3"}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def residual_of(name: str) -> ResidualConfig:
    return parse_residual(name + FITTED.get(name, ""))


def shape(residual: ResidualConfig, **fields: Any) -> ModelConfig:
    given = {"vocabulary": 17, "width": 12, "layers": 4, "heads": 2, "mlp_width": 20, "context": TOKENS, "init_std": 0.4} | fields
    return ModelConfig(**given, residual=residual)


def fill(module: nn.Module, scale: float = 0.3) -> None:
    """Initial values, and something on what the residual method has, by name too: routes that are all zero route nothing."""
    module.double()
    initialise(module, 0)
    wanted = {name for name, _ in module.named_parameters() if name.startswith("residual.")}

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in wanted:
                number = sum(map(ord, name))
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * scale
                put(whole(parameter).detach() + noise, parameter)


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(17, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(seed))


def alone(config: ModelConfig, z_loss: float = 1e-3) -> tuple[float, dict[str, Tensor], Tensor]:
    decoder = Decoder(config)
    fill(decoder)
    batch = tokens()
    sums = decoder.loss(batch[:, :-1], batch[:, 1:], z_loss)
    (sums.objective / sums.tokens).backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    return sums.nll.item(), gradients, decoder.token_nll(batch[:, :-1], batch[:, 1:])


def agrees(layout: str, names: list[str], fields: dict[str, Any], microbatch: int = ROWS, recompute: bool = False) -> None:
    for name in names:
        config = shape(residual_of(name), **fields)
        nll, gradients, losses = alone(config)
        world = meshes(parse_layout(layout).fitted(distributed.get_world_size()), torch.device("cpu"))
        network = Network(
            config, world, sequences=ROWS, microbatch=microbatch, precision=None, fill=fill, recompute=recompute, dtype=torch.float64
        )  # fmt: skip
        batch, rows = tokens(), world.layout.rows(ROWS)
        mine = batch[world.share * rows : (world.share + 1) * rows]
        for _ in range(2):  # for what only shows in the second: a parameter without a gradient, a memory that was not released
            for _, parameter in network.named:
                parameter.grad = None
            found = network.accumulate(mine, 1e-3)
            where = f"{name}, {layout}"
            assert abs(found.item() - nll) < 1e-11 * abs(nll), f"{where}: {found.item()} {nll}"
            for part, parameter in network.named:
                expected = gradients.get(part)
                if expected is None:
                    continue
                assert parameter.grad is not None, f"{where}: {part} has no gradient"
                difference = (whole(parameter.grad) - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
                assert difference < 1e-10, f"{where}: {part} is off by {difference:.1e}"
            expected_norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
            assert abs(network.gradient_norm() - expected_norm) < 1e-11 * expected_norm
            for some in (ROWS, 3):
                got = network.token_nll(batch[:some, :-1], batch[:some, 1:])
                torch.testing.assert_close(got, losses[:some], rtol=1e-11, atol=1e-12)
                short = network.token_nll(batch[:some, :3], batch[:some, 1:4])  # as the last window of an evaluation is
                torch.testing.assert_close(short, losses[:some, :3], rtol=1e-11, atol=1e-12)
            if network.pipeline is not None:
                assert len(network.pipeline.kept) == 0


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp,schedule=gpipe", "pp", "pp,virtual=2", "tp"])
def test_two_processes(world: World, layout: str) -> None:
    world.run(2, agrees, layout, ["block", "prenorm", "rd", "low-rank", "full"], {})


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_micro_batches_and_untied_embeddings(world: World, layout: str) -> None:
    world.run(2, agrees, layout, ["block"], {"tied_embeddings": False, "qk_norm": True}, 2, True)


@pytest.mark.parametrize("keeps", ["none", "received", "all"])
def test_a_pipeline_that_keeps_nothing_or_everything_is_the_same(world: World, keeps: str) -> None:
    """Six chunks on two processes: a source is read by up to three chunks of each."""
    fields = {"layers": 6, "tied_embeddings": keeps != "all"}
    world.run(2, agrees, f"pp,virtual=3,microbatch=1,keeps={keeps}", ["block", "rd", "full", "x0"], fields, ROWS, keeps == "received")


def test_every_method_in_a_pipeline(world: World) -> None:
    world.run(2, agrees, "pp,virtual=2,microbatch=4", list(SPECIFICATIONS), {})


@pytest.mark.parametrize(
    "layout",
    ["ddp:2,fsdp:2", "pp:2,ddp:2", "pp:2,virtual=2,fsdp:2", "tp:2,fsdp:2", "tp:2,ddp:2", "pp:2,virtual=2,tp:2", "pp:4", "pp:4,virtual=2"],
)
def test_four_processes(world: World, layout: str) -> None:
    world.run(4, agrees, layout, ["block", "prenorm"], {"layers": 8 if layout.startswith("pp:4,") else 4}, 2)


def trains(layouts: list[str], optimiser: str) -> None:
    """Four steps in float64, clipped: the losses before each and the weights behind all of them are those of one process."""
    steps = 4
    settings = TrainConfig(steps=steps, sequences=ROWS, learning_rate=0.01, optimiser=optimiser, weight_decay=0.1)  # type: ignore[arg-type]
    config = shape(residual_of("rd"), qk_norm=True)
    alone, losses = Decoder(config), []
    fill(alone)
    own = build_optimiser(alone, settings)
    for step in range(steps):
        batch = tokens(step)
        sums = alone.loss(batch[:, :-1], batch[:, 1:])
        losses.append(sums.nll.item())
        (sums.objective / sums.tokens).backward()
        norm = get_total_norm([parameter.grad for parameter in own.parameters if parameter.grad is not None])
        clip_grads_with_norm_(own.parameters, 0.5, norm)
        own.step()
        own.zero_grad()
    expected = dict(alone.named_parameters())
    # Muon orthogonalises in bfloat16: the last bits of a momentum may round to the next one there
    close = 1e-10 if optimiser == "adamw" else 2e-3
    for layout in layouts:
        world = meshes(parse_layout(layout).fitted(distributed.get_world_size()), torch.device("cpu"))
        network = Network(config, world, sequences=ROWS, microbatch=2, precision=None, fill=fill, dtype=torch.float64)
        together, rows = build_optimiser(network.parts, settings), world.layout.rows(ROWS)
        for step in range(steps):
            found = network.accumulate(tokens(step)[world.share * rows : (world.share + 1) * rows], 0.0).item()
            assert abs(found / losses[step] - 1) < close, f"{layout}, step {step}: {found} and {losses[step]}"
            network.clip(0.5, network.gradient_norm())
            together.step()
            together.zero_grad()
        for name, parameter in network.named:
            difference = (whole(parameter.detach()) - expected[name]).abs().max().item()
            assert difference < (1e-9 if optimiser == "adamw" else 2e-3), f"{layout}: {name} is off by {difference:.1e}"


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_training_is_the_same_on_two_processes(world: World, optimiser: str) -> None:
    world.run(2, trains, ["ddp", "fsdp", "pp,virtual=2", "tp"], optimiser)


def rounds(layout: str, fields: dict[str, Any]) -> None:
    """Under bf16 autocast, with as many sequences in a pass, the passes are the same to the last bit: what differs is the order of sums."""
    config, world = shape(residual_of("rd"), **fields), meshes(parse_layout(layout), torch.device("cpu"))
    rows = world.layout.rows(ROWS)
    alone, nll = Decoder(config), 0.0
    initialise(alone, 0)
    for part in tokens().split(rows):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sums = alone.loss(part[:, :-1].contiguous(), part[:, 1:].contiguous())
        (sums.objective / (ROWS * TOKENS)).backward()
        nll += sums.nll.item()
    network = Network(
        config, world, sequences=ROWS, microbatch=ROWS, precision=torch.bfloat16, fill=lambda module: initialise(module, 0)
    )  # fmt: skip
    found = network.accumulate(tokens()[world.share * rows : (world.share + 1) * rows], 0.0).item()
    assert abs(found / nll - 1) < 1e-7, f"{layout}: {found} {nll}"
    wanted = dict(alone.named_parameters())
    for name, parameter in network.named:
        expected, got = wanted[name].grad, parameter.grad
        if expected is not None and got is not None:
            difference = (whole(got) - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            assert difference < 1e-5, f"{layout}: {name} is off by {difference:.1e}"


@pytest.mark.parametrize("layout", ["ddp:2", "fsdp:2"])
def test_half_precision_rounds_as_one_process_does(world: World, layout: str) -> None:
    world.run(2, rounds, layout, {"qk_norm": True, "biases": ("query", "down")})
