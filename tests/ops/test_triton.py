"""The Triton kernels agree with the literal loop in every form, dtype and layout, and compile for CUDA and ROCm without a GPU.

On a machine without a GPU they run in Triton's interpreter. It must be switched on before Triton is imported and would change every kernel
of the process, so `test_the_interpreter_agrees` runs this file in a Python of its own. With `-m gpu` the same tests run compiled.
The interpreter cuts bfloat16 off where the hardware rounds, so outputs are exact to a whole unit in the last place there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import Case, assert_close, cases, truth
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import DepthRead, depth_attention, hold, triton_backend
from depthroute.ops.form import Form, Operands
from depthroute.ops.operator import read

pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])
DEVICES = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [CUDA])
NATIVE = pytest.mark.skipif(INTERPRETED, reason="needs the compiler, not the interpreter")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=INTERPRETED)
def nothing_is_left_unwritten() -> Iterator[None]:
    """Memory is full of NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def moved(case: Case, device: str) -> Case:
    """The same read on a device, with leaves of its own."""

    def leaf(x: Any) -> Any:
        return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    parts: dict[str, Any] = {name: leaf(getattr(case, name)) for name in ("query", "gain", "bias", "output_gain")}
    prior: Any = None if case.prior is None else [DepthRead(*map(leaf, one)) for one in case.prior]
    keys = None if case.keys is None else list(map(leaf, case.keys))
    return replace(case, sources=list(map(leaf, case.sources)), keys=keys, prior=prior, upstream=list(map(leaf, case.upstream)), **parts)


def grade(case: Case, device: str) -> None:
    """Outputs, weights, statistics, and the gradients that come from all three."""
    dtype, softmax, lead = case.sources[0].dtype, case.weighting == "softmax", case.sources[0].shape[:-1]
    generator, count, number = torch.Generator().manual_seed(0), len(case.upstream), len(case.sources)
    of_weights = torch.randn(count, case.heads, number, *lead, dtype=torch.float64, generator=generator)
    of_lse = torch.randn(count, case.heads, *lead, dtype=torch.float64, generator=generator) if softmax else None
    expected = truth(case, of_weights, of_lse)
    case = moved(case, device)
    reads = case.read("triton", return_weights=True, return_statistics=softmax)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    size = case.score_size() * case.value_size() * expected.amplified
    for m, found in enumerate(reads):
        assert isinstance(found, DepthRead) and found.weights is not None
        assert_close(found.output.cpu(), expected.outputs[m], dtype, size, "output")
        assert_close(found.weights.view(case.heads, number, *lead).cpu(), expected.weights[m], dtype, case.score_size(), "weights")
        loss = loss + (found.output * case.upstream[m]).double().sum()
        loss = loss + (found.weights * of_weights[m].view_as(found.weights).to(device)).sum()
        if of_lse is not None:
            lse = found.lse.view(*lead, case.heads).movedim(-1, 0)
            assert_close(lse.cpu(), expected.lse[m], dtype, case.score_size(), "log-sum-exp")
            loss = loss + (lse * of_lse[m].to(device)).sum()
    wanted = case.named()
    for (name, tensor), got in zip(wanted.items(), torch.autograd.grad(loss, list(wanted.values())), strict=True):
        assert got.dtype == tensor.dtype
        size = 10 * case.gradient_size() * expected.amplified
        assert_close(got.cpu(), expected.gradients[name], dtype, size, f"gradient of {name}")


def some_case(
    number: int, width: int, *, rank: int | None = None, count: int | None = None, heads: int = 1, key_norm: str = "slice",
    weighting: str = "softmax", projected: bool = False, prior: bool = False, biased: bool = False, normed: bool = False, tokens: int = 3,
    dtype: torch.dtype = torch.float64,
) -> Case:  # fmt: skip
    """A read of chosen sizes."""
    generator, rank, several = torch.Generator().manual_seed(number * 1000 + width), rank or width, () if count is None else (count,)
    exact = torch.float64 if dtype == torch.float64 else torch.float32

    def rand(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind).requires_grad_()

    def earlier() -> DepthRead:
        statistics = (tokens,) if heads == 1 else (tokens, heads)
        if weighting == "sigmoid":
            return DepthRead(rand(tokens, width))
        total = (1 + 4 * torch.rand(statistics, generator=generator, dtype=torch.float64)).to(exact).requires_grad_()
        return DepthRead(rand(tokens, width), None, rand(*statistics, kind=exact).detach(), total)

    return Case(
        sources=[rand(tokens, width) for _ in range(number)],
        keys=[rand(tokens, rank) for _ in range(number)] if projected else None,
        query=rand(*several, rank, kind=exact), gain=None, bias=rand(*several, number, kind=exact) if biased else None,
        output_gain=rand(width, kind=exact) if normed else None, prior=[earlier() for _ in range(count or 1)] if prior else None,
        heads=heads, key_norm=key_norm, weighting=weighting, eps=1e-6, output_eps=1e-6,
        upstream=[rand(tokens, width).detach() for _ in range(count or 1)],
    )  # fmt: skip


FORMS: list[dict[str, Any]] = [
    {"number": 1, "width": 1},
    {"number": 1, "width": 7, "prior": True, "biased": True},
    {"number": 3, "width": 24, "biased": True, "normed": True, "dtype": torch.float32},
    {"number": 2, "width": 33, "rank": 5, "count": 3, "prior": True, "tokens": 5},
    {"number": 4, "width": 40, "rank": 16, "key_norm": "full", "normed": True},
    {"number": 2, "width": 30, "rank": 12, "heads": 3, "count": 2, "prior": True, "normed": True},
    {"number": 2, "width": 30, "rank": 12, "heads": 6, "key_norm": "full", "biased": True},
    {"number": 3, "width": 20, "heads": 5, "key_norm": "none"},
    {"number": 3, "width": 16, "rank": 6, "heads": 2, "projected": True, "count": 2, "biased": True},
    {"number": 2, "width": 9, "weighting": "sigmoid", "prior": True, "normed": True, "count": 2},
    {"number": 2, "width": 12, "rank": 4, "weighting": "sigmoid", "projected": True, "key_norm": "none"},
    {"number": 9, "width": 100, "rank": 32, "tokens": 2, "dtype": torch.bfloat16},
    {"number": 2, "width": 257, "dtype": torch.float16, "count": 2, "normed": True, "tokens": 2},
]
MORE_FORMS: list[dict[str, Any]] = [
    {"number": number, "width": width, "rank": rank, "tokens": 2, "count": 2, "biased": True, "dtype": dtype}
    for number in (1, 8, 17, 64)
    for width, rank in ((64, 64), (100, 1), (129, 100))
    for dtype in DTYPES
]


@DEVICES
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(named, form.values())))
def test_every_form(device: str, form: dict[str, Any]) -> None:
    grade(some_case(**form), device)


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize("form", MORE_FORMS, ids=lambda form: "-".join(map(named, form.values())))
def test_many_sources_and_widths(device: str, form: dict[str, Any]) -> None:
    grade(some_case(**form), device)


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@settings(max_examples=40)
@given(data=st.data())
def test_random_reads(device: str, dtype: torch.dtype, data: st.DataObject) -> None:
    grade(data.draw(cases(dtype)), device)


@DEVICES
@pytest.mark.parametrize(
    "form",
    [
        {"number": 2, "width": 12, "count": 5, "heads": 2, "rank": 6, "normed": True, "biased": True, "prior": True},
        {"number": 2, "width": 10, "count": 3, "rank": 4, "projected": True, "dtype": torch.bfloat16},
    ],
    ids=["heads", "projected"],
)
def test_more_queries_than_a_program_holds(device: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "_TILE", 32)
    grade(some_case(**form), device)


@DEVICES
def test_the_weight_of_a_prior_has_a_gradient(device: str) -> None:
    """It is one minus the others."""
    case = moved(some_case(3, 12, prior=True), device)
    assert case.prior is not None and case.prior[0].max is not None and case.prior[0].sum is not None
    operands = Operands(case.sources, [], case.query[None], None, None, list(case.prior[0])[:1] + list(case.prior[0])[2:])
    weights = read(operands, Form(1, "slice", "softmax", 1e-6, 1e-6), "triton").weights
    leaves = list(case.named().values())
    own, others = (torch.autograd.grad(part.sum(), leaves, retain_graph=True) for part in (weights[..., 3], weights[..., :3]))
    for one, other in zip(own, others, strict=True):
        torch.testing.assert_close(one, -other, rtol=1e-12, atol=1e-12)
    assert own[-1].count_nonzero() == 3


def sources_and_query(number: int, width: int, device: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(3, 2, width, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for _ in range(number)]
    query = torch.randn(width, generator=generator, dtype=torch.float64)
    return rows, query.to(device, torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()


@DEVICES
def test_sources_are_read_as_they_lie(device: str) -> None:
    (first, *_), query = sources_and_query(1, 24, device)
    x = first.detach()
    wide = torch.full((3, 2, 30), float("nan"), dtype=x.dtype, device=device)
    wide[..., 3:27] = x
    layouts = [
        x.transpose(0, 1).contiguous().transpose(0, 1),  # no single row stride
        x.repeat_interleave(2, -1)[..., ::2],  # channels apart
        wide[..., 3:27],  # off the alignment, and rows at another stride
        torch.stack((x, x.new_full(x.shape, float("nan"))), -2)[..., 0, :],
        x[:, :1].expand(3, 2, 24),
        x[:1, :1].expand(3, 2, 24),
    ]
    strided, plain = [one.detach().requires_grad_() for one in layouts], [one.contiguous().requires_grad_() for one in layouts]
    upstream = torch.randn(24, 2, 3, dtype=torch.float64).permute(2, 1, 0).to(device)
    found, expected = (depth_attention(some, query, backend="triton") for some in (strided, plain))
    assert isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)
    got = torch.autograd.grad(found, (*strided, query), upstream)
    for gradient, wanted in zip(got, torch.autograd.grad(expected, (*plain, query), upstream), strict=True):
        assert torch.equal(gradient, wanted)


@DEVICES
def test_shared_sources_add_up_unrounded(device: str) -> None:
    """Two reads of three held sources, one of them twice in a list: as in float64, but for one rounding."""
    (a, b, c), query = sources_and_query(3, 20, device, torch.bfloat16)
    leaves, gradients = (a, b, c, query), []
    for dtype, backend in ((torch.bfloat16, "triton"), (torch.float64, "reference")):
        x, y, z = (hold(one.to(dtype)) for one in (a, b, c))
        q: Any = query if dtype == torch.bfloat16 else query.double()
        one, two = depth_attention([x, y, x], q, backend=backend), depth_attention([y, x, z.clone()], 2 * q, backend=backend)
        assert isinstance(one, Tensor) and isinstance(two, Tensor)
        gradients.append(torch.autograd.grad((one.double() * 3 - two.double()).sum(), leaves))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


@DEVICES
def test_the_same_bits_on_every_call(device: str) -> None:
    sources, query = sources_and_query(5, 40, device, torch.float32)
    results = []
    for _ in range(2):
        output = depth_attention(sources, query, backend="triton")
        assert isinstance(output, Tensor)
        results.append([output, *torch.autograd.grad(output.square().sum(), (*sources, query))])
    assert all(map(torch.equal, *results))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
def test_one_source_comes_back_exactly_and_its_query_feels_nothing(device: str, dtype: torch.dtype) -> None:
    (source,), query = sources_and_query(1, 45, device, dtype)
    output = depth_attention([source], query, backend="triton")
    assert isinstance(output, Tensor) and torch.equal(output, source)
    upstream = torch.randn_like(output)
    of_source, of_query = torch.autograd.grad(output, (source, query), upstream)
    assert torch.equal(of_source, upstream) and of_query.count_nonzero() == 0


@DEVICES
@pytest.mark.parametrize("height", [1e4, -1e4])
def test_huge_scores_and_a_bias_of_minus_infinity(device: str, height: float) -> None:
    sources, query = sources_and_query(4, 20, device, torch.float32)
    bias = torch.tensor([float("-inf"), height, height - 1e4, height], device=device, requires_grad=True)
    read = depth_attention(sources, query, bias=bias, return_weights=True, return_statistics=True, backend="triton")
    exact = depth_attention([sources[1].double(), sources[3].double()], query.double(), backend="reference")
    assert isinstance(read, DepthRead) and isinstance(exact, Tensor) and read.weights is not None
    torch.testing.assert_close(read.output.double(), exact, rtol=1e-2, atol=1e-2)  # at 1e4 a float32 score has three decimals
    torch.testing.assert_close(read.weights.sum(0), torch.ones_like(read.lse), rtol=1e-6, atol=1e-6)
    assert read.weights[0].eq(0).all() and read.weights[2].eq(0).all()
    left_out, *rest = torch.autograd.grad(read.output.sum(), (*sources, query, bias))
    assert left_out.eq(0).all() and all(gradient.isfinite().all() for gradient in rest)


@DEVICES
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_rows_beyond_two_to_the_31(device: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 1 lies more than 2^31 elements after token 0. Memory in between is never touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    stride = 2**31 + offset
    try:
        memory = torch.empty(stride + 24, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    (near, far), query = sources_and_query(2, 24, device, torch.bfloat16)
    near, far = near[0].detach(), far[0].detach()
    there = memory.as_strided((2, 24), (stride, 1)).copy_(far)
    keys = [there[:, :6], near[:, :6]]
    for options in ({}, {"keys": keys}):
        q = query[:6] if options else query
        found = depth_attention([there, near], q, backend="triton", **options)
        assert isinstance(found, Tensor) and torch.equal(found, depth_attention([far, near], q, backend="triton", **options))


@DEVICES
@pytest.mark.parametrize("lead", [(0,), (2, 0), ()])
def test_no_tokens_and_a_single_one(device: str, lead: tuple[int, ...]) -> None:
    sources = [torch.randn(*lead, 6, device=device, requires_grad=True) for _ in range(2)]
    query = torch.randn(6, device=device, requires_grad=True)
    outputs = [depth_attention(sources, query, backend=name) for name in ("triton", "reference")]
    gradients = [torch.autograd.grad(output.sum(), (*sources, query)) for output in outputs if isinstance(output, Tensor)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("tokens", [1, 4, 5, 8191, 8192, 8193, 10**6, 2**31])
@pytest.mark.parametrize("slots", [1, 1024, 16384, 10**6])
def test_programs_of_a_backward_share_the_tokens_among_them(tokens: int, slots: int) -> None:
    each, programs = triton_backend._programs(tokens, slots)
    assert each * (programs - 1) < tokens <= each * programs and each >= 4
    assert programs <= 2048 and (programs <= 256 or programs * slots <= 2**22)


@NATIVE
def test_the_interpreter_agrees() -> None:
    run_interpreted("not slow and not gpu")


@NATIVE
@pytest.mark.slow
def test_the_interpreter_agrees_on_many_more() -> None:
    run_interpreted("slow")


def run_interpreted(marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", marked, __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@NATIVE
def test_the_kernels_are_imported_only_when_used() -> None:
    code = "import sys, depthroute.residual; assert 'depthroute.ops.triton_kernels' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@NATIVE
def test_where_it_cannot_serve_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    x, query = torch.zeros(2, 4), torch.zeros(4)
    with pytest.raises(RequestError, match="'triton' cannot serve this read: it runs on CUDA and ROCm devices, and the sources are on cpu"):
        depth_attention([x], query, backend="triton")
    cuda = torch.device("cuda")
    assert triton_backend.refusal(cuda, torch.bfloat16) is None
    assert triton_backend.refusal(cuda, torch.float8_e5m2) == "it has no arithmetic for torch.float8_e5m2"
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert triton_backend.refusal(cuda, torch.float32) == "triton is not installed; pip install 'depthroute[triton]'"


class Compiler:
    """Stands where a device's driver does, and compiles what would be launched."""

    def __init__(self, target: Any) -> None:
        self.target, self.kernels = target, set[str]()

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def instead_of(self, kernel: Any) -> Any:
        outer = self

        class Launcher:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda **given: outer.kernels.add(kernel.run(grid=grid, warmup=True, **given).hash)

        return Launcher()


@pytest.fixture
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from depthroute.ops import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler = Compiler(GPUTarget(*request.param))
    monkeypatch.setattr(driver, "_active", compiler)
    monkeypatch.setattr(triton_backend, "refusal", lambda device, dtype: None)
    for name in ("forward_kernel", "backward_kernel"):
        kernel = getattr(triton_kernels, name)
        kernel.device_caches.clear()
        monkeypatch.setattr(triton_kernels, name, compiler.instead_of(kernel))
    yield compiler


HOPPER = pytest.mark.parametrize("compiler", [("cuda", 90, 32)], ids=["sm_90"], indirect=True)
TARGETS = pytest.mark.parametrize("compiler", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["sm_90", "gfx942"], indirect=True)


def launch(case: Case) -> None:
    reads = case.read("triton", return_weights=True, return_statistics=case.weighting == "softmax")
    outputs = [part for read in reads if isinstance(read, DepthRead) for part in (read.output, read.weights, read.sum) if part is not None]
    torch.autograd.grad(sum(output.double().sum() for output in outputs), list(case.named().values()))


@NATIVE
@TARGETS
def test_the_kernels_compile(compiler: Compiler) -> None:
    launch(some_case(3, 96, rank=32, heads=2, count=2, prior=True, biased=True, normed=True, dtype=torch.bfloat16))
    assert len(compiler.kernels) == 2


@NATIVE
@TARGETS
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(named, form.values())))
def test_every_form_compiles(compiler: Compiler, form: dict[str, Any]) -> None:
    launch(some_case(**form))
    assert len(compiler.kernels) == 2


@NATIVE
@HOPPER
def test_few_kernels_serve_many_reads(compiler: Compiler) -> None:
    """Numbers of sources and tokens, strides, and what is added to what compile nothing anew."""
    for number, tokens in ((2, 3), (5, 16), (8, 1)):
        launch(some_case(number, 32, tokens=tokens))
    assert len(compiler.kernels) == 2
    for stride in (48, 64, 80):
        case = some_case(4, 32)
        wide = torch.randn(3, stride, dtype=torch.float64)[:, :32].requires_grad_()
        launch(replace(case, sources=[wide, *case.sources[1:]]))
    assert len(compiler.kernels) == 4  # one more each: strides that differ from source to source
