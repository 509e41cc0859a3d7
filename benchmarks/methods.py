"""A training step of every residual method over PreNorm's, interleaved in one process: 8 layers x 256, 4 x 256 tokens, float32.

No method may take more than three times as long. `--docs` writes the tables of docs/methods.md, which holds the ratios.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from benchmarks.step import CASES, step_of
from depthroute.cli.options import changes
from depthroute.report.methods import COLUMNS, COSTS, markdown
from depthroute.residual import SPECIFICATIONS
from depthroute.train.devices import keep_freed_memory

LIMIT = 3.0
PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
SMALL = {"low-rank": "low-rank,rank=64"}  # what a method needs said


def specification(name: str) -> str:
    """The method as the benchmark runs it: as its name alone means it, blocks of eight sub-layers."""
    return SMALL.get(name, name)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--method", action="append", metavar="NAME", help="only this method; may be given more than once")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--together", type=int, default=6, help="methods measured in one interleaved group, each with PreNorm")
    options.add_argument("--docs", action="store_true", help="write what was measured into docs/methods.md")
    given = options.parse_args()
    keep_freed_memory()
    settings = changes(list(CASES["width-256"].settings))
    names = [name for name in given.method or SPECIFICATIONS if name != "prenorm"]
    rows, medians = [], {"prenorm": 1.0}
    for start in range(0, len(names), given.together):
        group = names[start : start + given.together]
        runs = {name: step_of("small", specification(name), settings) for name in ["prenorm", *group]}
        seconds = interleaved(runs, repeats=given.repeats)
        for name in group:
            lowest, median = ratios(seconds, name, "prenorm")
            medians[name] = median
            rows.append(Row(f"{name} over prenorm (median of pairs)", median, LIMIT, unit="x"))
            rows.append(Row(f"{name} over prenorm (minima)", lowest, unit="x"))
    if given.docs:
        text = PAGE.read_text(encoding="utf-8")
        methods = SPECIFICATIONS.values()
        steps = {f"step, {torch.get_num_threads()} cores": {name: f"{median:.2f}" for name, median in medians.items()}}
        text = between(text, "methods", markdown(methods, COLUMNS))
        PAGE.write_text(between(text, "costs", markdown(methods, COSTS, steps)), encoding="utf-8")
    finish(rows, given)


def between(text: str, name: str, new: str) -> str:
    """`text` with what stands between the marks of that name replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, rest = text.split(start)
    return f"{head}{start}\n\n{new}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    main()
