"""Facts about network shapes that an estimate needs: of any configuration, and of published models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from depthroute.common.errors import RequestError, choose
from depthroute.cost.inside import roles_read
from depthroute.model import Decoder, ModelConfig
from depthroute.model import layer_work as layers
from depthroute.model.published import K3_LAYERS_PER_BLOCK, LINEAR_LAYERS_PER_BLOCK, kimi_k3, kimi_linear_48b
from depthroute.residual import AttnResConfig, ResidualConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A network as estimates see it. Counts are of numbers, not bytes."""

    body: ModelConfig
    """The configuration, and the residual method."""
    parameters: int
    """All of them, without the residual method's."""
    active: int
    """Those that a token is multiplied with or that are added to it: of routed experts the chosen ones, the head and not the embedding."""
    routed: int = 0
    """Those of routed experts, over all layers."""
    experts: tuple[int, int] = (1, 1)
    """Routed experts of a layer, and how many of them a token uses."""
    cache: int
    """Numbers that a token leaves for later ones, over all layers."""
    state: int = 0
    """Numbers that a sequence carries whatever its length (KDA), over all layers."""
    attended: int
    """Multiply-adds of one token with one earlier one in a pass over a sequence, over all layers: scores and mixing."""
    attended_cached: int
    """The same in decoding, where MLA attends to latent vectors as they are."""
    updates: int = 0
    """Multiply-adds of one token with states, over all layers, in decoding."""
    updates_chunked: int = 0
    """The same in a pass over a sequence, which goes in chunks."""

    def with_residual(self, method: ResidualConfig) -> Shape:
        return shape_of(replace(self.body, residual=method))

    def weights_read(self, tokens: int) -> int:
        """Parameters that a batch of tokens needs at least once, if experts are drawn evenly: all but those of experts nobody chose."""
        number, chosen = self.experts
        missed = 1 - chosen / number
        return round(self.active + self.routed * (missed - missed**tokens))


def shape_of(model: ModelConfig) -> Shape:
    """A decoder of this library, counted on one without storage."""
    with torch.device("meta"):
        decoder = Decoder(model)
    counts = decoder.parameter_counts()
    body, routed = counts["total"] - counts["residual"], layers.routed_parameters(model)
    number, chosen = (1, 1) if model.experts is None else (model.experts.number, model.experts.chosen)
    unused = routed // number * (number - chosen) + (0 if model.tied_embeddings else model.vocabulary * model.width)
    every = range(model.layers)
    apart = [key != value for _, key, value in roles_read(model)] if model.mla is not None else [False] * model.layers
    whole = decoder.residual.has_values
    return Shape(
        body=model,
        parameters=body,
        active=body - unused,
        routed=routed,
        experts=(number, chosen),
        cache=sum(layers.cached(model, layer, whole, apart[layer]) for layer in every),
        state=sum(layers.state(model, layer) for layer in every),
        attended=sum(layers.attended(model, layer) for layer in every),
        attended_cached=sum(layers.attended(model, layer, cached=not whole) for layer in every),
        updates=sum(layers.state_products(model, layer, chunked=False) for layer in every),
        updates_chunked=sum(layers.state_products(model, layer, chunked=True) for layer in every),
    )


SHAPES: Mapping[str, Callable[[], ModelConfig]] = {
    "kimi-linear-48b": lambda: kimi_linear_48b(AttnResConfig(layers_per_block=LINEAR_LAYERS_PER_BLOCK)),
    "kimi-k3": lambda: kimi_k3(AttnResConfig(layers_per_block=K3_LAYERS_PER_BLOCK)),
}


def published(name: str) -> Shape:
    """A published shape by name; RequestError with the nearest right one otherwise."""
    if name not in SHAPES:
        raise RequestError(choose("shape", name, SHAPES))
    return shape_of(SHAPES[name]())
