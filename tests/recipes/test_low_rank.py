"""The sweep of the Low-Rank paper: all of Table 5, its losses and its added FLOPs, in both forms."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from depthroute.cost.summary import routing_percent
from depthroute.recipes.low_rank import REPLICATED, low_rank_sweep
from depthroute.residual import AttnResConfig, PreNormConfig
from depthroute.study.plan import Study, cells, plan_of
from depthroute.train import RunConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "low_rank_attnres_sweep.json").read_text(encoding="utf-8"))
KEYS = {"Projected": "projected", "(full RMS)": "full-rms"}


def study(form: Any = "small", **arguments: Any) -> Study:
    return low_rank_sweep(Path("tokens"), form=form, **arguments)


def planned(made: Study) -> dict[str, Any]:
    """The plan, with the fingerprint of data that nobody has."""
    return plan_of(replace(made, base=replace(made.base, data_fingerprint="0" * 64)))


def run(made: Study, arm: str) -> RunConfig:
    config = made.arms[arm].config
    assert isinstance(config, RunConfig)
    return config


def golden_place(row: dict[str, Any]) -> tuple[str, int, int]:
    """A row of Table 5 by the factors that an arm carries."""
    keys = next((found for words, found in KEYS.items() if words in row["method"]), "slice")
    return keys, row["blocks"] or 2 * GOLDEN["model"]["layers"], row["rank"]


def test_every_row_of_the_table_is_an_arm_with_its_loss_and_its_flops() -> None:
    made = study("paper")
    by_place = {tuple(arm.factors[name] for name in ("keys", "blocks", "rank")): name for name, arm in made.arms.items() if arm.factors}
    rows = {golden_place(row): row for row in GOLDEN["rows"] if row["rank"] is not None}
    assert by_place.keys() == rows.keys() and len(made.arms) == len(GOLDEN["rows"]) == 40
    repeated = {"block6": "attnres", "block6-d8": "low_rank"}
    for place, row in rows.items():
        name = by_place[place]
        arm = made.arms[name]
        assert float(f"{routing_percent(run(made, name).model):.4g}") == row["added_flops_percent"], name
        loss = statistics.mean(GOLDEN["three_seed_pairs"][repeated[name]]) if name in repeated else row["validation_loss"]
        assert arm.paper is not None and arm.paper.value == pytest.approx(loss, abs=5e-4 if name in repeated else 0), name
    baseline = made.arms["prenorm"]
    assert run(made, "prenorm").model.residual == PreNormConfig()
    assert baseline.paper is not None and baseline.paper.value == GOLDEN["rows"][0]["validation_loss"]
    assert run(made, "prenorm").train.steps * run(made, "prenorm").tokens_per_step == pytest.approx(GOLDEN["training_tokens"], rel=1e-5)


def test_names_are_shares_that_both_forms_have_in_common() -> None:
    small, paper = study("small"), study("paper")
    assert list(small.arms) == list(paper.arms) and small.comparisons == paper.comparisons
    assert [(c.text, c.kind, c.arm, c.parent) for c in small.claims] == [(c.text, c.kind, c.arm, c.parent) for c in paper.claims]
    for name in small.arms:
        if name == "prenorm":
            continue
        ours, theirs = (run(made, name).model for made in (small, paper))
        assert isinstance(ours.residual, AttnResConfig) and isinstance(theirs.residual, AttnResConfig)
        assert ours.residual.rank is not None and theirs.residual.rank is not None
        assert ours.residual.rank / ours.width == theirs.residual.rank / theirs.width
        sizes = [{b - a for a, b in zip((0, *ends), ends, strict=False)} for ends in
                 (model.residual.block_ends(2 * model.layers) for model in (ours, theirs))]  # fmt: skip
        assert sizes[0] == sizes[1] and len(sizes[0]) == 1, name  # blocks of one size, the same in both
        assert replace(ours.residual, rank=1, num_blocks=None) == replace(theirs.residual, rank=1, num_blocks=None)
        assert ours.residual.key_gain is False
    assert run(small, "block6-3d4").model.residual == AttnResConfig(num_blocks=4, rank=48, key_gain=False)
    assert run(small, "full").model.residual == AttnResConfig(rank=64, key_gain=False)
    assert run(small, "full-rms-block6-d8").model.residual == AttnResConfig(num_blocks=4, rank=8, key_norm="full", key_gain=False)
    assert run(small, "projected-full-d16").model.residual == AttnResConfig(rank=4, keys="projected", key_gain=False)


def test_the_small_body_keeps_the_proportions_of_the_paper() -> None:
    small, paper = (run(study(form), "prenorm").model for form in ("small", "paper"))
    assert small.mlp_width / small.width == paper.mlp_width / paper.width
    for name in ("qk_norm", "tied_embeddings", "rope_base"):
        assert getattr(small, name) == getattr(paper, name)
    assert (small.layers, small.width, small.resolved_head_width, small.context) == (12, 64, 16, 128)


def test_only_the_repeated_pair_has_more_than_one_seed() -> None:
    made = study(seeds=(3, 4, 5, 6))
    trained = cells(planned(made))
    assert len(trained) == 38 + 2 * 4
    for name in made.arms:
        assert [seed for arm, seed in trained if arm == name] == ([3, 4, 5, 6] if name in REPLICATED else [3])
    assert len(study().seeds) == len(GOLDEN["three_seed_pairs"]["attnres"])


def test_comparisons_are_within_a_grouping_or_with_the_baseline() -> None:
    made = study()
    assert made.comparisons[0] == ("block6-d8", "block6")
    assert {arm for arm, parent in made.comparisons if parent == "prenorm"} == set(made.arms) - {"prenorm"}
    for arm, parent in made.comparisons:
        if parent != "prenorm":
            assert made.arms[arm].factors["blocks"] == made.arms[parent].factors["blocks"]
    beside = {(arm, parent) for arm, parent in made.comparisons}
    assert {("projected-full-d16", "full-d16"), ("full-rms-block6-d8", "block6-d8"), ("full-rms-block6-d8", "block6")} <= beside
    planned(made)  # nothing but the method differs within a pair


def test_claims_carry_the_paper_s_effects() -> None:
    made = study("paper")
    losses = {name: arm.paper.value for name, arm in made.arms.items() if arm.paper is not None}
    for claim in made.claims:
        assert claim.paper is not None
        assert claim.paper.value == pytest.approx(losses[claim.arm] - losses[claim.parent], abs=1.1e-3), claim.text
        if claim.kind == "equivalent":
            assert claim.margin == 0.003 and abs(claim.paper.value) < claim.margin
    first = made.claims[0]
    assert (first.arm, first.parent, first.kind) == ("block6-d8", "block6", "lower") and "3 seeds" in first.boundary
    assert all("1 seed," in claim.boundary for claim in made.claims[1:])
    pairs = GOLDEN["three_seed_pairs"]
    assert first.paper is not None
    assert first.paper.value == pytest.approx(statistics.mean(pairs["low_rank"]) - statistics.mean(pairs["attnres"]), abs=5e-4)
