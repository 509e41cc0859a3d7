"""Compiles the C files beside it with the machine's C compiler, once, into the user's cache, and loads it through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from depthroute.common.errors import FailureError
from depthroute.common.files import cache_folder, write_bytes, write_text

_UNITS = ("kernel.c", "steps.c")
_SOURCES = tuple(Path(__file__).with_name(name) for name in (*_UNITS, "kernel_rows.h", "steps_typed.h"))
_COMPILE = ("-O3", "-fPIC", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")
# Each is left out where the compiler does not know it; the result is slower, never different in kind.
_OPTIONAL = ("-march=native", "-fopenmp")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """The compiled kernel, or why there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler (cc, gcc or clang) was found on the PATH"
    try:
        return _declare(_load(compiler))
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"{compiler} could not build the kernel: {detail.strip()[:300]}"


def _load(compiler: str) -> ctypes.CDLL:
    """From the user's cache, or compiled and put there, keyed by all that decides it: source, compiler, flags, processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    identity = [*(source.read_text() for source in _SOURCES), compiler, version, *_COMPILE, *_OPTIONAL, platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    target = cache_folder() / f"kernel-{digest}.so"
    if _is_ours(target):
        return ctypes.CDLL(str(target))
    with tempfile.TemporaryDirectory() as folder:
        flags = [flag for flag in _OPTIONAL if _accepts(compiler, flag, folder)]
        linked = _compile(compiler, flags, folder)
        try:
            found = ctypes.CDLL(str(linked))
        except OSError:  # torch was built with another OpenMP: one thread then
            linked = _compile(compiler, [flag for flag in flags if flag != "-fopenmp"], folder)
            found = ctypes.CDLL(str(linked))
        data = linked.read_bytes()
    with suppress(OSError, FailureError):  # no place to cache in: this process keeps what it has loaded
        write_bytes(target, data)
        write_text(target.with_suffix(".sha256"), hashlib.sha256(data).hexdigest())
    return found


def _is_ours(target: Path) -> bool:
    """A whole kernel that this user put there: a cut one would end the process that loads it."""
    try:
        recorded = target.with_suffix(".sha256").read_text()
        mine = not hasattr(os, "getuid") or target.stat().st_uid == os.getuid()
        return mine and hashlib.sha256(target.read_bytes()).hexdigest() == recorded
    except OSError:
        return False


def _compile(compiler: str, flags: list[str], folder: str) -> Path:
    built, linked = [Path(folder) / f"{name}.o" for name in _UNITS], Path(folder) / f"kernel-{len(flags)}.so"
    # OpenMP is not linked: its symbols are found in the runtime that torch has loaded, so that both share one set of threads.
    undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    for command in (
        *([compiler, *_COMPILE, *flags, "-c", str(source), "-o", str(one)] for source, one in zip(_SOURCES, built, strict=False)),
        [compiler, "-shared", *undefined, *map(str, built), "-o", str(linked), "-lm"],
    ):
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return linked


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


def _declare(found: ctypes.CDLL) -> ctypes.CDLL:
    integer, pointer, text, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double
    found.depth_chunks.argtypes, found.depth_chunks.restype = [integer], integer
    operands = [integer] * 6 + [ctypes.c_int] * 2 + [pointer] * 9
    for suffix in ("f32", "bf16", "f16", "f64"):
        if not hasattr(found, f"depth_forward_{suffix}"):
            continue  # a compiler without float16
        forward, backward = (getattr(found, f"depth_{way}_{suffix}") for way in ("forward", "backward"))
        forward.argtypes = operands + [pointer] * 2 + [number] * 2 + [pointer] * 7
        backward.argtypes = operands + [pointer] * 9 + [text] * 2 + [pointer] * 6
        forward.restype = backward.restype = None
    found.run_steps.argtypes, found.run_steps.restype = [pointer, pointer, integer], None
    found.most_rows.argtypes, found.most_rows.restype = [], integer
    return found
