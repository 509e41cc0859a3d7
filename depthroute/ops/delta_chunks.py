"""The delta rule in chunks: what does not depend on the state for all chunks at once, then the state from chunk to chunk.

Of one chunk that meets the state S, with D_t the product of the chunk's decays up to token t and D_tj of those after j up to t:

    A_tj = sum_e k_te k_je D_tje  (j < t),      P_tj = sum_e q_te k_je D_tje  (j <= t)
    Z = V - (K D) S,      U = (I + diag(b) A)^-1 diag(b) Z,      O = (Q D) S + P U,      S <- diag(D_C) S + (K D_C.)^T U

D_tj is not formed as D_t / D_j, which overflows. Halving makes every factor a product of decays, none above 1: for t in the second half
of a block and j in the first it is (product from the middle up to t) times (product after j up to the middle), and blocks of 2, 4, 8, ...
tokens leave no pair out. Where no channel decays by more than exp(-60) within 16 tokens, their pairs are one product: D_t / D_m by
D_m / D_j with a token m in the middle, both far inside the range of float32.

A document's start inside a chunk cuts the pairs across it and the state before it with masks, so zeros are exact. Halving then stays: the
tokens of a document must not be rounded otherwise for what another one holds.

Shapes: B batch, H heads, T tokens, E key width, V value width; N chunks, R rows (heads of all batches), C tokens of a chunk; h half of a
block, X = N*R*(C/2h) blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LONGEST = 64  # tokens of a chunk
BLOCK = 16  # tokens whose pairs are one product where no channel decays below `WEAKEST` within them
WEAKEST = -60.0  # a logarithm: its exponential, and one over it, are far inside the range of float32
PORTION = 3 << 18  # numbers of a tensor that are worked on together on a CPU: they stay in the cache


def in_chunks(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What each token reads, [B, H, T, V], and the last state, of inputs in one exact dtype. See `delta_rule`."""
    inputs = (query, key, value, log_decay, strength, state)
    keeps = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    read, last, *_ = torch.ops.depthroute.delta_chunks(*inputs, begins, keeps)
    return read, last


def _forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, begins: Tensor | None, keeps: bool
) -> tuple[Tensor, ...]:
    """O and the last state, and for `_backward` P and A, (I + diag(b) A)^-T, each chunk's S, Z and U: [N R, ...], portion by portion.

    `keeps`: whether there will be a backward pass; else those are empty.
    """
    read, last, *saved = _forward_shapes(query, key, value, log_decay, strength, state, begins, keeps)
    with torch.autocast(query.device.type, enabled=False):
        for cut, masks, parts in _portions(query, value, begins, saved):
            both, values, decays, strengths = _given(cut, query, key, value, log_decay, strength)
            found, now = _forward_portion(both, values, decays, strengths, cut.rows(state), *masks, *parts)
            cut.put(read, found)
            cut.put_rows(last, now)
    return read, last, *saved


def _forward_portion(
    both: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, same: Tensor | None, opening: Tensor | None,
    closing: Tensor | None, pairs: Tensor, solved: Tensor, met: Tensor, missed: Tensor, wrote: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [N, R, C, V] and the last state [R, E, V]; fills what is saved.

    Args:
        both: queries and keys, [N, R, C, 2, E].
        value: [N, R, C, V].
        log_decay: [N, R, C, E].
        strength: [N, R, C, 1].
        state: [R, E, V].
        same: bool [N, R, C, C], of two tokens: they are in one document. None, as the others: there is only one.
        opening, closing: bool [N, R, C, 1], the token is in the chunk's first, or last, document.
        pairs, solved, met, missed, wrote: [N, R, C, 2, C], [N, R, C, C], [N, R, E, V], [N, R, C, V] twice.
    """
    before, after = _pairs(both, log_decay, pairs, 1 if same is not None else _whole_blocks(log_decay))
    if same is not None:
        pairs *= same[..., None, :]
    reads, overlaps = pairs.unbind(3)
    one = torch.eye(both.shape[2], dtype=both.dtype, device=both.device).expand_as(overlaps)
    inverse = torch.linalg.solve_triangular(one + strength * overlaps, one, upper=False, unitriangular=True)
    solved.copy_(inverse.mT)
    (asked, known), writing, kept = _meetings(both, before, after, opening, closing)

    solve, last = inverse * strength.mT, torch.empty_like(state)
    met[0] = state
    for chunk in range(len(met)):
        behind = met[chunk + 1] if chunk + 1 < len(met) else last
        torch.baddbmm(value[chunk], known[chunk], met[chunk], alpha=-1, out=missed[chunk])
        torch.bmm(solve[chunk], missed[chunk], out=wrote[chunk])
        torch.mul(met[chunk], kept[chunk].mT, out=behind)
        behind.baddbmm_(writing[chunk].mT, wrote[chunk])
    return (asked @ met).add_(reads @ wrote), last


def _backward(
    d_read: Tensor, d_last: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, begins: Tensor | None,
    pairs: Tensor, solved: Tensor, met: Tensor, missed: Tensor, wrote: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of query, key, value, log_decay, strength and state. By hand: autograd would keep every factor of every halving."""
    gradients = _backward_shapes(d_read, d_last, query, key, value, log_decay, strength)
    with torch.autocast(query.device.type, enabled=False):
        for cut, masks, parts in _portions(query, value, begins, [pairs, solved, met, missed, wrote]):
            both, _, decays, strengths = _given(cut, query, key, None, log_decay, strength)
            d_both, *others, d_state = _backward_portion(cut.take(d_read), cut.rows(d_last), both, decays, strengths, *masks, *parts)
            others[-1] = others[-1][..., 0]
            for whole, found in zip(gradients, (*d_both.unbind(3), *others), strict=False):
                cut.put(whole, found)
            cut.put_rows(gradients[-1], d_state)
    return gradients


def _backward_portion(
    d_read: Tensor, d_last: Tensor, both: Tensor, log_decay: Tensor, strength: Tensor, same: Tensor | None, opening: Tensor | None,
    closing: Tensor | None, pairs: Tensor, solved: Tensor, met: Tensor, missed: Tensor, wrote: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of both, value, log_decay, strength and state, as `_forward_portion` has them."""
    (query, key), (reads, overlaps) = both.unbind(3), pairs.unbind(3)
    before, after = _started(log_decay, both.shape[2])
    (asked, known), writing, kept = _meetings(both, before, after, opening, closing)

    d_wrote, knowing = reads.mT @ d_read, (known * strength).mT
    d_states = met.new_empty(len(met) + 1, *met.shape[1:])  # before each chunk, and behind the last one
    d_states[-1] = d_last
    torch.matmul(asked.mT, d_read, out=d_states[:-1])
    d_solution = torch.empty_like(d_wrote)  # of diag(b) Z
    for chunk in reversed(range(len(met))):
        behind = d_states[chunk + 1]
        torch.bmm(solved[chunk], d_wrote[chunk].baddbmm_(writing[chunk], behind), out=d_solution[chunk])
        d_states[chunk].addcmul_(behind, kept[chunk].mT).baddbmm_(knowing[chunk], d_solution[chunk], alpha=-1)
    d_next = d_states[1:]

    outer = torch.stack((d_read, -d_solution), 3).flatten(2, 3)
    d_pairs = (outer @ wrote.mT).view(pairs.shape)
    if same is not None:
        d_pairs *= same[..., None, :]
    d_strength = (d_solution * missed).sum(-1, keepdim=True) + (d_pairs[..., 1, :] * overlaps).sum(-1, keepdim=True)
    d_pairs[..., 1, :] *= strength

    # Of queries and keys as later tokens of pairs, and of keys as earlier ones.
    d_both = (outer @ met.mT).view(both.shape).mul_(_masked(before, opening)[..., None, :])
    d_both[..., 1, :] *= strength
    d_earlier = _masked(wrote @ d_next.mT, closing) * after
    d_kept = (met * d_next).sum(-1)[..., None, :] * kept + (key * d_earlier).sum(-2, keepdim=True)
    _pairs_backward(both, log_decay, d_pairs, d_both, d_earlier, 1 if same is not None else _whole_blocks(log_decay))
    d_query, d_later = d_both.unbind(3)
    # A pair's decays are those after its earlier token up to its later one: its gradient enters at one and leaves at the other.
    d_sum = torch.addcmul(query * d_query, key, d_later - d_earlier)
    d_sum[..., -1:, :] += d_kept
    behind = torch.ones(both.shape[2], both.shape[2], dtype=both.dtype, device=both.device).triu()
    d_log_decay = (behind if same is None else behind * same) @ d_sum
    itself = d_pairs[..., 0, :].diagonal(dim1=-2, dim2=-1)[..., None]
    d_query.addcmul_(itself, key)
    d_later.add_(d_earlier).addcmul_(itself, query)
    return d_both, strength * d_solution, d_log_decay, d_strength, d_states[0]


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The first and second halves of the blocks of [N, R, C, ...]: [N*R, C/2h, h, ...] each, views."""
    first, second = x.view(-1, x.shape[2] // (2 * half), 2, half, *x.shape[3:]).unbind(2)
    return first, second


def _corners(pairs: Tensor, half: int) -> Tensor:
    """The pairs of each block's second half with its first, [N*R, C/2h, h, 2, h]: a view of [N, R, C, 2, C]."""
    count, size = pairs.shape[2] // (2 * half), 2 * half
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


def _started(log_decay: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Of blocks of so many tokens, the products of decays from the block's start up to each token, and after it up to the end."""
    before = log_decay.exp()
    after, half = torch.ones_like(before), 1
    while half < block:
        _double(before, after, half)
        half *= 2
    return before, after


def _whole_blocks(log_decay: Tensor) -> int:
    """Tokens of the blocks whose pairs are made at once; 1 where decays are too strong for it, and where to ask would stop a GPU.

    It is one answer for all, so a strong decay changes how others are rounded, earlier tokens and other rows too.
    """
    if log_decay.device.type != "cpu" or log_decay.shape[2] < BLOCK:
        return 1
    blocks = log_decay.view(*log_decay.shape[:2], -1, BLOCK, log_decay.shape[3])
    return BLOCK if blocks.sum(3).min() >= WEAKEST else 1


def _tiles(pairs: Tensor, block: int) -> Tensor:
    """The pairs within each block, [N*R, C/block, block, 2, block]: a view of [N, R, C, 2, C]."""
    count = pairs.shape[2] // block
    return pairs.view(-1, count, block, 2, count, block).diagonal(dim1=1, dim2=4).permute(0, 4, 1, 2, 3)


def _within(both: Tensor, before: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each block D_t / D_m, with a token m in its middle, [N*R, C/block, block, E]; queries and keys times it, and keys over it."""
    decays = before.view(-1, before.shape[2] // block, block, before.shape[3])
    ratio = decays / decays[:, :, block // 2 - 1 : block // 2]
    blocks = both.view(*ratio.shape[:3], 2, -1)
    rows = (blocks * ratio[..., None, :]).view(-1, 2 * block, both.shape[-1])
    return ratio, rows, (blocks[..., 1, :] / ratio).view(-1, block, both.shape[-1])


def _pairs(both: Tensor, log_decay: Tensor, pairs: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The products of decays up to each token and after it in a chunk; P and A into `pairs`, [N, R, C, 2, C].

    `half`: tokens of the blocks that are made at once; halving begins with 1.
    """
    pairs.zero_()
    before, after = _started(log_decay, half)
    if half > 1:
        _, rows, columns = _within(both, before, half)
        tiles = _tiles(pairs, half)
        made = torch.bmm(rows, columns.mT).view(tiles.shape)
        tiles.copy_(made.masked_fill_(_later(half, both), 0))
    while half < both.shape[2]:
        rows, columns = _factors(both, before, after, half)
        corners = _corners(pairs, half)
        corners.copy_(torch.bmm(rows, columns.mT).view(corners.shape))
        _double(before, after, half)
        half *= 2
    pairs[..., 0, :].diagonal(dim1=-2, dim2=-1).copy_((both[..., 0, :] * both[..., 1, :]).sum(-1))
    return before, after


def _later(block: int, like: Tensor) -> Tensor:
    """bool [block, 1, block]: the second token of a pair is not before the first."""
    return torch.ones(block, block, dtype=torch.bool, device=like.device).triu()[:, None]


def _pairs_backward(both: Tensor, log_decay: Tensor, d_pairs: Tensor, d_both: Tensor, d_earlier: Tensor, half: int) -> None:
    """Adds what `_pairs` without its diagonal gives to queries and keys as later tokens, and to keys as earlier ones."""
    before, after = _started(log_decay, half)
    if half > 1:
        ratio, rows, columns = _within(both, before, half)
        tiles = _tiles(d_pairs, half).masked_fill(_later(half, both), 0).view(-1, 2 * half, half)
        d_both.view(*ratio.shape[:3], 2, -1).addcmul_(torch.bmm(tiles, columns).view(*ratio.shape[:3], 2, -1), ratio[..., None, :])
        d_earlier.view(ratio.shape).addcdiv_(torch.bmm(tiles.mT, rows).view(ratio.shape), ratio)
    while half < both.shape[2]:
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
    """Q D and K D, what meets the state; K D_C., what changes it; and D_C, what is kept of it, [N, R, 1, E]."""
    query, key = both.unbind(3)
    meeting = _masked(before, opening)
    kept = _masked(before[..., -1:, :], None if opening is None else opening[..., -1:, :])
    return (query * meeting, key * meeting), _masked(key * after, closing), kept


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


class _Cut:
    """Some heads of every batch, and the tokens in chunks: [B, H, T, ...] to [N, R, C, ...] and back."""

    def __init__(self, heads: slice, tokens: int) -> None:
        self.heads, self.tokens = heads, tokens
        self.length = min(LONGEST, 1 << max(tokens - 1, 1).bit_length())

    def take(self, x: Tensor) -> Tensor:
        return self.chunks(x[:, self.heads])

    def chunks(self, part: Tensor) -> Tensor:
        missing = -self.tokens % self.length
        if missing:  # zeros at the end write nothing and let the state be
            part = torch.nn.functional.pad(part, (0, 0) * (part.ndim - 3) + (0, missing))
        part = torch.unflatten(part, 2, (-1, self.length)).movedim(2, 0)
        return part.reshape(part.shape[0], -1, *part.shape[3:]).contiguous()

    def put(self, whole: Tensor, found: Tensor) -> None:
        target = whole[:, self.heads]
        found = torch.unflatten(found, 1, target.shape[:2]).movedim(0, 2).flatten(2, 3)
        target.copy_(found[:, :, : self.tokens])

    def rows(self, x: Tensor) -> Tensor:
        return x[:, self.heads].flatten(0, 1)

    def put_rows(self, whole: Tensor, found: Tensor) -> None:
        target = whole[:, self.heads]
        target.copy_(found.view(target.shape))


def _portions(
    query: Tensor, value: Tensor, begins: Tensor | None, saved: list[Tensor]
) -> Iterator[tuple[_Cut, tuple[Tensor | None, Tensor | None, Tensor | None], list[Tensor]]]:
    """Heads that are worked on together: where they are, their `same`, `opening` and `closing`, and their part of what is saved."""
    batch, heads, tokens, width = query.shape
    together = heads
    if query.device.type == "cpu":
        together = min(max(PORTION // (batch * tokens * max(width, value.shape[-1])), 1), heads)
    for start in range(0, heads, together):
        cut = _Cut(slice(start, min(start + together, heads)), tokens)
        count = cut.heads.stop - start
        same = opening = closing = None
        if begins is not None:
            document = cut.chunks(begins[:, None, :, None].expand(-1, count, -1, -1)).cumsum(-2)
            same, opening, closing = document == document.mT, document == 0, document == document[..., -1:, :]
        chunks = -(-tokens // cut.length)
        rows = slice(batch * start * chunks, batch * cut.heads.stop * chunks)
        places = [one[rows] if len(one) else one.new_empty(rows.stop - rows.start, *one.shape[1:]) for one in saved]
        yield cut, (same, opening, closing), [torch.unflatten(place, 0, (chunks, batch * count)) for place in places]


def _given(
    cut: _Cut, query: Tensor, key: Tensor, value: Tensor | None, log_decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs of a portion; without values the decays stand in their place."""
    both = torch.stack((cut.take(query), cut.take(key)), 3)
    decays = cut.take(log_decay)
    return both, decays if value is None else cut.take(value), decays, cut.take(strength[..., None])


def _forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, begins: Tensor | None, keeps: bool
) -> tuple[Tensor, ...]:
    batch, heads, tokens, _ = query.shape
    length = _Cut(slice(None), tokens).length
    rows, new = batch * heads * -(-tokens // length) if keeps else 0, query.new_empty
    met, missed, wrote = new(rows, *state.shape[2:]), *(new(rows, length, value.shape[-1]) for _ in range(2))
    pairs, solved = new(rows, length, 2, length), new(rows, length, length)
    return torch.empty_like(value), torch.empty_like(state), pairs, solved, met, missed, wrote


def _backward_shapes(
    d_read: Tensor, d_last: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, *_: Tensor | None
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(one) for one in (query, key, value, log_decay, strength, d_last))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, log_decay, strength, _, begins, _ = inputs
    ctx.save_for_backward(query, key, value, log_decay, strength, begins, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_read: Tensor | None, d_last: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: where layers are recomputed, asking makes them
    query, _, value, *_ = saved
    d_read = torch.zeros_like(value) if d_read is None else d_read
    d_last = value.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1]) if d_last is None else d_last
    return *torch.ops.depthroute.delta_chunks_backward(d_read, d_last, *saved), None, None


def _register() -> None:
    """As operators, because a compiler would unroll the chunks of every layer."""
    given = "Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor strength"
    saved = "Tensor pairs, Tensor solved, Tensor met, Tensor missed, Tensor wrote"
    forward = torch.library.custom_op(
        "depthroute::delta_chunks", _forward, mutates_args=(),
        schema=f"({given}, Tensor state, Tensor? begins, bool keeps) -> ({', '.join(['Tensor'] * 7)})",
    )  # fmt: skip
    backward = torch.library.custom_op(
        "depthroute::delta_chunks_backward", _backward, mutates_args=(),
        schema=f"(Tensor d_read, Tensor d_last, {given}, Tensor? begins, {saved}) -> ({', '.join(['Tensor'] * 6)})",
    )  # fmt: skip
    forward.register_fake(_forward_shapes)
    backward.register_fake(_backward_shapes)
    forward.register_autograd(_gradients, setup_context=_keep)


_register()
