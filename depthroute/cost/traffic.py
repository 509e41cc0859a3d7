"""Memory traffic of every residual method, per token, beside what the sub-layers move themselves.

Two ways of counting:

- `least_traffic`, for every method: between two sub-layers lies one pass that writes what the first put out and reads for the second.
  Every tensor that it touches is read once and every tensor that is new is written once, so that no implementation of the same steps moves
  less. The sub-layer's output is read; what it writes is the sub-layer's own, and so is the norm behind a read. Parameters are not
  counted. A read that hands on a tensor which is there already (the plain stream) moves nothing.
- `table_traffic`, for the four rows of Attention Residuals, Table 1, by its formulas: it goes pass by pass as frameworks do for
  Hyper-Connections, charges keys and values apart for Full AttnRes, lets every block read as many sources as the last, and does not count
  that a block's partial sum is written beside what is read.

The plain stream is 3d in both. All numbers are elements: times the bytes of one they are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.cost.banked import Traffic, attnres, delta, dynamic, static
from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig
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


def least_traffic(model: ModelConfig) -> Traffic:
    """Elements per token that the residual method of a model moves over the whole depth, the opening and the last read included.

    Divided by `2 layers` it is the figure per sub-layer, 3 widths for the plain stream.

    Raises:
        RequestError: a method that has no formula here (one registered from outside).
    """
    formula = FORMULAS.get(type(model.residual))
    if formula is None:
        known = ", ".join(sorted(config.name for config in FORMULAS))
        raise RequestError(f"the traffic of the residual method {model.residual.name!r} has no formula; there is one for: {known}.")
    return formula(model.residual, model)


def table_traffic(method: ResidualConfig, *, width: int, sublayers: int, groups: int = 8) -> float | None:
    """Elements per token and sub-layer by Attention Residuals, Table 1; None for a method that the table does not have.

    Standard: 3d. n streams: (8n + 2)d + 2n^2 + 4n. Full AttnRes read in `groups` N of S sub-layers, two-phase: (S + N)d. Block AttnRes with
    N blocks of S: (N/S + 5)d.
    """
    if isinstance(method, PreNormConfig | PostNormConfig | ReZeroConfig | LayerScaleConfig):
        return 3.0 * width
    if isinstance(method, HyperConnectionsConfig | MHCConfig):
        n = method.streams
        return (8 * n + 2) * width + 2 * n * n + 4 * n
    if not (isinstance(method, AttnResConfig) and _as_in_the_table(method)):
        return None
    if not method.has_blocks:
        return (sublayers / groups + groups) * width
    blocks = len(method.block_ends(sublayers))
    return (blocks / (sublayers / blocks) + 5) * width


def _as_in_the_table(method: AttnResConfig) -> bool:
    """One route for all roles, unprojected keys, and sources that are sums and stay."""
    one_route = method.roles in ("shared", "tied") and method.keys == "slice"
    return one_route and method.window is None and method.summary == "sum" and method.values == "raw"


def _plain(method: ResidualConfig, model: ModelConfig) -> Traffic:
    """The stream and the output are read and the stream is written."""
    return _stream(model)


def _stream(model: ModelConfig, read: float = 0, written: float = 0) -> Traffic:
    """The plain stream over the depth, and what comes on top of it in all."""
    passes = 2 * model.layers * model.width
    return Traffic(2 * passes + read, passes + written)


def _highway(method: ResidualConfig, model: ModelConfig) -> Traffic:
    return _stream(model, read=2 * model.layers * model.width)  # the gate sees the normalised stream


def _laurel(method: LaurelConfig, model: ModelConfig) -> Traffic:
    earlier = sum(max(0, min(method.previous, site + 1) - 1) for site in range(2 * model.layers))
    return _stream(model, read=earlier * model.width)


def _skips(method: SkipsConfig, model: ModelConfig) -> Traffic:
    layers, width = model.layers, model.width
    half, read, written = layers // 2, 0, 0
    if method.embedding:
        read, written = 1 + layers - 1, 2  # the embedding is read, normalised and mixed once, then read before every layer
    for layer in range(1, layers if method.unet else 0):
        at_once = layer >= layers - half and layer - 1 < half  # what was put out last comes back before anything else is put out
        read += layer >= layers - half and not at_once
        written += method.embedding and layer - 1 < half and not at_once
    return _stream(model, read * width, written * width)


def _denseformer(method: DenseFormerConfig, model: ModelConfig) -> Traffic:
    layers, width = model.layers, model.width
    sums = range(method.period, layers + 1, method.period)
    read = sum(i // method.dilation for i in sums)
    kept = sum(any(later > i and (later - i) % method.dilation == 0 for later in sums) for i in sums)
    return _stream(model, read * width, kept * width)


def _muddformer(method: MUDDFormerConfig, model: ModelConfig) -> Traffic:
    layers, width = model.layers, model.width
    read, written = sum(range(1, layers + 1)), WAYS * (layers - 1) + 1
    normalised = 1 if method.prepost else 0  # the embedding as a source
    return _stream(model, (read + normalised) * width, (written + normalised) * width)


def _mrla(method: MRLAConfig, model: ModelConfig) -> Traffic:
    layers, stage = model.layers, method.stage or model.layers
    if method.light:
        return _stream(model, sum(layer % stage > 0 for layer in range(layers)) * model.width, layers * model.width)
    alone = layers % stage == 1 or stage == 1  # the last layer begins a stage: nothing is kept
    return _stream(model, 2 * sum(layer % stage for layer in range(layers)) * model.width, 2 * (layers - alone) * model.width)


def _streams(method: HyperConnectionsConfig | MHCConfig, model: ModelConfig) -> Traffic:
    """Streams, output and a site's coefficients are read; streams, the next coefficients and what the sub-layer reads are written."""
    sublayers, width, n = 2 * model.layers, model.width, method.streams
    dynamic = isinstance(method, MHCConfig) or method.dynamic
    coefficients = n * (n + 2) * sublayers if dynamic else 0
    last = n if isinstance(method, MHCConfig) and method.head == "hyper" else 0
    return Traffic(
        width + sublayers * (n + 1) * width + coefficients, width + sublayers * (n + 1) * width + coefficients + last
    )


def _linear(method: LinearDepthConfig, model: ModelConfig) -> Traffic:
    """As streams that are read and written without coefficients of a token. The first read is the embedding's own stream."""
    sublayers, width, n = 2 * model.layers, model.width, method.rank + 1
    return Traffic(width + sublayers * (n + 1) * width, n * width + sublayers * (n + 1) * width)


def _value_residual(method: ValueResidualConfig, model: ModelConfig) -> Traffic:
    mixed = 0 if method.shared else max(0, model.layers - method.start)
    return _stream(model, 2 * mixed * _values(model), mixed * _values(model))


def _depth_attention(method: DepthAttentionConfig, model: ModelConfig) -> Traffic:
    """A layer that looks at others reads its queries, keys and values, and a key and a value of each; mixed values are written."""
    stride, read, written = method.stride or max(1, model.layers // 2), 0, 0
    values, queries = _values(model), model.heads * model.resolved_head_width
    for layer in range(model.layers):
        earlier = {*range(layer - stride, -1, -stride), *range(max(0, layer - method.window), layer)}
        if earlier:
            read += queries + 2 * values * (1 + len(earlier))
            written += values
    return _stream(model, read, written)


def _values(model: ModelConfig) -> int:
    return model.resolved_key_value_heads * model.resolved_head_width


Formula = Callable[[Any, ModelConfig], Traffic]

FORMULAS: Mapping[type[ResidualConfig], Formula] = {
    PreNormConfig: _plain,
    PostNormConfig: _plain,
    ReZeroConfig: _plain,
    LayerScaleConfig: _plain,
    HighwayConfig: _highway,
    LaurelConfig: _laurel,
    SkipsConfig: _skips,
    DenseFormerConfig: _denseformer,
    MUDDFormerConfig: _muddformer,
    MRLAConfig: _mrla,
    HyperConnectionsConfig: _streams,
    MHCConfig: _streams,
    AttnResConfig: attnres,
    StaticMixConfig: static,
    DynamicQueryConfig: dynamic,
    LinearDepthConfig: _linear,
    DeltaConfig: delta,
    ValueResidualConfig: _value_residual,
    DepthAttentionConfig: _depth_attention,
}
