"""Forward and backward of a read as list-form tensor code, written to be compiled: sources are never stacked, only their scalars are.

Each public function fills tensors that are handed in and becomes one graph, except `weigh`. `read` and `unread` are the two passes of a
short list. A long one takes `score`, `weigh`, `mix`, `finish` forward and `mix`, `settle`, `unread_part` backward.

Shapes: N tokens, S sources, M queries, H heads, D width, R key rank, W weights. Rows come as [N, D] and are worked on as [N, H, D/H], keys
as [N, H, R/H]; a scalar of a token is [N, H, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from depthroute.ops.form import Form, Gradients, Operands, Saved, Upstream

Table = list[list[Tensor]]  # [m][s]: a scalar of query m and source s, [N, H, 1]


def read(form: Form, operands: Operands, outputs: Sequence[Tensor], saved: Saved) -> None:
    """The forward of a short list."""
    scores, rstd = _scores(form, operands)
    weights = [_weights(form, operands, m, of_query, saved) for m, of_query in enumerate(scores)]
    _put(form, operands, _mixed(form, operands, weights), outputs, saved)
    saved.weights.copy_(_packed(weights))
    saved.scores.copy_(_packed(scores))
    if rstd:
        saved.rstd.copy_(torch.cat(rstd, -1)[:, 0])


def score(form: Form, operands: Operands, scores: Tensor, rstd: Tensor) -> None:
    """Scores [N, M, H, S] and key statistics [N, S] of a part."""
    found, roots = _scores(form, operands)
    scores.copy_(_packed(found))
    if roots:
        rstd.copy_(torch.cat(roots, -1)[:, 0])


def weigh(form: Form, operands: Operands, saved: Saved) -> None:
    """The weights of a long list from its scores, with the prior's."""
    scores = saved.scores if operands.bias is None else saved.scores + operands.bias[:, None]
    number = scores.shape[-1]
    if form.weighting == "sigmoid":
        saved.weights.fill_(1)
        saved.weights[..., :number] = torch.sigmoid(scores)
        return
    maxima, sums = _statistics(operands)
    for m in range(operands.reads):
        largest = scores[:, m].amax(-1)
        largest = torch.maximum(largest, maxima[m]) if maxima else largest
        exponentials = torch.exp(scores[:, m] - largest[..., None])
        total = exponentials.sum(-1)
        if maxima:
            share = sums[m] * torch.exp(maxima[m] - largest)
            total = total + share
            saved.weights[:, m, :, number] = share / total
        saved.weights[:, m, :, :number] = exponentials / total[..., None]
        saved.max[m].copy_(largest)
        saved.sum[m].copy_(total)


def mix(form: Form, operands: Operands, weights: Tensor, totals: Sequence[Tensor]) -> None:
    """Add a part's share [N, M, H, S] of the mixture to M totals [N, D]."""
    for total, mixed in zip(totals, _mixed(form, operands, _table(weights)), strict=True):
        total.add_(mixed.flatten(1))


def finish(form: Form, operands: Operands, totals: Sequence[Tensor], outputs: Sequence[Tensor], saved: Saved) -> None:
    """The outputs of a long list whose sources are mixed in `totals`; `operands` has none left but the prior."""
    _put(form, operands, _with_prior(form, operands, totals, saved), outputs, saved)


def unread(form: Form, operands: Operands, saved: Saved, upstream: Upstream, into: Sequence[Tensor], add: bool, found: Gradients) -> None:
    """The backward of a short list."""
    weights, rows = _table(saved.weights), [_row(form, operands, source) for source in operands.sources]
    gradients = [_row(form, operands, gradient) for gradient in upstream.outputs]
    if operands.output_gain is not None:
        gradients = _before_norm(form, operands, _mixed(form, operands, weights), gradients, saved, found)
    of_weights = _of_weights(gradients, rows, upstream)
    levels: list[Tensor] = []
    alone = len(rows) == 1 and not operands.prior
    for m, gradient in enumerate(gradients):
        of_prior = _of_prior_weight(form, operands, m, gradient, upstream)
        if form.weighting == "softmax":
            if alone:  # its weight is one whatever its score: the difference below would be zero but for overflow
                of_weights[m] = [torch.zeros_like(weights[m][0])]
            delta = reduce(torch.add, [a * b for a, b in zip(weights[m], [*of_weights[m], *of_prior], strict=True)])
            levels.append(_level(m, delta, saved, upstream))
        _to_prior(form, operands, m, gradient, weights[m][-1], of_prior, levels, found)
    _to_sources(form, operands, saved, gradients, of_weights, levels, into, add, found)


def settle(
    form: Form, operands: Operands, saved: Saved, upstream: Upstream, totals: Sequence[Tensor], levels: Sequence[Tensor], found: Gradients
) -> None:
    """What the whole mixture decides in the backward of a long list; `operands` has no sources left.

    The M totals [N, D] come as the mixture of the sources. With an output norm they leave as the gradients before it. The M levels [N, H]
    are what all scores' gradients share.
    """
    mixed = _with_prior(form, operands, totals, saved)
    gradients = [_row(form, operands, gradient) for gradient in upstream.outputs]
    if operands.output_gain is not None:
        gradients = _before_norm(form, operands, mixed, gradients, saved, found)
    shared: list[Tensor] = []
    for m, gradient in enumerate(gradients):
        if form.weighting == "softmax":
            delta = (gradient * mixed[m]).sum(-1, keepdim=True)
            if upstream.weights is not None:
                delta = delta + (saved.weights[:, m] * upstream.weights[:, m]).sum(-1, keepdim=True)
            shared.append(_level(m, delta, saved, upstream))
            levels[m].copy_(shared[m][..., 0])
        of_prior = _of_prior_weight(form, operands, m, gradient, upstream)
        _to_prior(form, operands, m, gradient, saved.weights[:, m, :, -1:], of_prior, shared, found)
        if operands.output_gain is not None:
            totals[m].copy_(gradient.flatten(1))


def unread_part(
    form: Form, operands: Operands, saved: Saved, upstream: Upstream, levels: Sequence[Tensor], into: Sequence[Tensor], add: bool,
    found: Gradients,
) -> None:  # fmt: skip
    """The gradients of a part of a long list, from those of its mixture and the levels of `settle`."""
    rows = [_row(form, operands, source) for source in operands.sources]
    gradients = [_row(form, operands, gradient) for gradient in upstream.outputs]
    of_weights = _of_weights(gradients, rows, upstream)
    _to_sources(form, operands, saved, gradients, of_weights, [level[..., None] for level in levels], into, add, found)


def _row(form: Form, operands: Operands, row: Tensor) -> Tensor:
    return row.to(operands.queries.dtype).view(row.shape[0], form.heads, -1)


def _key(form: Form, operands: Operands, s: int) -> Tensor:
    rank = operands.queries.shape[-1]
    return _row(form, operands, operands.keys[s] if operands.keys else operands.sources[s][:, -rank:])


def _statistics(operands: Operands) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The prior's M maxima and sums, or none."""
    count = operands.reads
    return operands.prior[count : 2 * count], operands.prior[2 * count :]


def _table(scalars: Tensor) -> Table:
    """[N, M, H, S] by query and source."""
    return [[of_query[..., s : s + 1] for s in range(scalars.shape[-1])] for of_query in scalars.unbind(1)]


def _packed(table: Table) -> Tensor:
    return torch.stack([torch.cat(of_query, -1) for of_query in table], 1)


def _scores(form: Form, operands: Operands) -> tuple[Table, list[Tensor]]:
    """The scores, and each key's 1 / RMS [N, 1, 1] if it is normalised."""
    queries = operands.queries.view(operands.reads, form.heads, -1)
    scores: Table = [[] for _ in queries]
    rstd = []
    for s, source in enumerate(operands.sources):
        key = _key(form, operands, s)
        if form.key_norm != "none":
            normalised_by = _row(form, operands, source) if form.key_norm == "full" else key
            rstd.append(torch.rsqrt(normalised_by.square().mean((1, 2), keepdim=True) + form.eps))
        for m, of_query in enumerate(scores):
            found = (key * queries[m]).sum(-1, keepdim=True)
            of_query.append(found * rstd[s] if rstd else found)
    return scores, rstd


def _weights(form: Form, operands: Operands, m: int, scores: list[Tensor], saved: Saved) -> list[Tensor]:
    """The weights of query m, with the prior's."""
    if operands.bias is not None:
        scores = [score + operands.bias[m, s] for s, score in enumerate(scores)]
    if form.weighting == "sigmoid":
        return [*(torch.sigmoid(score) for score in scores), *(torch.ones_like(scores[0]) for _ in operands.prior[:1])]
    maxima, sums = _statistics(operands)
    of_prior = [maxima[m][..., None]] if maxima else []
    largest = reduce(torch.maximum, [*scores, *of_prior])
    parts = [torch.exp(score - largest) for score in scores]
    parts += [sums[m][..., None] * torch.exp(maximum - largest) for maximum in of_prior]
    total = reduce(torch.add, parts)
    saved.max[m].copy_(largest[..., 0])
    saved.sum[m].copy_(total[..., 0])
    return [part / total for part in parts]


def _mixed(form: Form, operands: Operands, weights: Table) -> list[Tensor]:
    """M mixtures of the sources and the prior."""
    rows = [_row(form, operands, source) for source in operands.sources]
    priors = [_row(form, operands, output) for output in operands.prior[: operands.reads]]
    return [
        reduce(torch.add, [weight * row for weight, row in zip(of_query, [*rows, *priors[m : m + 1]], strict=True)])
        for m, of_query in enumerate(weights)
    ]


def _with_prior(form: Form, operands: Operands, totals: Sequence[Tensor], saved: Saved) -> list[Tensor]:
    mixed = [_row(form, operands, total) for total in totals]
    for m, output in enumerate(operands.prior[: operands.reads]):
        mixed[m] = mixed[m] + saved.weights[:, m, :, -1:] * _row(form, operands, output)
    return mixed


def _put(form: Form, operands: Operands, mixed: list[Tensor], outputs: Sequence[Tensor], saved: Saved) -> None:
    """The mixtures, normalised if asked for."""
    if operands.output_gain is not None:
        gain = operands.output_gain.view(form.heads, -1)
        roots = [torch.rsqrt(row.square().mean((1, 2), keepdim=True) + form.output_eps) for row in mixed]
        saved.output_rstd.copy_(torch.cat(roots, -1)[:, 0])
        mixed = [row * root * gain for row, root in zip(mixed, roots, strict=True)]
    for output, row in zip(outputs, mixed, strict=True):
        output.copy_(row.flatten(1))


def _before_norm(
    form: Form, operands: Operands, mixed: list[Tensor], gradients: list[Tensor], saved: Saved, found: Gradients
) -> list[Tensor]:
    """The gradients of the M mixtures from those of the normalised outputs; fills that of the gain."""
    assert operands.output_gain is not None
    gain = operands.output_gain.view(form.heads, -1)
    before, of_gain = [], []
    for m, (row, gradient) in enumerate(zip(mixed, gradients, strict=True)):
        root = saved.output_rstd[:, m, None, None]
        normalised, scaled = row * root, gradient * gain
        of_gain.append(gradient * normalised)
        before.append(root * (scaled - normalised * (scaled * normalised).mean((1, 2), keepdim=True)))
    found.output_gain.copy_(reduce(torch.add, of_gain).sum(0, dtype=torch.float64).flatten())
    return before


def _of_weights(gradients: list[Tensor], rows: list[Tensor], upstream: Upstream) -> Table:
    """The gradients of the sources' weights."""
    found = [[(gradient * row).sum(-1, keepdim=True) for row in rows] for gradient in gradients]
    if upstream.weights is not None:
        arriving = _table(upstream.weights)
        found = [[one + arriving[m][s] for s, one in enumerate(of_query)] for m, of_query in enumerate(found)]
    return found


def _of_prior_weight(form: Form, operands: Operands, m: int, gradient: Tensor, upstream: Upstream) -> list[Tensor]:
    """The gradient of the prior's weight, or none without a prior."""
    if not operands.prior:
        return []
    found = (gradient * _row(form, operands, operands.prior[m])).sum(-1, keepdim=True)
    return [found if upstream.weights is None else found + upstream.weights[:, m, :, -1:]]


def _level(m: int, delta: Tensor, saved: Saved, upstream: Upstream) -> Tensor:
    """What the gradients of query m's scores share: a score's gradient is its weight times (its weight's gradient + the level)."""
    return saved.sum[m][..., None] * upstream.sums[m][..., None] - delta if upstream.sums else -delta


def _to_prior(
    form: Form, operands: Operands, m: int, gradient: Tensor, weight: Tensor, of_weight: list[Tensor], levels: list[Tensor],
    found: Gradients,
) -> None:  # fmt: skip
    """The gradients of query m's prior; `of_weight` is empty where there is none, `levels` for a sigmoid."""
    for one in of_weight:
        found.prior[m].copy_((weight * gradient).flatten(1))
        if levels:
            _, sums = _statistics(operands)
            found.prior[operands.reads + m].copy_((weight * (one + levels[m]))[..., 0] / sums[m])


def _to_sources(
    form: Form, operands: Operands, saved: Saved, gradients: list[Tensor], of_weights: Table, levels: list[Tensor],
    into: Sequence[Tensor], add: bool, found: Gradients,
) -> None:  # fmt: skip
    """The gradients of sources, keys, queries and bias from those of mixtures and weights.

    Sums over tokens are float64: more exact, and on the CPU a float32 sum would be compiled once more above 4,096 tokens.
    """
    rank, width = operands.queries.shape[-1], operands.sources[0].shape[-1]
    queries = operands.queries.view(operands.reads, form.heads, -1)
    weights, scores = _table(saved.weights), _table(saved.scores)
    of_scores: Table = []
    for m, of_query in enumerate(of_weights):
        slopes = [1 - weight for weight in weights[m]] if form.weighting == "sigmoid" else None
        of_scores.append([weights[m][s] * (slopes[s] * one if slopes is not None else one + levels[m]) for s, one in enumerate(of_query)])
    of_queries: list[list[Tensor]] = [[] for _ in gradients]
    for s, source in enumerate(operands.sources):
        key = _key(form, operands, s)
        of_source = reduce(torch.add, [weights[m][s] * gradient for m, gradient in enumerate(gradients)])
        scaled = [of_query[s] for of_query in of_scores]
        if form.key_norm != "none":
            root = saved.rstd[:, s, None, None]
            scaled = [one * root for one in scaled]
        of_key = reduce(torch.add, [one * query for one, query in zip(scaled, queries, strict=True)])
        if form.key_norm != "none":
            along = reduce(torch.add, [of_scores[m][s] * scores[m][s] for m in range(operands.reads)]).sum(1, keepdim=True)
            if form.key_norm == "full":
                of_source = of_source - along * root.square() / width * _row(form, operands, source)
            else:
                of_key = of_key - along * root.square() / rank * key
        of_row = of_source.flatten(1)
        if operands.keys:
            found.keys[s].copy_(of_key.flatten(1))
        else:
            of_row = of_row + torch.constant_pad_nd(of_key.flatten(1), (width - rank, 0))
        into[s].add_(of_row) if add else into[s].copy_(of_row)
        for m, one in enumerate(scaled):
            of_queries[m].append((one * key).sum(0, dtype=torch.float64))
    found.queries.copy_(torch.stack([reduce(torch.add, of_query).flatten() for of_query in of_queries]))
    found.bias.copy_(_packed(of_scores).sum((0, 2), dtype=torch.float64))
