"""Checks what the short form of the main job wrote: every cell, the statistics, and a page that holds them."""

import json
import math
import sys
from pathlib import Path

study = Path(sys.argv[1])
plan = json.loads((study / "plan.json").read_text())
statistics = json.loads((study / "statistics.json").read_text())
assert [arm["name"] for arm in plan["arms"]] == ["prenorm", "block", "rd"], plan["arms"]
assert not statistics["missing"] and not statistics["unanalysed"], statistics
assert [(c["arm"], c["parent"]) for c in statistics["comparisons"]] == [("block", "prenorm"), ("rd", "prenorm"), ("rd", "block")]

entropy = None
for arm in plan["arms"]:
    for seed in plan["seeds"]:
        run = study / "runs" / arm["name"] / f"seed-{seed}"
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = arm["config"]["train"]["steps"]
        assert [line["step"] for line in metrics] == list(range(1, steps + 1)), run
        result = json.loads((run / "result.json").read_text())
        assert math.isfinite(result["nll"]) and result["nll"] < metrics[0]["loss"] - 0.5, (run, result["nll"])
        assert (run / "routing.json").exists() == (arm["name"] != "prenorm"), run

# The arms start from one network: with route queries at zero the first loss is the same up to the norms' eps and rounding.
first = [
    json.loads((study / "runs" / arm["name"] / "seed-1" / "metrics.jsonl").read_text().splitlines()[0])["loss"] for arm in plan["arms"]
]
assert max(first) - min(first) < 0.01, first

page = (study / "report" / "index.html").read_text()
assert page.count("<svg") >= 5 and plan["hash"][:12] in page, "the page lacks figures or the plan's hash"
assert (study / "report" / "report.md").stat().st_size > 2000
print(f"{len(plan['arms']) * len(plan['seeds'])} cells, {page.count('<svg')} figures: the short study is whole")
