"""The passes through Inductor, on the CPU and on CUDA or ROCm: where each graph is compiled, and how lists of any length use a few of them.

Up to eight sources are one graph forward and one backward. A longer list is worked through in parts of four to eight: scores, one softmax
over all of them, mixtures; backward first what the whole mixture decides, then each part. So the number of graphs does not grow with the
number of sources.

A graph serves every number of tokens from two on. A single token has graphs of its own, none needs none. Beyond that a graph is compiled
for what `_kind` reads: the number of sources (1 to 8, or a part's 4 to 8), the form, the number of queries, width, rank, dtypes, device,
which optional tensors there are, and whether the gradients of sources are all written in the rows' dtype or all added in the statistics
dtype; a list that mixes these is added. Torch's own settings (threads, determinism, matmul precision) recompile what is called again.

Rows that are not contiguous are copied. Same inputs, same bits; but how a graph orders its sums over tokens may depend on the number of
tokens it first met.

Shapes: N tokens, S sources, M queries, H heads, D width, R key rank, W weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from depthroute.ops import passes
from depthroute.ops.form import Form, Gradients, Operands, Saved, Upstream

LONGEST = 8  # sources in one graph
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@cache
def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot serve, or None."""
    if dtype not in DTYPES:
        return f"it has no arithmetic for {dtype}"
    if device.type not in ("cpu", "cuda"):
        return f"it runs on the CPU and on CUDA, and the sources are on {device}"
    return _no_compiler(device)


def _no_compiler(device: torch.device) -> str | None:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "torch.compile finds no Triton"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return "torch.compile finds no C++ compiler"
    return None


def forward(operands: Operands, form: Form, outputs: Sequence[Tensor], saved: Saved) -> None:
    """As `form.Backend.forward`."""
    tokens = operands.sources[0].shape[:-1].numel()
    if tokens == 0:
        return
    flat, found, scalars = _operands(operands, tokens), _rows(outputs, tokens), _scalars(saved, tokens)
    if len(flat.sources) <= LONGEST:
        _run(passes.read, form, flat, found, scalars)
        return
    for part in _parts(len(flat.sources)):
        scores = _row(torch.empty_like(scalars.scores[..., part], memory_format=torch.contiguous_format), tokens, 3)
        rstd = _row(torch.empty_like(scalars.rstd[:, part], memory_format=torch.contiguous_format), tokens)
        _run(passes.score, form, _part(flat, part), scores, rstd)
        scalars.scores[..., part] = scores
        scalars.rstd[:, part] = rstd
    passes.weigh(form, flat, scalars)
    _run(passes.finish, form, _without_sources(flat), _mixture(flat, form, scalars, tokens), found, _without_scores(scalars))


def backward(
    operands: Operands, form: Form, saved: Saved, upstream: Upstream, into: Sequence[Tensor], add: Sequence[bool], found: Gradients
) -> None:
    """As `form.Backend.backward`."""
    tokens = operands.sources[0].shape[:-1].numel()
    if tokens == 0:
        for parameter in found[2:]:
            parameter.zero_()
        return
    targets, added, rest = _targets(into, add, operands)
    flat, scalars, targets = _operands(operands, tokens), _scalars(saved, tokens), _rows(targets, tokens)
    arriving = Upstream(
        _rows(_contiguous(upstream.outputs), tokens), _rows(_contiguous(upstream.sums), tokens),
        None if upstream.weights is None else _row(upstream.weights.contiguous(), tokens, 3),
    )  # fmt: skip
    leaving = found._replace(keys=_rows(found.keys, tokens), prior=_rows(found.prior, tokens))
    if len(flat.sources) <= LONGEST:
        _run(passes.unread, form, flat, scalars, arriving, targets, added, leaving)
    else:
        _long_backward(flat, form, scalars, arriving, targets, added, leaving, tokens)
    for destination, gradient, more in rest:
        destination.add_(gradient) if more else destination.copy_(gradient)


def _long_backward(
    flat: Operands, form: Form, saved: Saved, upstream: Upstream, into: list[Tensor], added: bool, found: Gradients, tokens: int
) -> None:
    mixture = _mixture(flat, form, saved, tokens)
    levels = _rows([torch.empty_like(largest) for largest in saved.max], tokens)
    whole = upstream if upstream.weights is None else upstream._replace(weights=_any_length(upstream.weights))
    absent = saved.weights.new_empty(0)
    of_mixture = Gradients([], found.prior, absent, absent, found.output_gain)
    _run(passes.settle, form, _without_sources(flat), _without_scores(saved), whole, mixture, levels, of_mixture)
    gradients = upstream.outputs if flat.output_gain is None else mixture
    found.queries.zero_()
    for part in _parts(len(flat.sources)):
        weights, scores = (_row(scalars[..., part].contiguous(), tokens, 3) for scalars in (saved.weights, saved.scores))
        scalars = Saved([], [], weights, scores, _row(saved.rstd[:, part].contiguous(), tokens), absent)
        arriving = Upstream(gradients, [], None if upstream.weights is None else _row(upstream.weights[..., part].contiguous(), tokens, 3))
        bias = found.bias.new_empty(flat.reads, scores.shape[-1])
        leaving = Gradients(found.keys[part], [], torch.empty_like(found.queries), bias, absent)
        _run(passes.unread_part, form, _part(flat, part), scalars, arriving, levels, into[part], added, leaving)
        found.queries.add_(leaving.queries)
        found.bias[:, part] = bias


def _mixture(flat: Operands, form: Form, saved: Saved, tokens: int) -> list[Tensor]:
    """The M mixtures of a long list [N, D] in the statistics dtype, without the prior."""
    first = flat.sources[0]
    totals = _rows([first.new_zeros(first.shape, dtype=flat.queries.dtype) for _ in range(flat.reads)], tokens)
    for part in _parts(len(flat.sources)):
        _run(passes.mix, form, _part(flat, part), _row(saved.weights[..., part].contiguous(), tokens, 3), totals)
    return totals


def _targets(
    into: Sequence[Tensor], add: Sequence[bool], operands: Operands
) -> tuple[list[Tensor], bool, list[tuple[Tensor, Tensor, bool]]]:
    """Where a graph puts the sources' gradients, whether it adds them, and what is left to do: destination, gradient, whether to add it."""
    rows, exact = operands.sources[0].dtype, operands.queries.dtype
    if not any(add) and all(target.dtype == rows for target in into):
        return list(into), False, []
    targets: list[Tensor] = []
    rest: list[tuple[Tensor, Tensor, bool]] = []
    for target, more in zip(into, add, strict=True):
        again = any(target is earlier for earlier in into[: len(targets)])
        if target.dtype == exact and not again:
            targets.append(target if more else target.zero_())
        else:
            targets.append(torch.zeros_like(target, dtype=exact))
            rest.append((target, targets[-1], more))
    return targets, True, rest


def _parts(number: int) -> list[slice]:
    """Consecutive parts of nearly one size."""
    count = -(-number // LONGEST)
    ends = [number * i // count for i in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _part(operands: Operands, part: slice) -> Operands:
    bias = None if operands.bias is None else _plain(operands.bias[:, part].contiguous())
    return Operands(operands.sources[part], operands.keys[part], operands.queries, bias, None, [])


def _without_sources(operands: Operands) -> Operands:
    return operands._replace(sources=[], keys=[], bias=None)


def _without_scores(saved: Saved) -> Saved:
    absent = saved.weights.new_empty(0)
    return saved._replace(weights=_any_length(saved.weights), scores=absent, rstd=absent)


def _operands(operands: Operands, tokens: int) -> Operands:
    sources, keys, prior = (_rows(_contiguous(rows), tokens) for rows in (operands.sources, operands.keys, operands.prior))
    queries, bias, gain = (None if one is None else _plain(one.contiguous()) for one in operands[2:5])
    assert queries is not None
    return Operands(sources, keys, queries, bias, gain, prior)


def _scalars(saved: Saved, tokens: int) -> Saved:
    weights, scores = _row(saved.weights, tokens, 3), _row(saved.scores, tokens, 3)
    return Saved(
        _rows(saved.max, tokens), _rows(saved.sum, tokens), weights, scores, _row(saved.rstd, tokens), _row(saved.output_rstd, tokens)
    )


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _rows(tensors: Sequence[Tensor], tokens: int) -> list[Tensor]:
    return [_row(tensor, tokens) for tensor in tensors]


def _row(tensor: Tensor, tokens: int, trailing: int = 1) -> Tensor:
    """Contiguous [..., trailing dimensions] as [N, trailing dimensions] with N dynamic, except that one is compiled for by itself."""
    flat = _plain(tensor, tokens, *tensor.shape[-trailing:])
    if tokens > 1:
        torch._dynamo.mark_dynamic(flat, 0)
    return flat


def _any_length(weights: Tensor) -> Tensor:
    """[N, M, H, W] with W dynamic too."""
    weights = weights.view(weights.shape)
    torch._dynamo.mark_dynamic(weights, [0, 3] if weights.shape[0] > 1 else 3)
    return weights


def _plain(tensor: Tensor, *shape: int) -> Tensor:
    """A contiguous tensor in this shape, or its own. The view puts strides right where a size is one: graphs insist on them."""
    return tensor.detach().view(shape or tensor.shape)


def _run(graph: Callable[..., None], form: Form, *given: Any) -> None:
    """A pass through its graph, in the one state of autograd and autocast that graphs are compiled in."""
    operands: Operands = given[0]
    with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView(), torch.autocast(operands.queries.device.type, enabled=False):
        _compiled(graph, form, _kind(given))(form, *given)


def _kind(given: Any) -> Any:
    """All that a graph is compiled for. Tensors of one list are alike."""
    if isinstance(given, Tensor):
        free = getattr(given, "_dynamo_dynamic_indices", ())
        return given.dtype, given.device, tuple(-1 if i in free else size for i, size in enumerate(given.shape))
    if isinstance(given, list):
        return (len(given), _kind(given[0])) if given else 0
    return tuple(_kind(one) for one in given) if isinstance(given, tuple) else given


@cache
def _compiled(graph: Callable[..., None], form: Form, kind: Any) -> Callable[..., None]:
    """A graph, from a code object of its own: torch counts what it compiles for each and stops after a few."""
    return torch.compile(FunctionType(graph.__code__.replace(), graph.__globals__), fullgraph=True, dynamic=False)
