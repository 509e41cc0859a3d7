"""Kimi Delta Attention: a memory matrix per head that decays by channel and that each token corrects (arXiv 2510.26692).

Of one head, with queries q_t, keys k_t, values v_t, log decays g_t <= 0 and strengths b_t:

    S' = diag(exp(g_t)) S_{t-1},      u_t = b_t (v_t - S'^T k_t),      S_t = S' + k_t u_t^T,      o_t = S_t^T q_t

`delta_rule_by_token` is this definition. `delta_rule` computes the same, of long sequences in chunks.

Shapes: B batch, H heads, T tokens, E key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthroute.ops.delta_chunks import in_chunks
from depthroute.ops.form import statistics_dtype

FEW = 4  # tokens that are faster one by one


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, *, state: Tensor | None = None,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What each token reads, [B, H, T, V] in the values' dtype, and the state after the last one, [B, H, E, V] in the exact dtype.

    The exact dtype, in which all is computed, is float64 for float64 values and else float32, under autocast too. Decays may be as strong
    as they like.

    Args:
        query, key, log_decay: [B, H, T, E]; queries scaled, keys normalised, log decays finite and <= 0.
        value: [B, H, T, V].
        strength: [B, H, T].
        state: [B, H, E, V], after earlier tokens; None is zero.
        begins: bool [B, T], the tokens that begin a document. To them and later ones, earlier tokens and `state` are as if they were not.
    """
    if query.shape[2] <= FEW:
        return delta_rule_by_token(query, key, value, log_decay, strength, state=state, begins=begins)
    with torch.autocast(query.device.type, enabled=False):
        read, last = in_chunks(*_exact(query, key, value, log_decay, strength, state), begins)
    return read.to(value.dtype), last


def delta_rule_by_token(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, *, state: Tensor | None = None,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`delta_rule` token by token, as it is defined."""
    with torch.autocast(query.device.type, enabled=False):
        query, key, exact, log_decay, strength, now = _exact(query, key, value, log_decay, strength, state)
        rows = (query[..., None, :], key[..., None, :], exact[..., None, :], log_decay.exp()[..., None], strength[..., None, None])
        reads = []
        for token, (q, k, v, decay, b) in enumerate(zip(*(part.unbind(2) for part in rows), strict=True)):
            if begins is not None:
                now = now.masked_fill(begins[:, token, None, None, None], 0)
            now = now * decay
            now = now + k.mT * (b * (v - k @ now))
            reads.append(q @ now)
    return torch.cat(reads, 2).to(value.dtype), now


def _exact(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = statistics_dtype(value.dtype)
    if state is None:
        state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    return query.to(dtype), key.to(dtype), value.to(dtype), log_decay.to(dtype), strength.to(dtype), state.to(dtype)
