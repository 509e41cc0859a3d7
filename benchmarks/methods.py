"""A training step of every residual method over PreNorm's, interleaved in one process: 8 layers x 256, 4 x 256 tokens, float32.

No method may take more than three times as long.
"""

from __future__ import annotations



from benchmarks.rows import Row, finish, interleaved, parser, ratios
from benchmarks.step import CASES, step_of
from depthroute.cli.options import changes
from depthroute.residual import SPECIFICATIONS
from depthroute.train.devices import keep_freed_memory

LIMIT = 3.0
SMALL = {"low-rank": "low-rank,rank=64"}  # what a method needs said


def specification(name: str) -> str:
    """The method as the benchmark runs it: as its name alone means it, blocks of eight sub-layers."""
    return SMALL.get(name, name)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--method", action="append", metavar="NAME", help="only this method; may be given more than once")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--together", type=int, default=6, help="methods measured in one interleaved group, each with PreNorm")
    given = options.parse_args()
    keep_freed_memory()
    settings = changes(list(CASES["width-256"].settings))
    names = [name for name in given.method or SPECIFICATIONS if name != "prenorm"]
    rows = []
    for start in range(0, len(names), given.together):
        group = names[start : start + given.together]
        runs = {name: step_of("small", specification(name), settings) for name in ["prenorm", *group]}
        seconds = interleaved(runs, repeats=given.repeats)
        for name in group:
            lowest, median = ratios(seconds, name, "prenorm")
            rows.append(Row(f"{name} over prenorm (median of pairs)", median, LIMIT, unit="x"))
            rows.append(Row(f"{name} over prenorm (minima)", lowest, unit="x"))
    finish(rows, given)


if __name__ == "__main__":
    main()
