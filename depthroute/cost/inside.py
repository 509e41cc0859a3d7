"""What autograd saves inside a sub-layer that no formula is given for: KDA, latent attention, experts and other gated activations.

The sub-layer is run on tensors without storage and its saved tensors are counted, at three lengths of the sequence: the part that grows
with the length is that of a token. What grows with its square is the weights that PyTorch's definition of attention keeps; fused kernels
do not keep them. The pass is one on a CPU, where norms keep the rows that they divide: elsewhere it is that much less.

Shapes: T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from depthroute.model import ModelConfig
from depthroute.model.experts import Experts
from depthroute.model.layers import Layer
from depthroute.model.sight import Seen, Sight
from depthroute.model.sublayer import SubLayerOutput
from depthroute.residual import Projected, RoleInputs, Trace

LENGTH = 128  # tokens, and twice and three times as many: whole chunks of a delta rule
Roles = tuple[int, int, int]  # which of the inputs query, key and value are


def has_formula(model: ModelConfig, site: int) -> bool:
    """Whether the sub-layer at a site is softmax attention or a dense SwiGLU MLP, whose saved tensors `memory` knows."""
    if site % 2 == 0:
        return model.mixer(site // 2) == "softmax"
    return not model.has_experts(site // 2) and model.activation == "swiglu"


def roles_read(model: ModelConfig) -> list[Roles]:
    """Which inputs every layer's mixer reads, those that are one tensor by the same number."""
    found: list[Roles] = []
    with FakeTensorMode(), torch.no_grad():
        residual = model.residual.module(model.body)
        memory = residual.open(torch.empty(1, 1, model.width))
        heads = model.heads, 1, model.resolved_head_width
        for site in range(2 * model.layers):
            inputs, kept = residual.read(memory, site, None), None
            if site % 2 == 0:
                roles = tuple(inputs) if isinstance(inputs, RoleInputs) else (inputs,) * 3
                query, key, value = (min(i for i in range(3) if roles[i] is role) for role in roles)
                found.append((query, key, value))
                shared = model.resolved_key_value_heads, *heads[1:]
                given = Projected(torch.empty(1, *heads), torch.empty(1, *shared), torch.empty(1, *shared))
                kept = residual.values(memory, site, given)[1]
            output, activation = torch.empty(1, 1, model.width), torch.empty(1, 1, model.body.activation(site))
            memory = residual.write(memory, site, output, Trace(inputs, activation, kept))
    return found


class Inside:
    """Bytes per token inside sub-layers, each kind of them run once."""

    def __init__(self, model: ModelConfig, mixed: bool) -> None:
        self.model, self.mixed = model, mixed
        self.compute = torch.bfloat16 if mixed else torch.float32
        self.adaptation = model.residual.adaptation(model.body)
        with torch.device("meta"):
            self.looks_inside = model.residual.module(model.body).looks_inside
        self._roles: list[Roles] | None = None
        self._found: dict[Any, int] = {}

    def saved(self, site: int, dtype: torch.dtype) -> int:
        """Of the sub-layer at a site that is fed `dtype`. Inputs count where it rounds them or keeps other ones than it computes with:
        others are what the read hands on."""
        layer, roles = site // 2, (0, 0, 0)
        if site % 2 == 0:
            if self._roles is None:
                self._roles = roles_read(self.model)
            roles = self._roles[layer]
        own = self.adaptation.value_layers is None or layer < self.adaptation.value_layers
        key = (site % 2, self.model.mixer(layer) if site % 2 == 0 else self.model.has_experts(layer), own, roles, dtype)
        if key not in self._found:
            with torch.device("meta"):
                whole = Layer(self.model, layer)
            sublayer = whole.mlp if site % 2 else whole.attention
            once, twice, thrice = (self._bytes(sublayer, site, times * LENGTH, roles, own, dtype) for times in (1, 2, 3))
            self._found[key] = _slope(once, twice, thrice)
        return self._found[key]

    def _bytes(self, sublayer: nn.Module, site: int, tokens: int, roles: Roles, own: bool, dtype: torch.dtype) -> int:
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
            return tensor

        with FakeTensorMode():
            names = [*sublayer.named_parameters(), *sublayer.named_buffers()]
            weights = {name: torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad) for name, value in names}
            inputs = [torch.empty(1, tokens, self.model.width, dtype=dtype, requires_grad=True) for _ in range(3)]
            heads = self.model.resolved_key_value_heads, tokens, self.model.resolved_head_width
            value = torch.empty(1, *heads, dtype=self.compute, requires_grad=True)
            if site % 2:
                arguments: tuple[Any, ...] = (inputs[0],)
                if isinstance(sublayer, Experts):
                    sublayer.traces = self.looks_inside
            else:
                read = inputs[0] if roles == (0, 0, 0) else RoleInputs(*(inputs[role] for role in roles))
                seen = Seen(None, causal=True)
                arguments = (read, Sight(None, seen, seen), None if own else lambda given: (value, None))  # type: ignore[arg-type]
            lower = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.mixed)
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor), lower:
                found: SubLayerOutput = functional_call(sublayer, weights, arguments)
                if self.looks_inside and site % 2 and found.activation is not None:
                    pack(found.activation)  # what keys are projected from
            aside = [*weights.values(), value, *(inputs if dtype == self.compute else [])]
            outside = {tensor.untyped_storage()._cdata for tensor in aside}
            return sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in outside)


def _slope(once: int, twice: int, thrice: int) -> int:
    """b of a + b T + c T^2, from its values at one, two and three lengths."""
    squared = thrice - 2 * twice + once  # 2 c L^2
    return (2 * (twice - once) - 3 * squared) // (2 * LENGTH)
