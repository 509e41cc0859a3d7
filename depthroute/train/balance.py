"""The balancing of mixtures of experts: after a step the router's biases move, so that every expert gets its share of the tokens.

An expert that had fewer tokens of the step than the mean is biased up, one that had more down (DeepSeek-V3, section 2.1.2). The biases
are parameters, which checkpoints hold; the loads that the layers count are of one step and are never kept.

Shapes: M layers with experts, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthroute.model import Decoder, ModelConfig
from depthroute.parallel.sharding import put


@torch.no_grad()
def balance(config: ModelConfig, parts: Sequence[Decoder], add_up: Callable[[Tensor], object] | None = None) -> dict[str, float]:
    """Move the biases by the loads since the last call, and set the loads to zero; how uneven the loads were, for the metrics.

    "expert_load_maximum" and "expert_load_minimum" are the tokens of the most and of the least loaded expert over the mean, each in the
    layer where it is worst; nothing without experts.

    Args:
        parts: the decoders whose layers are here: one that has all, or the parts of a model on several processes.
        add_up: sums a tensor [M, X] on the CPU over the processes, in place; each calls it, also one that has no experts.
    """
    numbers = [layer for layer in range(config.layers) if config.has_experts(layer)]
    if not numbers:
        return {}
    assert config.experts is not None
    here = {layer: experts for part in parts for layer, experts in part.experts.items()}
    # exact sums, in which an expert at the mean is at the mean whatever adds them up and divides
    loads = torch.zeros(len(numbers), config.experts.number, dtype=torch.float64)
    if here:
        loads[[numbers.index(layer) for layer in here]] = torch.stack([experts.load for experts in here.values()]).to(loads)
    if add_up is not None:
        add_up(loads)
    for layer, experts in here.items():
        bias = experts.router.bias
        moves = torch.empty_like(bias)
        put(experts.moves(loads[numbers.index(layer)]).to(bias), moves)
        bias.add_(moves)
        experts.load.zero_()
    shares = loads / loads.mean(dim=1, keepdim=True)
    return {"expert_load_maximum": shares.max().item(), "expert_load_minimum": shares.min().item()}
