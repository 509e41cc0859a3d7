"""Two phases are one read: sources read first, with their statistics, and then merged as the prior of the rest.

Attention Residuals, Algorithm 1. Exact for outputs, weights, statistics and every gradient, at any height of the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal import BACKENDS
from torch import Tensor

from depthroute.ops import DepthRead, depth_attention


@dataclass
class Whole:
    """All the sources of a read, with what belongs to each."""

    sources: list[Tensor]
    keys: list[Tensor] | None
    query: Tensor
    bias: Tensor  # [S] or [M, S]
    options: dict[str, Any]
    output_gain: Tensor | None = None

    def leaves(self) -> list[Tensor]:
        leaves = [*self.sources, *(self.keys or ()), self.query, self.bias, self.options.get("key_gain"), self.output_gain]
        return [leaf for leaf in leaves if leaf is not None]

    def read(self, *cuts: int, backend: str) -> tuple[list[Any], Tensor]:
        """The M reads of all the sources in phases that end at `cuts`, and the weights [M, H, S, ...] or [M, S, ...] of the last phase."""
        softmax, found = self.options["weighting"] == "softmax", None
        for start, stop in zip((0, *cuts), (*cuts, len(self.sources)), strict=True):
            last = stop == len(self.sources)
            found = depth_attention(
                self.sources[start:stop], self.query, keys=None if self.keys is None else self.keys[start:stop],
                bias=self.bias[..., start:stop], prior=found, output_gain=self.output_gain if last else None, return_weights=True,
                return_statistics=softmax, backend=backend, **self.options,
            )  # fmt: skip
        reads = [found] if self.query.ndim == 1 else list(found)
        return reads, torch.stack([read.weights for read in reads])


def make(
    number: int = 5, width: int = 12, rank: int = 12, *, lead: tuple[int, ...] = (2, 3), count: int | None = 2, projected: bool = False,
    normed: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any,
) -> Whole:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    several = () if count is None else (count,)

    def rand(*shape: int, kind: torch.dtype = parameter) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind).requires_grad_()

    return Whole(
        sources=[rand(*lead, width, kind=dtype) for _ in range(number)],
        keys=[rand(*lead, rank, kind=dtype) for _ in range(number)] if projected else None,
        query=rand(*several, rank),
        bias=rand(*several, number),
        output_gain=rand(width) if normed else None,
        options={"weighting": "softmax", "key_gain": rand(rank), **options},
    )


def loss_of(reads: list[Any], weights: Tensor) -> Tensor:
    """Something of everything that a read returns."""
    generator = torch.Generator().manual_seed(9)

    def project(x: Tensor) -> Tensor:
        return (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()

    parts = [project(weights)]
    for read in reads:
        parts += [project(read.output), *([] if read.sum is None else [project(read.lse)])]
    return torch.stack(parts).sum()


@st.composite
def wholes(draw: st.DrawFn) -> Whole:
    heads, projected = draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans())
    width = heads * draw(st.integers(1, 8))
    rank = heads * draw(st.integers(1, width // heads))
    return make(
        draw(st.integers(3, 6)), width, rank, lead=draw(st.sampled_from([(), (3,), (2, 2)])), count=draw(st.sampled_from([None, 1, 3])),
        projected=projected, normed=draw(st.booleans()), seed=draw(st.integers(0, 2**31)), heads=heads,
        key_norm=draw(st.sampled_from(["slice", "none"] if projected else ["slice", "full", "none"])),
        weighting=draw(st.sampled_from(["softmax", "softmax", "sigmoid"])),
    )  # fmt: skip


@BACKENDS
@given(data=st.data())
def test_any_number_of_phases_is_one_read(backend: str, data: st.DataObject) -> None:
    whole = data.draw(wholes())
    number = len(whole.sources)
    cuts = data.draw(st.sampled_from([(1,), (2,), (number - 1,), (1, 2), (1, number - 1)]))
    once, expected = whole.read(backend=backend)
    phased, weights = whole.read(*cuts, backend=backend)
    expected = expected.narrow(-whole.sources[0].ndim, cuts[-1], number - cuts[-1])
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(phased, once, strict=True):
        torch.testing.assert_close(found.output, wanted.output, rtol=1e-12, atol=1e-12)
        if whole.options["weighting"] == "softmax":
            torch.testing.assert_close(found.max, wanted.max, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.sum, wanted.sum, rtol=1e-12, atol=1e-12)
    leaves = whole.leaves()
    gradients = torch.autograd.grad(loss_of(once, expected), leaves)
    size = 1e-12 * max(1.0, *(gradient.abs().max().item() for gradient in gradients))
    for got, wanted in zip(torch.autograd.grad(loss_of(phased, weights), leaves), gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=size)


@BACKENDS
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("height", [0.0, 1e4, -1e4, 1e30])
def test_the_sum_survives_any_height_of_the_scores(backend: str, height: float, heads: int) -> None:
    """In float32 at 1e4 a log-sum-exp has three decimals: a merge by it would be wrong by 1e-3. The sum beside the maximum is not."""
    whole = make(dtype=torch.float32, heads=heads)
    whole.bias = (whole.bias.detach() + height).requires_grad_()
    once, all_weights = whole.read(backend=backend)
    phased, weights = whole.read(3, backend=backend)
    torch.testing.assert_close(weights, all_weights.narrow(-3, 3, 2), rtol=3e-6, atol=1e-7)
    for found, wanted in zip(phased, once, strict=True):
        assert torch.equal(found.max, wanted.max)
        torch.testing.assert_close(found.sum, wanted.sum, rtol=3e-6, atol=0)
        torch.testing.assert_close(found.output, wanted.output, rtol=3e-6, atol=3e-6)
    if abs(height) == 1e4:
        exact = phased[0].max.double() + phased[0].sum.double().log()
        assert (phased[0].lse.double() - exact).abs().max() > 1e-4
    upstream = [torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(m)) for m in range(2)]
    gradients = torch.autograd.grad([read.output for read in once], whole.leaves(), upstream)
    for got, wanted in zip(torch.autograd.grad([read.output for read in phased], whole.leaves(), upstream), gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=3e-6, atol=3e-6 * max(1.0, wanted.abs().max().item()))


@BACKENDS
@pytest.mark.parametrize("first_is_higher", [True, False])
def test_a_phase_far_below_the_other_adds_nothing(backend: str, first_is_higher: bool) -> None:
    whole = make(4, dtype=torch.float32, count=None)
    height = torch.tensor([1e4, 1e4, -1e4, -1e4]) * (1 if first_is_higher else -1)
    whole.bias = height.requires_grad_()
    (phased,), _ = whole.read(2, backend=backend)
    near = slice(0, 2) if first_is_higher else slice(2, 4)
    alone = depth_attention(whole.sources[near], whole.query, key_gain=whole.options["key_gain"], bias=whole.bias[near], backend=backend)
    torch.testing.assert_close(phased.output, alone, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(phased.output.sum(), whole.leaves())
    for gradient in gradients:
        assert gradient.isfinite().all()
    for far in gradients[2:4] if first_is_higher else gradients[:2]:
        assert far.eq(0).all()


@BACKENDS
def test_new_sources_at_minus_infinity_leave_the_prior_as_it_is(backend: str) -> None:
    sources = make(4, dtype=torch.float32, count=None).sources
    query = torch.ones(12, requires_grad=True)
    prior = depth_attention(sources[:2], query, return_statistics=True, backend=backend)
    bias = torch.full((2,), float("-inf"))
    merged = depth_attention(sources[2:], query, bias=bias, prior=prior, return_statistics=True, return_weights=True, backend=backend)
    assert isinstance(merged, DepthRead) and isinstance(prior, DepthRead) and merged.weights is not None
    for name in ("output", "max", "sum"):
        assert torch.equal(getattr(merged, name), getattr(prior, name)), name
    assert merged.weights.eq(0).all()
    expected = torch.autograd.grad(prior.output.sum(), (*sources[:2], query), retain_graph=True)
    for got, wanted in zip(torch.autograd.grad(merged.output.sum(), (*sources[:2], query), retain_graph=True), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(merged.output.sum(), sources[2:]))


@BACKENDS
def test_the_sites_of_a_block_share_one_first_phase(backend: str) -> None:
    """The closed sources are read once for three sites; each site then reads its own open source."""
    whole = make(7, count=3)
    closed, opened = whole.sources[:4], whole.sources[4:]
    plain = {"key_gain": whole.options["key_gain"], "backend": backend}
    first = depth_attention(closed, whole.query, return_statistics=True, **plain)
    phased = [
        depth_attention([row], query, prior=one, output_gain=torch.ones(12), **plain)
        for row, query, one in zip(opened, whole.query, first, strict=True)
    ]
    once = [
        depth_attention([*closed, row], query, output_gain=torch.ones(12), **plain) for row, query in zip(opened, whole.query, strict=True)
    ]
    leaves = [*whole.sources, whole.query, whole.options["key_gain"]]
    upstream = [torch.randn_like(output) for output in once]
    for found, wanted in zip(phased, once, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    expected = torch.autograd.grad(once, leaves, upstream)
    for got, gradient in zip(torch.autograd.grad(phased, leaves, upstream), expected, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-12)


@BACKENDS
def test_a_prior_without_a_gradient_is_a_constant(backend: str) -> None:
    whole = make(4, count=None)
    options = {"key_gain": whole.options["key_gain"].detach(), "backend": backend}
    with torch.no_grad():
        constant = depth_attention(whole.sources[:2], whole.query, return_statistics=True, **options)
    assert isinstance(constant, DepthRead) and not constant.output.requires_grad
    tracked = depth_attention(whole.sources[:2], whole.query.detach(), return_statistics=True, **options)
    found, expected = (depth_attention(whole.sources[2:], whole.query, prior=prior, **options) for prior in (constant, tracked))
    assert torch.equal(found, expected)
    leaves = [*whole.sources[2:], whole.query]
    for got, wanted in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert torch.equal(got, wanted)


@BACKENDS
def test_a_maximum_carries_no_gradient_and_an_unused_prior_has_none(backend: str) -> None:
    whole = make(4, count=2)
    first = depth_attention(whole.sources[:2], whole.query, return_statistics=True, backend=backend)
    assert not any(read.max.requires_grad for read in first) and all(read.sum.requires_grad for read in first)
    merged = depth_attention(whole.sources[2:], whole.query, prior=first, backend=backend)
    of_used, of_unused = torch.autograd.grad(merged[1].sum(), (first[1].output, first[0].output), allow_unused=True)
    assert of_used.abs().max() > 0 and (of_unused is None or of_unused.eq(0).all())
    given = [read._replace(max=read.max.clone().requires_grad_()) for read in first]
    merged = depth_attention(whole.sources[2:], whole.query, prior=given, backend=backend)
    assert torch.autograd.grad(merged[0].sum() + merged[1].sum(), [read.max for read in given], allow_unused=True) == (None, None)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_half_precision_prior_costs_one_more_rounding(backend: str, dtype: torch.dtype) -> None:
    whole = make(dtype=dtype)
    once, _ = whole.read(backend=backend)
    phased, _ = whole.read(3, backend=backend)
    step = torch.finfo(dtype).eps
    for found, wanted in zip(phased, once, strict=True):
        assert found.output.dtype == dtype and found.sum.dtype == torch.float32
        torch.testing.assert_close(found.sum, wanted.sum, rtol=3e-6, atol=0)
        largest = max(source.abs().max().item() for source in whole.sources)
        assert (found.output - wanted.output).abs().max() <= 2 * step * largest
    upstream = [torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(m)).to(dtype) for m in range(2)]
    expected = torch.autograd.grad([read.output for read in once], whole.leaves(), upstream)
    for got, wanted in zip(torch.autograd.grad([read.output for read in phased], whole.leaves(), upstream), expected, strict=True):
        assert got.dtype == wanted.dtype
        assert (got - wanted).abs().max() <= 8 * step * (1 + wanted.abs().max())


@BACKENDS
def test_a_prior_of_another_dtype_promotes(backend: str) -> None:
    whole = make(4, dtype=torch.bfloat16, count=None)
    prior = depth_attention([source.float() for source in whole.sources[:2]], whole.query, return_statistics=True, backend=backend)
    merged = depth_attention(whole.sources[2:], whole.query, prior=prior, backend=backend)
    once = depth_attention([source.float() for source in whole.sources], whole.query, backend=backend)
    assert isinstance(merged, Tensor) and isinstance(once, Tensor) and merged.dtype == torch.float32
    torch.testing.assert_close(merged, once, rtol=3e-6, atol=3e-6)
    gradient = torch.autograd.grad(merged.sum(), whole.sources)
    assert all(one.dtype == torch.bfloat16 for one in gradient)
