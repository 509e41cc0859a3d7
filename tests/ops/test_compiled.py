"""The `compiled` backend: its passes agree with the literal loop in every form and length of list, and a few graphs serve everything.

The passes are tried as plain torch code, which is quick, and through Inductor for a few forms. Graphs are counted with a compiler that
does nothing; there, to compile a graph again is an error.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal import Case, assert_close, cases, truth
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import DepthRead, compiled, depth_attention, hold
from depthroute.ops.form import Form, Operands, Upstream, empty_gradients, empty_results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
CPU = torch.device("cpu")
INDUCTOR = pytest.mark.skipif(compiled.refusal(CPU, torch.float32) is not None, reason=str(compiled.refusal(CPU, torch.float32)))
LONGEST = pytest.mark.parametrize("longest", [8, 2], ids=["whole", "in parts"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])


class Counter:
    """A compiler that sorts out what graphs mutate, and then runs them as they are."""

    graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    counter = Counter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(compiled, "refusal", lambda device, dtype: None)
    compiled._compiled.cache_clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield counter
    compiled._compiled.cache_clear()


def run_as_written(patch: pytest.MonkeyPatch, longest: int) -> None:
    """The passes run as plain torch code, and lists of more than `longest` sources in parts."""
    patch.setattr(compiled, "_compiled", lambda graph, form, kind: graph)
    patch.setattr(compiled, "refusal", lambda device, dtype: None)
    patch.setattr(compiled, "LONGEST", longest)


def grade(case: Case, dtype: torch.dtype) -> None:
    """Outputs, weights, statistics, and every gradient of a loss of all of them."""
    generator, softmax = torch.Generator().manual_seed(0), case.weighting == "softmax"
    lead, count, number = case.sources[0].shape[:-1], len(case.upstream), len(case.sources)
    of_weights = torch.randn(count, case.heads, number, *lead, dtype=torch.float64, generator=generator)
    of_lse = torch.randn(count, case.heads, *lead, dtype=torch.float64, generator=generator) if softmax else None
    expected = truth(case, of_weights, of_lse)
    loss = torch.zeros((), dtype=torch.float64)
    for m, read in enumerate(case.read("compiled", return_weights=True, return_statistics=softmax)):
        assert isinstance(read, DepthRead) and read.weights is not None
        weights = read.weights.view(case.heads, number, *lead)
        assert_close(read.output, expected.outputs[m], dtype, case.score_size() * case.value_size() * expected.amplified, "output")
        assert_close(weights, expected.weights[m], dtype, case.score_size(), "weights")
        loss = loss + (read.output * case.upstream[m]).double().sum() + (weights * of_weights[m]).sum()
        if of_lse is not None:
            lse = read.lse.view(*lead, case.heads).movedim(-1, 0)
            assert_close(lse, expected.lse[m], dtype, case.score_size(), "log-sum-exp")
            loss = loss + (lse * of_lse[m]).sum()
    wanted = case.named()
    for (name, tensor), got in zip(wanted.items(), torch.autograd.grad(loss, list(wanted.values())), strict=True):
        assert got.dtype == tensor.dtype
        assert_close(got, expected.gradients[name], dtype, 10 * case.gradient_size() * expected.amplified, f"gradient of {name}")


@LONGEST
@DTYPES
@given(data=st.data())
def test_the_passes_in_every_form(longest: int, dtype: torch.dtype, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_as_written(patch, longest)
        grade(data.draw(cases(dtype)), dtype)


def rows(number: int, *lead: int, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(*lead, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(number)]


def query(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype).requires_grad_()


@LONGEST
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("kinds", ["nnnn", "eeee", "EEEE", "NNNN", "eEnN", "nnEe", "EEEr", "erEr"])
def test_gradients_are_written_or_added_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, longest: int, dtype: torch.dtype, kinds: str
) -> None:
    """n: in the rows' dtype; e: in the statistics dtype; a capital: added to what is there; r: added to what the first one has."""
    run_as_written(monkeypatch, longest)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    sources = [row.detach() for row in rows(4, 5, dtype=dtype)]
    operands = Operands(sources, [], query(2, 6, dtype=exact).detach(), None, None, [])
    form = Form(2, "slice", "softmax", 1e-6, 1e-6)
    outputs, saved = empty_results(operands, form)
    compiled.forward(operands, form, outputs, saved)
    upstream = Upstream(rows(2, 5, dtype=dtype), [], None)

    def gradients(into: list[Tensor], add: list[bool]) -> None:
        compiled.backward(operands, form, saved, upstream, into, add, empty_gradients(operands, form))

    alone = [torch.empty_like(source, dtype=exact) for source in sources]
    gradients(alone, [False] * 4)
    there = [torch.randn(5, 8, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(4)]
    into = [torch.full((5, 8), torch.nan, dtype=dtype if kind in "nN" else exact) for kind in kinds]
    expected = []
    for s, kind in enumerate(kinds):
        if kind == "r":
            into[s] = into[0]
            expected[0] = expected[0] + alone[s]
        elif kind.isupper():
            into[s].copy_(there[s])
        expected.append(alone[s] + into[s] if kind.isupper() else alone[s])
    gradients(into, [kind not in "ne" for kind in kinds])
    for s, kind in enumerate(kinds):
        if kind != "r":
            bound = 1e-2 if into[s].dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(into[s].to(exact), expected[s].to(exact), rtol=bound, atol=bound)


@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
def test_no_tokens_need_no_graph(counter: Counter, weighting: Any) -> None:
    sources, vector = rows(3, 2, 0), query(8)
    output = depth_attention(sources, vector, weighting=weighting, backend="compiled")
    assert isinstance(output, Tensor) and output.shape == (2, 0, 8)
    *of_sources, of_query = torch.autograd.grad(output.sum(), (*sources, vector))
    assert [one.shape for one in of_sources] == [(2, 0, 8)] * 3 and of_query.eq(0).all()
    assert counter.graphs == 0


def test_one_graph_a_pass_whatever_the_batch_the_strides_and_the_mode(counter: Counter) -> None:
    def read(sources: list[Tensor], vector: Tensor) -> Tensor:
        found = depth_attention(sources, vector, backend="compiled")
        assert isinstance(found, Tensor)
        return found

    def both(sources: list[Tensor], vector: Tensor) -> None:
        output = read(sources, vector)
        expected = depth_attention(sources, vector, backend="reference")
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(output, expected)
        upstream = torch.ones(1).expand_as(output)
        for got, wanted in zip(
            torch.autograd.grad(output, sources, upstream), torch.autograd.grad(expected, sources, upstream), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)

    both(rows(3, 5), query(6))
    assert counter.graphs == 2
    for lead in ((2,), (3, 7), (2, 1, 2), (5000,), (8,)):  # 8 is also the width
        both(rows(3, *lead), query(6))
    both([row.detach().mT.contiguous().mT.requires_grad_() for row in rows(3, 4, 3)], query(6))
    both([row.detach().repeat(1, 2)[:, 3:11].requires_grad_() for row in rows(3, 4)], query(6))
    both([row.requires_grad_() for row in torch.stack(rows(3, 4)).detach()], torch.nn.Parameter(query(12).detach()[::2]))
    same = rows(1, 4)[0]
    both([same, *rows(2, 4)], query(6))
    torch.autograd.grad(read([same, same, same], query(6)).sum(), same)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = read(rows(3, 4), query(6))
        assert output.dtype == torch.float32
        output.sum().backward()
    with torch.no_grad():
        read(rows(3, 4), query(6))
    with torch.inference_mode():
        read(rows(3, 4), query(6))
        read([row * 1 for row in rows(3, 4)], query(6) * 1)
    assert counter.graphs == 2
    both(rows(3, 1), query(6))
    both([row.detach().repeat(1, 2)[2:3, :8].requires_grad_() for row in rows(3, 5)], query(6))
    both(rows(3, 1, 1), query(6))
    assert counter.graphs == 4


def test_the_number_of_graphs_does_not_grow_with_the_number_of_sources(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LONGEST", 3)

    def both(number: int) -> None:
        sources, vector = rows(number, 3 + number), query(6)
        options: Any = {"output_gain": torch.ones(8), "bias": torch.zeros(number), "return_weights": True}
        read = depth_attention(sources, vector, backend="compiled", **options)
        assert read.weights is not None
        torch.autograd.grad(read.output.square().sum() + read.weights.square().sum(), (*sources, vector))

    for number in range(1, 7):
        both(number)
    assert counter.graphs == 3 * 2 + 2 * 3 + 2  # whole lists; scores, mixtures and gradients of parts of 2 and 3; what joins parts
    for number in (7, 14, 26):
        both(number)
    assert counter.graphs == 14


def test_added_gradients_take_one_graph_more(counter: Counter) -> None:
    """Of held sources, one of them twice, beside one that is not."""

    def gradients(sources: list[Tensor], vector: Tensor, backend: Any) -> tuple[Tensor, ...]:
        first, second = hold(sources[0]), hold(sources[1])
        loss = torch.zeros((), dtype=torch.float64)
        for read in ([first, second, sources[2]], [first, second, first], [second, first, sources[2]]):
            output = depth_attention(read, vector, backend=backend)
            assert isinstance(output, Tensor)
            loss = loss + output.double().square().sum()
        return torch.autograd.grad(loss, (*sources, vector))

    for dtype, graphs in ((torch.float32, 3), (torch.bfloat16, 5)):  # forward, written, added; bfloat16 is never only written here
        sources, vector = rows(3, 5, dtype=dtype), query(8)
        wide = [source.detach().double().requires_grad_() for source in sources]
        expected = gradients(wide, vector.detach().double().requires_grad_(), "reference")
        for got, wanted in zip(gradients(sources, vector, "compiled"), expected, strict=True):
            bound = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(got.double(), wanted, rtol=10 * bound, atol=bound * wanted.abs().max().item())
        assert counter.graphs == graphs


# Through Inductor.


def check(number: int, dtype: torch.dtype, *, heads: int = 1, count: int = 1, tokens: int = 5, **options: Any) -> None:
    """Outputs and gradients near those of the definition in float64, and the same bits the second time."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    sources, queries = rows(number, tokens, width=12, dtype=dtype), query(count, 6, dtype=exact)

    def both(backend: str, sources: list[Tensor], queries: Tensor) -> list[Tensor]:
        outputs = depth_attention(sources, queries, heads=heads, backend=backend, **options)
        loss = torch.stack([(m + 1) * output.double().square().sum() for m, output in enumerate(outputs)]).sum()
        return [*outputs, *torch.autograd.grad(loss, (*sources, queries))]

    found = both("compiled", sources, queries)
    assert all(torch.equal(one, again) for one, again in zip(found, both("compiled", sources, queries), strict=True))
    wide = both("reference", [source.detach().double().requires_grad_() for source in sources], queries.detach().double().requires_grad_())
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for one, wanted in zip(found, wide, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=bound, atol=bound * (1 + wanted.abs().max().item()))


@INDUCTOR
def test_through_inductor() -> None:
    check(2, torch.bfloat16, count=2)


@INDUCTOR
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "dtype", "options"),
    [
        (1, torch.float32, {}),
        (3, torch.float64, {"heads": 3, "key_norm": "full", "output_gain": torch.linspace(0.5, 2, 12)}),
        (3, torch.float16, {"heads": 2, "key_norm": "none", "weighting": "sigmoid"}),
        (3, torch.float32, {"tokens": 1}),
        (11, torch.float32, {"count": 2, "output_gain": torch.linspace(0.5, 2, 12), "tokens": 9}),
        (17, torch.bfloat16, {"heads": 2, "bias": torch.linspace(-1, 1, 17)}),
    ],
    ids=["one source", "heads and norms", "sigmoid", "one token", "a long list", "a longer list"],
)
def test_more_forms_through_inductor(number: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(number, dtype, **options)


@INDUCTOR
@pytest.mark.slow
def test_one_source_through_inductor_comes_back_exactly_and_its_query_feels_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (source,), vector = rows(1, 5, dtype=dtype), query(8)
        output = depth_attention([source], vector, heads=2, backend="compiled")
        assert isinstance(output, Tensor) and torch.equal(output, source)
        upstream = torch.randn_like(output)
        of_source, of_query = torch.autograd.grad(output, (source, vector), upstream)
        assert torch.equal(of_source, upstream) and of_query.eq(0).all()


@INDUCTOR
@pytest.mark.slow
def test_held_sources_and_a_prior_through_inductor() -> None:
    sources, queries = rows(3, 6, dtype=torch.bfloat16), query(2, 8)

    def loss(sources: list[Tensor], queries: Tensor, backend: Any) -> Tensor:
        held = [hold(source) for source in sources]
        first = depth_attention(held[:2], queries, return_statistics=True, backend=backend)
        both = depth_attention(held[2:], queries, prior=first, backend=backend)
        again = depth_attention(held, queries, backend=backend)
        assert isinstance(both, tuple) and isinstance(again, tuple)
        return torch.stack([(one.double() * (m + 1)).square().sum() for m, one in enumerate((*both, *again))]).sum()

    wide = [source.detach().double().requires_grad_() for source in sources], queries.detach().double().requires_grad_()
    wanted = torch.autograd.grad(loss(*wide, "reference"), (*wide[0], wide[1]))
    for got, exact in zip(torch.autograd.grad(loss(sources, queries, "compiled"), (*sources, queries)), wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=3e-2, atol=3e-2 * exact.abs().max().item())


# What it refuses, and when it loads.


def test_no_compiler_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    compiled.refusal.cache_clear()
    with pytest.raises(RequestError, match=r"'compiled' cannot serve this read: torch.compile finds no C\+\+ compiler\. Use backend="):
        depth_attention(rows(2, 3), query(8), backend="compiled")
    compiled.refusal.cache_clear()


def test_other_devices_and_dtypes_are_refused() -> None:
    assert compiled.refusal(torch.device("meta"), torch.float32) == "it runs on the CPU and on CUDA, and the sources are on meta"
    assert compiled.refusal(CPU, torch.float8_e4m3fn) == "it has no arithmetic for torch.float8_e4m3fn"


def test_nothing_of_the_compiler_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, torch, depthroute.model\n"
        "from depthroute.ops import depth_attention\n"
        "depth_attention([torch.ones(2, 4)], torch.ones(4), backend='reference')\n"
        "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
