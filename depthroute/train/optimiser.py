"""AdamW, which parameters it decays, and how fast routes learn."""

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


def parameter_groups(model: nn.Module, weight_decay: float, route_rate: float = 1.0) -> list[dict[str, Any]]:
    """Groups for a torch optimiser, each trainable parameter in exactly one: decayed, then not decayed.

    `rate` of a group is what the learning rate is multiplied by: 1, and `route_rate` for the parameters of the residual method, those
    under `residual.` of a decoder. Where that is 1 too there are two groups at most; else the two of the body, then the two of the
    residual method. A tied parameter counts once. Frozen parameters (`requires_grad` false) are in none.
    """
    owners = dict(model.named_modules())
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {
        (rate, decayed): [] for rate in (1.0, route_rate) for decayed in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path, _, local = name.rpartition(".")
            rate = route_rate if name.startswith("residual.") else 1.0
            groups[rate, decays(owners[path], local, parameter)].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decayed else 0.0, "rate": rate}
        for (rate, decayed), parameters in groups.items() if parameters
    ]


def set_learning_rate(optimiser: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group of `parameter_groups` its share of the learning rate of a step."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate * group["rate"]


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) over the groups of `model`, in its fused form, which the CPU and CUDA have."""
    groups = parameter_groups(model, config.weight_decay, config.route_rate)
    optimiser = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
    set_learning_rate(optimiser, config.learning_rate)
    return optimiser
