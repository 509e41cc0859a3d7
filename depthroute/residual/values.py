"""Residual connections inside attention: value residual learning (Zhou et al. 2024) over a plain stream.

Shapes: B batch, K key-value heads, T tokens, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.ops import weighted_sum
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.prenorm import PreNormConfig
from depthroute.residual.protocol import NO_TRACE, Adaptation, Body, Kept, Projected, ResidualConfig, Trace
from depthroute.residual.stream import Beside, added


@dataclass(frozen=True, kw_only=True)
class ValueResidualConfig(ResidualConfig):
    """Attention in layer n attends to first * V_1 + own * V_n, where V_n are the values that it projects and V_1 those of the first layer.

    `first`, `own`: 0.5 and 0.5 is the paper's Identity-ResFormer, 2 and 1 its Constant form. `learned`: two numbers a layer that start
    there. `start`: the first layer (from 0) that does it; a late one is the paper's Sparse form. `shared`: SVFormer, V_1 alone, and no
    other layer projects values.
    """

    name: ClassVar[str] = "value_residual"

    first: float = 0.5
    own: float = 0.5
    learned: bool = False
    start: int = 1
    shared: bool = False

    def __post_init__(self) -> None:
        if self.start < 1:
            raise RequestError(f"residual.start = {self.start} is not allowed; it takes 1 or more: layer 0 has the values that others add.")
        if self.shared and (self.learned or self.start != 1 or (self.first, self.own) != (0.5, 0.5)):
            raise RequestError("residual.shared = true takes the first layer's values alone; leave first, own, learned and start out.")

    def module(self, body: Body) -> ValueResidual:
        if self.start >= max(body.layers, 2):
            raise RequestError(f"residual.start = {self.start} is behind the last of {body.layers} layers, so that no layer would do it.")
        return ValueResidual(self, body)

    def adaptation(self, body: Body) -> Adaptation:
        return Adaptation(value_layers=1 if self.shared else None)


class ValueWeights(nn.ParameterDict):
    """(first, own) by layer."""

    def __init__(self, config: ValueResidualConfig, layers: range) -> None:
        super().__init__({str(layer): nn.Parameter(torch.tensor([config.first, config.own])) for layer in layers})
        self.initial = (config.first, config.own)

    def initial_values(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        parameter.copy_(torch.tensor(self.initial))


class ValueMemory(NamedTuple):
    """The stream, and the first layer's values [B, K, T, E] once they are there."""

    stream: Tensor
    first: Tensor | None


class ValueResidual(Beside):
    """Values are mixed before token attention. A cache holds the mixed ones, and the first layer's are needed for the present token
    only."""

    def __init__(self, config: ValueResidualConfig, body: Body) -> None:
        super().__init__(body)
        self.config = config
        self.weights = ValueWeights(config, range(config.start, body.layers) if config.learned else range(0))

    def open(self, embedding: Tensor) -> ValueMemory:
        return ValueMemory(embedding, None)

    def values(self, memory: ValueMemory, site: int, projected: Projected) -> tuple[Tensor, Kept]:
        own, layer = projected.value, site // 2
        if layer == 0:
            assert own is not None
            return own, own
        assert memory.first is not None
        if own is None:
            return memory.first, None
        if layer < self.config.start:
            return own, None
        if self.config.learned:
            return weighted_sum((memory.first, own), self.weights[str(layer)]), None
        return self.config.first * memory.first + self.config.own * own, None

    def write(self, memory: ValueMemory, site: int, output: Tensor, trace: Trace = NO_TRACE) -> ValueMemory:
        first = memory.first if trace.kept is None else trace.kept
        if first is None:
            raise RequestError("value residuals need an attention that calls values(memory, site, projected), and its Trace(kept=...).")
        return ValueMemory(added(memory.stream, output), first)


def _row(name: str, label: str, config: ValueResidualConfig, degenerate: Degenerate, **facts: str) -> Method:
    return Method(
        name=name,
        label=label,
        configure=lambda base: config,
        reads="the stream, and the first layer's values",
        dynamic=False,
        state="d + values of a layer",
        paper="Zhou et al. 2024",
        degenerate=(degenerate,),
        **facts,
    )


def _plain(config: ValueResidualConfig) -> Degenerate:
    return Degenerate(says="(first, own) = (0, 1): PreNorm", config=config, equals=PreNormConfig())


METHODS = (
    _row(
        "value-residual", "Value residual", ValueResidualConfig(), _plain(ValueResidualConfig(first=0.0, own=1.0)),
        equation="V_n = (V_1 + V_n) / 2 before token attention; h = h + f(N h)", parameters="0", cost="values/2",
    ),
    _row(
        "value-residual-constant", "Value residual, constant", ValueResidualConfig(first=2.0, own=1.0),
        _plain(ValueResidualConfig(first=0.0, own=1.0)), equation="V_n = 2 V_1 + V_n", parameters="0", cost="values/2",
    ),
    _row(
        "value-residual-learned", "Value residual, learned", ValueResidualConfig(learned=True),
        _plain(ValueResidualConfig(first=0.0, own=1.0, learned=True)), equation="V_n = a_n V_1 + b_n V_n", parameters="2(L-1)",
        cost="values",
    ),
    _row(
        "svformer", "SVFormer", ValueResidualConfig(shared=True),
        Degenerate(
            says="a value residual with (first, own) = (1, 0)", config=ValueResidualConfig(shared=True),
            equals=ValueResidualConfig(first=1.0, own=0.0),
        ),
        equation="V_n = V_1", parameters="-(L-1) value matrices", cost="0",
    ),
)  # fmt: skip
