"""Multiply-adds of every residual method, per token over the whole depth, by what they are for.

The accounting is that of Low-Rank Attention Residuals, Appendix F, carried over to the other methods: norms, softmaxes, Sinkhorn iterations
and plain additions are not counted, so the plain stream costs nothing. A read of one source costs nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.cost.flops import source_counts
from depthroute.cost.reads import site_reads
from depthroute.model import ModelConfig
from depthroute.model.layer_work import body_products
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig
from depthroute.residual.bank import BankConfig
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.denseformer import DenseFormerConfig
from depthroute.residual.depth_attention import DepthAttentionConfig
from depthroute.residual.dynamic import DynamicQueryConfig
from depthroute.residual.highway import HighwayConfig
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.laurel import LaurelConfig
from depthroute.residual.layerscale import LayerScaleConfig
from depthroute.residual.linear import LinearDepthConfig
from depthroute.residual.mhc import MHCConfig
from depthroute.residual.mrla import MRLAConfig
from depthroute.residual.muddformer import WAYS, MUDDFormerConfig
from depthroute.residual.postnorm import PostNormConfig
from depthroute.residual.rezero import ReZeroConfig
from depthroute.residual.skips import SkipsConfig
from depthroute.residual.static import StaticMixConfig
from depthroute.residual.values import ValueResidualConfig


@dataclass(frozen=True, kw_only=True)
class Work:
    """Multiply-adds per token: comparing keys with queries, weighing what is mixed, and maps that make keys, queries or coefficients."""

    score: int = 0
    value: int = 0
    projection: int = 0

    @property
    def total(self) -> int:
        return self.score + self.value + self.projection


def routing_work(model: ModelConfig) -> Work:
    """What the residual method of a model adds to its arithmetic.

    Raises:
        RequestError: a method that has no formula here (one registered from outside).
    """
    formula = FORMULAS.get(type(model.residual))
    if formula is None:
        known = ", ".join(sorted(config.name for config in FORMULAS))
        raise RequestError(f"the arithmetic of the residual method {model.residual.name!r} has no formula; there is one for: {known}.")
    return formula(model.residual, model)


def body_work(model: ModelConfig) -> int:
    """Multiply-adds per token of the body's weights, without embedding, head, attention scores and states (Appendix F, eq. 68).

    `depthroute.model.layer_work.layer_products` says what counts where layers have other mixers, or experts.
    """
    return body_products(model)


def _values(model: ModelConfig) -> int:
    return model.resolved_key_value_heads * model.resolved_head_width


def _prenorm(method: PreNormConfig, model: ModelConfig) -> Work:
    return Work()


def _postnorm(method: PostNormConfig, model: ModelConfig) -> Work:
    return Work(value=2 * model.layers * model.width if method.deep else 0)


def _scaled(method: ResidualConfig, model: ModelConfig) -> Work:
    return Work(value=2 * model.layers * model.width)


def _highway(method: HighwayConfig, model: ModelConfig) -> Work:
    sites, width, gates = 2 * model.layers, model.width, 1 if method.coupled else 2
    return Work(value=2 * sites * width, projection=gates * sites * width * (width if method.gate == "full" else 1))


def _laurel(method: LaurelConfig, model: ModelConfig) -> Work:
    sites, width = 2 * model.layers, model.width
    earlier = sum(min(method.previous, site + 1) for site in range(sites))
    return Work(value=(2 * sites * method.weights + earlier) * width, projection=2 * sites * width * (method.rank or 0))


def _skips(method: SkipsConfig, model: ModelConfig) -> Work:
    return Work(value=(2 * model.layers * method.embedding + model.layers // 2 * method.unet) * model.width)


def _denseformer(method: DenseFormerConfig, model: ModelConfig) -> Work:
    sums = range(method.period, model.layers + 1, method.period)
    return Work(value=sum(i // method.dilation + 1 for i in sums) * model.width)


def _muddformer(method: MUDDFormerConfig, model: ModelConfig) -> Work:
    width, value, projection = model.width, 0, 0
    for layer in range(model.layers):
        ways, sources = 1 if layer == model.layers - 1 else WAYS, layer + 2
        hidden = WAYS * sources
        hidden = (hidden // 64 + 1) * 64 if method.rounded else hidden
        value += ways * sources * width
        projection += hidden * (width + ways * sources)
    return Work(value=value, projection=projection)


def _mrla(method: MRLAConfig, model: ModelConfig) -> Work:
    """Values are a gain a channel; queries and keys are convolutions over the channels."""
    layers, width, stage = model.layers, model.width, method.stage or model.layers
    taps = int((math.log2(width) + 1) / 2) // 2 * 2 + 1
    score = value = projection = 0
    for layer in range(layers):
        place = layer % stage
        alone = place == 0 and (stage == 1 or layer == layers - 1)
        query, key = method.light or place > 0, method.light or not alone
        seen = 0 if not query else 1 if method.light else place + 1
        score += seen * width
        value += (seen + (method.light and place > 0)) * width
        projection += (1 + taps * (query + key)) * width
    return Work(score=score, value=value, projection=projection)


def _hyper(method: HyperConnectionsConfig, model: ModelConfig) -> Work:
    sites, width, n = 2 * model.layers, model.width, method.streams
    return Work(value=sites * n * (n + 2) * width, projection=sites * n * (n + 2) * width if method.dynamic else 0)


def _mhc(method: MHCConfig, model: ModelConfig) -> Work:
    sites, width, n = 2 * model.layers, model.width, method.streams
    last = method.head == "hyper"
    return Work(value=(sites * n * (n + 2) + last * n) * width, projection=n * (sites * n * (n + 2) + last * n) * width)


def _linear(method: LinearDepthConfig, model: ModelConfig) -> Work:
    return Work(value=(2 * 2 * model.layers + 1) * (method.rank + 1) * model.width)  # writes, reads, and the embedding's write


def _value_residual(method: ValueResidualConfig, model: ModelConfig) -> Work:
    mixed = 0 if method.shared else max(0, model.layers - method.start)
    return Work(value=2 * mixed * _values(model))


def _depth_attention(method: DepthAttentionConfig, model: ModelConfig) -> Work:
    stride, seen = method.stride or max(1, model.layers // 2), 0
    for layer in range(model.layers):
        earlier = {*range(layer - stride, -1, -stride), *range(max(0, layer - method.window), layer)}
        seen += len(earlier) + 1 if earlier else 0
    return Work(score=seen * _values(model), value=seen * _values(model))


def _counts(method: BankConfig, model: ModelConfig) -> list[int]:
    """Sources of every site, the last included."""
    sources = source_counts(2 * model.layers, method.block_ends(2 * model.layers))
    return [count if method.window is None else min(count, method.window + 1) for count in sources]


def _attnres(method: AttnResConfig, model: ModelConfig) -> Work:
    rank = method.rank or model.width
    seen = sum(read.queries * read.sources for read in site_reads(method, 2 * model.layers) if read.sources > 1)
    projection = 0
    if method.keys == "projected":
        projection = rank * (model.width + sum(map(model.body.activation, range(2 * model.layers))))  # eq. 41
    return Work(score=rank * seen, value=model.width * seen, projection=projection)


def _static(method: StaticMixConfig, model: ModelConfig) -> Work:
    return Work(value=sum(_counts(method, model)[1:]) * model.width)


def _dynamic(method: DynamicQueryConfig, model: ModelConfig) -> Work:
    width, rank, seen = model.width, method.rank or model.width, sum(_counts(method, model)[1:])
    query = width * rank if method.query_rank is None else method.query_rank * (width + rank)
    return Work(score=rank * seen, value=width * seen, projection=2 * model.layers * query)


def _delta(method: DeltaConfig, model: ModelConfig) -> Work:
    """Reads see closed sources alone; the first and the last site take the stream as it is."""
    sublayers, width = 2 * model.layers, model.width
    ends = method.block_ends(sublayers)
    counts = [1 + sum(end <= site for end in ends) for site in range(1, sublayers)]
    counts = [count if method.window is None else min(count, method.window + 1) for count in counts]
    seen = sum(count for count in counts if count > 1)
    return Work(score=width * seen, value=width * (seen + (method.gate != "none") * len(counts)))


Formula = Callable[[Any, ModelConfig], Work]

FORMULAS: Mapping[type[ResidualConfig], Formula] = {
    PreNormConfig: _prenorm,
    PostNormConfig: _postnorm,
    ReZeroConfig: _scaled,
    LayerScaleConfig: _scaled,
    HighwayConfig: _highway,
    LaurelConfig: _laurel,
    SkipsConfig: _skips,
    DenseFormerConfig: _denseformer,
    MUDDFormerConfig: _muddformer,
    MRLAConfig: _mrla,
    HyperConnectionsConfig: _hyper,
    MHCConfig: _mhc,
    AttnResConfig: _attnres,
    StaticMixConfig: _static,
    DynamicQueryConfig: _dynamic,
    LinearDepthConfig: _linear,
    DeltaConfig: _delta,
    ValueResidualConfig: _value_residual,
    DepthAttentionConfig: _depth_attention,
}
