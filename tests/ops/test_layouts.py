"""Sources are read as they lie: a list or one stacked tensor, any strides, the same tensor twice, any dtypes, any sizes, nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal import BACKENDS, Case, cases
from torch import Tensor

from depthroute.ops import DepthRead, depth_attention, native


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def read(sources: Sequence[Tensor] | Tensor, query: Tensor, backend: str, **options: Any) -> Tensor:
    found = depth_attention(sources, query, backend=backend, **options)
    assert isinstance(found, Tensor)
    return found


@BACKENDS
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_a_stacked_tensor_is_its_list(backend: str, lead: tuple[int, ...]) -> None:
    stacked, keys, query = leaf(4, *lead, 10, seed=1), leaf(4, *lead, 6, seed=2), leaf(6, seed=3)
    found, expected = read(stacked, query, backend, keys=keys), read(list(stacked), query, backend, keys=list(keys))
    assert torch.equal(found, expected)
    upstream = leaf(*lead, 10, seed=4).detach()
    gradients = torch.autograd.grad(found, (stacked, keys, query), upstream)
    for got, wanted in zip(gradients, torch.autograd.grad(expected, (stacked, keys, query), upstream), strict=True):
        assert got.shape == wanted.shape and torch.equal(got, wanted)
    assert gradients[0].count_nonzero(-1).min() == 10


def flipped(x: Tensor) -> Tensor:
    """The same values with the leading dimensions in the other order in memory."""
    return x.movedim(-2, 0).contiguous().movedim(0, -2)


def spread(x: Tensor) -> Tensor:
    """The same values with a gap after every number."""
    return x.repeat_interleave(2, -1)[..., ::2]


def padded(x: Tensor) -> Tensor:
    """The same values as columns of wider rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype)
    wide[..., 2:-3] = x.detach()
    return wide[..., 2:-3]


def interleaved(x: Tensor) -> Tensor:
    """The same values as one source of a memory [..., S, D]."""
    return torch.stack((torch.full_like(x, float("nan")), x.detach()), -2)[..., 1, :]


LAYOUTS = [flipped, spread, padded, interleaved]


@BACKENDS
@given(data=st.data())
def test_any_strides_of_any_operand(backend: str, data: st.DataObject) -> None:
    """Sources, keys, prior and arriving gradients in layouts of their own; vectors with gaps."""
    case = data.draw(cases(torch.float64))

    def laid(x: Tensor) -> Tensor:
        layout = data.draw(st.sampled_from(LAYOUTS)) if x.ndim > 1 else spread if x.ndim == 1 else torch.clone
        return layout(x.detach()).requires_grad_(x.requires_grad)

    def maybe(x: Tensor | None) -> Tensor | None:
        return None if x is None else laid(x)

    strided = Case(
        [laid(source) for source in case.sources], case.keys and [laid(key) for key in case.keys], laid(case.query), maybe(case.gain),
        maybe(case.bias), maybe(case.output_gain), case.prior and [DepthRead(*map(maybe, one)) for one in case.prior], case.heads,
        case.key_norm, case.weighting, case.eps, case.output_eps, [laid(up) for up in case.upstream],
    )  # fmt: skip
    results = []
    for one in (case, strided):
        outputs = one.read(backend)
        gradients = torch.autograd.grad(outputs, list(one.named().values()), one.upstream)
        results.append([*outputs, *gradients])
    for got, wanted in zip(*results, strict=True):
        scale = 1e-13 * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=scale)


@BACKENDS
def test_rows_that_share_memory(backend: str) -> None:
    """One row for all tokens, and sources that are views of one tensor: the gradients add up where the memory is one."""
    row, memory, query = leaf(8, seed=1), leaf(4, 5, 3, 8, seed=2), leaf(8, seed=3)
    views = [row.expand(4, 5, 8), *memory.unbind(2), memory[:, :1, 1].expand(4, 5, 8)]
    found = read(views, query, backend)
    apart = [view.detach().contiguous().requires_grad_() for view in views]
    expected = read(apart, query, backend)
    assert torch.equal(found, expected)
    upstream = leaf(4, 5, 8, seed=4).detach()
    of_row, of_memory = torch.autograd.grad(found, (row, memory), upstream)
    parts = torch.autograd.grad(expected, apart, upstream)
    of_views = torch.stack(parts[1:4], 2)
    of_views[:, 0, 1] += parts[4].sum(1)
    torch.testing.assert_close(of_row, parts[0].sum((0, 1)))
    torch.testing.assert_close(of_memory, of_views)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_kernel_reads_rows_of_one_stride_where_they_are(
    requires_native: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    x, seen = leaf(4, 5, 8, dtype=dtype), list[int]()
    whole = native._addresses

    def addresses(tensors: Sequence[Tensor]) -> Any:
        seen.extend(tensor.data_ptr() for tensor in tensors)
        return whole(tensors)

    monkeypatch.setattr(native, "_addresses", addresses)

    def copied(*views: Tensor, **options: Any) -> list[bool]:
        seen.clear()
        output = read([view.requires_grad_() for view in views], leaf(8, dtype=torch.float32), "native", **options)
        forward = [view.data_ptr() not in seen for view in views]
        seen.clear()
        torch.autograd.grad(output.sum(), views)
        assert [view.data_ptr() not in seen for view in views] == forward
        return forward

    row = x.detach()[0, 0].clone().expand(4, 5, 8)
    plain = x.detach()
    transposed = plain.transpose(0, 1).contiguous().transpose(0, 1)
    assert copied(plain, padded(x), interleaved(x), row) == [False] * 4
    assert copied(plain, spread(plain), transposed) == [False, True, True]


@BACKENDS
def test_a_tensor_passed_twice_gets_both_gradients(backend: str) -> None:
    x, y, query = leaf(2, 3, 8, seed=1), leaf(2, 3, 8, seed=2), leaf(8, seed=3)
    doubled = [x, y, x]
    apart = [tensor.detach().clone().requires_grad_() for tensor in doubled]
    upstream = leaf(2, 3, 8, seed=4).detach()
    of_x, of_y, of_query = torch.autograd.grad(read(doubled, query, backend), (x, y, query), upstream)
    first, second, third, expected_query = torch.autograd.grad(read(apart, query, backend), (*apart, query), upstream)
    torch.testing.assert_close(of_x, first + third)
    torch.testing.assert_close(of_y, second)
    torch.testing.assert_close(of_query, expected_query)


@BACKENDS
def test_sources_may_be_their_own_keys_and_their_own_prior(backend: str) -> None:
    x, y, query = leaf(2, 3, 8, seed=1), leaf(2, 3, 8, seed=2), leaf(8, seed=3)
    ones = torch.ones(2, 3, dtype=torch.float64)

    def loss(rows: list[Tensor], keys: list[Tensor], prior: Tensor) -> Tensor:
        return read(rows, query, backend, keys=keys, prior=DepthRead(prior, None, ones, ones)).square().sum()

    copies = [tensor.detach().clone().requires_grad_() for tensor in (x, y, y, x, y)]
    of_x, of_y = torch.autograd.grad(loss([x, y], [y, x], y), (x, y))
    parts = torch.autograd.grad(loss(copies[:2], copies[2:4], copies[4]), copies)
    torch.testing.assert_close(of_x, parts[0] + parts[3])
    torch.testing.assert_close(of_y, parts[1] + parts[2] + parts[4])


@BACKENDS
@pytest.mark.parametrize(
    ("dtypes", "promoted"),
    [
        ((torch.float32, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.bfloat16, torch.float64, torch.float32), torch.float64),
    ],
)
def test_mixed_dtypes_promote_and_each_source_keeps_its_own_gradient_dtype(
    backend: str, dtypes: tuple[torch.dtype, ...], promoted: torch.dtype
) -> None:
    mixed = [leaf(2, 3, 8, dtype=dtype, seed=seed) for seed, dtype in enumerate(dtypes)]
    wide = [source.detach().double().requires_grad_() for source in mixed]
    query, upstream = leaf(8, seed=9), leaf(2, 3, 8, seed=10).detach()
    found, expected = read(mixed, query, backend), read(wide, query, "reference")
    assert found.dtype == promoted
    tolerance = 1e-12 if promoted == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(found, mixed, upstream.to(promoted))
    for gradient, exact, dtype in zip(got, torch.autograd.grad(expected, wide, upstream), dtypes, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), exact, rtol=2e-2, atol=2e-2)


@BACKENDS
@pytest.mark.parametrize("key_dtype", [torch.bfloat16, torch.float32])
def test_keys_promote_too(backend: str, key_dtype: torch.dtype) -> None:
    sources = [leaf(2, 3, 8, dtype=torch.bfloat16, seed=seed) for seed in range(2)]
    keys = [leaf(2, 3, 4, dtype=key_dtype, seed=seed + 5) for seed in range(2)]
    found = read(sources, leaf(4, dtype=torch.float32, seed=9), backend, keys=keys)
    assert found.dtype == key_dtype
    assert [one.dtype for one in torch.autograd.grad(found.sum(), (*sources, *keys))] == [torch.bfloat16] * 2 + [key_dtype] * 2


@BACKENDS
@pytest.mark.parametrize("parameter", [torch.float64, torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_parameters_of_any_dtype_take_part_in_the_statistics_dtype(backend: str, parameter: torch.dtype) -> None:
    sources = [leaf(2, 3, 8, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    leaves = [leaf(length, dtype=parameter, seed=seed) for seed, length in enumerate((8, 8, 3, 8), 5)]

    def call(query: Tensor, gain: Tensor, bias: Tensor, output_gain: Tensor) -> Tensor:
        return read(sources, query, backend, key_gain=gain, bias=bias, output_gain=output_gain)

    found = call(*leaves)
    assert found.dtype == torch.bfloat16 and torch.equal(found, call(*(one.float() for one in leaves)))
    assert [one.dtype for one in torch.autograd.grad(found.sum(), leaves)] == [parameter] * 4


@BACKENDS
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_tokens(backend: str, lead: tuple[int, ...]) -> None:
    sources, queries, gain = [leaf(*lead, 8) for _ in range(2)], leaf(2, 8), leaf(8)
    first = depth_attention(sources, queries, heads=2, return_statistics=True, backend=backend)
    reads = depth_attention(sources, queries, heads=2, prior=first, output_gain=gain, return_weights=True, backend=backend)
    for one in reads:
        assert isinstance(one, DepthRead) and one.weights is not None
        assert one.output.shape == (*lead, 8) and one.weights.shape == (2, 2, *lead)
    *of_sources, of_queries, of_gain = torch.autograd.grad(reads[1].output.sum(), (*sources, queries, gain))
    assert [gradient.shape for gradient in of_sources] == [(*lead, 8)] * 2
    assert torch.equal(of_queries, torch.zeros_like(queries)) and torch.equal(of_gain, torch.zeros_like(gain))


@BACKENDS
def test_shapes_of_what_comes_back(backend: str) -> None:
    sources, query = [leaf(2, 3, 8) for _ in range(5)], leaf(4)
    for heads, of_heads in ((1, ()), (2, (2,))):
        asked: Any = {"heads": heads, "return_weights": True, "return_statistics": True, "backend": backend}
        one, many = (depth_attention(sources, given, **asked) for given in (query, torch.stack((query, query))))
        assert isinstance(one, DepthRead) and isinstance(many, tuple) and len(many) == 2 and not isinstance(many, DepthRead)
        for found in (one, *many):
            assert found.output.shape == (2, 3, 8) and found.weights is not None and found.max is not None and found.sum is not None
            assert found.weights.shape == (*of_heads, 5, 2, 3)
            assert found.max.shape == found.sum.shape == found.lse.shape == (2, 3, *of_heads)
    only: Callable[..., Any] = depth_attention
    weights, statistics = only(sources, query, return_weights=True), only(sources, query, return_statistics=True)
    assert weights.max is None and weights.sum is None and weights.weights is not None
    assert statistics.weights is None and statistics.max is not None and statistics.sum is not None
    assert isinstance(only(sources, query), Tensor) and isinstance(only(sources, query[None]), tuple)


def test_shapes_on_the_meta_device() -> None:
    found = read([leaf(2, 3, 8).to("meta") for _ in range(2)], leaf(8).to("meta"), "auto")
    assert found.shape == (2, 3, 8) and found.device.type == "meta"
