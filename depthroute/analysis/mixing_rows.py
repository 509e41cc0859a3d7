"""What the memory of a residual method is made of, as far as no method is known: the base of mixing_streams.py and mixing_banks.py.

Every method here is linear in what sub-layers put out, once its weights are fixed. So its own equations, run on coefficients in place of
hidden states and with the weights that the tokens have, say how much of each output every part of the memory holds.

Shapes: ... leading dimensions (batch, tokens), D width, G groups of adjacent channels that share their weights (1, the heads, or D),
N = 2L + 1 outputs, the embedding the first of them. Coefficients are [..., G, N], or [G, N] where they are the same for every token.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from depthroute.residual import Inputs, Memory, Norm, Residual, ResidualConfig

Method = TypeVar("Method", bound=Residual)
Config = TypeVar("Config", bound=ResidualConfig)


class Step(NamedTuple):
    """One sub-layer's run."""

    site: int
    memory: Memory  # that it read
    norm: Norm | None  # before it
    inputs: Inputs  # through the norm
    output: Tensor  # [..., D], as it is written


class Row(NamedTuple):
    """What one site reads in one role."""

    weights: Tensor  # [..., G, N]: of the read before its norm
    total: Tensor | None = None  # of any shape: sums that the method's equations say are one; None where they say nothing


class Composition(abc.ABC, Generic[Config, Method]):
    """How much of every output each part of one memory holds, from `open` through every `write` of a forward pass."""

    def __init__(self, config: Config, residual: Method) -> None:
        self.config, self.residual = config, residual

    @classmethod
    def refusal(cls, config: Config) -> str | None:
        """Why this form of the method has no depth-mixing matrix, or None."""
        return None

    @property
    def needs_embedding(self) -> bool:
        """Whether the memory does not tell what the embedding was."""
        return False

    @property
    def by_channel(self) -> bool:
        """Whether channels have weights of their own, so that a matrix of numbers can only hold their mean."""
        return False

    @property
    def sums_to_one(self) -> str | None:
        """What sums to one by the method's equations: "rows" of the matrix, "weights" of a read over its sources, or nothing (None)."""
        return None

    def start(self, memory: Memory, embedding: Tensor | None) -> None:
        """The memory of a new sequence. `embedding`: [..., D], where the method needs it."""
        present = self.present(memory)
        # A value a token and channel: float64 would double what is by far the largest thing here.
        exact = torch.promote_types(present.dtype, torch.float32) if self.by_channel else torch.float64
        self._units = torch.eye(self.residual.body.sublayers + 1, dtype=exact, device=present.device)
        self.open(memory, embedding)

    def unit(self, column: int) -> Tensor:
        """[1, N]: one of this output and nothing of the others. Column 0 is the embedding, column i + 1 sub-layer i."""
        return self._units[column : column + 1]

    def present(self, memory: Memory) -> Tensor:
        """Any tensor [..., D] of the memory with a row a token."""
        found: Tensor = memory if isinstance(memory, Tensor) else memory.stream
        return found

    @abc.abstractmethod
    def open(self, memory: Memory, embedding: Tensor | None) -> None:
        """`Residual.open`."""

    @abc.abstractmethod
    def write(self, step: Step) -> None:
        """`Residual.write`."""

    @abc.abstractmethod
    def rows(self, memory: Memory, site: int) -> dict[str, Row]:
        """`Residual.read` by role; one role named "shared" where all read the same."""


AnyComposition = Composition[Any, Any]


def mixed(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_s weights_s sources_s, [..., G, N], from S sources [..., G, N] and their weights [S, ..., G] or [S, G]."""
    weights = weights.to(sources[0].dtype)
    if all(source.shape[:-1] == (1,) for source in sources):  # the same for all tokens and channels: a matrix product
        product: Tensor = torch.tensordot(weights, torch.cat(list(sources)), dims=([0], [0]))
        return product
    total = weights[0][..., None] * sources[0]
    for weight, source in zip(weights[1:], sources[1:], strict=True):
        total = total + weight[..., None] * source
    return total


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), [..., 1], in at least float32."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
