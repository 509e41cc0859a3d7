"""What the arms of a plan compute in training, from their configurations alone: no model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthroute.common.config import from_json
from depthroute.cost.work import FORMULAS, body_work, routing_work
from depthroute.model import ModelConfig
from depthroute.model.layer_work import attended, state_products
from depthroute.train import RunConfig

OPERATIONS = 2  # a multiply-add is a multiplication and an addition
PASSES = 3  # forward, and the backward's two products for each of the forward's


def arm_compute(plan: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """By arm: `plain` and `residual`, FLOPs per trained token of the decoder without its residual method and of what that adds, and
    `tokens`, how many it trains on. `statistics.json` holds this, so that a report needs no model.

    `plain` counts the weights of all layers, of experts those that a token goes through, the output head, attention scores and mixing over
    the mean number of positions that a causal mask leaves, (context + 1) / 2, and the states of KDA in chunks. Norms, softmaxes and the
    embedding's look-up are not counted, nor is it subtracted what a mask between documents leaves out. `residual` is counted as in Low-Rank
    Attention Residuals, Appendix F, and is None for a method that has no formula.
    """
    found: dict[str, dict[str, float | None]] = {}
    for arm in plan["arms"]:
        config = from_json(RunConfig, arm["config"])
        found[arm["name"]] = {**token_compute(config.model), "tokens": config.train.steps * config.tokens_per_step}
    return found


def token_compute(model: ModelConfig) -> dict[str, float | None]:
    """`plain` and `residual` of one shape, FLOPs of forward and backward per token."""
    pairs = sum(attended(model, layer) for layer in range(model.layers))
    states = sum(state_products(model, layer, chunked=True) for layer in range(model.layers))
    plain = body_work(model) + states + model.vocabulary * model.width + pairs * (model.context + 1) / 2
    residual = routing_work(model).total if type(model.residual) in FORMULAS else None
    each = OPERATIONS * PASSES
    return {"plain": each * plain, "residual": None if residual is None else float(each * residual)}
