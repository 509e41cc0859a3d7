"""What the operator promises beside its definition: exact special cases, extremes, autograd, and what it keeps for a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from literal import BACKENDS
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from depthroute.ops import DepthRead, depth_attention, hold
from depthroute.ops.form import Form, Operands
from depthroute.ops.reference import reference


def sources_and_query(
    number: int = 3, *, lead: tuple[int, ...] = (2, 3), width: int = 8, rank: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(*lead, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(number)]
    query = torch.randn(rank or width, generator=generator, dtype=torch.float64)
    return rows, query.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()


def read(sources: list[Tensor], query: Tensor, backend: str, **options: Any) -> Tensor:
    found = depth_attention(sources, query, backend=backend, **options)
    assert isinstance(found, Tensor)
    return found


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"key_norm": "none"}, {"key_norm": "full", "rank": 4}], ids=str)
def test_one_source_comes_back_exactly_and_its_query_feels_nothing(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    options = dict(options)
    sources, query = sources_and_query(1, dtype=dtype, rank=options.pop("rank", None))
    output = read(sources, query, backend, **options)
    assert torch.equal(output, sources[0])
    upstream = torch.randn_like(output)
    of_source, of_query = torch.autograd.grad(output, (sources[0], query), upstream)
    assert torch.equal(of_source, upstream)
    assert torch.count_nonzero(of_query) == 0


@BACKENDS
def test_one_channel(backend: str) -> None:
    """The key of a single channel is its sign."""
    sources, query = sources_and_query(3, width=1)
    signs = torch.stack([source / (source.square() + 1e-6).sqrt() for source in sources])
    expected = ((signs * query).softmax(0) * torch.stack(sources)).sum(0)
    found = read(sources, query, backend)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    wanted = torch.autograd.grad(expected.sum(), (*sources, query))
    for got, gradient in zip(torch.autograd.grad(found.sum(), (*sources, query)), wanted, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-11, atol=1e-12)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("height", [1e4, -1e4])
def test_huge_scores_are_as_good_as_small_ones(backend: str, dtype: torch.dtype, height: float) -> None:
    sources, query = sources_and_query(3, dtype=dtype)
    bias = torch.tensor([height, height - 1e4, height], requires_grad=True)
    output = read(sources, query, backend, bias=bias)
    exact = read([sources[0].double(), sources[2].double()], query.double(), "reference")
    torch.testing.assert_close(output.double(), exact, rtol=1e-2, atol=1e-2)  # at 1e4 a float32 score has three decimals
    for gradient in torch.autograd.grad(output.sum(), (*sources, query, bias)):
        assert gradient.isfinite().all()
    assert read(sources, query * 1e4, backend).isfinite().all()
    assert read(sources, query * 1e30, backend, key_norm="none", output_gain=torch.ones(8)).isfinite().all()
    found = depth_attention(sources, query, bias=bias, return_weights=True, return_statistics=True, backend=backend)
    assert found.weights[1].eq(0).all() and found.lse.isfinite().all() and found.sum.ge(1).all() and found.sum.le(3).all()


@BACKENDS
def test_a_bias_of_minus_infinity_leaves_a_source_out(backend: str) -> None:
    sources, query = sources_and_query(3)
    bias = torch.tensor([0.0, float("-inf"), 0.0], dtype=torch.float64)
    output = read(sources, query, backend, bias=bias)
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
def test_many_queries_are_the_single_reads_and_an_unused_one_costs_nothing(backend: str) -> None:
    sources, _ = sources_and_query(3)
    queries = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    outputs = depth_attention(sources, queries, backend=backend)
    assert isinstance(outputs, tuple) and not isinstance(outputs, DepthRead) and len(outputs) == 3
    for output, query in zip(outputs, queries, strict=True):
        torch.testing.assert_close(output, read(sources, query, backend), rtol=1e-14, atol=1e-14)
    of_queries = torch.autograd.grad(outputs[1].sum(), queries)[0]
    assert of_queries[1].count_nonzero() == 8 and of_queries[[0, 2]].count_nonzero() == 0


@BACKENDS
@pytest.mark.parametrize("of", ["output", "weights", "sum"])
def test_a_gradient_that_arrives_at_one_result_alone(backend: str, of: str) -> None:
    sources, _ = sources_and_query(3)
    queries = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found: dict[str, tuple[Tensor, ...]] = {}
    for name in ("reference", backend):
        reads = depth_attention(sources, queries, heads=2, return_weights=True, return_statistics=True, backend=name)
        result = getattr(reads[1], of)
        upstream = torch.randn(result.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        if of == "sum":  # through max + log(sum), as it must be used
            result = reads[1].lse
        found[name] = torch.autograd.grad(result, (*sources, queries), upstream)
    for got, wanted in zip(found[backend], found["reference"], strict=True):
        assert wanted.count_nonzero() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


@BACKENDS
def test_gradients_of_some_inputs_are_those_of_all(backend: str) -> None:
    sources, query = sources_and_query(3)
    gain = torch.ones(8, dtype=torch.float64, requires_grad=True)
    leaves = (*sources, query, gain)
    upstream = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = torch.autograd.grad(read(sources, query, backend, output_gain=gain), leaves, upstream)
    for index, wanted in enumerate(whole):
        alone = [leaf.detach().requires_grad_(index == i) for i, leaf in enumerate(leaves)]
        output = read(alone[:3], alone[3], backend, output_gain=alone[4])
        assert torch.equal(torch.autograd.grad(output, alone[index], upstream)[0], wanted)
    with torch.inference_mode():
        assert not read(sources, query, backend, output_gain=gain).requires_grad


@BACKENDS
@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
def test_numerical_gradients(backend: str, weighting: str) -> None:
    sources, _ = sources_and_query(5, lead=(2,), width=6)
    generator = torch.Generator().manual_seed(1)
    query, gain, bias, output_gain = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in ((2, 4), (4,), (2, 3), (6,))
    )
    softmax = weighting == "softmax"

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        rows, (query, gain, bias, output_gain) = tensors[:5], tensors[5:]
        options: Any = {"heads": 2, "key_norm": "full", "key_gain": gain, "weighting": weighting, "backend": backend}
        prior = depth_attention(rows[3:], query, return_weights=True, return_statistics=softmax, **options)
        found = depth_attention(
            rows[:3], query, bias=bias, prior=prior, output_gain=output_gain, return_weights=True, return_statistics=softmax, **options
        )
        return tuple(part for one in found for part in (one.output, one.weights, *([one.lse] if softmax else [])))

    assert gradcheck(function, (*sources, query, gain, bias, output_gain))
    if backend == "reference":
        assert gradgradcheck(function, (*sources, query, gain, bias, output_gain))


def test_double_backward_through_the_kernel_is_refused(requires_native: None) -> None:
    sources, query = sources_and_query(2)
    (gradient,) = torch.autograd.grad(read(sources, query, "native").square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@BACKENDS
@pytest.mark.parametrize("keep", [lambda x: x, hold], ids=["plain", "held"])
def test_a_source_changed_in_place_before_the_backward_is_noticed(backend: str, keep: Callable[[Tensor], Tensor]) -> None:
    sources, query = sources_and_query(2)
    output = read([keep(source) for source in sources], query, backend)
    with torch.no_grad():
        sources[1].add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?in-?place"):
        output.sum().backward()


@BACKENDS
def test_saved_tensor_hooks_and_checkpointing_change_nothing(backend: str) -> None:
    sources, query = sources_and_query(3, dtype=torch.float32)
    gain = torch.ones(8, requires_grad=True)
    leaves, upstream = (*sources, query, gain), torch.randn_like(sources[0])

    def function(*rows: Tensor) -> Tensor:
        prior = depth_attention(rows[:1], query, return_statistics=True, backend=backend)
        return read(list(rows[1:]), query, backend, prior=prior, output_gain=gain)

    expected = torch.autograd.grad(function(*sources), leaves, upstream)
    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor.clone(), lambda tensor: tensor):
        hooked = function(*sources)
    assert packed
    again = checkpoint(function, *sources, use_reentrant=False)
    for output in (hooked, again):
        for got, wanted in zip(torch.autograd.grad(output, leaves, upstream), expected, strict=True):
            assert torch.equal(got, wanted)


def kept_by(function: Callable[[], Any]) -> tuple[dict[int, int], Any]:
    """Bytes of each storage that the graph of `function` keeps, by address; and its result, which keeps it alive."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()
    return kept, result


def test_the_kernel_saves_each_source_once_however_many_reads(requires_native: None) -> None:
    """Stacked sources would make memory quadratic in the number of blocks."""
    sources, query = sources_and_query(6, lead=(64,), width=64, dtype=torch.float32)
    held = [hold(source) for source in sources]
    kept, outputs = kept_by(lambda: [read(held[:number], query, "native") for number in range(1, 7)])
    assert len(outputs) == 6
    assert {address for address, size in kept.items() if size >= sources[0].nbytes} == {source.data_ptr() for source in sources}


@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_kernel_keeps_only_scalars_beside_its_rows(requires_native: None, dtype: torch.dtype, weighting: Any) -> None:
    """No output, normalised or not, no copy of a source or a prior, and no score of a channel."""
    tokens, width, rank, heads, count, number = 64, 96, 32, 2, 2, 3
    rows, _ = sources_and_query(number + count, lead=(tokens,), width=width, dtype=dtype)
    sources, keys = rows[:number], [torch.randn(tokens, rank, dtype=torch.float32).to(dtype) for _ in range(number)]
    parameters = [torch.ones(shape, requires_grad=True) for shape in ((count, rank), (rank,), (count, number), (width,))]
    query, gain, bias, output_gain = parameters
    ones = torch.ones(tokens, heads)
    prior = [DepthRead(row, None, ones, ones) for row in rows[number:]]

    def function() -> Any:
        return depth_attention(
            sources, query, keys=keys, heads=heads, key_gain=gain, bias=bias, weighting=weighting, output_gain=output_gain, prior=prior,
            return_weights=True, return_statistics=weighting == "softmax", backend="native",
        )  # fmt: skip

    kept, found = kept_by(function)
    addresses = {tensor.data_ptr() for tensor in (*rows, *keys)}
    assert addresses <= kept.keys() and len(found) == count
    beside = sum(size for address, size in kept.items() if address not in addresses)
    scalars = tokens * (count * heads * (2 * number + 1 + 2) + number + count) * 4
    assert beside <= scalars + ones.nbytes + 4 * sum(parameter.nbytes for parameter in parameters) < width * tokens * dtype.itemsize * 2


@BACKENDS
def test_autocast_leaves_scores_and_weights_in_float32(backend: str) -> None:
    sources, query = sources_and_query(3, dtype=torch.float32)

    def function() -> Any:
        options: Any = {"heads": 2, "output_gain": torch.ones(8), "return_weights": True, "return_statistics": True, "backend": backend}
        return depth_attention(sources, query, prior=depth_attention(sources[:1], query, **options | {"output_gain": None}), **options)

    with torch.no_grad():
        outside = function()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = function()
    for name, part in outside._asdict().items():
        assert torch.equal(getattr(inside, name), part), name


def test_the_definition_takes_any_order_of_leading_dimensions() -> None:
    sources, query = sources_and_query(2, lead=(2, 3, 4))
    found = reference(Operands(sources, (), query[None], None, None, ()), Form(2, "slice", "softmax", 1e-6, 1e-6))
    assert found.outputs[0].shape == (2, 3, 4, 8) and found.weights.shape == (2, 3, 4, 1, 2, 2)
    assert found.max[0].shape == found.sum[0].shape == (2, 3, 4, 2)
