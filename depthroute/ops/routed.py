"""The products of a mixture of experts, from tokens to sorted rows and back, without a copy of the tokens for each of their experts.

On the CPU a group's tokens are gathered into a small buffer that stays in the cache, right before its matrices need them, and its outputs
are added to their tokens from one: large tensors that are written once and read once would cost a fifth of the time. Elsewhere all rows are
gathered, multiplied group by group and added back at once.

Shapes: T tokens, K experts of a token, X experts, N = T K rows sorted by expert, D width, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.ops.grouped import as_autocast, outer, product, summed


class Routes(NamedTuple):
    """Which rows are whose.

    `order` int64 [N]: row n is of token order[n] // K. `places` int64 [T, K], its inverse: where the rows of a token are, no two of one
    expert. `ends` int64 [X]: expert x has the rows ends[x - 1] to ends[x] - 1.
    """

    order: Tensor
    places: Tensor
    ends: Tensor


def routes(chosen: Tensor, counts: Tensor) -> Routes:
    """Of the experts `chosen` int64 [T, K], each at most once a token, and how often each was: `counts` int64 [X]."""
    order = chosen.flatten().argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return Routes(order, places.view_as(chosen), counts.cumsum(0))


def into_experts(tokens: Tensor, gate: Tensor, up: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
    """Each row's token times the gate and the up matrix of its expert: [T, D] and two [X, F, D] to two [N, F]. Differentiable once."""
    found: tuple[Tensor, Tensor] = torch.ops.depthroute.into_experts(*as_autocast(tokens, gate, up), *routes)
    return found


def out_of_experts(rows: Tensor, shares: Tensor, down: Tensor, routes: Routes) -> Tensor:
    """The sum over a token's rows, each times its share and the down matrix of its expert: [N, F], [T, K] and [X, D, F] to [T, D].

    `shares` may be wider than the rows. Differentiable once.
    """
    rows, down = as_autocast(rows, down)
    found: Tensor = torch.ops.depthroute.out_of_experts(rows, shares, down, *routes)
    return found


def weighed(rows: Tensor, shares: Tensor, routes: Routes) -> Tensor:
    """Rows times their shares: [N, F] and [T, K] to [N, F], in the dtype of the rows."""
    return (rows * shares.flatten().index_select(0, routes.order)[:, None]).to(rows.dtype)


@torch.library.custom_op("depthroute::into_experts", mutates_args=())
def _into(tokens: Tensor, gate: Tensor, up: Tensor, order: Tensor, places: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    owners = order // places.shape[1]
    if tokens.device.type != "cpu":
        rows = tokens.index_select(0, owners)
        return product(rows, gate, ends), product(rows, up, ends)
    gates, ups = _into_shapes(tokens, gate, up, order, places, ends)
    for x, here, mine, buffer in _groups(owners, ends, tokens):
        torch.index_select(tokens, 0, mine, out=buffer)
        torch.mm(buffer, gate[x].t(), out=gates[here])
        torch.mm(buffer, up[x].t(), out=ups[here])
    return gates, ups


@torch.library.custom_op("depthroute::into_experts_backward", mutates_args=())
def _into_backward(
    of_gates: Tensor, of_ups: Tensor, tokens: Tensor, gate: Tensor, up: Tensor, order: Tensor, places: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    owners = order // places.shape[1]
    if tokens.device.type != "cpu":
        of_rows = product(of_gates, gate.mT, ends) + product(of_ups, up.mT, ends)
        rows = tokens.index_select(0, owners)
        return summed(of_rows, places), outer(of_gates, rows, ends), outer(of_ups, rows, ends)
    of_tokens, of_gate, of_up = _sums(tokens, *tokens.shape), gate.new_empty(gate.shape), up.new_empty(up.shape)
    for x, here, mine, buffer in _groups(owners, ends, tokens):
        torch.index_select(tokens, 0, mine, out=buffer)
        torch.mm(of_gates[here].t(), buffer, out=of_gate[x])  # zeros where there are no rows
        torch.mm(of_ups[here].t(), buffer, out=of_up[x])
        torch.mm(of_gates[here], gate[x], out=buffer).addmm_(of_ups[here], up[x])
        of_tokens.index_add_(0, mine, buffer.to(of_tokens.dtype))
    return of_tokens.to(tokens.dtype), of_gate, of_up


@torch.library.custom_op("depthroute::out_of_experts", mutates_args=())
def _out(rows: Tensor, shares: Tensor, down: Tensor, order: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        return summed(product(weighed(rows, shares, Routes(order, places, ends)), down, ends), places)
    found, of_rows = _sums(rows, len(places), down.shape[1]), shares.flatten()[order][:, None]
    for x, here, mine, buffer in _groups(order // places.shape[1], ends, down):
        # Shares go to what enters the down matrix, which is narrower than what leaves it.
        torch.mm((rows[here] * of_rows[here]).to(rows.dtype), down[x].t(), out=buffer)
        found.index_add_(0, mine, buffer.to(found.dtype))
    return found.to(rows.dtype)


@torch.library.custom_op("depthroute::out_of_experts_backward", mutates_args=())
def _out_backward(
    gradient: Tensor, rows: Tensor, shares: Tensor, down: Tensor, order: Tensor, places: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    owners, share = order // places.shape[1], shares.flatten()[order][:, None]
    if rows.device.type != "cpu":
        of_products = gradient.index_select(0, owners)
        of_weighed = product(of_products, down.mT, ends).to(shares.dtype)
        of_down = outer(of_products, (rows * share).to(rows.dtype), ends)
        return (of_weighed * share).to(rows.dtype), (of_weighed * rows).sum(1)[places], of_down
    of_rows, of_share, of_down = rows.new_empty(rows.shape), share.new_empty(len(rows)), down.new_empty(down.shape)
    for x, here, mine, buffer in _groups(owners, ends, gradient):
        torch.index_select(gradient, 0, mine, out=buffer)
        torch.mm(buffer.t(), (rows[here] * share[here]).to(rows.dtype), out=of_down[x])
        of_weighed = torch.mm(buffer, down[x]).to(shares.dtype)
        torch.sum(of_weighed * rows[here], 1, out=of_share[here])
        torch.mul(of_weighed, share[here], out=of_rows[here])
    return of_rows, of_share[places], of_down


def _groups(owners: Tensor, ends: Tensor, like: Tensor) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """The number of every group, its rows, their tokens, and a buffer for them as wide as `like`, whose memory all groups share."""
    bounds = [0, *ends.tolist()]
    counts = [end - start for start, end in pairwise(bounds)]
    buffer = like.new_empty(max(counts), like.shape[1])
    for x, (start, count) in enumerate(zip(bounds, counts, strict=False)):
        here = slice(start, start + count)
        yield x, here, owners[here], buffer[:count]


def _sums(like: Tensor, tokens: int, width: int) -> Tensor:
    """Zeros for sums of rows, in at least float32."""
    return like.new_zeros(tokens, width, dtype=torch.promote_types(like.dtype, torch.float32))


@_into.register_fake
def _into_shapes(tokens: Tensor, gate: Tensor, up: Tensor, order: Tensor, places: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return tokens.new_empty(order.shape[0], gate.shape[1]), tokens.new_empty(order.shape[0], up.shape[1])


@_into_backward.register_fake
def _(
    of_gates: Tensor, of_ups: Tensor, tokens: Tensor, gate: Tensor, up: Tensor, order: Tensor, places: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return tokens.new_empty(tokens.shape), gate.new_empty(gate.shape), up.new_empty(up.shape)


@_out.register_fake
def _(rows: Tensor, shares: Tensor, down: Tensor, order: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(places.shape[0], down.shape[1])


@_out_backward.register_fake
def _(
    gradient: Tensor, rows: Tensor, shares: Tensor, down: Tensor, order: Tensor, places: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(rows.shape), shares.new_empty(shares.shape), down.new_empty(down.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _into_gradients(ctx: Any, of_gates: Tensor, of_ups: Tensor) -> tuple[Tensor | None, ...]:
    return *_into_backward(of_gates, of_ups, *ctx.saved_tensors), None, None, None


def _out_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_out_backward(gradient, *ctx.saved_tensors), None, None, None


_into.register_autograd(_into_gradients, setup_context=_keep)
_out.register_autograd(_out_gradients, setup_context=_keep)
