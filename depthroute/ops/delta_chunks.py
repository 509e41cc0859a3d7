"""The delta rule in chunks: what does not depend on the state for all chunks at once, then the state from chunk to chunk.

Of one chunk that meets the state S, with D_t the product of the chunk's decays up to token t and D_tj of those after j up to t:

    A_tj = sum_e k_te k_je D_tje  (j < t),      P_tj = sum_e q_te k_je D_tje  (j <= t)
    Z = V - (K D) S,      U = (I + diag(b) A)^-1 diag(b) Z,      O = (Q D) S + P U,      S <- diag(D_C) S + (K D_C.)^T U

D_tj is not formed as D_t / D_j, which overflows. Halving makes every factor a product of decays, none above 1: for t in the second half
of a block and j in the first it is (product from the middle up to t) times (product after j up to the middle), and blocks of 2, 4, 8, ...
tokens leave no pair out. A document's start inside a chunk cuts the pairs across it and the state before it with masks: exact zeros.

Shapes: B batch, H heads, N chunks, C tokens of a chunk, E key width, V value width; h half of a block, X = B*H*N*(C/2h) blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LONGEST = 64  # tokens of a chunk
PORTION = 3 << 17  # numbers of a tensor that are worked on together on a CPU: new memory is slow there, and the cache is fast


def in_chunks(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What each token reads, [B, H, T, V], and the last state, of inputs in one exact dtype. See `delta_rule`."""
    sequences = (query, key, value, log_decay, strength[..., None])
    batch, _, tokens, width = query.shape
    if query.device.type != "cpu":
        return _portion(sequences, state, begins)
    widest = max(width, value.shape[-1])
    together = max(PORTION // (batch * widest * tokens), 1)  # heads
    span = max(PORTION // (batch * widest * together) // LONGEST, 1) * LONGEST  # tokens; the state goes on from one span to the next
    reads, lasts = [], []
    for now, *parts in zip(*(torch.split(x, together, 1) for x in (state, *sequences)), strict=True):
        read = []
        spans = zip(*(torch.split(x, span, 2) for x in parts), strict=True)
        for number, part in enumerate(spans):
            done, now = _portion(part, now, None if begins is None else begins[:, number * span : (number + 1) * span])
            read.append(done)
        reads.append(_one(read, 2))
        lasts.append(now)
    return _one(reads, 1), _one(lasts, 1)


def _one(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _portion(sequences: tuple[Tensor, ...], state: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = sequences[0].shape
    length = min(LONGEST, 1 << (tokens - 1).bit_length())
    missing = -tokens % length

    def cut(x: Tensor) -> Tensor:  # zeros at the end write nothing and let the state be
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return x.reshape(batch, heads, -1, length, x.shape[-1]).contiguous()

    query, key, value, log_decay, strength = map(cut, sequences)
    same = opening = closing = None
    if begins is not None:
        document = F.pad(begins, (0, missing)).reshape(batch, 1, -1, length, 1).cumsum(-2)
        same, opening, closing = document == document.mT, document == 0, document == document[..., -1:, :]
    inputs = (torch.stack((query, key), 4), value, log_decay, strength, state, same, opening, closing)
    read, last, *_ = torch.ops.depthroute.delta_chunks(*inputs)
    return read.reshape(batch, heads, -1, value.shape[-1])[:, :, :tokens], last


def _forward(
    both: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, same: Tensor | None, opening: Tensor | None,
    closing: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """O, the last state, and for `_backward` P and A, (I + diag(b) A)^-T, each chunk's S, Z and U.

    Args:
        both: queries and keys, [B, H, N, C, 2, E].
        value: [B, H, N, C, V].
        log_decay: [B, H, N, C, E].
        strength: [B, H, N, C, 1].
        state: [B, H, E, V].
        same: bool [B, 1, N, C, C], of two tokens: they are in one document. None, as the others: there is only one.
        opening, closing: bool [B, 1, N, C, 1], the token is in the chunk's first, or last, document.
    """
    with torch.autocast(both.device.type, enabled=False):
        pairs, before, after = _pairs(both, log_decay.exp())
        if same is not None:
            pairs *= same[..., None, :]
        reads, overlaps = pairs.unbind(4)
        one = torch.eye(both.shape[3], dtype=both.dtype, device=both.device).expand_as(overlaps)
        inverse = torch.linalg.solve_triangular(one + strength * overlaps, one, upper=False, unitriangular=True)
        solved = inverse.mT.contiguous()  # the solver's own order
        (asked, known), writing, kept = _meetings(both, before, after, opening, closing)

        states, misses, writes = [], [], []
        now = state.flatten(0, 1)
        for v, k, solve, write, keep in _by_chunk(value, known, inverse * strength.mT, writing.mT, kept.mT):
            states.append(now)
            miss = torch.baddbmm(v, k, now, alpha=-1)
            written = torch.bmm(solve, miss)
            now = torch.baddbmm(now * keep, write, written)
            misses.append(miss)
            writes.append(written)
        met, missed, wrote = (_joined(parts, both) for parts in (states, misses, writes))
        return asked @ met + reads @ wrote, now.view_as(state), pairs, solved, met, missed, wrote


def _backward(
    d_read: Tensor, d_last: Tensor, both: Tensor, log_decay: Tensor, strength: Tensor, same: Tensor | None, opening: Tensor | None,
    closing: Tensor | None, pairs: Tensor, solved: Tensor, met: Tensor, missed: Tensor, wrote: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of both, value, log_decay, strength and state. By hand: autograd would keep every factor of every halving."""
    with torch.autocast(both.device.type, enabled=False):
        (query, key), (reads, overlaps) = both.unbind(4), pairs.unbind(4)
        decay = log_decay.exp()
        before, after = _products(decay)
        (asked, known), writing, kept = _meetings(both, before, after, opening, closing)

        states, solutions = [], []  # of the state after each chunk, and of diag(b) Z
        now = d_last.flatten(0, 1)
        by_chunk = _by_chunk(reads.mT @ d_read, asked.mT @ d_read, writing, solved, (known * strength).mT, kept.mT)
        for d_wrote, d_met, write, solve, know, keep in reversed(by_chunk):
            states.append(now)
            solution = torch.bmm(solve, torch.baddbmm(d_wrote, write, now))
            now = torch.baddbmm(torch.addcmul(d_met, now, keep), know, solution, alpha=-1)
            solutions.append(solution)
        d_next, d_solution = _joined(states[::-1], both), _joined(solutions[::-1], both)

        outer = torch.stack((d_read, -d_solution), 4).flatten(3, 4)
        d_pairs = (outer @ wrote.mT).view(pairs.shape)
        if same is not None:
            d_pairs *= same[..., None, :]
        d_strength = (d_solution * missed).sum(-1, keepdim=True) + (d_pairs[..., 1, :] * overlaps).sum(-1, keepdim=True)
        d_pairs[..., 1, :] *= strength

        # Of queries and keys as later tokens of pairs, and of keys as earlier ones.
        d_both = (outer @ met.mT).view(both.shape) * _masked(before, opening)[..., None, :]
        d_both[..., 1, :] *= strength
        d_earlier = _masked(wrote @ d_next.mT, closing) * after
        d_kept = (met * d_next).sum(-1)[..., None, :] * kept + (key * d_earlier).sum(-2, keepdim=True)
        _pairs_backward(both, decay, d_pairs, d_both, d_earlier)
        d_query, d_later = d_both.unbind(4)
        # A pair's decays are those after its earlier token up to its later one: its gradient enters at one and leaves at the other.
        d_sum = torch.addcmul(query * d_query, key, d_later - d_earlier)
        d_sum[..., -1:, :] += d_kept
        behind = torch.ones(both.shape[3], both.shape[3], dtype=both.dtype, device=both.device).triu()
        d_log_decay = (behind if same is None else behind * same) @ d_sum
        itself = d_pairs[..., 0, :].diagonal(dim1=-2, dim2=-1)[..., None]
        d_query.addcmul_(itself, key)
        d_later.add_(d_earlier).addcmul_(itself, query)
        return d_both, strength * d_solution, d_log_decay, d_strength, now.view_as(d_last)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The first and second halves of the blocks of [B, H, N, C, ...]: [B*H*N, C/2h, h, ...] each, views."""
    first, second = x.view(-1, x.shape[3] // (2 * half), 2, half, *x.shape[4:]).unbind(2)
    return first, second


def _corners(pairs: Tensor, half: int) -> Tensor:
    """The pairs of each block's second half with its first, [B*H*N, C/2h, h, 2, h]: a view of [B, H, N, C, 2, C]."""
    count, size = pairs.shape[3] // (2 * half), 2 * half
    blocks = pairs.view(-1, count, size, 2, count, size).diagonal(dim1=1, dim2=4)
    return blocks[:, half:, :, :half].permute(0, 4, 1, 2, 3)


def _factors(both: Tensor, before: Tensor, after: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The second half's queries and keys, [X, 2h, E], and the first half's keys, [X, h, E], decayed from and up to the middle."""
    (first, second), (_, since), (until, _) = (_halves(x, half) for x in (both, before, after))
    rows, columns = second * since[..., None, :], first[..., 1, :] * until
    return rows.view(-1, 2 * half, both.shape[-1]), columns.view(-1, half, both.shape[-1])


def _double(before: Tensor, after: Tensor, half: int) -> None:
    """From blocks of h tokens to blocks of 2h, in place: products from the block's start up to each token, after each up to its end."""
    (first, second), (until, _) = _halves(before, half), _halves(after, half)
    until *= second[..., -1:, :]  # still the second half's alone
    second *= first[..., -1:, :]


def _products(decay: Tensor) -> tuple[Tensor, Tensor]:
    """Of each chunk, the products of decays up to each token and after it."""
    before, after = decay.clone(), torch.ones_like(decay)
    half = 1
    while half < decay.shape[3]:
        _double(before, after, half)
        half *= 2
    return before, after


def _pairs(both: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P and A, [B, H, N, C, 2, C], and `_products`."""
    length = both.shape[3]
    pairs = both.new_zeros(*both.shape[:5], length)
    before, after = decay.clone(), torch.ones_like(decay)
    half = 1
    while half < length:
        rows, columns = _factors(both, before, after, half)
        corners = _corners(pairs, half)
        corners.copy_(torch.bmm(rows, columns.mT).view(corners.shape))
        _double(before, after, half)
        half *= 2
    pairs[..., 0, :].diagonal(dim1=-2, dim2=-1).copy_((both[..., 0, :] * both[..., 1, :]).sum(-1))
    return pairs, before, after


def _pairs_backward(both: Tensor, decay: Tensor, d_pairs: Tensor, d_both: Tensor, d_earlier: Tensor) -> None:
    """Adds what `_pairs` without its diagonal gives to queries and keys as later tokens, and to keys as earlier ones."""
    before, after = decay.clone(), torch.ones_like(decay)
    half = 1
    while half < both.shape[3]:
        rows, columns = _factors(both, before, after, half)
        corners = _corners(d_pairs, half).reshape(-1, 2 * half, half)
        (_, since), (until, _) = _halves(before, half), _halves(after, half)
        later, earlier = _halves(d_both, half)[1], _halves(d_earlier, half)[0]
        later.addcmul_(torch.bmm(corners, columns).view(later.shape), since[..., None, :])
        earlier.addcmul_(torch.bmm(corners.mT, rows).view(earlier.shape), until)
        _double(before, after, half)
        half *= 2


def _meetings(
    both: Tensor, before: Tensor, after: Tensor, opening: Tensor | None, closing: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Q D and K D, what meets the state; K D_C., what changes it; and D_C, what is kept of it, [B, H, N, 1, E]."""
    asked, known = (both * _masked(before, opening)[..., None, :]).unbind(4)
    kept = _masked(before[..., -1:, :], None if opening is None else opening[..., -1:, :])
    return (asked, known), _masked(both[..., 1, :] * after, closing), kept


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _by_chunk(*parts: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors [B, H, N, ...] as N tuples of [B*H, ...]."""
    return list(zip(*(part.flatten(0, 1).unbind(1) for part in parts), strict=True))


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """N tensors [B*H, ...] as one [B, H, N, ...]."""
    joined = torch.stack(parts, 1)
    return joined.view(*like.shape[:2], *joined.shape[1:])


def _forward_shapes(both: Tensor, value: Tensor, _decay: Tensor, _strength: Tensor, state: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    length, new = both.shape[3], both.new_empty
    met = (*both.shape[:3], *state.shape[2:])
    shapes = (value.shape, state.shape, (*both.shape[:5], length), (*both.shape[:4], length), met, value.shape, value.shape)
    return tuple(new(shape) for shape in shapes)


def _backward_shapes(d_read: Tensor, d_last: Tensor, both: Tensor, log_decay: Tensor, strength: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return tuple(both.new_empty(one.shape) for one in (both, d_read, log_decay, strength, d_last))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    both, _, log_decay, strength, _, *masks = inputs
    ctx.save_for_backward(both, log_decay, strength, *masks, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_read: Tensor | None, d_last: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: where layers are recomputed, asking makes them
    *_, met, missed, _ = saved
    d_read = torch.zeros_like(missed) if d_read is None else d_read
    d_last = torch.zeros_like(met[:, :, 0]) if d_last is None else d_last
    return (*torch.ops.depthroute.delta_chunks_backward(d_read, d_last, *saved), None, None, None)


def _register() -> None:
    """As operators, because a compiler would unroll the chunks of every layer."""
    masks = "Tensor? same, Tensor? opening, Tensor? closing"
    given = f"(Tensor both, Tensor value, Tensor log_decay, Tensor strength, Tensor state, {masks})"
    saved = "Tensor pairs, Tensor solved, Tensor met, Tensor missed, Tensor wrote"
    back = f"(Tensor d_read, Tensor d_last, Tensor both, Tensor log_decay, Tensor strength, {masks}, {saved})"
    forward = torch.library.custom_op(
        "depthroute::delta_chunks", _forward, mutates_args=(), schema=f"{given} -> ({', '.join(['Tensor'] * 7)})"
    )
    backward = torch.library.custom_op(
        "depthroute::delta_chunks_backward", _backward, mutates_args=(), schema=f"{back} -> ({', '.join(['Tensor'] * 5)})"
    )
    forward.register_fake(_forward_shapes)
    backward.register_fake(_backward_shapes)
    forward.register_autograd(_gradients, setup_context=_keep)


_register()
