"""One read, forward and backward: ours (each backend) beside the Low-Rank paper's pseudo-code, a list loop, installed peers, and a copy.

The copy moves the fewest bytes that the read must move, into buffers that exist: S sources in and one output forward; S sources and a
gradient in and S gradients out backward. Freed memory is kept, as the trainer keeps it. First calls are timed in fresh processes.

On a CUDA device (`--device cuda`): reads of several widths and numbers of sources beside the fused peers, and phases
against reads per site.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers import Read, installed, list_loop, pseudo_code
from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.ops import DepthRead, depth_attention, hold
from depthroute.train.devices import keep_freed_memory

SOURCES, TOKENS, WIDTH, SITES = 5, 4096, 576, 8
Run = Callable[[], object]


class Setting:
    """Sources, queries and upstream gradients of one size on one device, and the runs made of them."""

    def __init__(self, number: int, width: int, device: str, dtype: torch.dtype, tokens: int = TOKENS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.width = device, width

        def rows(scale: float, *shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).mul_(scale).to(device, kind)

        self.sources = [rows(1, tokens, width).requires_grad_() for _ in range(number)]
        self.partial = rows(1, tokens, width).requires_grad_()
        self.queries = rows(0.1, SITES, width, kind=torch.float32).requires_grad_()
        self.upstream = [rows(1, tokens, width) for _ in range(SITES)]
        self.leaves = [*self.sources, self.partial]

    def copies(self, rows: float) -> Run:
        """Copies of so many rows in or out: half of them in, half of them out."""
        whole, rest = int(rows // 2), rows / 2 % 1
        part = int(len(self.partial) * rest)
        plain = [source.detach() for source in self.leaves]
        buffers = [torch.empty_like(self.partial) for _ in range(whole + 1)]

        def run() -> None:
            for index in range(whole):
                buffers[index].copy_(plain[index % len(plain)])
            if part:
                buffers[whole][:part].copy_(plain[0][:part])
            self.wait()

        return run

    def step(self, read: Callable[[], Tensor | Sequence[Tensor]]) -> Run:
        """Forward and backward of what `read` puts out."""

        def run() -> None:
            for leaf in (*self.leaves, self.queries):
                leaf.grad = None
            found = read()
            outputs = [found] if isinstance(found, Tensor) else list(found)
            torch.autograd.backward(outputs, self.upstream[: len(outputs)])
            self.wait()

        return run

    def forward(self, read: Callable[[], object]) -> Run:
        def run() -> None:
            with torch.no_grad():
                read()
            self.wait()

        return run

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def one(self, read: Read) -> Callable[[], Tensor]:
        return lambda: read(self.sources, self.queries[0])

    def ours(self, backend: str = "auto", *, queries: int = 0, rank: int | None = None) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """One read by the first query's last `rank` coordinates, or `queries` of them at once."""

        def read() -> Tensor | tuple[Tensor, ...]:
            query = self.queries[:queries] if queries else self.queries[0]
            return depth_attention(self.sources, query[..., -(rank or self.width) :], backend=backend)  # type: ignore[arg-type]

        return read

    def per_site(self) -> list[Tensor]:
        """The reads of a block's sites, each of all closed sources and the partial sum, as autograd would have them."""
        found = [depth_attention([*self.sources, self.partial], query) for query in self.queries.unbind()]
        return [output for output in found if isinstance(output, Tensor)]

    def per_site_held(self) -> list[Tensor]:
        """The same with shared gradient buffers."""
        sources = [hold(source) for source in (*self.sources, self.partial)]
        found = [depth_attention(sources, query) for query in self.queries.unbind()]
        return [output for output in found if isinstance(output, Tensor)]

    def phases(self) -> list[Tensor]:
        """The closed sources once for all sites, then the partial sum merged at each."""
        reads = depth_attention(self.sources, self.queries, return_statistics=True)
        partial, outputs = hold(self.partial), []
        for query, prior in zip(self.queries.unbind(), reads, strict=True):
            assert isinstance(prior, DepthRead)
            output = depth_attention([partial], query, prior=prior)
            assert isinstance(output, Tensor)
            outputs.append(output)
        return outputs


def one_read(repeats: int) -> list[Row]:
    """Against the copy, every implementation; the targets are for what `auto` takes."""
    at = Setting(SOURCES, WIDTH, "cpu", torch.float32)
    reads: dict[str, Read] = {"pseudo-code": pseudo_code, "list loop": list_loop, **installed("cpu")}
    if _compiles():
        reads |= {f"{name}, torch.compile": torch.compile(reads[name]) for name in ("pseudo-code", "list loop")}
    runs = {"copy": at.copies(3 * SOURCES + 2), "auto": at.step(at.ours()), "reference": at.step(at.ours("reference"))}
    if _compiles():
        runs["compiled"] = at.step(at.ours("compiled"))
    runs |= {name: at.step(at.one(read)) for name, read in reads.items()}
    seconds = interleaved(runs, repeats=repeats)
    rows = []
    for name in [name for name in runs if name != "copy"]:
        lowest, median = ratios(seconds, name, "copy")
        rows.append(Row(f"{name} over copy, forward + backward (minima)", lowest, 1.8 if name == "auto" else None, unit="x"))
        rows.append(Row(f"{name} over copy, forward + backward (median)", median, unit="x"))
    rows.append(Row("pseudo-code over auto, forward + backward (minima)", 1 / ratios(seconds, "auto", "pseudo-code")[0], 10, False, "x"))
    forward = {"copy": at.copies(SOURCES + 1), "auto": at.forward(at.ours())}
    seconds = interleaved(forward, repeats=4 * repeats)
    rows.append(Row("auto over copy, forward (minima)", ratios(seconds, "auto", "copy")[0], 1.4, unit="x"))
    rows.append(Row("auto over copy, forward (median)", ratios(seconds, "auto", "copy")[1], unit="x"))
    return rows


def forms(repeats: int) -> list[Row]:
    """Phases, roles and ranks against what they replace."""
    at = Setting(SOURCES, WIDTH, "cpu", torch.float32)
    runs = {
        "one": at.step(at.ours()), "roles": at.step(at.ours(queries=2)), "rank": at.step(at.ours(rank=WIDTH // 8)),
        "per site": at.step(at.per_site), "per site, held": at.step(at.per_site_held), "phases": at.step(at.phases),
    }  # fmt: skip
    seconds = interleaved(runs, repeats=3 * repeats)
    rows = [
        Row("8 sites of one block, phases over reads per site (minima)", ratios(seconds, "phases", "per site")[0], 0.7, unit="x"),
        Row("the same over reads per site with shared gradient buffers", ratios(seconds, "phases", "per site, held")[0], unit="x"),
        Row("2 roles over 1 (minima)", ratios(seconds, "roles", "one")[0], 1.35, unit="x"),
        Row("rank d/8 over rank d, forward + backward (minima)", ratios(seconds, "rank", "one")[0], 1.0, unit="x"),
    ]
    forward = {"one": at.forward(at.ours()), "rank": at.forward(at.ours(rank=WIDTH // 8))}
    seconds = interleaved(forward, repeats=4 * repeats)
    rows.append(Row("rank d/8 over rank d, forward (minima)", ratios(seconds, "rank", "one")[0], 1.0, unit="x"))
    return rows


def many_sources(repeats: int) -> list[Row]:
    """Is the cost a straight line in the number of sources? And what is allocated beyond outputs and gradients?"""
    numbers = (2, 3, 5, 9, 17, 25, 33, 49)
    settings = {number: Setting(number, WIDTH, "cpu", torch.float32, tokens=2048) for number in numbers}
    runs = {str(number): at.step(at.ours()) for number, at in settings.items()}
    seconds = {int(name): min(times) for name, times in interleaved(runs, repeats=2 * repeats).items()}
    # least squares of the relative error
    design = torch.tensor([[1 / seconds[n], n / seconds[n]] for n in numbers], dtype=torch.float64)
    line = torch.linalg.lstsq(design, torch.ones(len(numbers), 1, dtype=torch.float64)).solution
    off = (design @ line - 1).abs().max().item()
    at = settings[49]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        runs["49"]()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in recorded.key_averages())
    beyond = allocated / at.partial.nbytes - 1 - 49  # an output and 49 gradients
    return [
        Row("cost against 2 to 49 sources, off a straight line", 100 * off, 15, unit=" %"),
        Row("allocated by a read of 49 sources beyond output and gradients, in rows", beyond, 1.0),
    ]


def first_calls() -> list[Row]:
    """The first call of a process, with nothing compiled before and with a warm cache, and of each new number of sources and dtype."""
    program = (
        "import time, torch; from depthroute.ops import depth_attention as read\n"
        "def first(number, dtype):\n"
        "    s = [torch.randn(8, 64).to(dtype).requires_grad_() for _ in range(number)]; q = torch.zeros(64, requires_grad=True)\n"
        "    t = time.perf_counter(); read(s, q).sum().backward(); return time.perf_counter() - t\n"
        "print(first(3, torch.float32)); print(max(first(n, d) for n in (1, 40) for d in (torch.bfloat16, torch.float64, torch.float32)))"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        found = [
            list(map(float, subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                                           check=True).stdout.split()))
            for _ in range(2)
        ]  # fmt: skip
    (cold, new), (warm, again) = found
    return [
        Row("first call with nothing compiled", cold, 10, unit=" s"),
        Row("first call of a process with a warm cache", warm, 1, unit=" s"),
        Row("first call of a new number of sources or dtype", max(new, again), 1, unit=" s"),
    ]


def on_cuda(repeats: int) -> list[Row]:
    """bfloat16 reads beside the fused peers, and phases."""
    rows = []
    peers = installed("cuda")
    for width in (512, 1024, 2048, 4096):
        for number in (2, 5, 9, 17, 33):
            at = Setting(number, width, "cuda", torch.bfloat16, tokens=16384)
            runs = {"copy": at.copies(3 * number + 2), "auto": at.step(at.ours())}
            runs |= {name: at.step(at.one(read)) for name, read in peers.items()}
            seconds = interleaved(runs, repeats=repeats, warm_up=5)
            rows.append(Row(f"{number} x {width}: auto over copy", ratios(seconds, "auto", "copy")[0], unit="x"))
            for name in peers:
                target = 1.0 if name in ("fla-core fused", "fast-attnres") else None
                rows.append(Row(f"{number} x {width}: auto over {name}", ratios(seconds, "auto", name)[0], target, unit="x"))
        at = Setting(SOURCES, width, "cuda", torch.bfloat16, tokens=16384)
        seconds = interleaved({"per site": at.step(at.per_site), "phases": at.step(at.phases)}, repeats=repeats, warm_up=5)
        rows.append(Row(f"{width}: reads per site over phases", 1 / ratios(seconds, "phases", "per site")[0], 1.5, False, "x"))
    return rows


def _compiles() -> bool:
    from depthroute.ops import compiled

    return compiled.refusal(torch.device("cpu"), torch.float32) is None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = options.parse_args()
    started = time.perf_counter()
    if given.device == "cuda":
        rows = on_cuda(given.repeats)
    else:
        keep_freed_memory()
        rows = one_read(given.repeats) + forms(given.repeats) + many_sources(given.repeats) + first_calls()
    finish(rows, given)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
