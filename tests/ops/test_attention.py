"""What the operator promises beside its definition: dtypes, layouts, extremes, autograd's features, and compilation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from depthroute.ops import DepthRead, depth_attention, native
from depthroute.ops.reference import reference

NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.unavailable() is not None, reason="no C compiler"))
BACKENDS = pytest.mark.parametrize("backend", ["reference", NATIVE])


def sources_and_query(
    number: int = 3, *, lead: tuple[int, ...] = (2, 3), width: int = 8, rank: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(*lead, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(number)]
    query = torch.randn(rank or width, generator=generator, dtype=torch.float64)
    return rows, query.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()


def read(sources: list[Tensor], query: Tensor, backend: str) -> Tensor:
    found = depth_attention(sources, query, backend=backend)
    assert isinstance(found, Tensor)
    return found


@BACKENDS
def test_one_source_comes_back_exactly_and_its_query_feels_nothing(backend: str) -> None:
    sources, query = sources_and_query(1, dtype=torch.float32)
    output = read(sources, query, backend)
    assert torch.equal(output, sources[0])
    upstream = torch.randn_like(output)
    of_source, of_query = torch.autograd.grad(output, (sources[0], query), upstream)
    assert torch.equal(of_source, upstream)
    assert torch.count_nonzero(of_query) == 0


@BACKENDS
def test_a_tensor_passed_twice_gets_both_gradients(backend: str) -> None:
    (x, y), query = sources_and_query(2)
    doubled = [x, y, x]
    apart = [tensor.detach().clone().requires_grad_() for tensor in doubled]
    upstream = torch.randn_like(x)
    of_x, of_y, of_query = torch.autograd.grad(read(doubled, query, backend), (x, y, query), upstream)
    first, second, third, expected_query = torch.autograd.grad(read(apart, query, backend), (*apart, query), upstream)
    torch.testing.assert_close(of_x, first + third)
    torch.testing.assert_close(of_y, second)
    torch.testing.assert_close(of_query, expected_query)


@BACKENDS
def test_strided_sources_and_gradients(backend: str) -> None:
    sources, query = sources_and_query(3, lead=(4, 5))
    strided = [
        sources[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        sources[1].detach().repeat_interleave(2, -1)[..., ::2].requires_grad_(),
        sources[2].detach()[:, :1].expand(4, 5, 8).requires_grad_(),
    ]
    plain = [tensor.detach().contiguous().requires_grad_() for tensor in strided]
    assert not any(tensor.is_contiguous() for tensor in strided)
    upstream = torch.randn(8, 5, 4, dtype=torch.float64).permute(2, 1, 0)
    found, expected = read(strided, query, backend), read(plain, query, backend)
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(found, (*strided, query), upstream)
    for got, wanted in zip(gradients, torch.autograd.grad(expected, (*plain, query), upstream), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtypes", "promoted"),
    [
        ((torch.float32, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.bfloat16, torch.float64, torch.float32), torch.float64),
    ],
)
def test_mixed_dtypes_promote_and_each_source_keeps_its_own_gradient_dtype(
    dtypes: tuple[torch.dtype, ...], promoted: torch.dtype
) -> None:
    sources, query = sources_and_query(len(dtypes))
    mixed = [source.detach().to(dtype).requires_grad_() for source, dtype in zip(sources, dtypes, strict=True)]
    wide = [source.detach().double().requires_grad_() for source in mixed]
    found = depth_attention(mixed, query)
    assert isinstance(found, Tensor) and found.dtype == promoted
    expected = read(wide, query, "reference")
    tolerance = 1e-12 if promoted == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    got, wanted = torch.autograd.grad(found.sum(), mixed), torch.autograd.grad(expected.sum(), wide)
    for gradient, exact, dtype in zip(got, wanted, dtypes, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), exact, rtol=2e-2, atol=2e-2)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("height", [1e4, -1e4])
def test_huge_scores_are_as_good_as_small_ones(backend: str, dtype: torch.dtype, height: float) -> None:
    sources, query = sources_and_query(3, dtype=dtype)
    bias = torch.tensor([height, height - 1e4, height], requires_grad=True)
    output = depth_attention(sources, query, bias=bias, backend=backend)
    assert isinstance(output, Tensor)
    exact = read([sources[0].double(), sources[2].double()], query.double(), "reference")
    torch.testing.assert_close(output.double(), exact, rtol=1e-2, atol=1e-2)  # at 1e4 a float32 score has three decimals
    for gradient in torch.autograd.grad(output.sum(), (*sources, query, bias)):
        assert gradient.isfinite().all()
    far = depth_attention(sources, query * 1e4, backend=backend)
    assert isinstance(far, Tensor) and far.isfinite().all()
    with torch.no_grad():
        found = depth_attention(sources, query, bias=bias, return_weights=True, return_lse=True, backend=backend)
    assert found.weights is not None and found.lse is not None
    assert found.weights[1].eq(0).all() and found.lse.isfinite().all()


@BACKENDS
def test_a_bias_of_minus_infinity_leaves_a_source_out(backend: str) -> None:
    sources, query = sources_and_query(3)
    bias = torch.tensor([0.0, float("-inf"), 0.0], dtype=torch.float64)
    output = depth_attention(sources, query, bias=bias, backend=backend)
    assert isinstance(output, Tensor)
    torch.testing.assert_close(output, read([sources[0], sources[2]], query, backend))
    left_out, of_query = torch.autograd.grad(output.sum(), (sources[1], query))
    assert torch.count_nonzero(left_out) == 0 and of_query.isfinite().all()


@BACKENDS
def test_a_zero_source_and_a_zero_query_are_no_special_case(backend: str) -> None:
    sources, query = sources_and_query(2)
    zeros = torch.zeros_like(sources[0], requires_grad=True)
    output = read([sources[0], zeros], query.detach().zero_().requires_grad_(), backend)
    torch.testing.assert_close(output, sources[0] / 2)
    of_zeros = torch.autograd.grad(output.sum(), zeros)[0]
    torch.testing.assert_close(of_zeros, torch.full_like(zeros, 0.5))


@BACKENDS
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_tokens(backend: str, lead: tuple[int, ...]) -> None:
    sources, query = sources_and_query(2, lead=lead)
    output = read(sources, query, backend)
    assert output.shape == (*lead, 8)
    *of_sources, of_query = torch.autograd.grad(output.sum(), (*sources, query))
    assert [gradient.shape for gradient in of_sources] == [(*lead, 8)] * 2
    assert torch.equal(of_query, torch.zeros_like(query))


@BACKENDS
def test_many_queries_are_the_single_reads_and_an_unused_one_costs_nothing(backend: str) -> None:
    sources, _ = sources_and_query(3)
    queries = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    outputs = depth_attention(sources, queries, backend=backend)
    assert isinstance(outputs, tuple) and not isinstance(outputs, DepthRead) and len(outputs) == 3
    for output, query in zip(outputs, queries, strict=True):
        torch.testing.assert_close(output, read(sources, query, backend), rtol=1e-14, atol=1e-14)
    of_queries = torch.autograd.grad(outputs[1].sum(), queries)[0]
    assert of_queries[1].count_nonzero() == 8 and of_queries[[0, 2]].count_nonzero() == 0


def test_what_comes_back_follows_what_is_asked_for() -> None:
    sources, query = sources_and_query(3)
    queries = torch.stack((query, query))
    weights = depth_attention(sources, query, return_weights=True)
    assert isinstance(weights.output, Tensor) and weights.weights is not None and weights.weights.shape == (3, 2, 3)
    assert weights.lse is None
    lse = depth_attention(sources, queries, return_lse=True)
    assert isinstance(lse.output, tuple) and lse.weights is None and lse.lse is not None and lse.lse.shape == (2, 2, 3)


@BACKENDS
def test_numerical_gradients(backend: str) -> None:
    sources, query = sources_and_query(3, lead=(2,), width=5, rank=3)
    gain, bias = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.randn(3, dtype=torch.float64, requires_grad=True)

    def function(*tensors: Tensor) -> Tensor:
        found = depth_attention(tensors[:3], tensors[3], key_norm="full", key_gain=tensors[4], bias=tensors[5], backend=backend)
        assert isinstance(found, Tensor)
        return found

    assert gradcheck(function, (*sources, query, gain, bias))
    if backend == "reference":
        assert gradgradcheck(function, (*sources, query, gain, bias))


def test_double_backward_through_the_kernel_is_refused(requires_native: None) -> None:
    sources, query = sources_and_query(2)
    (gradient,) = torch.autograd.grad(read(sources, query, "native").square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@BACKENDS
def test_saved_tensor_hooks_and_checkpointing_change_nothing(backend: str) -> None:
    sources, query = sources_and_query(3, dtype=torch.float32)
    upstream = torch.randn_like(sources[0])
    expected = torch.autograd.grad(read(sources, query, backend), (*sources, query), upstream)
    packed = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor.clone(), lambda tensor: tensor):
        hooked = read(sources, query, backend)
    assert packed
    again = checkpoint(lambda *rows: read(list(rows), query, backend), *sources, use_reentrant=False)
    for output in (hooked, again):
        for got, wanted in zip(torch.autograd.grad(output, (*sources, query), upstream), expected, strict=True):
            assert torch.equal(got, wanted)


def test_the_kernel_saves_each_source_once_however_many_reads(requires_native: None) -> None:
    """Stacked sources would make memory quadratic in the number of blocks."""
    sources, query = sources_and_query(6, lead=(64,), width=64, dtype=torch.float32)
    row_bytes = sources[0].nbytes
    kept: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda tensor: kept.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor):
        outputs = [read(sources[:number], query, "native") for number in range(1, 7)]
    assert len(outputs) == 6
    rows = [tensor for tensor in kept.values() if tensor.untyped_storage().nbytes() >= row_bytes]
    assert len(rows) == 6


@BACKENDS
def test_autocast_leaves_scores_and_weights_in_float32(backend: str) -> None:
    sources, query = sources_and_query(3, dtype=torch.float32)
    outside = depth_attention([s.detach() for s in sources], query.detach(), return_weights=True, return_lse=True, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        inside = depth_attention(sources, query, return_weights=True, return_lse=True, backend=backend)
    for name in ("output", "weights", "lse"):
        assert torch.equal(getattr(inside, name), getattr(outside, name)), name


def test_shapes_on_the_meta_device() -> None:
    sources, query = sources_and_query(2)
    found = depth_attention([source.to("meta") for source in sources], query.to("meta"))
    assert isinstance(found, Tensor) and found.shape == (2, 3, 8) and found.device.type == "meta"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_as_one_graph(compiler: str) -> None:
    sources, query = sources_and_query(3, dtype=torch.float32)

    def function(rows: list[Tensor], query: Tensor) -> Tensor:
        rows = [torch.tanh(row) for row in rows]
        first, second = depth_attention(rows, torch.stack((query, -query)))
        return (first * second).sum()

    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    expected, found = function(sources, query), compiled(sources, query)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, (*sources, query))
    for got, gradient in zip(torch.autograd.grad(found, (*sources, query)), wanted, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-5)


def test_the_definition_takes_any_order_of_leading_dimensions() -> None:
    sources, query = sources_and_query(2, lead=(2, 3, 4))
    outputs, weights, lse = reference(sources, None, query[None], None, False, 1e-6)
    assert outputs[0].shape == (2, 3, 4, 8) and weights.shape == (2, 3, 4, 1, 2) and lse.shape == (2, 3, 4, 1)
