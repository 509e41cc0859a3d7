"""Muon, which turns the momentum of a matrix into an orthogonal step, on whole matrices and on those that lie in shards.

A parameter may be a stack of matrices, [..., M, N]: each of them is a matrix by itself, as those of the experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

# The quintic of Jordan et al. (2024), steepest at zero: after five iterations all singular values lie between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum, the update scaled to the size of AdamW's (Moonlight, Liu et al., 2025).

    On whole matrices it is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, bit for bit. On shards that one exchanges partial sums
    in every iteration, in bf16, so the step depends on how a matrix is split. Here each rank keeps its shard of the momentum, the update is
    gathered once, every rank makes the whole of it orthogonal and takes its own part: the step of one process, for the price of that
    product on each. A stack that is split between its matrices is not gathered: each rank has whole ones.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, weight_decay: float, momentum: float) -> None:
        """`groups`: of matrices and stacks of them only; ValueError for anything else."""
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    raise ValueError(f"Muon is for matrices, not for a parameter of shape {list(parameter.shape)}.")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = _orthogonal_shard(parameter.grad.lerp(average, momentum).bfloat16())
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * (0.2 * math.sqrt(max(parameter.shape[-2:]))))


def orthogonalised(matrix: Tensor) -> Tensor:
    """U S V' of a bf16 `matrix` = U D V', with all of S near 1, by Newton-Schulz iterations; of each matrix of a stack [..., M, N]."""
    if matrix.ndim > 2:
        return _newton_schulz(matrix.flatten(end_dim=-3), torch.baddbmm).view_as(matrix)
    return _newton_schulz(matrix, torch.addmm)


def _newton_schulz(matrix: Tensor, added: Callable[..., Tensor]) -> Tensor:
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # the Gram matrix is the small one
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = added(x, added(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _orthogonal_shard(update: Tensor) -> Tensor:
    """`update` orthogonalised as one matrix or stack of them, in the shards that it came in."""
    if not isinstance(update, DTensor):
        return orthogonalised(update)
    mesh, everywhere = update.device_mesh, [Replicate()] * update.device_mesh.ndim
    if update.ndim > 2 and all(placement.is_replicate() or placement.is_shard(0) for placement in update.placements):
        own = orthogonalised(update.to_local())
        return DTensor.from_local(own, mesh, update.placements, run_check=False, shape=update.shape, stride=update.stride())
    whole = orthogonalised(update.full_tensor()).contiguous()
    return DTensor.from_local(whole, mesh, everywhere, run_check=False).redistribute(placements=update.placements)
