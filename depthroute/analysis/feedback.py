"""Routing feedback against the direct value gradient, site by site (Low-Rank Attention Residuals, Eq. 15).

With g the loss's gradient of a read h = sum_i a_i o_i, a source's gradient through this read is a_i g, the direct part, plus
a_i <g, o_i - h> grad z_i, what comes of changing the scores z_i.

Shapes: ... leading dimensions, D width, S sources, R key rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from depthroute.analysis.watch import place, watching
from depthroute.model import Decoder
from depthroute.residual import AttnRes, Inputs, Memory, Norm, RoleInputs, normalised


def routing_feedback(model: Decoder, batches: Iterable[Tensor]) -> list[dict[str, Any]] | None:
    """Root mean squares over tokens of both parts, summed over a site's sources in squares, and their ratio; None where the method has no
    such read.

    It has one in the AttnRes family with sliced keys, one head and softmax weights. Sites with two routes have a row a role.

    Args:
        batches: token ids [B, T + 1] (int64): inputs and targets.
    """
    residual = model.residual
    if not isinstance(residual, AttnRes) or not _has_one(residual):
        return None
    original = residual.read
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    tokens = 0
    for batch in batches:
        seen: list[tuple[int, Memory, Inputs]] = []

        def look(memory: Memory, site: int, norm: Norm | None, seen: list[tuple[int, Memory, Inputs]] = seen) -> Inputs:
            inputs = original(memory, site)
            for one in _distinct(inputs):
                one.retain_grad()
            seen.append((site, memory, inputs))
            return normalised(inputs, norm)

        with watching(residual, read=look):
            model.loss(batch[:, :-1], batch[:, 1:]).objective.backward()  # type: ignore[no-untyped-call]  # torch's own
        tokens += batch[:, 1:].numel()
        with torch.no_grad():
            for site, memory, inputs in seen:
                for role, (direct, routed) in _parts(residual, memory, site, inputs).items():
                    sums[site, role][0] += direct
                    sums[site, role][1] += routed
        model.zero_grad(set_to_none=True)
    rows = []
    for (site, role), (direct, routed) in sums.items():
        both = (direct / tokens) ** 0.5, (routed / tokens) ** 0.5
        ratio = both[1] / both[0] if both[0] else None
        rows.append({**place(site, residual.body.sublayers), "role": role, "direct": both[0], "routed": both[1], "ratio": ratio})
    return rows


def _has_one(residual: AttnRes) -> bool:
    config = residual.config
    return config.keys == "slice" and config.heads == 1 and config.weighting == "softmax" and config.roles != "average"


def _distinct(inputs: Inputs) -> list[Tensor]:
    return [inputs] if isinstance(inputs, Tensor) else list({id(one): one for one in inputs}.values())


def _parts(residual: AttnRes, memory: Memory, site: int, inputs: Inputs) -> dict[str, tuple[float, float]]:
    """By role, the squared norms of the direct and the routed gradients, over all sources and tokens."""
    weights = residual.source_weights(memory, site)
    reads = {"shared": inputs, "query_key": inputs, "query": inputs} if isinstance(inputs, Tensor) else {
        "shared": inputs.query, "query_key": inputs.query, "query": inputs.query, "key": inputs.key, "value": inputs.value,
    }  # fmt: skip
    found = {}
    queries = list(residual.route_queries(site)) if weights else []
    for (role, of_role), query in zip(weights.items(), queries, strict=True):
        h = reads[role]
        assert isinstance(h, Tensor) and not isinstance(h, RoleInputs)
        if h.grad is None:
            continue
        times = residual.times(memory)
        g, mixed = h.grad.float() * times, h.float() / times
        direct = routed = 0.0
        for source, weight in zip(residual.sources(memory), of_role, strict=True):
            o = source.float()
            direct += (weight * g.norm(dim=-1)).square().sum().item()
            turned = score_gradient(o, query.float(), residual.config.key_norm, residual.config.eps).norm(dim=-1)
            routed += (weight * (g * (o - mixed)).sum(-1) * turned).square().sum().item()
        found[role] = (direct, routed)
    return found


def score_gradient(o: Tensor, query: Tensor, key_norm: str, eps: float) -> Tensor:
    """The gradient of a score q . N(k) with respect to its source [..., D]; q [R] has the key norm's gain folded in (Eqs. 15-16)."""
    width, rank = o.shape[-1], query.shape[-1]
    key = o[..., width - rank :]
    if key_norm == "none":
        return torch.nn.functional.pad(query.expand_as(key), (width - rank, 0))
    over = key if key_norm == "slice" else o
    rho = (over.square().mean(-1, keepdim=True) + eps).sqrt()
    score = (key * query).sum(-1, keepdim=True) / rho
    through_norm = score * over / (over.shape[-1] * rho.square())
    direct = query.expand_as(key) / rho
    if key_norm == "slice":
        return torch.nn.functional.pad(direct - through_norm, (width - rank, 0))
    return torch.nn.functional.pad(direct, (width - rank, 0)) - through_norm
