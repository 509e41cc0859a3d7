"""A decoder with depth attention under DDP and FSDP2: two processes on half a batch each have the losses and gradients of one on all of it.

This file is also the program that each process runs. FSDP2 gathers a module's parameters when the module is called, and a read uses the
norm before the sub-layer is called: so sub-layers are groups of their own, and norms and routes belong to the whole model's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.ops import depth_attention
from depthroute.residual import SPECIFICATIONS, AttnResConfig, ResidualConfig, parse_residual
from depthroute.train import initialise

CONFIGS: dict[str, ResidualConfig] = {
    "block": AttnResConfig(block=2),
    "role-decoupled": AttnResConfig(block=3, roles="decoupled", phases=False),
}
# Every other method, as it fits two layers of width 12.
FITTED = {"mhar": ",heads=3", "mhar-block": ":2,heads=3", "laurel-lr": ",rank=4", "low-rank": ":2,rank=4", "delta-block": ":2"}
FITTED |= {"mrla-base": ",head_width=4", "mrla-light": ",head_width=4", "block-query": ":2", "denseformer-4x5": ",period=2", "block": ":2"}
CONFIGS |= {name: parse_residual(name + FITTED.get(name, "")) for name in SPECIFICATIONS}


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo")
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_are_as_good_as_one(way: str, tmp_path: Path) -> None:
    run_two(way, tmp_path)


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo")
def test_a_sharded_gain_is_refused(tmp_path: Path) -> None:
    """A read must not take a rank's part of a gain for the gain: that is what it is handed where FSDP2 shards sub-layers as they are."""
    run_two("sharded_gain", tmp_path)


def run_two(way: str, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, __file__, way, str(rank), str(tmp_path / "meeting")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


class Loss(nn.Module):
    """The mean loss of a decoder, as one module."""

    def __init__(self, residual: ResidualConfig) -> None:
        super().__init__()
        shape: dict[str, Any] = {"vocabulary": 17, "width": 12, "layers": 2, "heads": 2, "mlp_width": 20, "context": 8, "init_std": 0.4}
        self.model = Decoder(ModelConfig(**shape, residual=residual))
        initialise(self.model, 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.residual.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        sums = self.model.loss(tokens[:, :-1], tokens[:, 1:])
        return sums.objective / sums.tokens


def agree(loss: Loss, run: nn.Module, config: ResidualConfig, rank: int) -> None:
    """Two steps, for what only shows in the second: a parameter that had no gradient in the first."""
    tokens = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(3))
    alone = Loss(config)
    expected = alone(tokens)
    expected.backward()
    for _ in range(2):
        run.zero_grad()
        found = run(tokens[2 * rank : 2 * rank + 2])
        found.backward()
    mean = found.detach().clone()
    distributed.all_reduce(mean)
    torch.testing.assert_close(mean / 2, expected.detach(), rtol=1e-13, atol=1e-13)
    wanted = dict(alone.named_parameters())
    for name, parameter in loss.named_parameters():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(whole, wanted[name].grad, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def ddp(config: ResidualConfig, rank: int) -> None:
    loss = Loss(config)
    agree(loss, nn.parallel.DistributedDataParallel(loss), config, rank)


def fsdp2(config: ResidualConfig, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    loss, mesh = Loss(config), init_device_mesh("cpu", (2,))
    for layer in loss.model.layers:
        fully_shard(layer.attention, mesh=mesh)
        fully_shard(layer.mlp, mesh=mesh)
    fully_shard(loss, mesh=mesh)
    agree(loss, loss, config, rank)


def sharded_gain(config: ResidualConfig, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    gain: Any = distribute_tensor(torch.ones(12), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(RequestError, match="output_gain is a DTensor"):
        depth_attention([torch.ones(3, 12)], torch.ones(12), output_gain=gain)


if __name__ == "__main__":
    way, rank, meeting = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for config in CONFIGS.values():
        {"ddp": ddp, "fsdp2": fsdp2, "sharded_gain": sharded_gain}[way](config, rank)
    distributed.destroy_process_group()
