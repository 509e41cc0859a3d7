"""Depth-Attention: values are mixed over layers by attention at the same token, inside token attention (Zeng et al. 2026, arXiv
2606.05014).

In layer l, per key-value head: a_j = softmax_j(q_l . k_j / sqrt(E)) over this layer and some earlier ones; v~_l = a_l v_l + sum_{j<l} a_j
v~_j takes its own raw values and the mixed ones of the others. v~_l replaces v_l in token attention and in a cache. No parameters.

Shapes: B batch, H heads, K key-value heads, T tokens, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Kept, Projected, ResidualConfig, Trace
from depthroute.residual.stream import Beside, added


@dataclass(frozen=True, kw_only=True)
class DepthAttentionConfig(ResidualConfig):
    """Layer l looks at l - stride, l - 2 stride, ... and at the `window` layers before it.

    `stride`: None is half the layers, as the authors train it: the upper half then has one source beside itself.
    Keys and queries are compared as token attention has them: each layer's own norm, rotated. At one position rotation changes no score.
    """

    name: ClassVar[str] = "depth_attention"

    stride: int | None = None
    window: int = 0

    def __post_init__(self) -> None:
        if self.stride is not None and self.stride < 1:
            raise RequestError(f"residual.stride = {self.stride} is not allowed; it takes 1 or more, or none for half the layers.")
        if self.window < 0:
            raise RequestError(f"residual.window = {self.window} is not allowed; it takes 0 or more.")

    def module(self, body: Body) -> DepthAttention:
        return DepthAttention(self, body)


class LayerValues(NamedTuple):
    """What a layer leaves for later ones: keys and mixed values [B, K, T, E]."""

    key: Tensor
    value: Tensor


class DepthMemory(NamedTuple):
    """The stream, and the layers so far; None for those that no later layer looks at."""

    stream: Tensor
    layers: tuple[LayerValues | None, ...]


class DepthAttention(Beside):
    """Grouped queries are averaged over their group before they are compared, as the authors do."""

    def __init__(self, config: DepthAttentionConfig, body: Body) -> None:
        super().__init__(body)
        stride = config.stride or max(1, body.layers // 2)
        self.looks_at = tuple(
            tuple(sorted({*range(layer - stride, -1, -stride), *range(max(0, layer - config.window), layer)}))
            for layer in range(body.layers)
        )

    def open(self, embedding: Tensor) -> DepthMemory:
        return DepthMemory(embedding, ())

    def values(self, memory: DepthMemory, site: int, projected: Projected) -> tuple[Tensor, Kept]:
        query, key, value = projected
        assert value is not None
        looked_at = (memory.layers[j] for j in self.looks_at[site // 2])
        earlier = [found for found in looked_at if found is not None]
        if earlier:
            exact = torch.promote_types(key.dtype, torch.float32)
            grouped = query.to(exact).reshape(len(query), key.shape[1], -1, *query.shape[2:]).mean(2)
            scores = [(grouped * one).sum(-1) for one in (key, *(j.key for j in earlier))]
            weights = (torch.stack(scores) * key.shape[-1] ** -0.5).softmax(0)
            value = weighted_sum((value, *(j.value.to(value.dtype) for j in earlier)), weights)
        return value, LayerValues(key, value)

    def write(self, memory: DepthMemory, site: int, output: Tensor, trace: Trace = NO_TRACE) -> DepthMemory:
        stream = added(memory.stream, output)
        if site % 2 == 1:
            return memory._replace(stream=stream)
        if trace.kept is None:
            raise RequestError("depth attention needs an attention that calls values(memory, site, projected), and its Trace(kept=...).")
        layers = (*memory.layers, trace.kept)
        needed = {j for sources in self.looks_at[site // 2 + 1 :] for j in sources}
        return DepthMemory(stream, tuple(found if j in needed else None for j, found in enumerate(layers)))


METHODS = (
    Method(
        name="depth-attention",
        label="Depth-Attention",
        configure=lambda base: DepthAttentionConfig(),
        size="stride",
        equation="v~_l = a_l v_l + sum_j a_j v~_j, a = softmax_j(q_l . k_j / sqrt(E)) at the same token; h = h + f(N h)",
        reads="the stream; keys and mixed values of every stride-th layer before",
        dynamic=True,
        parameters="0",
        state="d + keys and values of the layers looked at",
        cost="2 values a source and attention",
        paper="Zeng et al. 2026, Eqs. 2-4",
        degenerate=(
            Degenerate(says="stride beyond the layers: PreNorm", config=DepthAttentionConfig(stride=10**6), equals=PreNormConfig()),
        ),
        notes="not the plain stream at first: about the mean of the values",
    ),
)
