"""Facts about network shapes that an estimate needs: of any configuration, and of published models that are too large to build here.

The published ones are mixtures of experts with linear attention in most layers (Kimi Linear technical report; Kimi K3 technical report and
released configuration). Their `body` stands for what a residual method sees of them: width, depth, heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from depthroute.common.errors import RequestError, choose
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig, ResidualConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A network as estimates see it. Counts are of numbers, not bytes."""

    body: ModelConfig
    """Width, layers and heads, and the residual method. Of a published model the widths of MLPs and the vocabulary mean nothing here."""
    parameters: int
    """All of them, without the residual method's."""
    active: int
    """Those that a token is multiplied with, the head included and the embedding not."""
    experts: tuple[int, int] = (1, 1)
    """Routed experts of a layer, and how many of them a token uses."""
    cache: int
    """Numbers that a token leaves for later ones, over all layers."""
    state: int = 0
    """Numbers that a sequence carries whatever its length (linear attention), over all layers."""
    attended: int
    """Multiply-adds of one token with one earlier one, over all layers: scores and mixing."""

    def with_residual(self, method: ResidualConfig) -> Shape:
        return replace(self, body=replace(self.body, residual=method))

    def weights_read(self, tokens: int) -> int:
        """Parameters that a batch of tokens needs at least once, if experts are drawn evenly: all but those of experts nobody chose."""
        number, chosen = self.experts
        if chosen >= number:
            return self.active
        routed = (self.parameters - self.active) / (1 - chosen / number)
        return round(self.active + routed * (1 - chosen / number) * (1 - (1 - chosen / number) ** (tokens - 1)))


def shape_of(model: ModelConfig) -> Shape:
    """A decoder of this library: dense, with softmax attention in every layer."""
    with torch.device("meta"):
        counts = Decoder(model).parameter_counts()
    body = counts["total"] - counts["residual"]
    values = model.resolved_key_value_heads * model.resolved_head_width
    return Shape(
        body=model,
        parameters=body,
        active=body - (0 if model.tied_embeddings else model.vocabulary * model.width),
        cache=2 * model.layers * values,
        attended=2 * model.layers * model.heads * model.resolved_head_width,
    )


def _published(
    *, layers: int, full_layers: int, width: int, heads: int, experts: tuple[int, int], parameters: float, active: float,
    layers_per_block: int, vocabulary: int = 163_840,
) -> Shape:  # fmt: skip
    """Linear attention (KDA) with states [128, 128] a head, and latent attention (MLA) whose cache holds 512 + 64 numbers a token.

    With the latent absorbed into the queries a head compares 576 numbers with an earlier token's and mixes 512.
    """
    method = AttnResConfig(layers_per_block=layers_per_block)
    body = ModelConfig(
        vocabulary=vocabulary, width=width, layers=layers, heads=heads, head_width=128, mlp_width=width, context=1 << 20,
        tied_embeddings=False, residual=method,
    )  # fmt: skip
    return Shape(
        body=body,
        parameters=round(parameters),
        active=round(active),
        experts=experts,
        cache=full_layers * (512 + 64),
        state=(layers - full_layers) * heads * 128 * 128,
        attended=full_layers * heads * (512 + 64 + 512),
    )


SHAPES = {
    "kimi-linear-48b": _published(
        layers=27, full_layers=7, width=2_304, heads=32, experts=(256, 8), parameters=48e9, active=3e9, layers_per_block=3
    ),
    "kimi-k3": _published(
        layers=93, full_layers=24, width=7_168, heads=96, experts=(896, 16), parameters=2.78e12, active=104e9, layers_per_block=12
    ),
}
DESCRIPTIONS = {
    "kimi-linear-48b": "27 layers x 2304, 48B parameters, 3B active; Attention Residuals, section 5.2, with blocks of 6 sub-layers",
    "kimi-k3": "93 layers x 7168, 2.78T parameters, 104B active; blocks of 12 layers",
}


def published(name: str) -> Shape:
    """A published shape by name; RequestError with the nearest right one otherwise."""
    if name not in SHAPES:
        raise RequestError(choose("shape", name, SHAPES))
    return SHAPES[name]
