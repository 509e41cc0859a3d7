"""Running studies: cells beside each other against one after another, the split that is chosen, what a kill costs, the report of 100 cells.

Times of training are ratios of runs that take turns. The report's time is that of this machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks.rows import Row, finish, parser
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json
from depthroute.data import PrepareConfig, prepare
from depthroute.recipes import matched_study, recipe, run_of
from depthroute.report import write_report
from depthroute.study.pace import measure_pace
from depthroute.study.plan import Study, cell_config, cells, read_plan, run_folder, write_plan
from depthroute.study.runner import run_study
from depthroute.study.split import read_machine, with_threads
from depthroute.train import resolve, train

ROUNDS = 3
SECONDS = 3.0
CORES = 2
SYNTHETIC = Path(__file__).parents[1] / "tests" / "report" / "synthetic_study.py"
DRIVER = "import sys, pathlib; from depthroute.study.runner import run_study; run_study(None, pathlib.Path(sys.argv[1]), console=False)"
TINY = {
    "model.vocabulary": "300", "model.width": "16", "model.layers": "2", "model.heads": "2", "model.mlp_width": "32", "model.context": "16",
    "train.steps": "300", "train.sequences": "4", "train.checkpoint_every": "20", "train.evaluation_tokens": "64", "train.threads": "1",
}  # fmt: skip


def split_rows(folder: Path) -> list[Row]:
    """The first study's body on two cores, and the split that a study with open threads takes there."""
    base = run_of(recipe("small"), folder, residual="prenorm")
    base = dataclasses.replace(base, data_fingerprint="0" * 64, train=dataclasses.replace(base.train, threads=None))
    study = matched_study(recipe("small"), base, arms=("prenorm", "block"), seeds=(1,))
    with_threads(study, folder, cores=CORES)
    machine = read_machine(folder)
    assert machine is not None
    config = resolve(study.config_of(machine["arm"]))
    ways: dict[tuple[int, int], list[float]] = {(1, CORES): [], (CORES, 1): []}
    for _ in range(ROUNDS):
        for (workers, threads), found in ways.items():
            found.append(measure_pace(config, workers=workers, threads=threads, seconds=SECONDS).tokens_per_second)
    serial, parallel = ways.values()
    medians = {way: statistics.median(found) for way, found in ways.items()}
    chosen = medians[machine["workers"], machine["threads"]]
    ratios = [one / other for one, other in zip(serial, parallel, strict=True)]
    return [
        Row("two cells beside each other over one after the other, time (median of pairs)", statistics.median(ratios), 0.9, unit="x"),
        Row("two cells beside each other over one after the other, time (minima)", max(serial) / max(parallel), 0.9, unit="x"),
        Row("speed of the split that was chosen over the fastest (medians)", chosen / max(medians.values()), 0.95, at_most=False),
    ]


def report_rows(folder: Path) -> list[Row]:
    write_study = runpy.run_path(str(SYNTHETIC))["write_study"]
    residual = {"method": "attnres", "block": 4, "roles": "decoupled"}
    arms = {"prenorm": ("PreNorm", {"method": "prenorm"}, 0.0)}
    arms |= {f"rd-{index}": (f"RD-AttnRes {index}", residual, -0.02 * index) for index in range(1, 10)}
    write_study(folder, seeds=range(10), arms=arms, comparisons=[(name, "prenorm") for name in arms if name != "prenorm"])
    started = time.perf_counter()
    write_report(folder)
    return [Row("report of a study of 100 cells of 400 steps", time.perf_counter() - started, 20, unit=" s")]


def kill_rows(folder: Path) -> list[Row]:
    """A study and its cell are killed after some random time, and run again."""
    plan = read_plan(_tiny_study(folder))
    runs = [run_folder(folder, *cell) for cell in cells(plan)]
    lost = 0
    for _ in range(2):
        _killed_after(folder, lambda: sum(map(_checkpoint, runs)))  # somewhere behind a new checkpoint
        reached, seen = list(map(_checkpoint, runs)), [len(_continued(run)) for run in runs]
        _killed_after(folder, lambda: sum(len(_continued(run)) for run in runs))  # once it has gone on
        for run, step, before in zip(runs, reached, seen, strict=True):
            lost = max([lost, *(step - after for after in _continued(run)[before:])])
    _wait_for(lambda: _runs_to_its_end(folder))
    differing = 0
    for cell, run in zip(cells(plan), runs, strict=True):
        alone = folder.parent / "alone" / cell[0]
        train(cell_config(plan, *cell), alone, console=False)
        here, there = (path / "metrics.jsonl" for path in (run, alone))
        losses = [[json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in (here, there)]
        differing += sum(one != other for one, other in zip(*losses, strict=True))
    return [
        Row("steps lost by a kill beyond those since the last checkpoint", lost, 0),
        Row("training losses that differ from runs that never stopped", differing, 0),
    ]


def _tiny_study(folder: Path) -> Path:
    folder.mkdir()
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"the sum of {i} sources, read by site {i % 7}, " * 5}) + "\n" for i in range(200)))
    prepare(PrepareConfig.of(str(source), vocabulary=300, sample_one_in=1, validation_share=0.15), folder / "data")
    base = run_of(recipe("small"), folder / "data", residual="prenorm", settings=TINY)
    study: Study = matched_study(recipe("small"), base, arms=("prenorm", "block:2"), seeds=(1,))
    write_plan(study, folder)
    return folder


def _killed_after(folder: Path, count: Callable[[], int]) -> None:
    """Run the study and kill it a random moment after `count` has risen, or when it is at its end."""
    before = count()
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], start_new_session=True) as driver:
        _wait_for(lambda: driver.poll() is not None or count() > before)
        time.sleep(random.random() * 0.3)
        _kill(driver)


def _kill(driver: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the study and to its cells, which have sessions of their own."""
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(int(worker), signal.SIGKILL)
    driver.wait()
    time.sleep(0.1)


def _checkpoint(run: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")), default=0)


def _continued(run: Path) -> list[int]:
    log = run / "log.txt"
    return [int(step) for step in re.findall(r"continuing after step (\d+)", log.read_text())] if log.exists() else []


def _runs_to_its_end(folder: Path) -> bool:
    try:
        run_study(None, folder, console=False)
    except RequestError as error:
        if "is being run by another process" not in str(error):
            raise
        return False
    missing = read_json(folder / "statistics.json")["missing"]
    assert missing == [], missing
    return True


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a cell of some seconds did not come to its end in five minutes")
        time.sleep(0.01)


PARTS = {"split": split_rows, "report": report_rows, "kill": kill_rows}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=list(PARTS), action="append", help="only this part; may be given more than once")
    given = options.parse_args()
    rows = []
    for name in given.part or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            rows += PARTS[name](Path(folder) / "study")
    finish(rows, given)


if __name__ == "__main__":
    main()
