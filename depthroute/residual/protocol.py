"""The one protocol behind which every way of connecting sub-layers stands.

    memory = residual.open(embedding)
    for site, (norm, sublayer) in enumerate(sublayers):          # attention at even sites, MLP at odd ones
        inputs = residual.read(memory, site, norm)
        memory = residual.write(memory, site, sublayer(inputs))
    hidden = residual.close(memory, final_norm)                  # the last read, before the head

A memory is an immutable pytree of tensors. `read` is pure. The method owns all its parameters, a group per site. The norm before a
sub-layer belongs to the body; it is handed to the read, so that a method can apply it in the same pass, or somewhere else.

Some methods look further: at what the sub-layer read or fed its output projection (`Trace`), at the values that an attention has
projected (`values`), or at how the body is built (`Adaptation`). A body that offers these serves every method.

Shapes: ... any leading dimensions (batch, tokens), D width, S sources.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

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
Kept = Any  # a pytree of tensors that `values` hands to `write`


class Projected(NamedTuple):
    """What an attention sub-layer has projected, head by head, normalised and rotated as token attention takes it."""

    query: Tensor  # [B, H, T, E]; of latent attention the coordinates that a head has for itself
    key: Tensor  # [B, K, T, E]
    value: Tensor | None  # [B, K, T, E]; None where the body was built without a value projection


class Trace(NamedTuple):
    """What a sub-layer's run leaves behind beside its output. A method takes what it needs and says so if it is not there."""

    inputs: Inputs | None = None  # what `read` returned: the norm is applied
    activation: Tensor | None = None  # what the sub-layer fed its output projection
    kept: Kept = None  # what `values` asked to keep


NO_TRACE = Trace()


class Routing(Protocol):
    """What connects the sub-layers of a pass: a `Residual`, or what its `decoding` returns."""

    def open(self, embedding: Tensor) -> Memory: ...
    def read(self, memory: Memory, site: int, norm: Norm | None = None) -> Inputs: ...
    def values(self, memory: Memory, site: int, projected: Projected) -> tuple[Tensor, Kept]: ...
    def write(self, memory: Memory, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Memory: ...
    def close(self, memory: Memory, norm: Norm | None = None) -> Tensor: ...


class Adaptation(NamedTuple):
    """What a method needs otherwise in the body it serves; whoever builds the body asks `ResidualConfig.adaptation` first.

    `input_norms`: whether there is a norm before every sub-layer. `value_layers`: how many layers, from the first, project values; None is
    all. `initial_scale`: what the initial standard deviation of a weight matrix is multiplied with, by its name in a layer ("query", "key",
    "value", "output", "gate", "up", "down"); 1 where it is not named.
    """

    input_norms: bool = True
    value_layers: int | None = None
    initial_scale: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a residual method may know of the network it serves."""

    width: int
    layers: int
    attention_activation: int  # width of what the attention's output projection is fed
    mlp_activation: int | tuple[int, ...]  # width of what the MLP's output projection is fed, in all layers or by layer
    norms: str = "pre"  # where the body has its norms; "pre" is one before every sub-layer

    @property
    def sublayers(self) -> int:
        return 2 * self.layers

    def activation(self, site: int) -> int:
        """The width of what the sub-layer at this site feeds its output projection."""
        if site % 2 == 0:
            return self.attention_activation
        return self.mlp_activation if isinstance(self.mlp_activation, int) else self.mlp_activation[site // 2]


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
    def module(self, body: Body) -> Residual:
        """The module that does it; its values need not be set. Raises RequestError where the method does not fit the body."""

    def build(self, body: Body) -> Residual:
        """The module that does it, with its initial values (random ones from torch's own generator).

        Raises:
            RequestError: the method does not fit the body.
        """
        residual = self.module(body)
        residual.reset_parameters()
        return residual

    def adaptation(self, body: Body) -> Adaptation:
        """What the method needs otherwise in its body; as a rule nothing."""
        return Adaptation()

    def describe(self) -> str:
        """The method's name, and the settings that are not the usual ones."""
        changed = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return ", ".join([self.name, *(f"{field.name} {getattr(self, field.name)}" for field in changed)])

    def check(self, body: Body) -> None:
        """Refuse a body that the method does not fit, before any work starts; nothing is allocated."""
        with torch.device("meta"):
            self.module(body)


METHODS: dict[str, type[ResidualConfig]] = {}  # filled by registry.py, a line a method


class Residual(nn.Module, abc.ABC):
    """A way of connecting sub-layers. `body` has 2L sub-layers; sites 0..2L-1 are read before them, site 2L by `close`.

    `reads`: the sites that this module reads; all of them, but for a module of a pipeline stage, which prepares nothing for others.

    `per_token`: whether the memory of a token depends on that token alone. Decoding with a cache of keys and values needs it, since a later
    token then brings nothing new to the memories of earlier ones.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.reads = range(body.sublayers + 1)

    @property
    def has_values(self) -> bool:
        """Whether the method has its own `values`. Where it has not, an attention need not make the values of a token to keep them."""
        return type(self).values is not Residual.values

    @property
    def looks_inside(self) -> bool:
        """Whether the method takes something from within sub-layers: the values of `values`, or `Trace.activation`.

        It then needs whole sub-layers: where processes share one, each has its own heads and columns within, of all tokens. True for a
        method that has its own `values`; one that takes the activation says so itself.
        """
        return self.has_values

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values for all parameters, by the `initial_values(name, parameter, generator)` of the modules that own them."""
        for module in self.modules():
            fill = getattr(module, "initial_values", None)
            for name, parameter in module.named_parameters(recurse=False):
                if fill is not None:
                    fill(name, parameter, None)

    @abc.abstractmethod
    def open(self, embedding: Tensor) -> Memory:
        """The memory of a new sequence, from the embedding [..., D]. Its dtype is the memory's dtype from then on."""

    @abc.abstractmethod
    def read(self, memory: Memory, site: int, norm: Norm | None = None) -> Inputs:
        """The input of the sub-layer at `site`, through its `norm` if there is one: [..., D], or one tensor per role at attention sites."""

    def values(self, memory: Memory, site: int, projected: Projected) -> tuple[Tensor, Kept]:
        """The values [B, K, T, E] that the attention at `site` attends to (and caches), and what `write` is to get as `Trace.kept`."""
        assert projected.value is not None
        return projected.value, None

    @abc.abstractmethod
    def write(self, memory: Memory, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Memory:
        """The memory after the sub-layer at `site` has put out `output` [..., D].

        Raises:
            RequestError: the method needs something of the trace that is not there.
        """

    def close(self, memory: Memory, norm: Norm | None = None) -> Tensor:
        """The last read [..., D], through the final norm if there is one, before the head."""
        inputs = self.read(memory, self.body.sublayers, norm)
        assert isinstance(inputs, Tensor)
        return inputs

    def newest(self, memory: Memory) -> Tensor | None:
        """What the sub-layers so far hand on, [..., D]: the newest source, as an open block's sum. None: what the next site reads."""
        return None

    def hand_over(self, memory: Memory) -> Memory:
        """The memory as it goes to the process that reads the next sites: without what that one can make of the rest."""
        return memory

    def take_over(self, memory: Memory, site: int) -> Memory:
        """The memory at the process that goes on with `site`, from what `hand_over` gave at the one before."""
        return memory

    def decoding(self, embedding: Tensor) -> Routing:
        """What reads and writes passes of one shape, those of `embedding` [..., D], one after the other and without gradients.

        A method may keep its memory for it in one place, so that nothing is allocated in a pass; what it reads is then valid until its next
        pass. As a rule it is the module itself.
        """
        return self

    def source_names(self, site: int) -> tuple[str, ...]:
        """What the sources at this site are called, oldest first; empty where the method has no source weights."""
        return ()

    def source_weights(self, memory: Memory, site: int) -> dict[str, Tensor]:
        """The softmax weights at this site, [S, ...] by role; empty where the method has none."""
        return {}

