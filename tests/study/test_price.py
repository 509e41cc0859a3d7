"""What a plan costs: FLOPs, tokens of branches once, memory, hours at a known speed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from depthroute.common.files import write_json
from depthroute.study import price as prices
from depthroute.study.budget import need_of
from depthroute.study.compute import token_compute
from depthroute.study.design import Arm, Study
from depthroute.study.pace import Pace
from depthroute.study.plan import plan_of
from depthroute.study.price import price_lines, price_of
from depthroute.train import RunConfig


def test_the_price_is_that_of_all_tokens_of_all_cells(study: Study, tmp_path: Path) -> None:
    plan = plan_of(dataclasses.replace(study, arms={**study.arms, "block": dataclasses.replace(study.arms["block"], seeds=(3,))}))
    price = price_of(plan, tmp_path)
    plain, block = price.arms
    assert (plain.cells, block.cells, price.cells) == (2, 1, 3)
    assert plain.tokens == block.tokens == 6 * 2 * 8
    compute = token_compute(study.config_of("block").model)
    assert block.flops == 96 * (compute["plain"] + compute["residual"])
    assert price.flops == plain.flops + block.flops
    assert price.tokens == 3 * 96
    assert price.memory_bytes == max(need_of(tmp_path, plan, arm).memory_bytes for arm in ("plain", "block"))
    assert price.hours is plain.hours is None
    lines = price_lines(price)
    assert lines[0].split() == ["arm", "cells", "tokens", "a", "cell", "FLOPs", "memory", "time"]
    assert lines[3].startswith("all")
    assert lines[-1] == "the time is not known before the speed of the machine is measured"


def test_what_a_trunk_trains_for_a_branch_is_counted_once(study: Study, tmp_path: Path) -> None:
    settings = dataclasses.replace(study.base.train, schedule="wsd", warmup_fraction=None, warmup_steps=1, decay_fraction=0.0)
    stays = dataclasses.replace(study.base, train=dataclasses.replace(settings, keep_checkpoints=(4,)))
    decays = dataclasses.replace(study.base, train=dataclasses.replace(settings, decay_fraction=1 / 3))
    branched = dataclasses.replace(
        study,
        base=stays,
        arms={"trunk": Arm(label="Trunk", config=stays), "branch": Arm(label="Branch", config=decays, trunk="trunk")},
        comparisons=(("branch", "trunk"),),
        differs=("train.decay_fraction", "train.keep_checkpoints"),
    )
    trunk, branch = price_of(plan_of(branched), tmp_path).arms
    assert trunk.tokens == 6 * 16
    assert branch.tokens == 2 * 16
    assert branch.flops == pytest.approx(trunk.flops / 3)


def test_hours_follow_from_the_speed_that_was_measured(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(study)
    write_json(tmp_path / "machine.json", {"tokens_per_second": 200.0, "flops_per_token": 5.0, "workers": 2, "cores": 2})
    known = price_of(plan, tmp_path)
    assert known.flops_per_second == 1000.0
    assert known.hours == pytest.approx(known.flops / 1000 / 3600)
    assert sum(arm.hours or 0.0 for arm in known.arms) == pytest.approx(known.hours)
    assert "time at 1e-06 GFLOP/s" in price_lines(known)[-1]

    asked: list[tuple[int, int]] = []

    def measure(config: RunConfig, *, workers: int, threads: int) -> Pace:
        asked.append((workers, threads))
        return Pace(workers=workers, threads=threads, tokens_per_second=50.0, memory_bytes=1)

    monkeypatch.setattr(prices, "measure_pace", measure)
    monkeypatch.setattr(prices, "usable_processors", lambda: 3)
    measured = price_of(plan, tmp_path / "elsewhere", measure=True)
    assert asked == [(3, 1)]
    assert measured.flops_per_second == pytest.approx(50.0 * prices.flops_per_token(study.config_of("plain")))
    # A speed of another split than the one that is asked for is none.
    price_of(plan, tmp_path, measure=True, workers=1, cores=2)
    assert price_of(plan, tmp_path, measure=True, workers=2).flops_per_second == 1000.0
    price_of(plan, tmp_path / "elsewhere", measure=True, cores=2)
    assert asked == [(3, 1), (1, 1), (2, 1)]
