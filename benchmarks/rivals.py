"""How long it takes to know that every residual method is right, and to train them all: the contract tests, and the small baseline study.

Minutes on two cores, which is what a person waits for. The study is run only with --study, since it takes most of half an hour.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rows import Row, finish, parser

ROOT = Path(__file__).parent.parent
TESTS = ["-m", "pytest", "-q", "-n", "2", "-m", "not slow and not gpu", "tests/residual", "tests/analysis/test_degenerate.py"]
STUDY = ["-m", "depthroute", "study", "--baselines", "--seeds", "1", "--set", "train.steps=150"]


def minutes(*arguments: str) -> float:
    """How long a Python command takes that must not fail."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)
    return (time.perf_counter() - started) / 60


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--study", action="store_true", help="also run the small baseline study")
    given = options.parse_args()
    rows = [Row("contract tests of every method", minutes(*TESTS), 4.0, unit=" min")]
    if given.study:
        with tempfile.TemporaryDirectory() as place:
            rows.append(Row("small baseline study", minutes(*STUDY, str(Path(place) / "study")), 30.0, unit=" min"))
    finish(rows, given)


if __name__ == "__main__":
    main()
