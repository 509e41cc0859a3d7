"""`hold`: the gradient of a source that many reads share is summed in the statistics dtype and rounded once, whatever the graph looks like.

For the reference backend a held source is the source itself: autograd adds up what the reads hand it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from literal import BACKENDS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from depthroute.ops import depth_attention, hold

SITES = 12


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def sites(x: Tensor, y: Tensor, queries: Tensor, backend: str, between: Callable[..., Any] = lambda read, *rows: read(*rows)) -> Tensor:
    """A loss of SITES reads of the same two sources; its upstream gradients are exact in every dtype."""

    def read(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        found = depth_attention([x, y], query, backend=backend)
        assert isinstance(found, Tensor)
        return found

    loss = torch.zeros((), dtype=torch.float64)
    for site, query in enumerate(queries):
        output = between(read, x, y, query)
        upstream = torch.randint(-9, 10, output.shape, generator=torch.Generator().manual_seed(site)) / 8
        loss = loss + (output.double() * upstream).sum()
    return loss


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    return leaf(40, 16, dtype=dtype, seed=1), leaf(40, 16, dtype=dtype, seed=2), leaf(SITES, 16, dtype=parameter, seed=3)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=["bfloat16", "float16"])
def test_a_half_precision_gradient_is_rounded_once(requires_native: None, dtype: torch.dtype, unit: float) -> None:
    x, y, queries = inputs(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, y, queries)]
    expected = torch.autograd.grad(sites(*exact, "reference"), exact[:2])
    with_hold = torch.autograd.grad(sites(hold(x), hold(y), queries, "native"), (x, y))
    without = torch.autograd.grad(sites(x, y, queries, "native"), (x, y))
    slack = 1e-5  # of float32 sums
    for held_gradient, plain, wanted in zip(with_hold, without, expected, strict=True):
        assert held_gradient.dtype == dtype
        bound = unit * wanted.abs() + slack
        assert ((held_gradient.double() - wanted).abs() <= bound).all()
        assert ((plain.double() - wanted).abs() > bound).float().mean() > 0.2


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_held_source_has_the_gradient_of_autograd(backend: str, dtype: torch.dtype) -> None:
    x, y, queries = inputs(dtype)
    expected = torch.autograd.grad(sites(x, y, queries, backend), (x, y, queries))
    found = torch.autograd.grad(sites(hold(x), hold(y), queries, backend), (x, y, queries))
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@BACKENDS
def test_one_held_source_twice_in_a_read_beside_one_that_is_not(backend: str) -> None:
    x, y, queries = inputs(torch.float64)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        outputs = depth_attention([x, y, x], queries, heads=2, key_norm="full", backend=backend)
        return torch.stack([output * (m + 1) for m, output in enumerate(outputs)]).square().sum()

    expected = torch.autograd.grad(loss(x, y), (x, y))
    for got, wanted in zip(torch.autograd.grad(loss(hold(x), y), (x, y)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-11)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_ordinary_operations_may_use_a_held_source_too(backend: str, dtype: torch.dtype) -> None:
    x, y, queries = inputs(dtype)

    def loss(x: Tensor) -> Tensor:
        return sites(x, y, queries, backend) + (x * 3).double().square().sum() + x.double().sum()

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, y, queries)]
    truth = sites(*exact, "reference") + (exact[0] * 3).square().sum() + exact[0].sum()
    (expected,) = torch.autograd.grad(truth, exact[0])
    (found,) = torch.autograd.grad(loss(hold(x)), x)
    bound = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound * expected.abs().max().item())
    (nothing_else,) = torch.autograd.grad((hold(x) * 3).sum(), x)
    assert nothing_else.eq(3).all()


@BACKENDS
def test_a_backward_that_ends_before_the_source_leaves_nothing_behind(backend: str) -> None:
    x, y, queries = inputs(torch.float64)
    expected = torch.autograd.grad(sites(x, y, queries, backend), (x, y, queries))
    held_x = hold(x)
    loss = sites(held_x, hold(y), queries, backend)
    (of_queries,) = torch.autograd.grad(loss, queries, retain_graph=True)  # the reads run, the held nodes do not
    torch.testing.assert_close(of_queries, expected[2], rtol=1e-12, atol=1e-12)
    (without_reads,) = torch.autograd.grad((3 * held_x).sum(), x)
    assert without_reads.eq(3).all()
    (of_y,) = torch.autograd.grad(loss, y, retain_graph=True)  # one of the two held nodes runs
    torch.testing.assert_close(of_y, expected[1], rtol=1e-12, atol=1e-12)
    for got, wanted in zip(torch.autograd.grad(loss, (x, y, queries)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@BACKENDS
def test_a_backward_that_fails_leaves_nothing_behind(backend: str) -> None:
    x, y, queries = inputs(torch.float64)
    inner = y * 1
    inner.register_hook(lambda gradient: pytest.fail("on purpose") if fail else gradient)
    loss, fail = sites(hold(x), inner, queries, backend), True
    with pytest.raises(pytest.fail.Exception, match="on purpose"):
        torch.autograd.grad(loss, (x, y), retain_graph=True)
    fail = False
    expected = torch.autograd.grad(sites(x, y, queries, backend), (x, y))
    for got, wanted in zip(torch.autograd.grad(loss, (x, y)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@BACKENDS
def test_the_held_tensor_has_a_gradient_of_its_own(backend: str) -> None:
    """For `autograd.grad`, hooks and `retain_grad`."""
    x, y, queries = inputs(torch.float64)
    (expected,) = torch.autograd.grad(sites(x, y, queries, backend) + x.square().sum(), x)
    held_x, seen = hold(x), list[Tensor]()
    loss = sites(held_x, y, queries, backend) + held_x.square().sum()
    found = [*torch.autograd.grad(loss, held_x, retain_graph=True), *torch.autograd.grad(loss, (held_x, x), retain_graph=True)]
    held_x.register_hook(seen.append)
    held_x.retain_grad()
    loss.backward()
    assert held_x.grad is not None and x.grad is not None
    for one in (*found, *seen, held_x.grad, x.grad):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_two_backwards_give_twice_the_gradient(backend: str, dtype: torch.dtype) -> None:
    x, y, queries = inputs(dtype)
    loss = sites(hold(x), hold(y), queries, backend)
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)


@BACKENDS
def test_checkpointing_around_reads_and_around_hold(backend: str) -> None:
    x, y, queries = inputs(torch.bfloat16)
    expected = torch.autograd.grad(sites(hold(x), hold(y), queries, backend), (x, y, queries))
    around_each = sites(hold(x), hold(y), queries, backend, between=lambda read, *rows: checkpoint(read, *rows, use_reentrant=False))
    around_all = checkpoint(lambda *rows: sites(hold(rows[0]), hold(rows[1]), rows[2], backend), x, y, queries, use_reentrant=False)
    for loss in (around_each, around_all):
        for got, wanted in zip(torch.autograd.grad(loss, (x, y, queries)), expected, strict=True):
            assert torch.equal(got, wanted)


def test_double_backward_through_the_definition() -> None:
    x, y, queries = (tensor[:2].detach().requires_grad_() for tensor in inputs(torch.float64))

    def second(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(sites(x, y, queries, "reference").square(), (x, y), create_graph=True)
        return torch.autograd.grad(torch.stack(first).square().sum(), (x, y, queries))

    expected, (held_x, held_y) = second(x, y), (hold(x), hold(y))
    first = torch.autograd.grad(sites(held_x, held_y, queries, "reference").square(), (x, y), create_graph=True)
    for got, wanted in zip(torch.autograd.grad(torch.stack(first).square().sum(), (x, y, queries)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_double_backward_through_the_kernel_is_refused_for_held_sources_too(requires_native: None) -> None:
    x, y, queries = inputs(torch.float64)
    loss = sites(hold(x), y, queries, "native") + x.square().sum()  # the square alone would have a second derivative
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (gradient,) = torch.autograd.grad(loss.square(), x, create_graph=True)
        gradient.sum().backward()


class Allocations(TorchDispatchMode):
    """The shapes and dtypes of new memory of at least `least` bytes."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.made = least, list[tuple[torch.Size, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, new = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in ((args, kwargs), found))
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        fresh = [tensor for tensor in new if tensor.untyped_storage().data_ptr() not in known]
        self.made += [(tensor.shape, tensor.dtype) for tensor in fresh if tensor.untyped_storage().nbytes() >= self.least]
        return found


def test_one_buffer_a_held_source_however_many_reads(requires_native: None) -> None:
    x, y, queries = inputs(torch.bfloat16)

    def made(x: Tensor, y: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """By the backward of all the sites."""
        outputs = [depth_attention([x, y], query, backend="native") for query in queries]
        upstream = [torch.ones_like(output) for output in outputs]
        with Allocations(x.nbytes) as allocations:
            torch.autograd.grad(outputs, (x, y), upstream)
        return allocations.made

    assert sorted(made(hold(x), hold(y)), key=str) == [(x.shape, torch.bfloat16)] * 2 + [(x.shape, torch.float32)] * 2
    assert made(x, y).count((x.shape, torch.bfloat16)) >= 2 * SITES


@BACKENDS
def test_what_needs_no_gradient_is_not_held(backend: str) -> None:
    x, y, queries = inputs(torch.float64)
    constant = y.detach()
    assert hold(constant) is constant
    with torch.no_grad():
        assert hold(x) is x
    held_x = hold(x)
    assert torch.equal(held_x, x) and held_x.data_ptr() == x.data_ptr()
    (found,) = torch.autograd.grad(sites(held_x, constant, queries, backend), x)
    (expected,) = torch.autograd.grad(sites(x, constant, queries, backend), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
