"""The compiled kernel: when it runs, that it is deterministic, and what happens on a machine that cannot build it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.ops import attention, build, depth_attention, native


def rows(number: int = 3, tokens: int = 5, width: int = 24, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_() for _ in range(number)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the backends that ran, in order."""
    ran: list[str] = []
    for name, holder, attribute in (("native", native, "read"), ("reference", attention, "reference")):
        whole = getattr(holder, attribute)
        monkeypatch.setattr(holder, attribute, lambda *given, _name=name, _whole=whole: ran.append(_name) or _whole(*given))
    return ran


def test_which_backend_runs(requires_native: None, calls: list[str]) -> None:
    query = torch.randn(24, requires_grad=True)
    depth_attention(rows(), query)
    depth_attention(rows(), query, backend="native")
    depth_attention(rows(), query, backend="reference")
    depth_attention(rows(dtype=torch.float16), query)  # no half-precision kernel
    depth_attention([*rows(1), *rows(1, dtype=torch.bfloat16)], query)  # mixed storage
    depth_attention(rows(), query, return_weights=True)  # weights with a gradient
    with torch.no_grad():
        depth_attention(rows(), query, return_weights=True)
    expected = ["native", "native", "reference", "reference", "reference", "reference", "native"]
    assert calls == expected


def test_asking_for_the_kernel_where_it_cannot_serve_is_refused(requires_native: None) -> None:
    query = torch.randn(24, requires_grad=True)
    with pytest.raises(RequestError, match=r"'native' cannot serve this read: .*float16.* Use backend='reference'"):
        depth_attention(rows(dtype=torch.float16), query, backend="native")
    with pytest.raises(RequestError, match="carry no gradient"):
        depth_attention(rows(), query, return_lse=True, backend="native")
    with pytest.raises(RequestError, match="runs on the CPU, and the sources are on meta"):
        depth_attention([row.to("meta") for row in rows()], query.to("meta"), backend="native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_bits_on_every_call_and_for_any_number_of_threads(requires_native: None, dtype: torch.dtype) -> None:
    sources = rows(5, tokens=3_000, width=40, dtype=dtype)
    queries = torch.randn(2, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    upstream = [torch.randn(3_000, 40, generator=torch.Generator().manual_seed(m)).to(dtype) for m in (1, 2)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            outputs = depth_attention(sources, queries, backend="native")
            results.append([*outputs, *torch.autograd.grad(outputs, (*sources, queries), upstream)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("projected", [False, True])
def test_torch_checks_of_both_operators(requires_native: None, projected: bool) -> None:
    sources = rows(dtype=torch.float64)
    keys = rows(width=6, dtype=torch.float64) if projected else []
    queries = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.depthroute.depth_read, (sources, keys, queries, bias, False, 1e-6))
    with torch.no_grad():
        found = torch.ops.depthroute.depth_read(sources, keys, queries, bias, False, 1e-6)
    plain = [[tensor.detach() for tensor in some] for some in (sources, keys)]
    gradients = [torch.randn_like(output) for output in found[:2]]
    statistics = [found[2], found[4], found[5]]
    torch.library.opcheck(torch.ops.depthroute.depth_read_backward, (*plain, queries.detach(), False, gradients, statistics))


@pytest.fixture
def forget_the_kernel() -> Iterator[None]:
    build.library.cache_clear()
    attention._say_slower.cache_clear()
    yield
    build.library.cache_clear()
    attention._say_slower.cache_clear()


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
    assert torch.equal(depth_attention(rows(), torch.ones(24)), expected)  # type: ignore[arg-type]
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
    assert native.unavailable() is None
    depth_attention(rows(), torch.ones(24), backend="native")
