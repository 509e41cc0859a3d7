"""The CPU backend: `kernel.c`, compiled once by the machine's C compiler, behind a registered custom operator.

One pass a token forward and one backward. Beside the sources it saves three scalars a source and token. Without a C compiler
`unavailable()` says so, and the reference serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from depthroute.ops.reference import statistics_dtype

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64"}
_SOURCE = Path(__file__).with_name("kernel.c")
_COMPILE = ("-O3", "-fPIC", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")
# Each is left out where the compiler does not know it; the result is slower, never different in kind.
_OPTIONAL = ("-march=native", "-fopenmp")


def unavailable() -> str | None:
    """Why this backend cannot serve on this machine, or None."""
    library = _library()
    return library if isinstance(library, str) else None


def read(
    sources: Sequence[Tensor], keys: Sequence[Tensor] | None, queries: Tensor, bias: Tensor | None, full: bool, eps: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """As `reference.reference`, for CPU tensors of one dtype in `DTYPES`. Weights and log-sum-exp carry no gradient."""
    count = queries.shape[0]
    if bias is None:
        bias = queries.new_zeros(count, len(sources))
    found = _depth_read(list(sources), list(keys) if keys is not None else [], queries, bias, full, eps)
    return found[:count], found[count].detach().movedim((-2, -1), (0, 1)), found[count + 1].detach().movedim(-1, 0)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler (cc, gcc or clang) was found on the PATH"
    try:
        return _declare(ctypes.CDLL(str(_build(compiler))))
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"{compiler} could not build the kernel: {detail.strip()[:300]}"


def _build(compiler: str) -> Path:
    """Compile into the user's cache, keyed by everything that decides the result: source, compiler, flags, processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    identity = [_SOURCE.read_text(), compiler, version, *_COMPILE, *_OPTIONAL, platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthroute"
    target = cache / f"kernel-{digest}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernel.o"
        linked = Path(folder) / "kernel.so"
        flags = [flag for flag in _OPTIONAL if _accepts(compiler, flag, folder)]
        run = {"capture_output": True, "text": True, "check": True, "timeout": 120}
        subprocess.run([compiler, *_COMPILE, *flags, "-c", str(_SOURCE), "-o", str(built)], **run)  # type: ignore[call-overload]
        # OpenMP is not linked: its symbols are found in the runtime that torch has loaded, so that both share one set of threads.
        undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
        subprocess.run([compiler, "-shared", *undefined, str(built), "-o", str(linked), "-lm"], **run)  # type: ignore[call-overload]
        try:
            ctypes.CDLL(str(linked))
        except OSError:  # torch was built with another OpenMP: one thread then
            flags = [flag for flag in flags if flag != "-fopenmp"]
            subprocess.run([compiler, *_COMPILE, *flags, "-c", str(_SOURCE), "-o", str(built)], **run)  # type: ignore[call-overload]
            subprocess.run([compiler, "-shared", *undefined, str(built), "-o", str(linked), "-lm"], **run)  # type: ignore[call-overload]
        try:
            cache.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=cache, suffix=".so")
        except OSError:  # no home to cache in: this process keeps its own copy
            handle, name = tempfile.mkstemp(suffix=".so")
            target = Path(name)
        os.close(handle)
        shutil.copyfile(linked, name)
        os.replace(name, target)
    return target


def _accepts(compiler: str, flag: str, folder: str) -> bool:
    empty = Path(folder) / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    command = [compiler, "-Werror", flag, "-c", str(empty), "-o", str(empty.with_suffix(".o"))]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    library.depth_chunk_tokens.argtypes = [integer]
    library.depth_chunk_tokens.restype = integer
    for suffix in DTYPES.values():
        forward = getattr(library, f"depth_forward_{suffix}")
        forward.argtypes = [integer] * 5 + [pointer] * 4 + [ctypes.c_int, ctypes.c_double] + [pointer] * 5
        forward.restype = None
        backward = getattr(library, f"depth_backward_{suffix}")
        backward.argtypes = [integer] * 5 + [pointer] * 3 + [ctypes.c_int] + [pointer] * 9
        backward.restype = None
    return library


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p] | None:
    if not tensors:
        return None
    return (ctypes.c_void_p * len(tensors))(*[None if tensor is None else tensor.data_ptr() for tensor in tensors])


@torch.library.custom_op("depthroute::depth_read", mutates_args=(), device_types="cpu")
def _depth_read(sources: list[Tensor], keys: list[Tensor], queries: Tensor, bias: Tensor, full: bool, eps: float) -> list[Tensor]:
    """M outputs [..., D], then weights [..., M, S], log-sum-exp [..., M], rstd [..., S], scores [..., M, S]."""
    library = _library()
    assert isinstance(library, ctypes.CDLL)
    sources = [source.contiguous() for source in sources]
    keys = [key.contiguous() for key in keys]
    queries, bias = queries.contiguous(), bias.contiguous()
    found = _empty_results(sources, queries)
    count = queries.shape[0]
    weights, lse, rstd, scores = found[count:]
    width, tokens = sources[0].shape[-1], rstd[..., 0].numel()
    getattr(library, f"depth_forward_{DTYPES[sources[0].dtype]}")(
        tokens, width, len(sources), count, queries.shape[1], _addresses(sources), _addresses(keys), queries.data_ptr(), bias.data_ptr(),
        int(full), eps, _addresses(found[:count]), rstd.data_ptr(), scores.data_ptr(), weights.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return found


def _empty_results(sources: list[Tensor], queries: Tensor) -> list[Tensor]:
    lead, count = sources[0].shape[:-1], queries.shape[0]
    outputs = [sources[0].new_empty(sources[0].shape) for _ in range(count)]
    exact = statistics_dtype(sources[0].dtype)
    shapes = [(*lead, count, len(sources)), (*lead, count), (*lead, len(sources)), (*lead, count, len(sources))]
    return outputs + [sources[0].new_empty(shape, dtype=exact) for shape in shapes]


@_depth_read.register_fake
def _(sources: list[Tensor], keys: list[Tensor], queries: Tensor, bias: Tensor, full: bool, eps: float) -> list[Tensor]:
    return _empty_results(sources, queries)


@torch.library.custom_op("depthroute::depth_read_backward", mutates_args=(), device_types="cpu")
def _depth_read_backward(
    sources: list[Tensor], keys: list[Tensor], queries: Tensor, full: bool, gradients: list[Tensor], statistics: list[Tensor]
) -> list[Tensor]:
    """Gradients of the sources, the keys, the queries [M, R] and the bias [M, S], in this order."""
    library = _library()
    assert isinstance(library, ctypes.CDLL)
    sources = [source.contiguous() for source in sources]
    keys = [key.contiguous() for key in keys]
    queries = queries.contiguous()
    gradients = [gradient.contiguous() for gradient in gradients]
    weights, rstd, scores = statistics
    found = _empty_gradients(sources, keys, queries)
    dsources, dkeys, (dqueries, dbias) = found[: len(sources)], found[len(sources) : -2], found[-2:]
    tokens = rstd[..., 0].numel()
    chunks = -(-tokens // library.depth_chunk_tokens(tokens))
    partial = queries.new_empty(max(chunks, 1), dqueries.numel() + dbias.numel())
    getattr(library, f"depth_backward_{DTYPES[sources[0].dtype]}")(
        tokens, sources[0].shape[-1], len(sources), queries.shape[0], queries.shape[1], _addresses(sources), _addresses(keys),
        queries.data_ptr(), int(full), _addresses(gradients), rstd.data_ptr(), scores.data_ptr(), weights.data_ptr(),
        _addresses(dsources), _addresses(dkeys), partial.data_ptr(), dqueries.data_ptr(), dbias.data_ptr(),
    )  # fmt: skip
    return found


def _empty_gradients(sources: list[Tensor], keys: list[Tensor], queries: Tensor) -> list[Tensor]:
    rows = [tensor.new_empty(tensor.shape) for tensor in (*sources, *keys)]
    return [*rows, torch.empty_like(queries), queries.new_empty(queries.shape[0], len(sources))]


@_depth_read_backward.register_fake
def _(
    sources: list[Tensor], keys: list[Tensor], queries: Tensor, full: bool, gradients: list[Tensor], statistics: list[Tensor]
) -> list[Tensor]:
    return _empty_gradients(sources, keys, queries)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    sources, keys, queries, _, full, _ = inputs
    ctx.counts = (len(sources), len(keys), queries.shape[0])
    ctx.full = full
    weights, _, rstd, scores = output[queries.shape[0] :]
    ctx.save_for_backward(*sources, *keys, queries, weights, rstd, scores)


def _backward(ctx, gradients: list[Tensor]):  # type: ignore[no-untyped-def]
    number, number_of_keys, count = ctx.counts
    saved = list(ctx.saved_tensors)
    sources, keys, queries = saved[:number], saved[number : number + number_of_keys], saved[number + number_of_keys]
    found = _depth_read_backward(sources, keys, queries, ctx.full, gradients[:count], saved[-3:])
    return found[:number], found[number:-2], found[-2], found[-1], None, None


_depth_read.register_autograd(_backward, setup_context=_save)
