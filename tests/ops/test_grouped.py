"""Products of sorted rows against loops over rows, whatever the groups hold, and in every way a model may run them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from depthroute.common.errors import RequestError
from depthroute.ops import collect, grouped_product
from depthroute.ops.grouped import spread

X, D, F = 4, 6, 5
COUNTS = {"all": (2, 3, 1, 4), "some empty": (0, 3, 0, 2), "one": (0, 0, 7, 0), "none": (0, 0, 0, 0)}


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def drawn(counts: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    rows = torch.randn(sum(counts), D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weights = torch.randn(len(counts), F, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return rows, weights, torch.tensor(counts).cumsum(0)


def literal(rows: Tensor, weights: Tensor, counts: tuple[int, ...]) -> Tensor:
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    found = [torch.stack([row @ weights[group, f] for f in range(F)]) for group, row in zip(groups, rows, strict=True)]
    return torch.stack(found) if found else rows.new_empty(0, F)


@pytest.mark.parametrize("ends_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_a_product_and_its_gradients_are_a_loop_over_rows(counts: tuple[int, ...], ends_dtype: torch.dtype) -> None:
    rows, weights, ends = drawn(counts)
    found, right = grouped_product(rows, weights, ends.to(ends_dtype)), literal(rows, weights, counts)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    if not sum(counts):
        found.sum().backward()
        assert weights.grad is not None and not weights.grad.any()
        return
    upstream = torch.randn_like(right)
    got = torch.autograd.grad(found, (rows, weights), upstream)
    for one, other in zip(got, torch.autograd.grad(right, (rows, weights), upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert all(bool(got[1][group].any()) == (count > 0) for group, count in enumerate(counts))


def test_its_gradients_are_those_of_differences_also_of_columns_and_repeated_rows() -> None:
    rows, weights, ends = drawn((2, 0, 3, 1))

    def strided(rows: Tensor, weights: Tensor) -> Tensor:
        return grouped_product(rows.t().contiguous().t(), weights.mT.contiguous().mT, ends)

    assert torch.autograd.gradcheck(strided, (rows, weights))
    of_sum = torch.autograd.grad(grouped_product(rows, weights, ends).sum(), rows)[0]  # its gradient has strides of zero
    torch.testing.assert_close(of_sum, weights.sum(1).repeat_interleave(torch.tensor((2, 0, 3, 1)), 0), rtol=1e-12, atol=1e-12)


def test_only_the_gradients_that_are_wanted_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights, ends = drawn(COUNTS["all"])
    monkeypatch.setattr("depthroute.ops.grouped._outer", None)
    grouped_product(rows, weights.detach(), ends).sum().backward()
    assert rows.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_casts_what_it_casts_of_a_linear_layer(dtype: torch.dtype) -> None:
    rows, weights, ends = drawn((10, 0, 0, 0), dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, right = grouped_product(rows, weights, ends), torch.nn.functional.linear(rows, weights[0])
    assert found.dtype == right.dtype
    torch.testing.assert_close(found, right)
    found.sum().backward()
    assert rows.grad is not None and weights.grad is not None
    assert rows.grad.dtype == weights.grad.dtype == dtype


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
def test_it_is_one_graph_that_serves_all_groups(compiler: None) -> None:
    def loss(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return (grouped_product(rows, weights, ends) ** 2).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for counts in ((2, 3, 1, 4), (0, 0, 10, 0)):
        rows, weights, ends = drawn(counts)
        with torch.compiler.set_stance("fail_on_recompile") if counts[0] == 0 else torch.enable_grad():
            found = torch.autograd.grad(compiled(rows, weights, ends), (rows, weights))
        for one, other in zip(found, torch.autograd.grad(loss(rows, weights, ends), (rows, weights)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.library.opcheck(torch.ops.depthroute.grouped_product.default, drawn(COUNTS["some empty"]))


def test_it_has_shapes_without_data() -> None:
    with FakeTensorMode():
        rows = torch.empty(9, D, requires_grad=True)
        weights, ends = torch.empty(X, F, D, requires_grad=True), torch.empty(X, dtype=torch.int64)
        found = grouped_product(rows, weights, ends)
        found.sum().backward()
        assert found.shape == (9, F) and rows.grad is not None and weights.grad is not None
        assert rows.grad.shape == rows.shape and weights.grad.shape == weights.shape


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


@pytest.mark.parametrize("shapes", [((3, 5), (2, 4, 6), 2), ((3, 6), (2, 4, 6), 3), ((3, 2, 6), (2, 4, 6), 2)], ids=str)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    rows, weights, groups = shapes
    with pytest.raises(RequestError, match="grouped_product takes rows"):
        grouped_product(torch.zeros(rows), torch.zeros(weights), torch.zeros(groups, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(16, 40, 3, 5), (0, 64, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_finds_the_same(dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(64, 32, generator=generator).to(dtype), torch.randn(4, 24, 32, generator=generator).to(dtype)
    upstream, ends = torch.randn(64, 24, generator=generator).to(dtype), torch.tensor(counts).cumsum(0)
    found = []
    for device, wide in (("cpu", torch.float64), ("cuda", dtype)):
        r, w = rows.to(device, wide).requires_grad_(), weights.to(device, wide).requires_grad_()
        out = grouped_product(r, w, ends.to(device))
        found.append([part.detach().double().cpu() for part in (out, *torch.autograd.grad(out, (r, w), upstream.to(device, wide)))])
    for right, other in zip(*found, strict=True):
        torch.testing.assert_close(other, right, rtol=2e-2, atol=5e-2)
