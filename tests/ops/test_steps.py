"""The steps of decoding programs against PyTorch in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from depthroute.ops import PreparedRead, depth_attention, kernel_unavailable, linear, linears, steps

pytestmark = pytest.mark.skipif(kernel_unavailable() is not None, reason="there is no C compiler")

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 3e-7, torch.bfloat16: 4e-3}  # of a result, and some for the order of sums


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, times: float = 4) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < times * ROUNDING[found.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 31, 77, 576])
@pytest.mark.parametrize("rows", range(1, 9))
@torch.no_grad()
def test_products(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x = normal(2, rows, inputs, dtype=dtype)[0]
    weights = [normal(outputs, inputs, seed=outputs, dtype=dtype) for outputs in (5, 64, 33, 1)]
    biases = [normal(5, dtype=dtype), None, normal(33, seed=2, dtype=dtype), None]
    for found, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
        close(found, F.linear(x.double(), weight.double(), None if bias is None else bias.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    x, weight = normal(8, 200, dtype=dtype), normal(50, 200, seed=1, dtype=dtype)
    whole = linear(x, weight)
    for rows in range(1, 9):
        assert torch.equal(linear(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_products_that_add_and_gate(dtype: torch.dtype) -> None:
    x, gate, up = normal(3, 40, dtype=dtype), normal(21, 40, seed=1, dtype=dtype), normal(21, 40, seed=2, dtype=dtype)
    stream = normal(3, 50, seed=3, dtype=dtype)
    expected, view = stream.double().clone(), stream[:, 4:25]
    expected[:, 4:25] += F.linear(x.double(), gate.double())
    steps.product(x, [gate], [None], [view], "add")()
    close(stream, expected)
    gated = x.new_empty(3, 21)
    steps.product(x, [gate, up], [None, None], [gated], "swiglu")()
    close(gated, F.silu(F.linear(x.double(), gate.double())) * F.linear(x.double(), up.double()))


def test_gradients_and_watchers_get_the_usual_product() -> None:
    x, weight = normal(1, 8).requires_grad_(), torch.nn.Parameter(normal(4, 8, seed=1))
    linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    with torch.no_grad():
        found = torch.compile(lambda x: linear(x, weight), fullgraph=True, backend="eager")(x)
        assert torch.equal(found, F.linear(x, weight))
        assert linear(normal(9, 8), weight).shape == (9, 4) and linear(normal(0, 8), weight).shape == (0, 4)


def test_shapes_that_do_not_fit_are_refused_as_ever() -> None:
    with torch.no_grad():
        for x, weight, bias in ((8, (3, 4), None), (8, (3, 8), 2)):
            with pytest.raises(RuntimeError):
                linear(normal(1, x), normal(*weight), None if bias is None else normal(bias))


def test_tracers_and_forward_derivatives_see_the_product() -> None:
    weight = normal(4, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of both, by torch itself
        traced = torch.jit.trace(lambda x: linear(x, weight), normal(1, 8), check_trace=False)
        assert torch.equal(traced(normal(1, 8, seed=3)), F.linear(normal(1, 8, seed=3), weight))
        with forward_ad.dual_level():
            found = linear(forward_ad.make_dual(normal(1, 8), normal(1, 8, seed=5)), weight)
            tangent = forward_ad.unpack_dual(found).tangent
        assert tangent is not None and torch.allclose(tangent, F.linear(normal(1, 8, seed=5), weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width", "normed", "padded"),
    [(1, 4, 4, 16, False, False), (3, 6, 2, 10, True, True), (2, 4, 1, 64, True, False), (8, 2, 2, 6, False, True)],
)
@torch.no_grad()
def test_attention_of_one_token(
    rows: int, heads: int, groups: int, width: int, normed: bool, padded: bool, dtype: torch.dtype
) -> None:
    capacity, start, own = 50, 3, 37
    keys, values = (normal(rows, groups, capacity, width, seed=seed, dtype=dtype) for seed in (1, 2))
    sizes = [heads * width, groups * width, groups * width]
    query, key, value = normal(rows, sum(sizes), seed=3, dtype=dtype).split(sizes, dim=1)
    gains = ((normal(width, seed=4) / 4 + 1).to(dtype), (normal(width, seed=5) / 4 + 1).to(dtype)) if normed else None
    angle = 5 * torch.rand(rows, width // 2, generator=torch.Generator().manual_seed(6))
    first = torch.tensor([0, 5, 30, 2, 37, 9, 36, 1][:rows]) if padded else None
    out, before = query.new_empty(rows, heads * width), (keys.double(), values.double())
    steps.attention(
        query, key, value, gains=gains, eps=1e-6, cos=angle.cos(), sin=angle.sin(), keys=keys, values=values,
        slots=torch.tensor([start, own]), first=first, scores=torch.empty(rows * heads, capacity), out=out,
    )()  # fmt: skip

    def turned(x: Tensor, gain: Tensor | None) -> Tensor:
        x = x.double().view(rows, -1, 1, width)
        if gain is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain.double()
        a, b = x.chunk(2, -1)
        cos, sin = (one.double().view(rows, 1, 1, -1) for one in (angle.cos(), angle.sin()))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    query, new = turned(query, gains[0] if gains else None), turned(key, gains[1] if gains else None)
    close(keys[:, :, own], new[:, :, 0])
    assert torch.equal(values[:, :, own].flatten(1), value)
    all_keys, all_values = before
    all_keys[:, :, own], all_values[:, :, own] = new[:, :, 0], value.double().view(rows, groups, width)
    slot = torch.arange(capacity)
    seen = ((slot <= own) & (slot >= start)).expand(rows, capacity)
    if first is not None:
        seen = seen & (slot >= first[:, None])
    expected = F.scaled_dot_product_attention(query, all_keys, all_values, seen[:, None, None, :], enable_gqa=True)
    close(out, expected[:, :, 0].flatten(1), times=8)


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@torch.no_grad()
def test_attention_with_scores_far_apart(size: float) -> None:
    """The exponential of the kernel is its own: small, large and hopeless scores."""
    keys, values, query = size * normal(1, 1, 40, 16), normal(1, 1, 40, 16, seed=1), normal(1, 16, seed=2)
    out, still = query.clone(), torch.ones(1, 8)
    steps.attention(
        query, size * normal(1, 16, seed=3), normal(1, 16, seed=4), gains=None, eps=1e-6, cos=still, sin=torch.zeros(1, 8), keys=keys,
        values=values, slots=torch.tensor([0, 39]), first=None, scores=torch.empty(1, 40), out=out,
    )()  # fmt: skip
    expected = F.scaled_dot_product_attention(query.double()[None, None], keys.double(), values.double())
    torch.testing.assert_close(out.double(), expected[0, 0], rtol=1e-5, atol=1e-6 * size**0.5)


@torch.no_grad()
def test_look_up() -> None:
    table, ids, out = normal(9, 5, dtype=torch.bfloat16), torch.tensor([8, 0, 3]), torch.empty(3, 5, dtype=torch.bfloat16)
    program = steps.Program([steps.look_up(table, ids, out)])
    program()
    assert torch.equal(out, table[ids])
    ids.copy_(torch.tensor([1, 1, 7]))
    program()
    assert torch.equal(out, table[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"heads": 2}, {"weighting": "sigmoid"}, {"key_norm": "none"}, {"key_norm": "full"}, {"biased": True}, {"gained": True}]
)
@torch.no_grad()
def test_a_prepared_read_follows_its_sources(options: dict[str, object], dtype: torch.dtype) -> None:
    options = dict(options)
    sources, queries = [normal(2, 3, 12, seed=seed, dtype=dtype) for seed in range(4)], normal(3, 8, seed=9).double()
    given: dict[str, object] = {}
    if options.pop("biased", False):
        given["bias"] = normal(3, 4, seed=10)
    if options.pop("gained", False):
        given["output_gain"] = normal(12, seed=11)
    read = PreparedRead(sources, queries.float(), **options, **given)  # type: ignore[arg-type]
    for change in (1.0, -0.5):
        sources[1].mul_(change)
        sources[3].add_(change)
        read()
        expected = depth_attention(sources, queries.float(), **options, **given)  # type: ignore[call-overload]
        for found, one in zip(read.reads, expected, strict=True):
            assert torch.equal(found.output, one)


@torch.no_grad()
def test_a_prepared_read_merges_what_another_read() -> None:
    sources, queries = [normal(5, 12, seed=seed) for seed in range(4)], normal(2, 12, seed=9)
    first = PreparedRead(sources[:3], queries)
    into = [torch.empty(5, 12), torch.empty(5, 12)]
    second = PreparedRead(sources[3:], queries, prior=first.reads, into=into)
    for _ in range(2):
        sources[0].add_(1)
        sources[3].mul_(2)
        first()
        second()
        for found, one in zip(into, depth_attention(sources, queries), strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)
