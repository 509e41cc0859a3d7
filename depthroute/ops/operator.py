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
from depthroute.ops.watched import watched

OPERANDS = "Tensor[] sources, Tensor[] keys, Tensor queries, Tensor? bias, Tensor? output_gain, Tensor[] prior"
FORM = "int heads, str key_norm, str weighting, float eps, float output_eps, str backend"


def read(operands: Operands, form: Form, backend: str) -> Found:
    """A read by a backend of the registry, with gradients for everything but the maxima."""
    found: Sequence[Tensor]
    if _watched(operands):
        found = torch.ops.depthroute.depth_read(*map(_listed, operands), *form, backend)
    else:
        found = (_autograd if torch.is_grad_enabled() else _forward)(*map(_listed, operands), *form, backend)
    outputs, saved = _unflatten(found, operands.reads, form)
    return Found(outputs, saved.max, saved.sum, saved.weights)


def _watched(operands: Operands) -> bool:
    """If nobody looks, a read skips the dispatcher, which costs a small model as much as the arithmetic."""
    return watched((*operands.sources, operands.queries))


def _listed(operand: Any) -> Any:
    return list(operand) if isinstance(operand, tuple) else operand


def _flatten(outputs: Sequence[Tensor], saved: Saved, form: Form) -> list[Tensor]:
    """As the operator returns it: maxima and sums lose the axis of a single head here, where autograd does not count it as a step."""
    statistics = (*saved.max, *saved.sum)
    return [*outputs, *(part.squeeze(-1) if form.heads == 1 else part for part in statistics), *saved[2:]]


def _with_heads(parts: Sequence[Tensor], form: Form) -> list[Tensor]:
    """Maxima and sums [..., H], as backends know them."""
    return [part.unsqueeze(-1) for part in parts] if form.heads == 1 else list(parts)


def _operands(given: Sequence[Any], form: Form) -> Operands:
    """The operator's first six arguments as backends know them."""
    operands = Operands(*given)
    count = operands.reads
    return operands._replace(prior=[*operands.prior[:count], *_with_heads(operands.prior[count:], form)])


def _unflatten(found: Sequence[Tensor], count: int, form: Form) -> tuple[Sequence[Tensor], Saved]:
    outputs, rest = found[:count], found[count:]
    if form.weighting == "sigmoid":
        return outputs, Saved((), (), *rest)
    return outputs, Saved(rest[:count], rest[count : 2 * count], *rest[2 * count :])


def _forward(*given: Any) -> list[Tensor]:
    """M outputs [..., D], then the scalars of `Saved`, flat."""
    form, backend = Form(*given[6:11]), given[11]
    operands = _operands(given[:6], form)
    outputs, saved = empty_results(operands, form)
    BACKENDS[backend].forward(operands, form, outputs, saved)
    return _flatten(outputs, saved, form)


def _shapes(*given: Any) -> list[Tensor]:
    form = Form(*given[6:11])
    return _flatten(*empty_results(Operands(*given[:6]), form), form)


def _backward(into: list[Tensor], found: list[Tensor], add: list[bool], *given: Any) -> None:
    """Puts the gradients of the sources into `into` and the others, laid out flat as in `Gradients`, into `found`."""
    scalars, outputs, sums, weights = given[6:10]
    form, backend = Form(*given[10:15]), given[15]
    operands = _operands(given[:6], form)
    count, keyed = operands.reads, len(operands.keys)
    _, saved = _unflatten([*outputs, *scalars], count, form)
    saved = saved._replace(max=_with_heads(saved.max, form), sum=_with_heads(saved.sum, form))
    of_keys, of_prior, of_prior_sums = found[:keyed], found[keyed:-3][:count], _with_heads(found[keyed:-3][count:], form)
    gradients = Gradients(of_keys, [*of_prior, *of_prior_sums], *found[-3:])
    BACKENDS[backend].backward(operands, form, saved, Upstream(outputs, _with_heads(sums, form), weights), into, add, gradients)


class _DepthRead(torch.autograd.Function):
    """The autograd rule. Lists travel flat, because autograd sees only tensors among the arguments."""

    @staticmethod
    def forward(
        ctx: Any, number: int, keyed: int, form: Form, backend: str, buffers: Sequence[Buffer | None], queries: Tensor, bias: Tensor | None,
        gain: Tensor | None, *rows: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        sources, keys, prior = rows[:number], rows[number : number + keyed], rows[number + keyed :]
        operands = Operands(sources, keys, queries, bias, gain, prior)
        ctx.watched = _watched(operands)
        if ctx.watched:
            with torch._C._AutoDispatchBelowAutograd():
                found = torch.ops.depthroute.depth_read(*map(_listed, operands), *form, backend)
        else:
            found = _forward(*operands, *form, backend)
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
        run = torch.ops.depthroute.depth_read_backward if ctx.watched else _backward
        run(into, found, add, sources, keys, queries, bias, gain, prior, saved, outputs, sums, gradients[-4], *form, ctx.backend)
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
