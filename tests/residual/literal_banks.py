"""Residual methods that read a bank of sources before every sub-layer, as loops over the equations of their papers.

Every function takes a body, the embedding x [B, T, D] and the method's parameters by name, and returns the hidden state after the final
norm. Sites are reads: 0..2L-1 before the sub-layers, 2L before the final norm. `ends` are the last sub-layers of the blocks, from 1 on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from literal_body import EPS, Network, r, sublayer
from torch import Tensor

Parameters = dict[str, Tensor]


class Source(NamedTuple):
    value: Tensor
    count: int  # sub-layers in it; 1 for the embedding


class Bank(NamedTuple):
    closed: list[Source]  # the embedding and the closed blocks
    partial: Source | None  # the open block, None while it is empty

    @property
    def sources(self) -> list[Source]:
        return self.closed + ([] if self.partial is None else [self.partial])


def bank(x: Tensor, outputs: list[Tensor], ends: tuple[int, ...], summary: str = "sum", eps: float = EPS) -> Bank:
    """What can be read once `outputs` are there."""
    closed, start = [Source(x, 1)], 0
    for end in sorted(ends):
        if end <= len(outputs):
            closed.append(Source(summarise(outputs[start:end], summary, eps), end - start))
            start = end
    rest = outputs[start:]
    return Bank(closed, Source(summarise(rest, "sum", eps), len(rest)) if rest else None)


def summarise(outputs: list[Tensor], summary: str, eps: float) -> Tensor:
    total = torch.zeros_like(outputs[0])
    for y in outputs:
        total = total + (r(y, eps) if summary == "rms" else y)
    return total / len(outputs) if summary == "mean" else total


def key_of(source: Tensor, rank: int, key_norm: str, gain: Tensor | None, eps: float) -> Tensor:
    """The last `rank` coordinates over their RMS, over the RMS of the whole row, or as they are; times the gain."""
    key = source[..., source.shape[-1] - rank :]
    if key_norm == "slice":
        key = r(key, eps)
    elif key_norm == "full":
        key = r(source, eps)[..., source.shape[-1] - rank :]
    else:
        assert key_norm == "none", key_norm
    return key if gain is None else key * gain


def mix(weights: list[Tensor], values: list[Tensor]) -> Tensor:
    total = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        total = total + weight * value
    return total


def softmax(scores: list[Tensor]) -> list[Tensor]:
    return list(torch.stack(scores).softmax(0))


def attnres(
    net: Network,
    x: Tensor,
    p: Parameters,
    *,
    ends: tuple[int, ...],
    rank: int,
    key_norm: str = "slice",
    heads: int = 1,
    weighting: str = "softmax",
    window: int | None = None,
    values: str = "raw",
    scaled: bool = False,
    roles: str = "shared",
    summary: str = "sum",
    count_prior: float | None = None,
    learned_count_prior: bool = False,
    eps: float = EPS,
) -> Tensor:
    """h_i = sum_j softmax_j(w_i . normalised key_j) source_j, and every variant of it."""

    def read(site: int, query: str) -> Tensor:
        sources = bank(x, outputs, ends, summary, eps).sources
        if window is not None:
            sources = sources[:1] + sources[1:][-window:]
        contents = [r(source.value, eps) if values == "normed" else source.value for source in sources]
        keys = [key_of(content, rank, key_norm, p.get(f"sites.{site}.key_gain"), eps) for content in contents]
        w = p[f"sites.{site}.{query}"]
        assert w.shape == (rank,)
        prior = p.get(f"sites.{site}.count_prior", 0.0) if learned_count_prior else count_prior or 0.0
        parts = []
        for head in range(heads):
            of_key = slice(head * rank // heads, (head + 1) * rank // heads)
            of_value = slice(head * x.shape[-1] // heads, (head + 1) * x.shape[-1] // heads)
            scores = []
            for key, source in zip(keys, sources, strict=True):
                score = (key[..., of_key] * w[of_key]).sum(-1, keepdim=True)
                score = score / rank**0.5 if scaled else score
                scores.append(score + prior * math.log(source.count))
            weights = [torch.sigmoid(score) for score in scores] if weighting == "sigmoid" else softmax(scores)
            parts.append(mix(weights, [content[..., of_value] for content in contents]))
        return torch.cat(parts, dim=-1)

    outputs = [sublayer(net, 0, r(x, eps) if values == "normed" else x)]
    for site in range(1, 2 * net.layers):
        h = read(site, "query")
        if site % 2 == 1:
            outputs.append(sublayer(net, site, h))
            continue
        for_key = read(site, "key_query") if roles == "separate" else h
        for_value = h if roles == "shared" else read(site, "value_query")
        norm = net.norms[site]
        outputs.append(net.attention[site // 2](norm(h), norm(for_key), norm(for_value)))
    return net.norms[-1](read(2 * net.layers, "query"))


def static(net: Network, x: Tensor, p: Parameters, *, raw: bool, ends: tuple[int, ...]) -> Tensor:
    """Input-independent mixing: a softmax over learned scalars, or the scalars themselves."""

    def read(site: int) -> Tensor:
        sources = bank(x, outputs, ends).sources
        if f"logits.{site}" not in p:
            assert site == 0
            return x
        logits = p[f"logits.{site}"]
        assert logits.shape == (len(sources),)
        return mix(list(logits if raw else logits.softmax(0)), [source.value for source in sources])

    outputs: list[Tensor] = []
    for site in range(2 * net.layers):
        outputs.append(sublayer(net, site, read(site)))
    return net.norms[-1](read(2 * net.layers))


def dynamic(net: Network, x: Tensor, p: Parameters, *, ends: tuple[int, ...], query_from: str, rank: int, eps: float = EPS) -> Tensor:
    """Input-dependent queries: q = W r(newest source), one a token; keys are the last `rank` coordinates over their RMS."""

    def read(site: int) -> Tensor:
        memory = bank(x, outputs, ends)
        newest = memory.closed[-1] if query_from == "block" else memory.sources[-1]
        name = f"sites.{site}"
        W = p[f"{name}.weight"] if f"{name}.weight" in p else p[f"{name}.up"] @ p[f"{name}.down"]
        assert query_from in ("latest", "block") and W.shape == (rank, x.shape[-1])
        query = r(newest.value, eps) @ W.T
        values = [source.value for source in memory.sources]
        scores = [(query * key_of(value, rank, "slice", None, eps)).sum(-1, keepdim=True) for value in values]
        return mix(softmax(scores), values)

    outputs = [sublayer(net, 0, x)]
    for site in range(1, 2 * net.layers):
        outputs.append(sublayer(net, site, read(site)))
    return net.norms[-1](read(2 * net.layers))


def delta(net: Network, x: Tensor, p: Parameters, *, ends: tuple[int, ...] | None, gate: str = "none", eps: float = EPS) -> Tensor:
    """Delta Attention Residuals: h = stream + g read; the sources are the embedding and what is closed. `ends` None: every output."""
    if ends is None:
        ends = tuple(range(1, 2 * net.layers + 1))
    width = x.shape[-1]
    outputs: list[Tensor] = []
    stream = x
    for site in range(2 * net.layers):
        h = stream
        if site > 0:
            values = [source.value for source in bank(x, outputs, ends).closed]
            anything = torch.ones(width, dtype=x.dtype)  # a score that stands alone decides nothing, and has no parameters
            query, gain = p.get(f"sites.{site}.query", anything), p.get(f"sites.{site}.key_gain")
            scores = [(key_of(value, width, "full", gain, eps) * query).sum(-1, keepdim=True) for value in values]
            h = h + delta_gate(p, site, gate) * mix(softmax(scores), values)
        outputs.append(sublayer(net, site, h))
        stream = stream + outputs[-1]
    return net.norms[-1](stream)


def delta_gate(p: Parameters, site: int, gate: str) -> Tensor | float:
    if gate == "none":
        return 1.0
    value = p[f"sites.{site}.gate"]
    if gate == "sigmoid":
        return torch.sigmoid(value)
    assert gate == "alpha", gate
    return value


def linear(net: Network, x: Tensor, p: Parameters, *, rank: int, eps: float = EPS) -> Tensor:
    """Depth-wise linear attention: h = sum_i (1 + w . k_i) s_i over the embedding and every output."""

    def read(site: int) -> Tensor:
        w = p[f"sites.{site}.query"]
        weights = [1 + (key_of(source, rank, "slice", None, eps) * w).sum(-1, keepdim=True) for source in sources]
        return mix(weights, sources)

    sources = [x, sublayer(net, 0, x)]
    for site in range(1, 2 * net.layers):
        sources.append(sublayer(net, site, read(site)))
    return net.norms[-1](read(2 * net.layers))
