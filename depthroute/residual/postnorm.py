"""PostNorm and DeepNorm: the norm lies on the trunk, not on a branch.

The norm that a body has before sub-layer i+1 stands exactly where PostNorm has the norm after sub-layer i, and the final norm where it has
the last one. So the body keeps its norms, and the trunk passes through them. The norm before the first sub-layer becomes one of the
embedding, as in BERT; the original Transformer had none there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.residual.method import Degenerate, Method
from depthroute.residual.protocol import NO_TRACE, Adaptation, Body, Inputs, Norm, ResidualConfig, Trace
from depthroute.residual.stream import Stream, read_inputs

SCALED = ("value", "output", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class PostNormConfig(ResidualConfig):
    """h = N(h + f(h)) (Vaswani et al. 2017), or with `deep` h = N(alpha h + f(h)) (DeepNet, Wang et al. 2022).

    `deep`: alpha = (2L)^(1/4), and the initial values of the value, output and MLP matrices times (8L)^(-1/4), the paper's constants for a
    decoder of L layers. A gated MLP has a third matrix; it is scaled like the other two.
    """

    name: ClassVar[str] = "postnorm"

    deep: bool = False

    def module(self, body: Body) -> PostNorm:
        if body.norms != "pre":
            raise RequestError(f"{self.name} puts the norms before sub-layers on the trunk; model.norms = {body.norms!r} has none there.")
        return PostNorm((2 * body.layers) ** 0.25 if self.deep else 1.0, body)

    def adaptation(self, body: Body) -> Adaptation:
        beta = (8 * body.layers) ** -0.25
        return Adaptation(initial_scale=dict.fromkeys(SCALED, beta)) if self.deep else Adaptation()


class PostNorm(Stream):
    """The memory is the trunk before its next norm, [..., D]."""

    def __init__(self, alpha: float, body: Body) -> None:
        super().__init__(body)
        self.alpha = alpha

    def read(self, memory: Tensor, site: int, norm: Norm | None = None) -> Inputs:
        if norm is None:
            raise RequestError("postnorm needs read(memory, site, norm) with the norm, which lies on its trunk.")
        return super().read(memory, site, norm)

    def write(self, memory: Tensor, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        trunk = read_inputs(trace, "postnorm").to(memory.dtype)
        return (trunk if self.alpha == 1 else self.alpha * trunk) + output.to(memory.dtype)


def _alpha_one(residual: object) -> None:
    assert isinstance(residual, PostNorm)
    residual.alpha = 1.0


METHODS = (
    Method(
        name="postnorm",
        label="PostNorm",
        configure=lambda base: PostNormConfig(),
        equation="h = N(h + f(h))",
        reads="the normalised stream",
        dynamic=False,
        parameters="0 (the body's norms, on the trunk)",
        state="d",
        cost="0",
        paper="Vaswani et al. 2017",
        degenerate=(
            Degenerate(
                says="DeepNorm with alpha = 1", config=PostNormConfig(), equals=PostNormConfig(deep=True), adjust_other=_alpha_one,
            ),
        ),
        notes="wants a lower learning rate and a warm-up",
    ),
    Method(
        name="deepnorm",
        label="DeepNorm",
        configure=lambda base: PostNormConfig(deep=True),
        equation="h = N((2L)^(1/4) h + f(h)); value, output and MLP matrices start times (8L)^(-1/4)",
        reads="the normalised stream",
        dynamic=False,
        parameters="0 (the body's norms, on the trunk)",
        state="d",
        cost="d",
        paper="Wang et al. 2022",
        degenerate=(
            Degenerate(says="alpha = 1: PostNorm", config=PostNormConfig(deep=True), adjust=_alpha_one, equals=PostNormConfig()),
        ),
        notes="wants a learning rate of its own",
    ),
)  # fmt: skip
