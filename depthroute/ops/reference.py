"""The definition of depth attention in plain PyTorch: what every backend must agree with. Shapes as in `form`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from depthroute.ops.form import Form, Found, Operands


def reference(operands: Operands, form: Form) -> Found:
    """Read the sources with M queries. Nothing is stacked but scores. Differentiable as often as you like.

    Softmax (Attention Residuals, Eqs. 2-4): weight_i = exp(score_i - max) / sum. A prior takes part as one more source whose share of the
    sum is known: prior_sum x exp(prior_max - max). Sigmoid (its Table 4): weight_i = sigmoid(score_i), and a prior is added as it is.
    """
    sources, _, queries, bias, gain, prior = operands
    dtype, count = sources[0].dtype, queries.shape[0]
    device = sources[0].device.type
    # autocast would take the scores' product to bfloat16; meta tensors have none
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        score = _scores(operands, form)  # [S, ..., M, H]
        if bias is not None:
            score = score + bias.T.reshape(len(sources), *[1] * (score.ndim - 3), count, 1)
        if form.weighting == "sigmoid":
            weights = torch.sigmoid(score)
            return Found(_mixtures(operands, form, weights, [1.0] * count, gain, dtype), (), (), _token_major(weights))
        # The largest score only keeps the exponentials in range: nothing below depends on it, so it needs no gradient.
        largest = score.detach().amax(0)
        share: Tensor | None = None
        if prior:
            prior_max, prior_sum = (_stacked(part, form) for part in (prior[count : 2 * count], prior[2 * count :]))
            largest = torch.maximum(largest, prior_max.detach())
            share = prior_sum * torch.exp(prior_max.detach() - largest)
        exponentials = torch.exp(score - largest)
        total = exponentials.sum(0) if share is None else exponentials.sum(0) + share
        weights = exponentials / total
        of_prior = [] if share is None else list((share / total).unbind(-2))
        outputs = _mixtures(operands, form, weights, of_prior, gain, dtype)
    return Found(outputs, _unstacked(largest, form), _unstacked(total, form), _token_major(weights))


def _stacked(parts: Sequence[Tensor], form: Form) -> Tensor:
    """M tensors [..., H], or [...] for one head, as [..., M, H]."""
    return torch.stack([part.unsqueeze(-1) if form.heads == 1 else part for part in parts], -2)


def _unstacked(part: Tensor, form: Form) -> list[Tensor]:
    return [one.squeeze(-1) if form.heads == 1 else one for one in part.unbind(-2)]


def _token_major(weights: Tensor) -> Tensor:
    return weights.movedim(0, -1)


def _scores(operands: Operands, form: Form) -> Tensor:
    sources, keys, queries, *_ = operands
    rank = queries.shape[-1]
    split = (form.heads, rank // form.heads)
    grouped = queries.view(-1, *split)  # [M, H, R/H]
    scores = []
    for index, source in enumerate(sources):
        key = (keys[index] if keys else source[..., source.shape[-1] - rank :]).to(queries.dtype)
        if form.key_norm != "none":
            normalised_by = source.to(queries.dtype) if form.key_norm == "full" else key
            key = key * torch.rsqrt(normalised_by.square().mean(-1, keepdim=True) + form.eps)
        scores.append(torch.einsum("...hr,mhr->...mh", key.reshape(*key.shape[:-1], *split), grouped))
    return torch.stack(scores)


def _mixtures(
    operands: Operands, form: Form, weights: Tensor, of_prior: list[Tensor] | list[float], gain: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """M outputs from weights [S, ..., M, H] and the prior's, each [..., H] or a number."""
    width = operands.sources[0].shape[-1]

    def across(weight: Tensor | float) -> Tensor | float:  # a head's weight to each of its channels
        return weight if isinstance(weight, float) or form.heads == 1 else weight.repeat_interleave(width // form.heads, -1)

    outputs = []
    for m in range(operands.queries.shape[0]):
        mixed = across(weights[0, ..., m, :]) * operands.sources[0]
        for index in range(1, len(operands.sources)):
            mixed = mixed + across(weights[index, ..., m, :]) * operands.sources[index]
        if operands.prior:
            mixed = mixed + across(of_prior[m]) * operands.prior[m]
        if gain is not None:
            mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + form.output_eps) * gain
        outputs.append(mixed.to(dtype))
    return outputs
