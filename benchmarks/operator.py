"""One read of 5 sources of 4096 x 576 in float32, forward and backward: ours beside the Low-Rank paper's pseudo-code and a copy.

The copy moves the fewest bytes that the read must move: S sources in and one output forward; S sources and a gradient in and S gradients
out backward. First calls are timed in a fresh process with an empty cache of compiled kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import torch
from torch import Tensor

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.ops import depth_attention

SOURCES, TOKENS, WIDTH = 5, 4096, 576


def pseudo_code(sources: list[Tensor], query: Tensor) -> Tensor:
    """Low-Rank AttnRes, Appendix H."""
    values = torch.stack(sources)
    keys = torch.nn.functional.rms_norm(values, values.shape[-1:])
    weights = (keys * query).sum(-1).softmax(dim=0)
    return (weights[..., None] * values).sum(dim=0)


def measure(repeats: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True) for _ in range(SOURCES)]
    query = torch.randn(WIDTH, generator=generator).mul_(0.1).requires_grad_()
    gradient = torch.randn(TOKENS, WIDTH, generator=generator)
    buffers = [torch.empty(TOKENS, WIDTH) for _ in range(2 * SOURCES + 1)]

    def copy() -> None:  # forward 5 in, 1 out; backward 6 in, 5 out: 17 rows moved, 8.5 copies of one in and one out
        for index in range(8):
            buffers[index].copy_(sources[index % SOURCES].detach())
        buffers[8][: TOKENS // 2].copy_(sources[0].detach()[: TOKENS // 2])

    def step(read: object) -> object:
        def run() -> None:
            for source in sources:
                source.grad = None
            read(sources, query).backward(gradient)  # type: ignore[operator]

        return run

    candidates = {
        "copy": copy,
        "pseudo-code": step(pseudo_code),
        "reference": step(lambda s, q: depth_attention(s, q, backend="reference")),
        "auto": step(depth_attention),
    }
    seconds = interleaved(candidates, repeats=repeats)  # type: ignore[arg-type]
    rows = [Row("pseudo-code over auto, forward + backward (minima)", 1 / ratios(seconds, "auto", "pseudo-code")[0], 10, False, "x")]
    rows.append(Row("pseudo-code over auto, forward + backward (median)", 1 / ratios(seconds, "auto", "pseudo-code")[1], 10, False, "x"))
    for name in ("pseudo-code", "reference", "auto"):
        rows.append(Row(f"{name} over copy, forward + backward (minima)", ratios(seconds, name, "copy")[0], unit="x"))
    return rows


def first_call() -> float:
    """Seconds from the first call of a fresh process to its result, with nothing compiled before."""
    program = (
        "import time, torch; from depthroute.ops import depth_attention as read; s = [torch.randn(8, 64) for _ in range(3)];"
        "t = time.perf_counter(); read(s, torch.zeros(64)); print(time.perf_counter() - t)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=9)
    given = options.parse_args()
    started = time.perf_counter()
    rows = measure(given.repeats)
    rows.append(Row("first call with nothing compiled", first_call(), 5, unit=" s"))
    finish(rows, given)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
