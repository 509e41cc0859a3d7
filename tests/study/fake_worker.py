"""Stands in for depthroute.study.worker: `python fake_worker.py STUDY ARM SEED` writes a run folder in milliseconds.

`STUDY/behaviour.json` maps "ARM/SEED" to what goes wrong: "refuse", "traceback", "kill", "silent", "unanalysed", "sleep" (until its input
closes), "deaf" (sleeps on when it does) or "meet" (until another one has started).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path


def nll(arm: str, seed: int, step: int) -> float:
    return 4.0 - 0.1 * step + 0.01 * seed - (0.02 + 0.001 * seed if arm == "block" else 0.0)


def write_run(study: Path, arm: str, seed: int, *, complete: bool = True) -> None:
    plan = json.loads((study / "plan.json").read_text())
    config = next(entry["config"] for entry in plan["arms"] if entry["name"] == arm)
    config["train"]["seed"] = seed
    folder = study / "runs" / arm / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"format": 1, **config}))
    milestones = config["train"]["milestones"]
    steps = range(1, milestones[-1] + 1 if complete else milestones[0] + 1)
    lines = [{"step": step, "tokens": 16 * step, "loss": nll(arm, seed, step), "seconds": 0.1} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluations = [
        {"step": step, "tokens": 16 * step, "split": "validation", "nll": nll(arm, seed, step)}
        for step in milestones if step in steps
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    if complete:
        result = {"order": "feistel-1", "nll": evaluations[-1]["nll"], "tokens_per_second": {"median": 160.0}, "training_seconds": 0.6}
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "routing.json").write_text("{}")


def main(study: Path, arm: str, seed: int) -> int:
    with (study / "started.txt").open("a") as file:
        file.write(f"{arm}/{seed} {os.getpid()}\n")
    behaviours = study / "behaviour.json"
    behaviour = json.loads(behaviours.read_text()).get(f"{arm}/{seed}") if behaviours.exists() else None
    if behaviour == "refuse":
        print("some warning\nno room for the data; free some space.", file=sys.stderr)
        return 2
    if behaviour == "traceback":
        raise ValueError("a bug")
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "silent":
        return 3
    if behaviour == "sleep":
        write_run(study, arm, seed, complete=False)
        select.select([0], [], [], 20)  # readable when closed
        time.sleep(0.2)
        (study / "runs" / arm / f"seed-{seed}" / "checkpoint").write_text("written on the way out")
        return 130
    if behaviour == "deaf":
        time.sleep(20)
        return 4
    if behaviour == "meet":
        deadline = time.monotonic() + 10
        while len((study / "started.txt").read_text().splitlines()) < 2:
            if time.monotonic() > deadline:
                return 4
            time.sleep(0.02)
    write_run(study, arm, seed)
    if behaviour == "unanalysed":
        (study / "runs" / arm / f"seed-{seed}" / "routing.json").unlink()
        print("no room for the analysis.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
