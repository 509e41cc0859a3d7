"""The one protocol behind which every way of connecting sub-layers stands.

    memory = residual.open(embedding)
    for site, (norm, sublayer) in enumerate(sublayers):          # attention at even sites, MLP at odd ones
        output, activation = sublayer(residual.read(memory, site, norm))
        memory = residual.write(memory, site, output, activation)
    hidden = residual.close(memory, final_norm)                  # the last read, before the head

A memory is an immutable pytree of tensors. `read` is pure. The method owns all its parameters, a group per site. The norm before a
sub-layer belongs to the body; it is handed to the read, so that a method can apply it in the same pass, or somewhere else.

Shapes: ... any leading dimensions (batch, tokens), D width, S sources.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class RoleInputs(NamedTuple):
    """What an attention sub-layer reads, one tensor [..., D] per role. Roles that share a read hold the same object."""

    query: Tensor
    key: Tensor
    value: Tensor


Inputs = Tensor | RoleInputs
Norm = Callable[[Tensor], Tensor]
Memory = Any  # a pytree of tensors that only its own method looks into


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a residual method may know of the network it serves."""

    width: int
    layers: int
    attention_activation: int  # width of what the attention's output projection is fed
    mlp_activation: int  # width of what the MLP's output projection is fed

    @property
    def sublayers(self) -> int:
        return 2 * self.layers

    def activation(self, site: int) -> int:
        """The width of what the sub-layer at this site feeds its output projection."""
        return self.attention_activation if site % 2 == 0 else self.mlp_activation


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(abc.ABC):
    """Base of every method's configuration; written to JSON with the method's name under `method`."""

    tag: ClassVar[str] = "method"
    name: ClassVar[str] = ""

    @staticmethod
    def variants() -> dict[str, type[ResidualConfig]]:
        """Every registered method by name."""
        return METHODS

    @abc.abstractmethod
    def build(self, body: Body) -> Residual:
        """The module that does it. Raises RequestError where the method does not fit the body."""

    def check(self, body: Body) -> None:
        """Refuse a body that the method does not fit, before any work starts; nothing is allocated."""
        with torch.device("meta"):
            self.build(body)


METHODS: dict[str, type[ResidualConfig]] = {}  # filled by registry.py, a line a method


class Residual(nn.Module, abc.ABC):
    """A way of connecting sub-layers. `body` has 2L sub-layers; sites 0..2L-1 are read before them, site 2L by `close`."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    @abc.abstractmethod
    def open(self, embedding: Tensor) -> Memory:
        """The memory of a new sequence, from the embedding [..., D]. Its dtype is the memory's dtype from then on."""

    @abc.abstractmethod
    def read(self, memory: Memory, site: int, norm: Norm | None = None) -> Inputs:
        """The input of the sub-layer at `site`, through its `norm` if there is one: [..., D], or one tensor per role at attention sites."""

    @abc.abstractmethod
    def write(self, memory: Memory, site: int, output: Tensor, activation: Tensor | None = None) -> Memory:
        """The memory after the sub-layer at `site` has put out `output` [..., D].

        `activation` is what it fed its output projection; only methods with projected keys look at it.
        """

    def close(self, memory: Memory, norm: Norm | None = None) -> Tensor:
        """The last read [..., D], through the final norm if there is one, before the head."""
        inputs = self.read(memory, self.body.sublayers, norm)
        assert isinstance(inputs, Tensor)
        return inputs

    def source_names(self, site: int) -> tuple[str, ...]:
        """What the sources at this site are called, oldest first; empty where the method has no source weights."""
        return ()

    def source_weights(self, memory: Memory, site: int) -> dict[str, Tensor]:
        """The softmax weights at this site, [S, ...] by role; empty where the method has none."""
        return {}

