"""Heads, the sigmoid, keys without a norm and the output norm: each against a loop that is as short as its formula, and its own facts.

`test_definition` tries all of them together. Attention Residuals, Table 4; Multi-Head Attention Residuals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from literal import BACKENDS
from torch import Tensor
from torch.nn import functional as F

from depthroute.ops import DepthRead, depth_attention


def rows(number: int = 4, width: int = 12, *, tokens: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(number)]


def vector(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype).requires_grad_()


def agree(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """To the last digits of float64, with the gradients of a random projection."""
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    for got, gradient in zip(torch.autograd.grad(found, leaves, upstream), wanted, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-11, atol=1e-12)


@BACKENDS
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_each_head_mixes_its_own_channels(backend: str, heads: int) -> None:
    """One norm over the whole key, then a softmax a head."""
    sources, query = rows(), vector(6)
    tokens = []
    for t in range(5):
        groups = []
        for h in range(heads):
            scores = []
            for source in sources:
                key = source[t, 6:] / (source[t, 6:].square().mean() + 1e-6).sqrt()
                scores.append(query.view(heads, -1)[h] @ key.view(heads, -1)[h])
            weights = torch.stack(scores).softmax(0)
            groups.append(sum(weight * source[t].view(heads, -1)[h] for weight, source in zip(weights, sources, strict=True)))
        tokens.append(torch.cat(groups))
    found = depth_attention(sources, query, heads=heads, backend=backend)
    assert isinstance(found, Tensor)
    agree(found, torch.stack(tokens), [*sources, query])


@BACKENDS
@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
def test_heads_without_a_key_norm_are_reads_of_their_channels(backend: str, weighting: Any) -> None:
    sources, query, heads, softmax = rows(), vector(12), 3, weighting == "softmax"
    options: Any = {"key_norm": "none", "weighting": weighting, "return_weights": True, "return_statistics": softmax, "backend": backend}
    whole = depth_attention(sources, query, heads=heads, **options)
    for h in range(heads):
        channels = slice(4 * h, 4 * (h + 1))
        part = depth_attention([source[:, channels] for source in sources], query[channels], **options)
        torch.testing.assert_close(whole.output[:, channels], part.output, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(whole.weights[h], part.weights, rtol=1e-13, atol=1e-13)
        if softmax:
            torch.testing.assert_close(whole.max[:, h], part.max, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(whole.sum[:, h], part.sum, rtol=1e-13, atol=1e-13)


@BACKENDS
def test_a_sigmoid_weighs_each_source_by_itself(backend: str) -> None:
    sources, query = rows(), vector(7)
    tokens = []
    for t in range(5):
        row = torch.zeros(12, dtype=torch.float64)
        for source in sources:
            key = source[t, 5:] / (source[t, 5:].square().mean() + 1e-6).sqrt()
            row = row + torch.sigmoid(query @ key) * source[t]
        tokens.append(row)
    found = depth_attention(sources, query, weighting="sigmoid", backend=backend)
    assert isinstance(found, Tensor)
    agree(found, torch.stack(tokens), [*sources, query])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sigmoid_at_its_ends(backend: str, dtype: torch.dtype) -> None:
    """Scores of +1000 and -1000 overflow the exponential of either sign."""
    sources = rows(2, dtype=dtype)
    bias = torch.tensor([1e3, -1e3], dtype=dtype, requires_grad=True)
    read = depth_attention(sources, vector(12, dtype=dtype), bias=bias, weighting="sigmoid", return_weights=True, backend=backend)
    assert isinstance(read, DepthRead) and read.weights is not None and read.max is None and read.sum is None
    assert torch.equal(read.output, sources[0])
    assert read.weights[0].eq(1).all() and read.weights[1].eq(0).all()
    of_first, of_second, of_bias = torch.autograd.grad(read.output.sum(), (*sources, bias))
    assert of_first.eq(1).all() and of_second.eq(0).all() and of_bias.eq(0).all()


@BACKENDS
def test_keys_without_a_norm_are_taken_as_they_are(backend: str) -> None:
    sources, query, gain = rows(), vector(7), 1 + vector(7).detach().requires_grad_()
    tokens = []
    for t in range(5):
        weights = torch.stack([query @ (gain * source[t, 5:]) for source in sources]).softmax(0)
        tokens.append(sum(weight * source[t] for weight, source in zip(weights, sources, strict=True)))
    found = depth_attention(sources, query, key_norm="none", key_gain=gain, backend=backend)
    assert isinstance(found, Tensor)
    agree(found, torch.stack(tokens), [*sources, query])


@BACKENDS
def test_full_and_slice_norms_are_one_at_full_rank_and_differ_below(backend: str) -> None:
    sources, found = rows(), {}
    for rank in (12, 4):
        for key_norm in ("slice", "full"):
            output = depth_attention(sources, vector(rank), key_norm=key_norm, backend=backend)
            found[rank, key_norm] = output
    assert torch.equal(found[12, "slice"], found[12, "full"])
    assert (found[4, "slice"] - found[4, "full"]).abs().max() > 0.01


@BACKENDS
@pytest.mark.parametrize("heads", [1, 4])
def test_the_output_norm_is_rms_norm_of_the_read(backend: str, heads: int) -> None:
    sources, queries, gain = rows(), vector(2, 8), vector(12)
    plain = depth_attention(sources, queries, heads=heads, backend=backend)
    normalised = depth_attention(sources, queries, heads=heads, output_gain=gain, output_eps=1e-3, backend=backend)
    expected = torch.stack([F.rms_norm(output, (12,), gain, 1e-3) for output in plain])
    agree(torch.stack(list(normalised)), expected, [*sources, queries, gain])


@BACKENDS
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("normed", [False, True])
def test_an_output_is_rounded_once(backend: str, dtype: torch.dtype, rounding: float, normed: bool) -> None:
    """A mixture that is stored and then normalised is rounded twice: its error passes half a unit in the last place."""
    sources, query, gain = rows(tokens=50, dtype=dtype), vector(12, dtype=torch.float32), vector(12, dtype=torch.float32)
    options: Any = {"output_gain": gain} if normed else {}
    output = depth_attention(sources, query, backend=backend, **options)
    wide: Any = {"output_gain": gain.double()} if normed else {}
    exact = depth_attention([source.double() for source in sources], query.double(), backend="reference", **wide)
    assert isinstance(output, Tensor) and isinstance(exact, Tensor) and output.dtype == dtype
    slack = 2e-6 if dtype == torch.bfloat16 else 4e-6  # of float32 statistics, and float16's step below its normal range
    assert ((output.double() - exact).abs() <= rounding * exact.abs() + slack).all()
    if normed:
        plain = depth_attention(sources, query, backend=backend)
        assert isinstance(plain, Tensor)
        twice = F.rms_norm(plain.float(), (12,), gain, 1e-6).to(dtype)
        assert ((twice.double() - exact).abs() > rounding * exact.abs() + slack).any()


@BACKENDS
def test_a_zero_mixture_is_normalised_to_zero(backend: str) -> None:
    (x,), gain = rows(1), vector(12)
    sources = [x, (-x).detach().requires_grad_()]
    output = depth_attention(sources, torch.zeros(12, dtype=torch.float64), output_gain=gain, backend=backend)
    assert isinstance(output, Tensor) and output.eq(0).all()
    of_first, of_second, of_gain = torch.autograd.grad(output, (*sources, gain), torch.ones_like(output))
    torch.testing.assert_close(of_first, gain.detach().expand(5, 12) * 500)  # half the weight, and 1 / sqrt(1e-6)
    assert torch.equal(of_first, of_second) and of_gain.eq(0).all()


@BACKENDS
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("key_norm", ["slice", "full", "none"])
def test_zero_queries_take_the_mean(backend: str, heads: int, key_norm: Any) -> None:
    sources, query = rows(4), torch.zeros(9, dtype=torch.float64)
    read = depth_attention(sources, query, heads=heads, key_norm=key_norm, return_weights=True, backend=backend)
    assert isinstance(read, DepthRead) and read.weights is not None
    torch.testing.assert_close(read.output, torch.stack(sources).mean(0), rtol=1e-14, atol=1e-14)
    assert read.weights.shape == ((4, 5) if heads == 1 else (heads, 4, 5)) and read.weights.eq(0.25).all()
