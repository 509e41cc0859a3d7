"""What a body may have in place of softmax attention and dense MLPs: the parts of Kimi Linear and Kimi K3, and their settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from depthroute.common.errors import RequestError, choose

MixerName = Literal["softmax", "kda", "mla"]
OutputGate = Literal["low_rank", "full"]


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention (Kimi Linear, 2025): a delta rule whose state decays by channel, in place of attention to every earlier token.

    Heads and their width are the model's. `convolution`: tokens that the short convolutions of queries, keys and values see.
    `decay_floor`: None is Kimi Linear's gate, with decays exp(-exp(a) softplus(z)); a negative number is Kimi K3's,
    exp(floor sigmoid(exp(a) z)), which no token decays below. `output_gate`: a product of two matrices through the width of a head, as in
    Kimi Linear, or one matrix, as in Kimi K3.
    """

    convolution: int = 4
    decay_floor: float | None = None
    output_gate: OutputGate = "low_rank"

    def __post_init__(self) -> None:
        at_least_one("model.kda", self, "convolution")
        if self.output_gate not in get_args(OutputGate):
            raise RequestError(f"model.kda.output_gate: {choose('value', str(self.output_gate), get_args(OutputGate))}")
        if self.decay_floor is not None and not float("-inf") < self.decay_floor < 0:
            raise RequestError(f"model.kda.decay_floor = {self.decay_floor} is not allowed; it is the logarithm of a decay, below 0.")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention without positions (DeepSeek-V2; Kimi Linear): keys and values are made of one latent vector a token.

    Heads and their width are the model's: that of a head's own key and of its value. `latent`: width of the latent vector, which is what a
    cache holds. `shared_key`: coordinates of a key that all heads share (the rotated ones of DeepSeek, which are not rotated here).
    `query_latent`: width of a latent vector for queries; None is none. `output_gate`: a sigmoid gate on what the heads put out (Kimi K3).
    """

    latent: int = 512
    shared_key: int = 64
    query_latent: int | None = None
    output_gate: bool = False

    def __post_init__(self) -> None:
        at_least_one("model.mla", self, "latent", "shared_key", "query_latent")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP (DeepSeek-V3; Kimi Linear): a sigmoid router that is balanced by a bias, without a loss.

    `number`: routed experts of a layer, each of `width`; `chosen`: how many of them a token uses. `shared`: experts that every token uses,
    together one MLP of `shared` times the width. `dense_layers`: the first layers, which keep their dense MLP. `scaling`: what the routed
    experts' weights, which add up to one, are multiplied by. `balance_rate`: how far the bias of an expert moves after a step. `latent`:
    width in which the routed experts work, between two matrices of the layer (Kimi K3); None is the model's.
    """

    number: int
    chosen: int
    width: int
    shared: int = 1
    dense_layers: int = 1
    scaling: float = 1.0
    balance_rate: float = 1e-3
    latent: int | None = None

    def __post_init__(self) -> None:
        at_least_one("model.experts", self, "number", "chosen", "width", "latent")
        if self.chosen > self.number:
            raise RequestError(f"model.experts.chosen = {self.chosen} is more than the {self.number} experts of model.experts.number.")
        for name in ("shared", "dense_layers", "balance_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(f"model.experts.{name} = {getattr(self, name)} is not allowed; it takes 0 or more.")
        if not 0 < self.scaling < math.inf:
            raise RequestError(f"model.experts.scaling = {self.scaling} is not allowed; it must be positive and finite.")


def at_least_one(owner: str, config: object, *names: str) -> None:
    """Refuse sizes below 1; None is not one. RequestError by the field's whole name."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise RequestError(f"{owner}.{name} = {value} is not allowed; it takes 1 or more.")
