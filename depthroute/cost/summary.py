"""What a model shape holds and what its routing costs, from its configuration alone."""

from __future__ import annotations

from typing import Any

from depthroute.common.config import to_json
from depthroute.cost.body_words import body_facts
from depthroute.cost.shapes import shape_of
from depthroute.cost.work import FORMULAS, body_work, routing_work
from depthroute.model import Decoder, ModelConfig


def model_facts(config: ModelConfig) -> dict[str, Any]:
    """Parameters by part, counted on a model without storage, and the routing's share of the multiply-adds of the body."""
    import torch

    with torch.device("meta"):
        counts = Decoder(config).parameter_counts()
    active = {} if config.experts is None else {"active_parameters": shape_of(config).active}
    facts = {
        "parameters": counts["total"],
        "residual_parameters": counts["residual"],
        "embedding_parameters": counts["embedding"],
        **active,
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "mlp_width": config.mlp_width,
        **body_facts(to_json(config)),
        "context": config.context,
        "vocabulary": config.vocabulary,
        "residual": config.residual.describe(),
    }
    percent = routing_percent(config)
    return facts if percent is None else facts | {"routing_flops_percent": percent}


def parameter_parts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part, counted on a model without storage: embedding (with the head, where that is separate), attention (whatever mixes
    the tokens), mlp (shared experts are one), experts (the routed ones of a model that has them, with router and latent matrices), norms
    (all of the body's), residual (all that the method adds), total."""
    import torch

    with torch.device("meta"):
        model = Decoder(config)
    parts = dict.fromkeys(("embedding", "attention", "mlp", *(["experts"] if config.experts else []), "norms", "residual"), 0)
    for name, parameter in model.named_parameters():
        path = name.split(".")
        if path[0] in ("embedding", "head"):
            part = "embedding"
        elif path[0] == "residual":
            part = "residual"
        else:
            routed = path[2:3] == ["mlp"] and path[3] != "shared" and config.has_experts(int(path[1]))
            part = "norms" if any(step.endswith("norm") for step in path) else "experts" if routed else path[2]
        parts[part] += parameter.numel()
    return parts | {"total": sum(parts.values())}


def residual_parameters(config: ModelConfig) -> int:
    """What the residual method adds, counted without storage."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in config.residual.module(config.body).parameters())


def routing_percent(config: ModelConfig) -> float | None:
    """Multiply-adds of the residual method per token as a percentage of the body's weight matrices (Low-Rank AttnRes, Appendix F).

    None for a method that has no formula, which is one from outside.
    """
    if type(config.residual) not in FORMULAS:
        return None
    return 100 * routing_work(config).total / body_work(config)
