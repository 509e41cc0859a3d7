"""A model in a pipeline of two processes, in a training loop of one's own: what it sends with and without a cache of the depth memory.

    torchrun --standalone --nproc-per-node 2 examples/parallel/own_pipeline.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import distributed

from depthroute.model import ModelConfig
from depthroute.parallel.layout import parse_layout
from depthroute.parallel.network import Network
from depthroute.parallel.world import World, first, joined
from depthroute.residual import parse_residual
from depthroute.train import initialise

SEQUENCES, TOKENS, STEPS = 8, 32, 3
MODEL = ModelConfig(vocabulary=64, width=32, layers=8, heads=4, mlp_width=64, context=TOKENS, residual=parse_residual("block:2"))


def trained(world: World) -> tuple[float, int]:
    """The last loss, in nats a token, and the bytes that all processes have sent between stages."""
    network = Network(MODEL, world, sequences=SEQUENCES, microbatch=2, precision=None, fill=partial(initialise, seed=0))
    optimiser = torch.optim.AdamW([parameter for _, parameter in network.named], lr=3e-3)  # of what this process holds
    source = torch.Generator().manual_seed(0)
    loss = float("nan")
    for _ in range(STEPS):
        batch = torch.randint(MODEL.vocabulary, (SEQUENCES, TOKENS + 1), generator=source)  # the same on every process
        rows = batch[world.share * network.rows :][: network.rows]  # all of them: a pipeline alone is one share
        loss = network.accumulate(rows, z_loss=0.0).item() / (SEQUENCES * TOKENS)
        network.clip(1.0, network.gradient_norm())
        optimiser.step()
        optimiser.zero_grad()
    assert network.pipeline is not None
    sent = torch.tensor(network.pipeline.wire.total)
    distributed.all_reduce(sent)
    return loss, int(sent)


found = {}
for keeps in ("none", "all"):
    with joined(parse_layout(f"pp:2,virtual=2,keeps={keeps}"), "cpu") as world:
        found[keeps] = trained(world)
if first():
    for keeps, (loss, sent) in found.items():
        print(f"keeps={keeps}: loss {loss:.6f} nats after {STEPS} steps, {sent:,} bytes between stages")
