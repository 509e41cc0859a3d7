"""The compiled kernel: when it runs, that it is deterministic, and what happens on a machine that cannot build it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import attention, build, depth_attention, hold, native, registry
from depthroute.ops.form import Form, Operands, empty_gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def rows(number: int = 3, tokens: int = 5, width: int = 24, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_() for _ in range(number)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the backends that ran, in order."""
    ran: list[str] = []
    for name, holder, attribute in (("native", registry.BACKENDS["native"], "forward"), ("reference", attention, "reference")):
        whole = getattr(holder, attribute)
        monkeypatch.setattr(holder, attribute, lambda *given, _name=name, _whole=whole: ran.append(_name) or _whole(*given))
    return ran


@pytest.fixture
def forget_the_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is loaded, before and after; and what is compiled in between is compiled quickly."""
    monkeypatch.setattr(build, "_COMPILE", ("-O0", *build._COMPILE[1:]))
    build.library.cache_clear()
    registry._say_slower.cache_clear()
    yield
    build.library.cache_clear()
    registry._say_slower.cache_clear()


def test_which_backend_runs(requires_native: None, calls: list[str]) -> None:
    query = torch.randn(24, requires_grad=True)
    depth_attention(rows(), query, backend="native")
    depth_attention(rows(), query, backend="reference")
    assert calls == ["native", "reference"]
    calls.clear()
    for dtype in DTYPES:
        depth_attention(rows(dtype=dtype), query)
    depth_attention([*rows(1), *rows(1, dtype=torch.bfloat16)], query)  # mixed storage is promoted
    first = depth_attention(rows(), query, heads=2, return_weights=True, return_statistics=True)  # with gradients
    depth_attention(rows(), query, heads=2, prior=first, output_gain=torch.ones(24))
    depth_attention(rows(), query, weighting="sigmoid", key_norm="none")
    expected = ["native"] * 8 if hasattr(build.library(), "depth_forward_f16") else [*["native"] * 2, "reference", *["native"] * 5]
    assert calls == expected


def test_asking_for_a_backend_where_it_cannot_serve_is_refused(requires_native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(24)
    with pytest.raises(RequestError, match="'native' cannot serve this read: it runs on the CPU, and the sources are on meta"):
        depth_attention([row.to("meta") for row in rows()], query.to("meta"), backend="native")
    with pytest.raises(RequestError, match=r"'triton' cannot serve this read: .+\. Use backend='reference' or 'auto'\."):
        depth_attention(rows(), query, backend="triton")
    with pytest.raises(RequestError, match=r"'native' cannot serve this read: it .* torch\.float8_e4m3fn"):
        depth_attention(rows(dtype=torch.float8_e4m3fn), query, backend="native")


def test_a_kernel_without_half_precision_leaves_it_to_the_definition(
    forget_the_kernel: None, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(native, "library", lambda: SimpleNamespace(depth_forward_f32=None))
    with pytest.raises(RequestError, match=r"'native' cannot serve this read: it was compiled without arithmetic for torch\.float16"):
        depth_attention(rows(dtype=torch.float16), torch.ones(24), backend="native")
    with pytest.warns(RuntimeWarning, match="is slower: it was compiled without arithmetic"):
        depth_attention(rows(dtype=torch.float16), torch.ones(24))
    assert calls == ["reference"]


def everything(dtype: torch.dtype, weighting: Any, backend: str = "native", *, tokens: int = 3_000, width: int = 40) -> list[Tensor]:
    """Results and gradients of two phases of held and plain sources, with heads, projected keys and an output norm."""
    sources, keys = rows(5, tokens=tokens, width=width, dtype=dtype), rows(5, tokens=tokens, width=24, dtype=dtype)
    generator, softmax = torch.Generator().manual_seed(0), weighting == "softmax"
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = ((5, 24), (24,), (5, 3), (width,))
    parameters = [torch.randn(shape, generator=generator, dtype=exact, requires_grad=True) for shape in shapes]
    query, gain, bias, output_gain = parameters
    held = [hold(source) for source in sources[:3]] + sources[3:]
    options: Any = {"heads": 4, "key_gain": gain, "weighting": weighting, "return_weights": True, "return_statistics": softmax}
    options["backend"] = backend
    prior = depth_attention(held[2:], query, keys=keys[2:], **options)
    reads = depth_attention(held[:3], query, keys=keys[:3], bias=bias, prior=prior, output_gain=output_gain, **options)
    results = [part for read in (*prior, *reads) for part in read if part is not None]
    tracked = [part for part in results if part.requires_grad]
    upstream = [torch.randn(part.shape, generator=generator).to(part.dtype) for part in tracked]
    return [*results, *torch.autograd.grad(tracked, (*sources, *keys, *parameters), upstream)]


@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_same_bits_on_every_call_and_for_any_number_of_threads(requires_native: None, dtype: torch.dtype, weighting: str) -> None:
    if native.refusal(torch.device("cpu"), dtype) is not None:
        pytest.skip("the kernel was compiled without this dtype")
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            results.append(everything(dtype, weighting))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "width"), [(17, 1_000), (5_003, 12)])
def test_wide_rows_and_many_tokens(requires_native: None, weighting: str, tokens: int, width: int) -> None:
    """Many vectors a row, and more tokens than fit the least chunks."""
    found, expected = (everything(torch.float64, weighting, name, tokens=tokens, width=width) for name in ("native", "reference"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12 * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
@pytest.mark.parametrize("full", [False, True])
def test_torch_checks_of_both_operators(requires_native: None, full: bool, weighting: str) -> None:
    generator, softmax = torch.Generator().manual_seed(0), weighting == "softmax"
    sources, form = rows(dtype=torch.float64), (2 if full else 1, "slice", weighting, 1e-6, 1e-6, "native")

    def parameter(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    keys = rows(width=6, dtype=torch.float64) if full else []
    prior = rows(2, dtype=torch.float64) if full else []
    if full and softmax:
        prior += [parameter(5, 2).detach() for _ in range(2)] + [parameter(5, 2).detach().exp().requires_grad_() for _ in range(2)]
    given = (sources, keys, parameter(2, 6), parameter(2, 3), parameter(24) if full else None, prior)
    torch.library.opcheck(torch.ops.depthroute.depth_read, (*given, *form))
    plain: Any = [[part.detach() for part in one] if isinstance(one, list) else None if one is None else one.detach() for one in given]
    found = torch.ops.depthroute.depth_read(*plain, *form)
    into, add = [torch.zeros_like(source) for source in plain[0]], [False, True, False]
    empty = empty_gradients(Operands(*plain), Form(*form[:5]))
    sums = [torch.randn_like(part) for part in found[4:6]] if full and softmax else []
    gradients, weights = [torch.randn_like(output) for output in found[:2]], torch.randn_like(found[-4]) if full else None
    filled = [torch.zeros_like(part) for part in (*empty.keys, *empty.prior, *empty[2:])]
    given_backward = (into, filled, add, *plain, found[2:], gradients, sums, weights, *form)
    torch.library.opcheck(torch.ops.depthroute.depth_read_backward, given_backward)


def test_without_a_compiler_the_definition_serves_and_says_so_once(
    forget_the_kernel: None, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    query = torch.randn(24, requires_grad=True)
    with pytest.warns(RuntimeWarning, match=r"is slower: no C compiler \(cc, gcc or clang\) was found") as caught:
        depth_attention(rows(), query)
    assert caught[0].filename == __file__  # the warning points at the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        depth_attention(rows(), query)
    assert calls == ["reference", "reference"]
    with pytest.raises(RequestError, match="'native' cannot serve this read: no C compiler"):
        depth_attention(rows(), query, backend="native")


def test_a_compiler_that_fails_is_quoted(forget_the_kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "licence expired" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.warns(RuntimeWarning, match="could not build the kernel: licence expired"):
        depth_attention(rows(), torch.randn(24))


def test_the_kernel_is_built_into_the_users_cache_and_found_there_again(
    requires_native: None, forget_the_kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = depth_attention(rows(), torch.ones(24))
    (built,) = (tmp_path / "depthroute").glob("*.so")
    build.library.cache_clear()
    monkeypatch.setattr(build, "_accepts", lambda *_: pytest.fail("compiled again"))
    assert torch.equal(depth_attention(rows(), torch.ones(24)), expected)
    assert sorted(path.name for path in built.parent.iterdir()) == [built.with_suffix(".sha256").name, built.name]


def test_a_cut_kernel_in_the_cache_is_built_again(
    requires_native: None, forget_the_kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cut = tmp_path / "depthroute" / "kernel-cut.so"
    cut.parent.mkdir()
    cut.write_bytes(b"whole")
    cut.with_suffix(".sha256").write_text(hashlib.sha256(b"whole").hexdigest())
    assert build._is_ours(cut)
    cut.write_bytes(b"who")  # loading it would end the process
    assert not build._is_ours(cut)
    assert not build._is_ours(cut.with_name("kernel-none.so"))


def test_without_a_place_to_cache_in_the_kernel_serves_all_the_same(
    requires_native: None, forget_the_kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.missing() is None
    depth_attention(rows(), torch.ones(24), backend="native")


@pytest.mark.parametrize(
    ("width", "heads", "rank", "dtype", "bound"),
    [
        (576, 1, 72, torch.float32, 1e-5), (600, 3, 300, torch.float32, 1e-5), (576, 4, 288, torch.float32, 1e-5),
        (640, 1, 100, torch.bfloat16, 1e-2),
    ],
)
def test_rows_that_no_cache_keeps(requires_native: None, width: int, heads: int, rank: int, dtype: torch.dtype, bound: float) -> None:
    """They are stored past the caches, where keys and heads begin with a vector and where they do not."""
    closed, latest = rows(3, 4_000, width, dtype), rows(2, 4_000, width, dtype)
    queries = torch.randn(2, rank, generator=torch.Generator().manual_seed(0)).mul_(0.3).requires_grad_()
    gain = torch.linspace(0.5, 1.5, width).requires_grad_()
    upstream = [row.detach().flip(0) for row in closed[:2]]
    leaves = [*closed, *latest, queries, gain]

    def results(backend: str) -> list[Tensor]:
        prior: Any = depth_attention(closed, queries, heads=heads, return_statistics=True, backend=backend)
        outputs: Any = depth_attention(latest, queries, heads=heads, prior=prior, output_gain=gain, backend=backend)
        return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]

    for found, expected in zip(results("native"), results("reference"), strict=True):
        assert (found.double() - expected.double()).abs().max() <= bound * expected.double().abs().max()
