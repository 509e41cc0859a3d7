"""The crossed study: an orthogonal half fraction that holds both corners, and conditions that are what their names say."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.recipes.crossed import CONDITIONS, CORNERS, METHODS, crossed_study
from depthroute.residual import AttnResConfig
from depthroute.study.plan import Study, cells, plan_of
from depthroute.train import RunConfig

TOKENS = Path("tokens")
FACTORS = ("learning_rate", "route_learning_rate", "head_width", "steps")
LEVELS = {
    "small": ((1e-3, 3e-3), (1e-3, 3e-3), (16, 32), (150, 600)),
    "paper": ((3e-4, 9e-4), (3e-4, 9e-4), (16, 32), (15_259, 61_036)),
}


def planned(made: Study) -> dict[str, Any]:
    """The plan, with the fingerprint of data that nobody has."""
    return plan_of(replace(made, base=replace(made.base, data_fingerprint="0" * 64)))


def run(made: Study, arm: str) -> RunConfig:
    config = made.arms[arm].config
    assert isinstance(config, RunConfig)
    return config


def test_the_design_is_a_balanced_orthogonal_half_fraction_of_resolution_four() -> None:
    rows = [condition.signs for condition in CONDITIONS]
    assert len(set(rows)) == 8
    columns = list(zip(*rows, strict=True))
    assert len(columns) == 4 and all(sum(column) == 0 for column in columns)
    assert all(sum(a * b for a, b in zip(left, right, strict=True)) == 0 for left, right in combinations(columns, 2))
    for one, (left, right) in ((i, pair) for i in range(4) for pair in combinations(range(4), 2) if i not in pair):
        assert sum(row[one] * row[left] * row[right] for row in rows) == 0  # no factor is mixed with an interaction of two
    assert {a * b * c * d for a, b, c, d in rows} == {-1}  # the defining relation
    assert {condition.name for condition in CONDITIONS} >= set(CORNERS)
    assert len({(rate, head, steps) for rate, _, head, steps in rows}) == 8  # PreNorm, without routes, sees a full factorial


@pytest.mark.parametrize("form", ["small", "paper"])
def test_every_condition_is_at_its_levels_and_is_a_scale_with_four_matched_arms(form: Any) -> None:
    made = crossed_study(TOKENS, form=form)
    assert len(made.arms) == 8 * len(METHODS) and len(cells(planned(made))) == 64
    for condition in CONDITIONS:
        wanted = {name: levels[sign > 0] for name, levels, sign in zip(FACTORS, LEVELS[form], condition.signs, strict=True)}
        for method in METHODS:
            name = f"{method}-{condition.name}"
            arm, config = made.arms[name], run(made, name)
            assert arm.scale == condition.name and arm.factors == {"method": method, **{k: pytest.approx(v) for k, v in wanted.items()}}
            train = config.train
            found = (train.learning_rate, train.learning_rate * train.route_rate, config.model.resolved_head_width, train.steps)
            assert found == pytest.approx(tuple(wanted.values())) and train.milestones[-1] == train.steps
        assert len({run(made, f"{method}-{condition.name}").train for method in METHODS}) == 1
    assert len({arm.factors["route_learning_rate"] for arm in made.arms.values()}) == 2  # levels that a table can be grouped by


def test_arms_pairs_and_claims() -> None:
    made = crossed_study(TOKENS, seeds=(3,), vocabulary=300)
    assert made.seeds == (3,) and len(crossed_study(TOKENS).seeds) == 2
    assert made.comparisons[:2] == (("rd-hhhl", "block-hhhl"), ("rd-lllh", "block-lllh"))  # where the two experiments disagreed
    assert all(made.arms[arm].scale == made.arms[parent].scale for arm, parent in made.comparisons)
    assert [(claim.arm, claim.parent) for claim in made.claims] == list(made.comparisons[:2])
    assert run(made, "low-rank-hhhl").model.residual == AttnResConfig(
        layers_per_block=2, rank=16, key_gain=False, first_read=True
    )
    assert run(made, "rd-hhhl").model.vocabulary == 300
    assert list(made.arms) == list(crossed_study(TOKENS, form="paper").arms)


def test_settings_move_the_lower_levels() -> None:
    made = crossed_study(TOKENS, settings={"train.steps": "8", "train.learning_rate": "0.01", "model.width": "32"})
    assert {run(made, name).train.steps for name in made.arms} == {8, 32}
    assert {run(made, name).train.milestones for name in made.arms} == {(1, 2, 4, 8), (4, 8, 16, 32)}
    assert {round(run(made, name).train.learning_rate, 9) for name in made.arms} == {0.01, 0.03}
    assert run(made, "low-rank-hhhl").model.residual == AttnResConfig(layers_per_block=2, rank=8, key_gain=False, first_read=True)
    kept = crossed_study(TOKENS, settings={"train.milestones": "[5]"})
    assert {run(kept, name).train.milestones for name in kept.arms} == {(5,)}
    planned(kept)
    with pytest.raises(RequestError, match=r"model\.heads = 1 is odd"):
        crossed_study(TOKENS, settings={"model.heads": "1"})
