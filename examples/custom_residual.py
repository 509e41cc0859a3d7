"""A residual method of your own: one class behind the protocol and one registration, then everything else works with it.

Momentum residual networks (Sander et al. 2021): a velocity v = a v + (1 - a) f(N h) moves the stream, h = h + v. With a = 0 it is PreNorm.
Run it: .venv/bin/python examples/custom_residual.py
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from depthroute.analysis.degenerate import verify
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import (
    NO_TRACE,
    Body,
    Degenerate,
    Inputs,
    Method,
    Norm,
    PreNormConfig,
    Residual,
    ResidualConfig,
    Trace,
    normalised,
    parse_residual,
    register,
)


@dataclass(frozen=True, kw_only=True)
class MomentumConfig(ResidualConfig):
    name: ClassVar[str] = "momentum"

    momentum: float = 0.5

    def module(self, body: Body) -> Residual:
        return Momentum(self.momentum, body)


class State(NamedTuple):
    stream: Tensor
    velocity: Tensor


class Momentum(Residual):
    def __init__(self, momentum: float, body: Body) -> None:
        super().__init__(body)
        self.momentum = momentum

    def open(self, embedding: Tensor) -> State:
        return State(embedding, embedding * 0)

    def read(self, memory: State, site: int, norm: Norm | None = None) -> Inputs:
        return normalised(memory.stream, norm)  # the norm before a sub-layer is the body's; the method says where it is applied

    def write(self, memory: State, site: int, output: Tensor, trace: Trace = NO_TRACE) -> State:
        velocity = self.momentum * memory.velocity + (1 - self.momentum) * output.to(memory.stream.dtype)
        return State(memory.stream + velocity, velocity)


METHOD = Method(
    name="momentum",
    label="Momentum",
    configure=lambda base: MomentumConfig(),
    equation="v = a v + (1 - a) f(N h), h = h + v",
    reads="the stream",
    dynamic=False,
    parameters="0",
    state="2d",
    cost="2d",
    paper="Sander et al. 2021",
    degenerate=(Degenerate(says="a = 0: PreNorm", config=MomentumConfig(momentum=0.0), equals=PreNormConfig()),),
)


def main() -> None:
    register(METHOD)  # a file in depthroute/residual is named in FAMILIES of registry.py instead
    for found in verify(METHOD):
        verdict = "holds" if found.holds else "FAILS"
        print(f"{found.case.says}: {verdict}, output within {found.logits:.0e}, gradients {found.gradients:.0e}")
    residual = parse_residual("momentum,momentum=0.9")
    config = ModelConfig(vocabulary=512, width=64, layers=4, heads=4, mlp_width=160, context=64, residual=residual)
    model = Decoder(config)
    print(f"{residual}: {model.parameter_counts()['residual']} parameters added")


if __name__ == "__main__":
    main()
