"""The depth-mixing matrix M of a residual method: h_l = sum_i M[l, i] v_i (Attention Residuals, section 6).

h_l is what is read at site l before its norm, the last read included; v_0 is the embedding and v_i what sub-layer i - 1 writes. With a
norm behind sub-layers v_i is what comes out of that. M is (2L+1) x (2L+1), lower triangular, and different for every token where weights
are; what is written down are its mean and its spread over tokens. Where channels have weights of their own (heads, gains or gates a
channel) a token's M is the mean over channels. Gates and gains a channel need N numbers a token and channel, as much as a bank of all
outputs: for these take fewer tokens at a time.

Sub-layers that a block sums share its weight, so that a row of Block AttnRes does not sum to one: its weights over sources do, and that
is what is checked there.

Shapes: N = 2L + 1, G groups of channels, ... leading dimensions (batch, tokens), D width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from depthroute.analysis.mixing_banks import AttnResRead, DeltaRead, DynamicQueryRead, StaticMixRead
from depthroute.analysis.mixing_rows import AnyComposition, Row, Step
from depthroute.analysis.mixing_streams import (
    DenseFormerStream,
    HighwayStream,
    LaurelStream,
    LayerScaleStream,
    LinearDepthRead,
    MUDDFormerStream,
    Plain,
    PostNormStream,
    ReZeroStream,
    SkipsStream,
    StreamsMixed,
)
from depthroute.common.errors import RequestError
from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, Memory, PreNormConfig, ResidualConfig
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
from depthroute.residual.muddformer import MUDDFormerConfig
from depthroute.residual.postnorm import PostNormConfig
from depthroute.residual.rezero import ReZeroConfig
from depthroute.residual.skips import SkipsConfig
from depthroute.residual.static import StaticMixConfig
from depthroute.residual.values import ValueResidualConfig

COMPOSITIONS: dict[type[ResidualConfig], type[AnyComposition]] = {
    PreNormConfig: Plain,
    ValueResidualConfig: Plain,
    DepthAttentionConfig: Plain,
    PostNormConfig: PostNormStream,
    ReZeroConfig: ReZeroStream,
    LayerScaleConfig: LayerScaleStream,
    HighwayConfig: HighwayStream,
    LaurelConfig: LaurelStream,
    SkipsConfig: SkipsStream,
    DenseFormerConfig: DenseFormerStream,
    MUDDFormerConfig: MUDDFormerStream,
    HyperConnectionsConfig: StreamsMixed,
    MHCConfig: StreamsMixed,
    LinearDepthConfig: LinearDepthRead,
    AttnResConfig: AttnResRead,
    StaticMixConfig: StaticMixRead,
    DynamicQueryConfig: DynamicQueryRead,
    DeltaConfig: DeltaRead,
}

NONE: dict[type[ResidualConfig], str] = {
    MRLAConfig: "what is added after a layer mixes no outputs, but values: the normalised stream times a learned gain a channel",
}


def without_matrix(config: ResidualConfig) -> str | None:
    """Why there is no depth-mixing matrix, or None if there is one."""
    kind = type(config)
    if kind in NONE:
        return NONE[kind]
    return COMPOSITIONS[kind].refusal(config) if kind in COMPOSITIONS else f"no depth-mixing matrix is known for {config.name!r}"


class Mixing:
    """Rows of M for every token of a forward pass, from the memory before each read.

    What a sub-layer read and put out is taken by hooks that are there while it runs. `residual.values = "normed"` and embedding skips lose
    the embedding's magnitude before the first read: for these there is a hook on the embedding, as long as this object lives.
    """

    def __init__(self, model: Decoder) -> None:
        """Raises RequestError where the model's method has no depth-mixing matrix."""
        config = model.config.residual
        reason = without_matrix(config)
        if reason is not None:
            raise RequestError(f"{config.name} has no depth-mixing matrix: {reason}.")
        self.model = model
        self.composition = COMPOSITIONS[type(config)](config, model.residual)
        self._embedding: Tensor | None = None
        self._before: Callable[[Tensor], Step] | None = None
        self._inputs: Any = None
        self._output: Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        if self.composition.needs_embedding:
            _keep_embedding(weakref.ref(self), model.embedding)

    @torch.no_grad()
    def rows(self, site: int, memory: Memory) -> dict[str, Row]:
        """The site's row by role; "shared" alone where all roles read the same. To be called before each read, from the first to the last.

        Raises:
            RequestError: the read before was not seen.
        """
        self._release()
        if site == 0:
            if self.composition.needs_embedding and self._embedding is None:
                raise RequestError("the embedding was not seen; rows(0, memory) belongs into a forward pass of the model's own.")
            self.composition.start(memory, self._embedding)
            self._embedding = None
        else:
            if self._before is None or self._output is None:
                raise RequestError(f"sub-layer {site - 1} was not seen; ask for the rows of every site of a forward pass, in order.")
            self.composition.write(self._before(self._output))
        self._before, self._output = None, None
        if site < self.model.residual.body.sublayers:
            self._watch(site, memory)
        return self.composition.rows(memory, site)

    def _watch(self, site: int, memory: Memory) -> None:
        layer: Any = self.model.layers[site // 2]
        attention = site % 2 == 0
        norm = layer.attention_norm if attention else layer.mlp_norm
        behind = layer.attention_output_norm if attention else layer.mlp_output_norm

        def ran(_: nn.Module, inputs: Any, found: Any) -> None:
            self._inputs, self._output = inputs[0], found.output.detach()

        def normed(_: nn.Module, __: Any, output: Tensor) -> None:
            self._output = output.detach()

        self._before = lambda output: Step(site, memory, norm, self._inputs, output)
        self._hooks = [(layer.attention if attention else layer.mlp).register_forward_hook(ran)]
        if behind is not None:
            self._hooks.append(behind.register_forward_hook(normed))

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _keep_embedding(mixing: weakref.ref[Mixing], embedding: nn.Module) -> None:
    def found(_: nn.Module, __: Any, output: Tensor) -> None:
        if (alive := mixing()) is not None:
            alive._embedding = output.detach()

    handle = embedding.register_forward_hook(found)
    if (alive := mixing()) is not None:
        weakref.finalize(alive, handle.remove).atexit = False


class Moments:
    """Mean and sum of squared differences from it, over tokens [N], joined batch by batch: exactly no spread where there is none."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros(())

    def add(self, rows: Tensor, count: int) -> None:
        """`rows` [T, N] of `count` tokens: one each, or one [1, N] for all of them."""
        mean = rows.mean(0)
        squares = (rows - mean).square().sum(0)
        if not self.count:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        difference = mean - self.mean
        self.squares = self.squares + squares + difference.square() * (self.count * count / total)
        self.mean, self.count = self.mean + difference * (count / total), total


class SingularValues(NamedTuple):
    """`values`: singular values of a matrix, largest first. `rank`: how many exceed `tolerance`. `crossing_rank`: see `ranks`."""

    values: list[float]
    tolerance: float
    rank: int
    crossing_rank: int


def ranks(matrix: Tensor, eps: float) -> SingularValues:
    """Numerical ranks of a lower triangular M [N, N]. Singular values count above N eps times the largest of M.

    A lower triangular matrix whose newest outputs have weight has full rank whatever the method. What tells methods apart is what crosses a
    depth: `crossing_rank` is the largest rank of the blocks M[k:, :k+1], all reads from site k on of all that there is before it. It is 1
    for a plain stream, and for a token's Highway with scalar gates; n for n streams; at most the number of sources for block sums
    (m-semiseparable, section 6). A mean of different matrices, over tokens or channels, may have more than each of them.
    """
    values = torch.linalg.svdvals(matrix)
    tolerance = len(matrix) * eps * values[0].item()
    crossing = max(int((torch.linalg.svdvals(matrix[k:, : k + 1]) > tolerance).sum()) for k in range(len(matrix)))
    return SingularValues(values.tolist(), tolerance, int((values > tolerance).sum()), crossing)


class MixingTotals:
    """M over any number of tokens, in memory that does not grow with them. `observe` goes to the decoder's forward pass.

    `reason`: why the method has no such matrix; None if it has one. Without one `observe` does nothing.
    """

    def __init__(self, model: Decoder) -> None:
        self.reason = without_matrix(model.config.residual)
        self._mixing = Mixing(model) if self.reason is None else None
        self._moments: dict[int, dict[str, Moments]] = {}
        self._farthest: dict[str, Tensor] = {}
        exact = next(chain(model.parameters(), [torch.zeros(())])).dtype == torch.float64
        self._eps = torch.finfo(torch.float64 if exact else torch.float32).eps

    @torch.no_grad()
    def observe(self, site: int, memory: Memory) -> None:
        if self._mixing is None:
            return
        count = self._mixing.composition.present(memory)[..., 0].numel()
        for role, row in self._mixing.rows(site, memory).items():
            weights = row.weights.mean(-2, dtype=torch.float64)
            weights = weights.reshape(-1, weights.shape[-1])
            self._moments.setdefault(site, {}).setdefault(role, Moments()).add(weights, count)
            if row.total is not None:
                away = (row.total.double() - 1).abs().max()
                self._farthest[role] = torch.maximum(self._farthest[role], away) if role in self._farthest else away

    def summary(self) -> dict[str, Any] | None:
        """The matrix by role, ready for JSON; None where there is none, or before any token.

        `columns`: what the outputs are called. `rows`: the sites, likewise. `by_channel`: whether entries are means over channels.
        `sums_to_one`: what does by the method's equations, "rows", "weights" (of a read over its sources) or None; `deviation` is the
        largest distance from one over tokens, sites and roles. By role: `mean` and `spread` (standard deviation over tokens) of M, `sums`
        of the mean's rows, `singular_values`, `tolerance`, `rank` and `crossing_rank` of the mean (see `ranks`).
        """
        if self._mixing is None or not self._moments:
            return None
        composition, sites = self._mixing.composition, self._mixing.model.residual.body.sublayers
        roles = dict.fromkeys(role for rows in self._moments.values() for role in rows)
        if len(roles) > 1:  # then "shared" is a row of each of them
            del roles["shared"]
        farthest = max((away.item() for away in self._farthest.values()), default=None)
        names = [f"{'attention' if site % 2 == 0 else 'mlp'} {site // 2}" for site in range(sites)]
        return {
            "tokens": self._moments[0]["shared"].count,
            "rows": [*names, "output"],
            "columns": ["embedding", *names],
            "by_channel": composition.by_channel,
            "sums_to_one": composition.sums_to_one,
            "deviation": farthest if composition.sums_to_one else None,
            "roles": {role: self._matrix(role) for role in roles},
        }

    def _matrix(self, role: str) -> dict[str, Any]:
        rows = [self._moments[site].get(role) or self._moments[site]["shared"] for site in sorted(self._moments)]
        mean = torch.stack([row.mean for row in rows])
        found = ranks(mean, self._eps)
        return {
            "mean": mean.tolist(),
            "spread": torch.stack([(row.squares / row.count).sqrt() for row in rows]).tolist(),
            "sums": mean.sum(-1).tolist(),
            "singular_values": found.values,
            "tolerance": found.tolerance,
            "rank": found.rank,
            "crossing_rank": found.crossing_rank,
        }
