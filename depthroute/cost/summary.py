"""What a model shape holds and what its routing costs, from its configuration alone."""

from __future__ import annotations

from typing import Any

from depthroute.cost.flops import core_flops, projected_key_flops, routing_flops, source_counts
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, block_ends


def model_facts(config: ModelConfig) -> dict[str, Any]:
    """Parameters by part, counted on a model without storage, and the routing's share of the multiply-adds of the body."""
    import torch

    with torch.device("meta"):
        counts = Decoder(config).parameter_counts()
    method = config.residual
    return {
        "parameters": counts["total"],
        "residual_parameters": counts["residual"],
        "embedding_parameters": counts["embedding"],
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "mlp_width": config.mlp_width,
        "context": config.context,
        "vocabulary": config.vocabulary,
        "residual": method.name if not isinstance(method, AttnResConfig) else f"{method.name}, {describe(method)}",
        "routing_flops_percent": routing_percent(config),
    }


def describe(method: AttnResConfig) -> str:
    """The choices that make a member of the AttnRes family."""
    size = next((f"{name} {value}" for name in ("block", "layers_per_block", "num_blocks") if (value := getattr(method, name))), "full")
    keys = f"{'projected' if method.keys == 'projected' else 'sliced'} keys, rank {method.rank or 'width'}"
    return f"{size}, {keys}, roles {method.roles}"


def routing_percent(config: ModelConfig) -> float:
    """Multiply-adds of routing per token as a percentage of the body's weight matrices (Low-Rank AttnRes, Appendix F)."""
    method = config.residual
    if not isinstance(method, AttnResConfig):
        return 0.0
    sublayers = 2 * config.layers
    ends = block_ends(sublayers, block=method.block, layers_per_block=method.layers_per_block, num_blocks=method.num_blocks)
    counts = list(source_counts(sublayers, ends))
    if method.roles not in ("shared", "tied"):  # attention sites are read twice
        counts += counts[:-1:2]
    rank = method.rank or config.width
    cost = routing_flops(config.width, rank, counts)
    heads = config.heads * config.resolved_head_width
    if method.keys == "projected":
        cost += projected_key_flops(config.layers, config.width, config.mlp_width, rank, heads)
    key_values = config.resolved_key_value_heads * config.resolved_head_width
    return 100 * cost / core_flops(config.layers, config.width, config.mlp_width, attention_width=heads, key_value_width=key_values)
