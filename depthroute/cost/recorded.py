"""A residual method run on tensors without storage, between sub-layers that save nothing: what it carries and what autograd saves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from depthroute.cost.inside import has_formula
from depthroute.model import ModelConfig
from depthroute.residual import Projected, RoleInputs, Trace

TOKENS = 8_191  # a prime, so that what has another number of rows is told apart

Place = dict[int, Tensor]  # a tensor for every storage


@dataclass
class Recorded:
    """Tensors of tokens by what they are for; each storage once in a place, and in more than one place if it serves several ends."""

    saved: Place = field(default_factory=dict)
    """What autograd saves, and what sub-layers read."""
    carried: Place = field(default_factory=dict)
    """The memory before every read."""
    handed: Place = field(default_factory=dict)
    """What norms of the body put out, if that is what sub-layers keep."""
    copied: int = 0
    """Numbers per token of the rounded copies that projections keep of what they read."""
    attended: Place = field(default_factory=dict)
    """Queries, keys and values as token attention takes them."""
    projected: Place = field(default_factory=dict)
    """The same of mixers whose own memory is counted elsewhere."""
    unknown: dict[int, torch.dtype] = field(default_factory=dict)
    """Sites whose sub-layer has no formula, and what it is fed."""
    normed: int = 0
    """Rows that the body's norms divide."""
    most: int = 0
    """Bytes per token of the memory where it is largest."""
    _alive: list[Tensor] = field(default_factory=list)  # a storage that is freed could come back as another

    def note(self, place: Place, tensors: Sequence[Any]) -> Place:
        found: Place = {}
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.numel() and tensor.numel() % TOKENS == 0:
                self._alive.append(tensor)
                found.setdefault(tensor.untyped_storage()._cdata, tensor)
        place.update({key: tensor for key, tensor in found.items() if key not in place})
        return found


def bytes_of(tensor: Tensor) -> int:
    """Per token, of the whole storage."""
    return tensor.untyped_storage().nbytes() // TOKENS


def copies_of_input(site: int, own_values: bool = True) -> int:
    """How many matrices read the input of a sub-layer."""
    return 2 + own_values if site % 2 == 0 else 2


def carried_numbers(model: ModelConfig) -> int:
    """Numbers per token that the residual method carries from one sub-layer to the next, where they are most."""
    return recorded(model).most // 4


def has_norm(model: ModelConfig, site: int) -> bool:
    """Whether the body has a norm behind the read of a site."""
    if site == 2 * model.layers:
        return True
    adaptation = model.residual.adaptation(model.body)
    return adaptation.input_norms and model.norms != "post" and not (model.norms == "hybrid" and site % 2 == 0)


def recorded(model: ModelConfig, checkpointed: bool = False, mixed: bool = False) -> Recorded:
    """Run the residual method of a model through its whole depth, in float32.

    Delta reads with the depth-attention operator; where no kernel for it can be built, what its definition saves is counted, which is more.

    `checkpointed`: what reads save is left out, as it is made again in the backward pass. `mixed`: under autocast to bfloat16, where each
    projection keeps a rounded copy of its own of a float32 input.
    """
    found = Recorded()
    compute = torch.bfloat16 if mixed else torch.float32
    heads, shared, head = model.heads, model.resolved_key_value_heads, model.resolved_head_width
    sublayers, projecting = 2 * model.layers, model.residual.adaptation(model.body).value_layers

    def pack(tensor: Tensor) -> Tensor:
        found.note(found.saved, [tensor])
        return tensor

    def norm(x: Tensor) -> Tensor:
        rows = x.float()
        if not checkpointed:
            found.note(found.saved, [rows])
        put = _opaque(model.width, torch.float32, rows)
        found.normed += 1
        return put

    def read(memory: Any, site: int) -> Any:
        now = found.note(found.carried, tree_leaves(memory))
        found.most = max(found.most, sum(map(bytes_of, now.values())))
        with saved_tensors_hooks(_same, _same) if checkpointed else nullcontext():
            inputs = residual.read(memory, site, norm if has_norm(model, site) else None)
        fed = tree_leaves(inputs)[0].dtype
        formula = site == sublayers or has_formula(model, site)
        if not formula:
            found.unknown[site] = fed
        if mixed and site < sublayers and fed != compute:
            found.copied += model.width * copies_of_input(site, projects_values(site)) * formula
        else:
            found.note(found.handed if has_norm(model, site) else found.saved, tree_leaves(inputs))
        return inputs

    def projects_values(site: int) -> bool:
        return projecting is None or site // 2 < projecting

    def projected(inputs: Tensor, number: int) -> Tensor:
        return _opaque(number * head, compute, inputs).view(1, TOKENS, number, head).transpose(1, 2)

    lower = torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed)
    with FakeTensorMode(), saved_tensors_hooks(pack, _same), lower:
        residual = model.residual.module(model.body)
        kind = compute if model.memory_dtype == "compute" else torch.float32
        memory = residual.open(torch.empty(1, TOKENS, model.width, requires_grad=True, dtype=kind))
        for site in range(sublayers):
            inputs = read(memory, site)
            kept = None
            if site % 2 == 0:
                roles = inputs if isinstance(inputs, RoleInputs) else RoleInputs(inputs, inputs, inputs)
                own = projected(roles.value, shared) if projects_values(site) else None
                given = Projected(projected(roles.query, heads), projected(roles.key, shared), own)
                value, kept = residual.values(memory, site, given)
                found.note(found.attended if has_formula(model, site) else found.projected, [given.query, given.key, value])
                output = _opaque(model.width, compute, given.query, given.key, value)
            else:
                output = _opaque(model.width, compute, inputs)
            activation = _opaque(model.body.activation(site), compute, output)
            memory = residual.write(memory, site, output, Trace(inputs, activation, kept))
        read(memory, sublayers)
    return found


class _Opaque(torch.autograd.Function):
    """Something between tensors that saves nothing itself: a sub-layer, a norm."""

    @staticmethod
    def forward(ctx: Any, width: int, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        return inputs[0].new_empty(1, TOKENS, width, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError  # only what a forward pass saves is counted; nothing is differentiated


def _opaque(width: int, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
    return cast(Tensor, _Opaque.apply(width, dtype, *inputs))  # type: ignore[no-untyped-call]


def _same(tensor: Tensor) -> Tensor:
    return tensor
