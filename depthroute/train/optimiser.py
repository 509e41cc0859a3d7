"""AdamW, and which parameters it decays."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from depthroute.train.config import TrainConfig


def decays(owner: nn.Module, local: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to the parameter `local` of `owner`.

    It does to matrices, unless the module names them in `no_decay`, and to vectors that it names in `decayed`.

    Route queries and key gains are never decayed: decay pulls a query to zero, which is the plain mean of the sources, so it would be
    a bias for one arm only. A residual method that keeps several queries in one matrix lists it in `no_decay`.
    """
    return local in getattr(owner, "decayed", ()) or (parameter.ndim >= 2 and local not in getattr(owner, "no_decay", ()))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for a torch optimiser, each trainable parameter in exactly one: decayed, then not decayed.

    A tied parameter counts once. Frozen parameters (`requires_grad` false) are in neither.
    """
    owners = dict(model.named_modules())
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path, _, local = name.rpartition(".")
            (decayed if decays(owners[path], local, parameter) else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) over the groups of `model`, in its fused form, which the CPU and CUDA have."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay), lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
    )
