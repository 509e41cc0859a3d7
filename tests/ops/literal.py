"""A literal reading of the papers' equations: token by token, head by head, source by source, in float64; and random reads to try it on.

Attention Residuals, Eqs. 1-4 and Table 4; Low-Rank AttnRes, Eqs. 8-13 and 26. A prior is one more source whose part of the softmax's sum
is known. Shapes: S sources, M queries, H heads, D width, R key rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from depthroute.ops import DepthRead, depth_attention, native

NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.missing() is not None, reason="no C compiler"))
BACKENDS = pytest.mark.parametrize("backend", ["reference", NATIVE])

# Errors have two parts. Rounding of what is stored: a few units in the last place of its dtype, relative to the largest value. Rounding of
# the statistics, which are float32 or float64 throughout: relative to the size of the terms that cancel.
STORED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
STATISTICS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


@dataclass(repr=False)
class Case:
    """One read and the gradients that arrive at its outputs."""

    sources: list[Tensor]
    keys: list[Tensor] | None
    query: Tensor
    gain: Tensor | None
    bias: Tensor | None
    output_gain: Tensor | None
    prior: list[DepthRead] | None
    heads: int
    key_norm: str
    weighting: str
    eps: float
    output_eps: float
    upstream: list[Tensor]

    def named(self) -> dict[str, Tensor]:
        """What gradients are wanted of."""
        given: dict[str, Tensor | None] = {f"source {i}": source for i, source in enumerate(self.sources)}
        given |= {f"key {i}": key for i, key in enumerate(self.keys or ())}
        given |= {"query": self.query, "gain": self.gain, "bias": self.bias, "output gain": self.output_gain}
        given |= {f"prior output {m}": one.output for m, one in enumerate(self.prior or ())}
        given |= {f"prior sum {m}": one.sum for m, one in enumerate(self.prior or ())}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def exact(self) -> Case:
        """The same read in float64."""

        def wide(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().double().requires_grad_(x.requires_grad)

        def several(some: Sequence[Tensor] | None) -> Any:
            return None if some is None else [wide(one) for one in some]

        prior: Any = None if self.prior is None else [DepthRead(*map(wide, one)) for one in self.prior]
        parts: dict[str, Any] = {name: wide(getattr(self, name)) for name in ("query", "gain", "bias", "output_gain")}
        return replace(self, sources=several(self.sources), keys=several(self.keys), upstream=several(self.upstream), prior=prior, **parts)

    def read(self, backend: str, **asked: Any) -> list[Tensor] | list[DepthRead]:
        """M results of the operator."""
        given: Any = self.prior[0] if self.prior is not None and self.query.ndim == 1 else self.prior
        found: Any = depth_attention(
            self.sources, self.query, keys=self.keys, heads=self.heads, key_norm=self.key_norm, key_gain=self.gain, bias=self.bias,
            weighting=self.weighting, output_gain=self.output_gain, prior=given, eps=self.eps, output_eps=self.output_eps, backend=backend,
            **asked,
        )  # fmt: skip
        return [found] if self.query.ndim == 1 else list(found)

    def score_size(self) -> float:
        """How large scores can be."""
        query = self.query.detach().double() * (1 if self.gain is None else self.gain.detach().double())
        longest = max(row.detach().double().norm(dim=-1).max().item() for row in self.keys or self.sources)
        length = longest if self.key_norm == "none" else self.query.shape[-1] ** 0.5
        bias = 0.0 if self.bias is None else self.bias.abs().max().item()
        return 1 + query.norm(dim=-1).max().item() * length + bias

    def value_size(self) -> float:
        """How large the numbers that are mixed can be, added up."""
        rows = [*self.sources, *(one.output for one in self.prior or ())]
        return (len(self.sources) if self.weighting == "sigmoid" else 1) * max(row.detach().abs().max().item() for row in rows)

    def gradient_size(self) -> float:
        """How large the terms of a score's gradient can be, before they cancel."""
        rows = [*self.sources, *(one.output for one in self.prior or ())]
        norm = max(row.detach().double().norm(dim=-1).max().item() for row in rows)
        upstream = max(up.double().norm(dim=-1).max().item() for up in self.upstream)
        rank = self.query.shape[-1]
        keys = self.keys or [source if self.key_norm == "full" else source[..., -rank:] for source in self.sources]
        squares = min(key.detach().double().square().mean(-1).min().item() for key in keys)
        divided = (squares + self.eps) ** -0.5 if self.key_norm != "none" else 0.0
        tokens = self.sources[0][..., 0].numel()
        return tokens * len(self.upstream) * (1 + norm) * upstream * self.score_size() * (1 + divided)


@dataclass
class Truth:
    outputs: list[Tensor]  # M x [..., D]
    weights: Tensor  # [M, H, S, ...], without the prior's
    lse: Tensor  # [M, H, ...]; none for a sigmoid
    gradients: dict[str, Tensor]
    amplified: float  # by how much the output norm makes errors larger


def literal_read(case: Case) -> tuple[list[Tensor], Tensor, Tensor, float]:
    """Outputs M x [N, D], weights [M, H, S, N], log-sum-exp [M, H, N] and the largest factor of the output norm, for N tokens."""
    queries = case.query if case.query.ndim == 2 else case.query[None]
    (count, rank), width, number, heads = queries.shape, case.sources[0].shape[-1], len(case.sources), case.heads
    sources = [source.reshape(-1, width) for source in case.sources]
    keys = [source[:, width - rank :] for source in sources] if case.keys is None else [key.reshape(-1, rank) for key in case.keys]
    gain = torch.ones(rank, dtype=torch.float64) if case.gain is None else case.gain
    bias = torch.zeros(count, number, dtype=torch.float64) if case.bias is None else case.bias.expand(count, number)
    tokens, largest_factor = sources[0].shape[0], 1.0
    outputs, weights, lse = [], queries.new_zeros(count, heads, number, tokens), queries.new_zeros(count, heads, tokens)
    for m in range(count):
        rows = []
        for t in range(tokens):
            groups = []
            for h in range(heads):
                channels = slice(h * width // heads, (h + 1) * width // heads)
                coordinates = slice(h * rank // heads, (h + 1) * rank // heads)
                scores = []
                for i in range(number):
                    normalised_by = sources[i][t] if case.key_norm == "full" else keys[i][t]
                    rms = (torch.dot(normalised_by, normalised_by) / len(normalised_by) + case.eps).sqrt()
                    key = keys[i][t] if case.key_norm == "none" else keys[i][t] / rms
                    scores.append(torch.dot(queries[m][coordinates], (gain * key)[coordinates]) + bias[m, i])
                mixed = [sources[i][t][channels] for i in range(number)]
                if case.weighting == "sigmoid":
                    alphas = [1 / (1 + (-score).exp()) for score in scores]
                    group = sum(alpha * row for alpha, row in zip(alphas, mixed, strict=True))
                    if case.prior is not None:
                        group = group + case.prior[m].output.reshape(-1, width)[t][channels]
                else:
                    largest = max(score.detach() for score in scores)
                    share = None
                    if case.prior is not None:
                        prior = case.prior[m]
                        assert prior.max is not None and prior.sum is not None
                        prior_max, prior_sum = (part.reshape(-1, heads)[t, h] for part in (prior.max, prior.sum))
                        largest = max(largest, prior_max)
                        share = prior_sum * (prior_max - largest).exp()
                    exponentials = [(score - largest).exp() for score in scores]
                    total = sum(exponentials) if share is None else sum(exponentials) + share
                    alphas = [exponential / total for exponential in exponentials]
                    group = sum(alpha * row for alpha, row in zip(alphas, mixed, strict=True))
                    if share is not None:
                        group = group + share / total * case.prior[m].output.reshape(-1, width)[t][channels]
                    lse[m, h, t] = largest + total.log()
                weights[m, h, :, t] = torch.stack(alphas)
                groups.append(group)
            row = torch.cat(groups)
            if case.output_gain is not None:
                rms = (torch.dot(row, row) / width + case.output_eps).sqrt()
                largest_factor = max(largest_factor, (case.output_gain.abs().max() / rms).item())
                row = case.output_gain * row / rms
            rows.append(row)
        outputs.append(torch.stack(rows))
    return outputs, weights, lse, largest_factor


def truth(case: Case, of_weights: Tensor | None = None, of_lse: Tensor | None = None) -> Truth:
    """What the literal loop finds, and its gradients; `of_weights` and `of_lse` are gradients that arrive there."""
    exact = case.exact()
    outputs, weights, lse, amplified = literal_read(exact)
    lead = case.sources[0].shape[:-1]
    outputs = [output.view(case.sources[0].shape) for output in outputs]
    weights, lse = weights.view(*weights.shape[:3], *lead), lse.view(*lse.shape[:2], *lead)
    loss = torch.stack([(output * up).sum() for output, up in zip(outputs, exact.upstream, strict=True)]).sum()
    if of_weights is not None:
        loss = loss + (weights * of_weights).sum()
    if of_lse is not None:
        loss = loss + (lse * of_lse).sum()
    wanted = exact.named()
    gradients = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return Truth(outputs, weights, lse, dict(zip(wanted, gradients, strict=True)), amplified)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    """Random reads of every form."""
    heads = draw(st.sampled_from([1, 1, 2, 3, 5]))
    number, width = draw(st.integers(1, 6)), heads * draw(st.integers(1, 70 // heads))
    rank = draw(st.one_of(st.just(width), st.integers(1, width // heads).map(lambda part: part * heads)))
    count = draw(st.sampled_from([None, 1, 2, 3]))
    lead = draw(st.sampled_from([(), (1,), (4,), (2, 3)]))
    projected = draw(st.booleans())
    key_norm = draw(st.sampled_from(["slice", "none"] if projected else ["slice", "full", "none"]))
    weighting = draw(st.sampled_from(["softmax", "softmax", "sigmoid"]))
    bias_shape = draw(st.sampled_from([None, (number,), (count or 1, number)]))
    if count is None and bias_shape is not None:
        bias_shape = (number,)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.02, 1.0, 20.0]))
    parameter = torch.float64 if dtype == torch.float64 else torch.float32

    def rand(*shape: int, kind: torch.dtype = dtype, by: float = 1.0) -> Tensor:
        return (by * torch.randn(shape, generator=generator, dtype=torch.float64)).to(kind).requires_grad_()

    def earlier() -> DepthRead:
        output, statistics = rand(*lead, width, by=scale), lead if heads == 1 else (*lead, heads)
        if weighting == "sigmoid":
            return DepthRead(output)
        total = 1 + 4 * torch.rand(statistics, generator=generator, dtype=torch.float64)
        return DepthRead(output, None, rand(*statistics, kind=parameter, by=2.0).detach(), total.to(parameter).requires_grad_())

    return Case(
        sources=[rand(*lead, width, by=scale) for _ in range(number)],
        keys=[rand(*lead, rank) for _ in range(number)] if projected else None,
        query=rand(*(() if count is None else (count,)), rank, kind=parameter),
        gain=rand(rank, kind=parameter) if draw(st.booleans()) else None,
        bias=None if bias_shape is None else rand(*bias_shape, kind=parameter),
        output_gain=rand(width, kind=parameter) if draw(st.booleans()) else None,
        prior=[earlier() for _ in range(count or 1)] if draw(st.booleans()) else None,
        heads=heads,
        key_norm=key_norm,
        weighting=weighting,
        eps=draw(st.sampled_from([1e-6, 1e-2])),
        output_eps=draw(st.sampled_from([1e-6, 1e-2])),
        upstream=[rand(*lead, width).detach() for _ in range(count or 1)],
    )


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, size: float, what: str) -> None:
    """Within the rounding of what is stored, in `dtype` or in the statistics dtype, and of terms of this size."""
    assert found.shape == expected.shape, what
    stored = STORED[dtype] if found.dtype == dtype else STATISTICS[dtype]
    bound = stored * (1 + expected.abs().max().item()) + STATISTICS[dtype] * size
    error = (found.double() - expected).abs().max().item()
    assert error <= bound, f"{what}: error {error:.2e}, bound {bound:.2e}"
