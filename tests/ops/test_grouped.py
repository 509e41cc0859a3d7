"""Products of sorted rows against loops over rows, whatever the groups hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from depthroute.ops.grouped import collect, outer, product, spread

D, F = 6, 5
COUNTS = {"all": (2, 3, 1, 4), "some empty": (0, 3, 0, 2), "one": (0, 0, 7, 0), "none": (0, 0, 0, 0)}


def drawn(counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    rows = torch.randn(sum(counts), D, generator=generator, dtype=torch.float64)
    weights = torch.randn(len(counts), F, D, generator=generator, dtype=torch.float64)
    return rows, weights, torch.tensor(counts).cumsum(0)


def literal(rows: Tensor, weights: Tensor, counts: tuple[int, ...]) -> Tensor:
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    found = [torch.stack([row @ weights[group, f] for f in range(F)]) for group, row in zip(groups, rows, strict=True)]
    return torch.stack(found) if found else rows.new_empty(0, F)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_are_loops_over_rows(counts: tuple[int, ...]) -> None:
    rows, weights, ends = drawn(counts)
    torch.testing.assert_close(product(rows, weights, ends), literal(rows, weights, counts), rtol=1e-12, atol=1e-12)
    columns = product(rows.t().contiguous().t(), weights.mT.contiguous().mT, ends)
    torch.testing.assert_close(columns, literal(rows, weights, counts), rtol=1e-12, atol=1e-12)
    left = torch.randn(sum(counts), F, dtype=torch.float64)
    found, starts = outer(left, rows, ends), [0, *ends.tolist()]
    for group, (start, end) in enumerate(pairwise(starts)):
        torch.testing.assert_close(found[group], left[start:end].T @ rows[start:end], rtol=1e-12, atol=1e-12)  # zeros where there are none


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_spread_and_collect_are_each_others_gradients(dtype: torch.dtype) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    places = order.argsort().view(4, 3)
    tokens, rows = torch.randn(4, D, dtype=torch.float64).to(dtype), torch.randn(12, D, dtype=torch.float64).to(dtype)
    tokens.requires_grad_()
    rows.requires_grad_()
    spreaded, collected = spread(tokens, order, places), collect(rows, order, places)
    assert torch.equal(spreaded, tokens.repeat_interleave(3, 0)[order])
    right = torch.stack([sum((rows[place].double() for place in places[token]), torch.zeros(D)) for token in range(4)])
    torch.testing.assert_close(collected, right.to(dtype))
    of_tokens, of_rows = torch.autograd.grad((spreaded, collected), (tokens, rows), (rows.detach(), tokens.detach()))
    assert torch.equal(of_tokens, collected.detach()) and torch.equal(of_rows, spreaded.detach())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("counts", [(16, 40, 3, 5), (0, 64, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_finds_the_same(dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(64, 32, generator=generator).to(dtype), torch.randn(4, 24, 32, generator=generator).to(dtype)
    upstream, ends = torch.randn(64, 24, generator=generator).to(dtype), torch.tensor(counts).cumsum(0)
    found = []
    for device, wide in (("cpu", torch.float64), ("cuda", dtype)):
        r, w, up = (x.to(device, wide) for x in (rows, weights, upstream))
        found.append([one.double().cpu() for one in (product(r, w, ends.to(device)), outer(up, r, ends.to(device)))])
    for right, other in zip(*found, strict=True):
        torch.testing.assert_close(other, right, rtol=2e-2, atol=5e-2)
