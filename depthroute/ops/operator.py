"""The registered operator `depthroute::depth_read`: its shapes for tracing, its autograd rule, and the dispatch to a backend.

It is registered key by key. `torch.library.custom_op` would do the same in fewer lines, but its generated rule costs three times as much
per call, which small models feel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops.form import Form, Found, Gradients, Operands, Saved, Upstream, empty_gradients, empty_results
from depthroute.ops.held import Buffer, behind, destinations
from depthroute.ops.registry import BACKENDS

OPERANDS = "Tensor[] sources, Tensor[] keys, Tensor queries, Tensor? bias, Tensor? output_gain, Tensor[] prior"
FORM = "int heads, str key_norm, str weighting, float eps, float output_eps, str backend"


def read(operands: Operands, form: Form, backend: str) -> Found:
    """A read by a backend of the registry, with gradients for everything but the maxima."""
    found = torch.ops.depthroute.depth_read(*map(_listed, operands), *form, backend)
    outputs, saved = _unflatten(found, operands.count, form)
    return Found(outputs, saved.max, saved.sum, saved.weights)


def _listed(operand: Any) -> Any:
    return list(operand) if isinstance(operand, tuple) else operand


def _flatten(outputs: Sequence[Tensor], saved: Saved) -> list[Tensor]:
    return [*outputs, *saved.max, *saved.sum, *saved[2:]]


def _unflatten(found: Sequence[Tensor], count: int, form: Form) -> tuple[Sequence[Tensor], Saved]:
    outputs, rest = found[:count], found[count:]
    if form.weighting == "sigmoid":
        return outputs, Saved((), (), *rest)
    return outputs, Saved(rest[:count], rest[count : 2 * count], *rest[2 * count :])


def _forward(*given: Any) -> list[Tensor]:
    """M outputs [..., D], then the scalars of `Saved`, flat."""
    operands, form, backend = Operands(*given[:6]), Form(*given[6:11]), given[11]
    outputs, saved = empty_results(operands, form)
    BACKENDS[backend].forward(operands, form, outputs, saved)
    return _flatten(outputs, saved)


def _shapes(*given: Any) -> list[Tensor]:
    return _flatten(*empty_results(Operands(*given[:6]), Form(*given[6:11])))


def _backward(into: list[Tensor], found: list[Tensor], add: list[bool], *given: Any) -> None:
    """Puts the gradients of the sources into `into` and the others, laid out flat as in `Gradients`, into `found`."""
    operands, scalars, outputs, sums, weights = Operands(*given[:6]), *given[6:10]
    form, backend = Form(*given[10:15]), given[15]
    _, saved = _unflatten([*outputs, *scalars], operands.count, form)
    keyed = len(operands.keys)
    gradients = Gradients(found[:keyed], found[keyed:-3], *found[-3:])
    BACKENDS[backend].backward(operands, form, saved, Upstream(outputs, sums, weights), into, add, gradients)


class _DepthRead(torch.autograd.Function):
    """The autograd rule. Lists travel flat, because autograd sees only tensors among the arguments."""

    @staticmethod
    def forward(
        ctx: Any, number: int, keyed: int, form: Form, backend: str, buffers: Sequence[Buffer | None], queries: Tensor, bias: Tensor | None,
        gain: Tensor | None, *rows: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        sources, keys, prior = rows[:number], rows[number : number + keyed], rows[number + keyed :]
        with torch._C._AutoDispatchBelowAutograd():
            found = torch.ops.depthroute.depth_read(sources, keys, queries, bias, gain, prior, *form, backend)
        ctx.number, ctx.keyed, ctx.form, ctx.backend, ctx.buffers = number, keyed, form, backend, buffers
        count = queries.shape[0]
        ctx.save_for_backward(queries, bias, gain, *rows, *found[count:])
        softmax = form.weighting == "softmax"
        ctx.mark_non_differentiable(*found[count : 2 * count if softmax else count], *found[-3:])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        number, keyed, form = ctx.number, ctx.keyed, ctx.form
        queries, bias, gain, *rest = ctx.saved_tensors
        count, softmax = queries.shape[0], form.weighting == "softmax"
        scalars = 4 + 2 * count * softmax
        rows, saved = rest[:-scalars], rest[-scalars:]
        sources, keys, prior = rows[:number], rows[number : number + keyed], rows[number + keyed :]
        outputs = [sources[0].new_zeros(sources[0].shape) if g is None else g for g in gradients[:count]]
        of_sum = gradients[2 * count : 3 * count] if softmax and any(g is not None for g in gradients[2 * count : 3 * count]) else ()
        sums = [torch.zeros_like(saved[count + m]) if g is None else g for m, g in enumerate(of_sum)]
        into, add, of_sources = destinations(sources, ctx.buffers)
        empty = empty_gradients(Operands(sources, keys, queries, bias, gain, prior), form)
        found = [*empty.keys, *empty.prior, *empty[2:]]
        torch.ops.depthroute.depth_read_backward(
            into, found, add, sources, keys, queries, bias, gain, prior, saved, outputs, sums, gradients[-4], *form, ctx.backend
        )
        of_keys, of_prior = found[:keyed], found[keyed:-3]
        of_maxima = [None] * count if prior and softmax else []
        *_, of_queries, of_bias, of_gain = found
        return (
            *(None,) * 5, of_queries, None if bias is None else of_bias, None if gain is None else of_gain, *of_sources, *of_keys,
            *of_prior[:count], *of_maxima, *of_prior[count:],
        )  # fmt: skip


def _autograd(
    sources: list[Tensor], keys: list[Tensor], queries: Tensor, bias: Tensor | None, gain: Tensor | None, prior: list[Tensor], *given: Any
) -> list[Tensor]:
    apply: Any = _DepthRead.apply  # torch has no types for it
    rows, buffers = zip(*map(behind, sources), strict=True)
    return list(apply(len(sources), len(keys), Form(*given[:5]), given[5], buffers, queries, bias, gain, *rows, *keys, *prior))


def _register() -> torch.library.Library:
    library_of_operators: Any = torch.library.Library  # torch has no types for it
    operators = library_of_operators("depthroute", "DEF")
    operators.define(f"depth_read({OPERANDS}, {FORM}) -> Tensor[]")
    # Everything it computes goes into tensors that are handed in: torch.compile takes no operator that both mutates and returns lists.
    operators.define(
        f"depth_read_backward(Tensor(a!)[] into, Tensor(b!)[] found, bool[] add, {OPERANDS}, Tensor[] saved, Tensor[] gradients,"
        f" Tensor[] sum_gradients, Tensor? weight_gradients, {FORM}) -> ()"
    )
    for key in ("CPU", "CUDA"):
        operators.impl("depth_read", _forward, key)
        operators.impl("depth_read_backward", _backward, key)
    operators.impl("depth_read", _autograd, "Autograd")
    torch.library.register_fake("depthroute::depth_read", _shapes, lib=operators)
    torch.library.register_fake("depthroute::depth_read_backward", lambda *_: None, lib=operators)
    return cast(torch.library.Library, operators)


_OPERATORS = _register()  # the registration lasts as long as this object
