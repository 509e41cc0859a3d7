"""MRLA: attention over the layers of a stage, added after each layer (Fang et al., ICLR 2023), for a causal decoder.

The paper is about vision: queries and keys come from a global average over the image, values from a 3x3 convolution. Both would leak
later tokens. This form is ours and looks at one token at a time: y = r(x) of the stream after the layer stands for the pooled image, and
the values are y times a learned gain a channel. Queries and keys are the paper's convolutions over channels, without a bias.

Shapes: G heads of E channels, ... leading dimensions (batch, tokens), D = G E width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Body, Residual, ResidualConfig, Trace
from depthroute.residual.stream import Beside, added, rms

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MRLAConfig(ResidualConfig):
    """After layer t: x = x + o_t, head by head.

    Base: o_t = sum_s softmax_s(q_t . k_s / sqrt(E)) v_s over the layers s <= t of the stage. `light`: o_t = sigmoid(q_t . k_t / sqrt(E))
    v_t + decay * o_{t-1}, with a decay a channel that starts normal with variance one, as the authors' does. `head_width`: E. `stage`:
    layers a stage, after which the attention starts anew; None is one stage.
    """

    name: ClassVar[str] = "mrla"

    light: bool = False
    head_width: int = 16
    stage: int | None = None

    def __post_init__(self) -> None:
        if self.head_width < 1:
            raise RequestError(f"residual.head_width = {self.head_width} is not allowed; it takes 1 or more.")
        if self.stage is not None and self.stage < 2:
            raise RequestError(f"residual.stage = {self.stage} is not allowed; it takes 2 layers or more, or none for one stage.")

    def module(self, body: Body) -> MRLA:
        if body.width % self.head_width:
            raise RequestError(f"residual.head_width = {self.head_width} does not divide the width {body.width}.")
        return MRLA(self, body)


class LayerAttention(nn.Module):
    """The parameters of one layer. What cannot act has none: a query before the first source, a key that nothing else is weighed
    against."""

    def __init__(self, width: int, query: bool, key: bool, decay: bool) -> None:
        super().__init__()
        taps = int((math.log2(width) + 1) / 2) // 2 * 2 + 1  # the authors' odd kernel over channels: 5 from 128 to 2047
        self.query = nn.Parameter(torch.zeros(taps)) if query else None
        self.key = nn.Parameter(torch.zeros(taps)) if key else None
        self.value = nn.Parameter(torch.zeros(width))
        self.decay = nn.Parameter(torch.zeros(width)) if decay else None

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        """The authors' framework defaults for their convolutions, uniform in 1 / sqrt(fan-in); a 3x3 kernel a channel has fan-in 9."""
        if name == "decay":
            parameter.normal_(generator=generator)
        else:
            bound = 1 / 3 if name == "value" else len(parameter) ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)


class Stage(NamedTuple):
    """The stream; keys and values of the stage's layers so far (base), or the last output (light)."""

    stream: Tensor
    keys: tuple[Tensor, ...]  # [..., G, E] each
    values: tuple[Tensor, ...]
    output: Tensor | None


class MRLA(Beside):
    """Attention is added once a layer, when its MLP has written."""

    def __init__(self, config: MRLAConfig, body: Body) -> None:
        super().__init__(body)
        self.config = config
        self.stage = config.stage or body.layers
        self.layers = nn.ModuleDict({str(layer): self._attention_of(layer) for layer in range(body.layers)})

    def _attention_of(self, layer: int) -> LayerAttention:
        place = layer % self.stage
        alone = place == 0 and (self.stage == 1 or layer == self.body.layers - 1)
        light = self.config.light
        return LayerAttention(self.body.width, query=light or place > 0, key=light or not alone, decay=light and place > 0)

    def open(self, embedding: Tensor) -> Stage:
        return Stage(embedding, (), (), None)

    def write(self, memory: Stage, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Stage:
        stream = added(memory.stream, output)
        if site % 2 == 0:
            return memory._replace(stream=stream)
        layer = site // 2
        if layer % self.stage == 0:
            memory = Stage(stream, (), (), None)
        parameters = self.layers[str(layer)]
        assert isinstance(parameters, LayerAttention)
        y = rms(stream, EPS)
        value = self._heads((y * parameters.value).to(stream.dtype))
        query, key = (None if taps is None else self._heads(convolved(y, taps)) for taps in (parameters.query, parameters.key))
        if self.config.light:
            assert query is not None and key is not None
            gate = torch.sigmoid(self._score(query, key))
            mixed = weighted_sum((value,), (gate,)).flatten(-2)
            if memory.output is not None and parameters.decay is not None:
                mixed = mixed + (memory.output * parameters.decay).to(mixed.dtype)
            return Stage(stream + mixed, (), (), mixed)
        if key is None:  # one layer in the stage: its value has weight one
            return Stage(stream + value.flatten(-2), (), (), None)
        keys, values = (*memory.keys, key.to(stream.dtype)), (*memory.values, value)
        if query is None:
            mixed = value
        else:
            weights = torch.stack([self._score(query, key) for key in keys]).softmax(0)
            mixed = weighted_sum(values, weights)
        return Stage(stream + mixed.flatten(-2), keys, values, None)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.config.head_width)

    def _score(self, query: Tensor, key: Tensor) -> Tensor:
        score: Tensor = (query * key).sum(-1) * self.config.head_width**-0.5
        return score


def convolved(y: Tensor, taps: Tensor) -> Tensor:
    """One kernel slid over the channels of y [..., D], zero beyond the first and the last."""
    reach, width = len(taps) // 2, y.shape[-1]
    padded = F.pad(y, (reach, reach))
    return weighted_sum([padded[..., tap : tap + width] for tap in range(len(taps))], taps)


def _silent(residual: Residual) -> None:
    assert isinstance(residual, MRLA)
    for parameters in residual.layers.values():
        parameters.value.zero_()  # type: ignore[operator]


def _row(name: str, label: str, light: bool, **facts: str) -> Method:
    config = MRLAConfig(light=light)
    return Method(
        name=name,
        label=label,
        configure=lambda base: config,
        dynamic=True,
        paper="Fang et al. 2023; this causal form is ours",
        degenerate=(Degenerate(says="values zero: PreNorm", config=config, adjust=_silent, equals=PreNormConfig()),),
        **facts,
    )


METHODS = (
    _row(
        "mrla-base", "MRLA base", False, equation="after layer t, h = h + sum_s softmax_s(q_t . k_s) v_s by head; q, k, v from r(h)",
        reads="keys and values of the earlier layers", parameters="about L(d + 2k)", state="(2L+1)d", cost="(L/2 + k)d",
    ),
    _row(
        "mrla-light", "MRLA light", True, equation="after layer t, o = sigmoid(q_t . k_t) v_t + c * o, h = h + o",
        reads="the stream and a decayed sum", parameters="about L(2d + 2k)", state="2d", cost="(2 + k)d",
    ),
)  # fmt: skip
