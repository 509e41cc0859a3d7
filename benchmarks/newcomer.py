"""What a newcomer gets: a fresh clone of HEAD, `make study` and `make test`, timed without the installation, and what the study says.

The cache of extracted text and compiled kernels starts empty. The rows of the study come from its own run folders.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.rows import Row, finish, parser

MINUTE = 60.0
ROOT = Path(__file__).parents[1]
# "Clearly learned": at least this share of the unigram entropy is gone, in every run.
LEARNED = 0.20


def timed(target: str, clone: Path, environment: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(["make", target], cwd=clone, env=environment, check=True)
    return time.perf_counter() - started


def study_rows(study: Path) -> list[Row]:
    """How far each arm learned below the unigram entropy, and what routing costs, from the run folders."""
    plan = json.loads((study / "plan.json").read_text())
    runs = {arm["name"]: [study / "runs" / arm["name"] / f"seed-{seed}" for seed in plan["seeds"]] for arm in plan["arms"]}
    results = {name: [json.loads((run / "result.json").read_text()) for run in folders] for name, folders in runs.items()}
    first = next(iter(runs.values()))[0]
    entropy = json.loads((first / "environment.json").read_text())["data"]["unigram_entropy_nats"]
    rows = []
    for name, found in results.items():
        share = max(result["nll"] for result in found) / entropy
        rows.append(Row(f"{name}: worst validation NLL over unigram entropy", share, 1 - LEARNED))
    parent = plan["arms"][0]["name"]
    for name, found in results.items():
        if name != parent:
            pairs = [
                theirs["tokens_per_second"]["median"] / ours["tokens_per_second"]["median"]
                for ours, theirs in zip(found, results[parent], strict=True)
            ]
            rows.append(Row(f"{name}: time per token over {parent}, median of pairs", statistics.median(pairs), 1.10, unit="x"))
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--study", type=Path, help="only read this finished study")
    given = options.parse_args()
    if given.study:
        finish(study_rows(given.study), given)
        return
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "depthroute"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        environment = {**os.environ, "XDG_CACHE_HOME": str(Path(folder) / "cache")}
        subprocess.run(["make", "-s", ".venv/.installed"], cwd=clone, env=environment, check=True)
        rows = [Row("make study from a fresh clone, without installation", timed("study", clone, environment) / MINUTE, 8, unit=" min")]
        rows += study_rows(clone / "runs" / "study")
        subprocess.run(["make", "-s", ".venv/.installed-dev"], cwd=clone, env=environment, check=True)
        rows.append(Row("make test, without installation", timed("test", clone, environment) / MINUTE, 10, unit=" min"))
    finish(rows, given)


if __name__ == "__main__":
    main()
