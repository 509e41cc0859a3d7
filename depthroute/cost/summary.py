"""What a model shape holds and what its routing costs, from its configuration alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from depthroute.cost.flops import core_flops, projected_key_flops, routing_flops, source_counts
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig


def model_facts(config: ModelConfig) -> dict[str, Any]:
    """Parameters by part, counted on a model without storage, and the routing's share of the multiply-adds of the body."""
    import torch

    with torch.device("meta"):
        counts = Decoder(config).parameter_counts()
    facts = {
        "parameters": counts["total"],
        "residual_parameters": counts["residual"],
        "embedding_parameters": counts["embedding"],
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "mlp_width": config.mlp_width,
        "context": config.context,
        "vocabulary": config.vocabulary,
        "residual": describe(config.residual),
    }
    percent = routing_percent(config)
    return facts if percent is None else facts | {"routing_flops_percent": percent}


def describe(method: ResidualConfig) -> str:
    """A method and its settings that are not the usual ones."""
    fields = [field for field in dataclasses.fields(method) if getattr(method, field.name) != field.default]
    return ", ".join([method.name, *(f"{field.name} {getattr(method, field.name)}" for field in fields)])


def routing_percent(config: ModelConfig) -> float | None:
    """Multiply-adds of routing per token as a percentage of the body's weight matrices (Low-Rank AttnRes, Appendix F).

    None for methods outside the AttnRes family and a plain stream, whose FLOPs are not counted here.
    """
    method = config.residual
    if isinstance(method, PreNormConfig):
        return 0.0
    if not isinstance(method, AttnResConfig):
        return None
    sublayers = 2 * config.layers
    sources = source_counts(sublayers, method.block_ends(sublayers))
    counts = [count if method.window is None else min(count, method.window + 1) for count in sources]
    reads = {"shared": 1, "tied": 1, "separate": 3}.get(method.roles, 2)  # of an attention site
    counts += counts[:-1:2] * (reads - 1)
    rank = method.rank or config.width
    cost = routing_flops(config.width, rank, counts)
    heads = config.heads * config.resolved_head_width
    if method.keys == "projected":
        cost += projected_key_flops(config.layers, config.width, config.mlp_width, rank, heads)
    key_values = config.resolved_key_value_heads * config.resolved_head_width
    return 100 * cost / core_flops(config.layers, config.width, config.mlp_width, attention_width=heads, key_value_width=key_values)
