"""Sums of sources with given weights, against a stack."""

from __future__ import annotations

import pytest
import torch

from depthroute.ops import weighted_sum


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["one each", "scalars", "a token", "a token, kept"])
def test_weighted_sum_is_that_of_the_stack(leading: tuple[int, ...], kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(*leading, 5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(4)]
    shape = {"one each": (4,), "scalars": (4, 1), "a token": (4, *leading), "a token, kept": (4, *leading, 1)}[kind]
    weights = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    found = weighted_sum(sources, weights)
    wide = weights.view(4, *(leading if "token" in kind else [1] * len(leading)), 1)
    expected = (torch.stack(sources) * wide).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(
        torch.autograd.grad(found, [*sources, weights], upstream), torch.autograd.grad(expected, [*sources, weights], upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_bf16_sources_are_summed_in_float32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(64, 32, generator=generator).bfloat16() for _ in range(30)]
    weights = torch.randn(30, 64, generator=generator)
    found = weighted_sum(sources, weights)
    exact = weighted_sum([source.double() for source in sources], weights.double())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * 2**-8, atol=1e-5)


def test_as_many_weights_as_sources() -> None:
    with pytest.raises(ValueError):
        weighted_sum([torch.ones(3)] * 2, torch.ones(3))
