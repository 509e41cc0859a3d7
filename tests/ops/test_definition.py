"""Both backends against a literal reading of the papers' equations, token by token and source by source, in float64.

Attention Residuals, Eqs. 1-4; Low-Rank AttnRes, Eqs. 8-13 and 26. Truth is computed from the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from depthroute.ops import depth_attention, native

NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.unavailable() is not None, reason="no C compiler"))
BACKENDS = pytest.mark.parametrize("backend", ["reference", NATIVE])

# Errors have two parts. Rounding of what is stored: a few units in the last place of its dtype, relative to the largest value. Rounding of
# the statistics, which are float32 or float64 throughout: relative to the size of the terms that cancel.
STORED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
STATISTICS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


def literal_read(
    sources: Sequence[Tensor], queries: Tensor, keys: Sequence[Tensor] | None, key_norm: str, gain: Tensor, bias: Tensor, eps: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs M x [N, D], weights [M, S, N] and log-sum-exp [M, N] of float64 sources [N, D]."""
    count, rank = queries.shape
    tokens, width = sources[0].shape
    outputs, weights, lse = [], [], []
    for m in range(count):
        rows, weight_rows, lse_row = [], [], []
        for t in range(tokens):
            scores = []
            for i, source in enumerate(sources):
                key = source[t, width - rank :] if keys is None else keys[i][t]
                normalised_by = source[t] if key_norm == "full" else key
                rms = (torch.dot(normalised_by, normalised_by) / len(normalised_by) + eps).sqrt()
                scores.append(torch.dot(queries[m], gain * (key / rms)) + bias[m, i])
            largest = max(scores, key=lambda score: score.item())
            exponentials = [(score - largest).exp() for score in scores]
            total = sum(exponentials[1:], exponentials[0])
            alphas = [exponential / total for exponential in exponentials]
            row = alphas[0] * sources[0][t]
            for alpha, source in zip(alphas[1:], sources[1:], strict=True):
                row = row + alpha * source[t]
            rows.append(row)
            weight_rows.append(torch.stack(alphas))
            lse_row.append(largest + total.log())
        outputs.append(torch.stack(rows))
        weights.append(torch.stack(weight_rows).T)
        lse.append(torch.stack(lse_row))
    return outputs, torch.stack(weights), torch.stack(lse)


@dataclass(repr=False)
class Case:
    sources: list[Tensor]
    keys: list[Tensor] | None
    query: Tensor
    gain: Tensor | None
    bias: Tensor | None
    key_norm: str
    eps: float
    upstream: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """What gradients are wanted of."""
        return [*self.sources, *(self.keys or ()), self.query, *(x for x in (self.gain, self.bias) if x is not None)]

    def score_size(self) -> float:
        """How large scores can be."""
        query = self.query.detach().double() * (1 if self.gain is None else self.gain.detach().double())
        bias = 0.0 if self.bias is None else self.bias.abs().max().item()
        return 1 + query.norm(dim=-1).max().item() * self.query.shape[-1] ** 0.5 + bias

    def gradient_size(self) -> float:
        """How large the terms of a score's gradient can be, before they cancel."""
        norm = max(source.detach().double().norm(dim=-1).max().item() for source in self.sources)
        upstream = max(up.double().norm(dim=-1).max().item() for up in self.upstream)
        rank = self.query.shape[-1]
        rows = self.keys or [source if self.key_norm == "full" else source[..., -rank:] for source in self.sources]
        squares = min(row.detach().double().square().mean(-1).min().item() for row in rows)
        tokens = self.sources[0][..., 0].numel()
        return tokens * len(self.upstream) * norm * upstream * self.score_size() * (1 + (squares + self.eps) ** -0.5)

    def options(self) -> dict[str, Any]:
        return {"keys": self.keys, "key_norm": self.key_norm, "key_gain": self.gain, "bias": self.bias, "eps": self.eps}


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    number, width = draw(st.integers(1, 6)), draw(st.integers(1, 70))
    rank = draw(st.one_of(st.just(width), st.integers(1, width)))
    count = draw(st.sampled_from([None, 1, 2, 3]))
    lead = draw(st.sampled_from([(), (1,), (4,), (2, 3)]))
    projected = draw(st.booleans())
    key_norm = "slice" if projected else draw(st.sampled_from(["slice", "full"]))
    bias_shape = draw(st.sampled_from([None, (number,), (count or 1, number)]))
    if count is None and bias_shape is not None:
        bias_shape = (number,)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.02, 1.0, 20.0]))

    def rand(*shape: int, kind: torch.dtype = dtype, by: float = 1.0) -> Tensor:
        return (by * torch.randn(shape, generator=generator, dtype=torch.float64)).to(kind).requires_grad_()

    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        sources=[rand(*lead, width, by=scale) for _ in range(number)],
        keys=[rand(*lead, rank) for _ in range(number)] if projected else None,
        query=rand(*(() if count is None else (count,)), rank, kind=parameter),
        gain=rand(rank, kind=parameter) if draw(st.booleans()) else None,
        bias=None if bias_shape is None else rand(*bias_shape, kind=parameter),
        key_norm=key_norm,
        eps=draw(st.sampled_from([1e-6, 1e-2])),
        upstream=[rand(*lead, width).detach() for _ in range(count or 1)],
    )


def truth(case: Case, extra: tuple[Tensor, Tensor] | None = None) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Outputs, weights, log-sum-exp and gradients by the literal loop; `extra` are upstream gradients of weights and log-sum-exp."""
    exact = [tensor.detach().double().requires_grad_() for tensor in case.tensors()]
    number, rest = len(case.sources), list(exact)
    sources = [rest.pop(0) for _ in range(number)]
    keys = [rest.pop(0) for _ in range(number)] if case.keys is not None else None
    query = rest.pop(0)
    queries = query if query.ndim == 2 else query[None]
    gain = rest.pop(0) if case.gain is not None else torch.ones(queries.shape[1], dtype=torch.float64)
    bias = rest.pop(0) if case.bias is not None else torch.zeros(1, number, dtype=torch.float64)
    outputs, weights, lse = literal_read(
        [source.reshape(-1, source.shape[-1]) for source in sources], queries,
        None if keys is None else [key.reshape(-1, key.shape[-1]) for key in keys],
        case.key_norm, gain, bias.expand(len(queries), number), case.eps,
    )  # fmt: skip
    lead = sources[0].shape[:-1]
    outputs = [output.view(sources[0].shape) for output in outputs]
    weights, lse = weights.view(*weights.shape[:2], *lead), lse.view(-1, *lead)
    loss = torch.stack([(output * up.double()).sum() for output, up in zip(outputs, case.upstream, strict=True)]).sum()
    if extra is not None:
        loss = loss + (weights * extra[0]).sum() + (lse * extra[1]).sum()
    return outputs, weights, lse, list(torch.autograd.grad(loss, exact, materialize_grads=True))


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, size: float, what: str) -> None:
    assert found.shape == expected.shape, what
    stored = STORED[dtype] if found.dtype == dtype else STATISTICS[dtype]
    bound = stored * (1 + expected.abs().max().item()) + STATISTICS[dtype] * size
    error = (found.double() - expected).abs().max().item()
    assert error <= bound, f"{what}: error {error:.2e}, bound {bound:.2e}"


def grade(case: Case, backend: str, dtype: torch.dtype) -> None:
    outputs, weights, lse, gradients = truth(case)
    found = depth_attention(case.sources, case.query, backend=backend, **case.options())
    found = found if isinstance(found, tuple) else (found,)
    largest = max(source.detach().abs().max().item() for source in case.sources)
    for output, expected in zip(found, outputs, strict=True):
        assert output.dtype == dtype
        assert_close(output, expected, dtype, case.score_size() * largest, "output")
    names = [
        *(f"source {i}" for i in range(len(case.sources))), *(f"key {i}" for i in range(len(case.keys or ()))), "query",
        *(name for name in ("gain", "bias") if getattr(case, name) is not None),
    ]  # fmt: skip
    loss = torch.stack([(output * up).double().sum() for output, up in zip(found, case.upstream, strict=True)]).sum()
    for name, tensor, got, expected in zip(names, case.tensors(), torch.autograd.grad(loss, case.tensors()), gradients, strict=True):
        assert got.dtype == tensor.dtype
        assert_close(got, expected, dtype, case.gradient_size(), f"gradient of {name}")
    with torch.no_grad():
        read = depth_attention(case.sources, case.query, return_weights=True, return_lse=True, backend=backend, **case.options())
    assert read.weights is not None and read.lse is not None
    single = case.query.ndim == 1
    assert read.weights.dtype == read.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(read.weights, weights[0] if single else weights, dtype, case.score_size(), "weights")
    assert_close(read.lse, lse[0] if single else lse, dtype, case.score_size(), "log-sum-exp")


@BACKENDS
@given(data=st.data())
def test_float64_outputs_weights_and_every_gradient(backend: str, data: st.DataObject) -> None:
    grade(data.draw(cases(torch.float64)), backend, torch.float64)


@BACKENDS
@given(data=st.data())
def test_float32_outputs_weights_and_every_gradient(backend: str, data: st.DataObject) -> None:
    grade(data.draw(cases(torch.float32)), backend, torch.float32)


@BACKENDS
@given(data=st.data())
def test_bfloat16_outputs_weights_and_every_gradient(backend: str, data: st.DataObject) -> None:
    grade(data.draw(cases(torch.bfloat16)), backend, torch.bfloat16)


@given(case=cases(torch.float16))
def test_float16_outputs_weights_and_every_gradient(case: Case) -> None:
    grade(case, "auto", torch.float16)


@given(case=cases(torch.float64))
def test_weights_and_log_sum_exp_carry_gradients(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    lead, count = case.sources[0].shape[:-1], len(case.upstream)
    extra = (
        torch.randn(count, len(case.sources), *lead, dtype=torch.float64, generator=generator),
        torch.randn(count, *lead, dtype=torch.float64, generator=generator),
    )
    *_, gradients = truth(case, extra)
    read = depth_attention(case.sources, case.query, return_weights=True, return_lse=True, **case.options())
    assert read.weights is not None and read.lse is not None
    outputs = read.output if isinstance(read.output, tuple) else (read.output,)
    loss = torch.stack([(output * up).sum() for output, up in zip(outputs, case.upstream, strict=True)]).sum()
    loss = loss + (read.weights * extra[0].view(read.weights.shape)).sum() + (read.lse * extra[1].view(read.lse.shape)).sum()
    for got, expected in zip(torch.autograd.grad(loss, case.tensors()), gradients, strict=True):
        assert_close(got, expected, torch.float64, 10 * case.gradient_size(), "gradient")


@BACKENDS
@given(seed=st.integers(0, 2**31), number=st.integers(1, 5), width=st.integers(1, 40), data=st.data())
def test_the_low_rank_papers_pseudo_code(backend: str, seed: int, number: int, width: int, data: st.DataObject) -> None:
    """`route` of Appendix H, as it is printed: parameter-free key norm, and torch's own default epsilon."""
    rank = data.draw(st.integers(1, width))
    torch.manual_seed(seed)
    sources = [torch.randn(2, 3, width, dtype=torch.float64) for _ in range(number)]
    q = torch.randn(rank, dtype=torch.float64)
    V = torch.stack(sources)
    K = F.rms_norm(V[..., -rank:], (rank,))
    weights = (K * q).sum(-1).softmax(dim=0)
    expected = (weights[..., None] * V).sum(dim=0)
    found = depth_attention(sources, q, eps=torch.finfo(torch.float64).eps, backend=backend)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
