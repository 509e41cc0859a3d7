"""Rank crossed with the rate of routes, and RD against Block over it."""

from __future__ import annotations

from pathlib import Path

from depthroute.recipes.next_tests import rd_route_rate
from depthroute.recipes.route_rate import PARTS, route_rate_study
from depthroute.residual import AttnResConfig

SETTINGS = {"data_fingerprint": "f" * 64}


def test_every_rank_has_every_rate_and_keys_have_no_gain() -> None:
    study = route_rate_study(Path("none"), settings=SETTINGS)
    width = study.base.model.width
    for part in PARTS:
        for rate in PARTS:
            run = study.config_of(f"d{part}-x{rate}")
            method = run.model.residual
            assert isinstance(method, AttnResConfig) and (method.rank, method.key_gain) == (width // part, False)
            assert run.train.route_rate == rate and study.arms[f"d{part}-x{rate}"].factors == {"rank": width // part, "route_rate": rate}
    block = study.config_of("block").model.residual
    assert isinstance(block, AttnResConfig) and (block.rank, block.key_gain) == (None, True)
    # The claims of equal speed are made where rank times rate is the width.
    for claim in study.claims:
        if claim.kind == "equivalent":
            factors = study.arms[claim.arm].factors
            assert factors["rank"] * factors["route_rate"] == width  # type: ignore[operator]


def test_rd_and_block_share_a_rate_in_every_pair_of_the_two() -> None:
    study = rd_route_rate(Path("none"), settings=SETTINGS)
    for arm, parent in study.comparisons:
        ours, theirs = study.config_of(arm), study.config_of(parent)
        if arm.startswith("rd") and parent.startswith("block"):
            assert ours.train == theirs.train
        else:
            assert arm.partition("-")[0] == parent.partition("-")[0] and ours.model == theirs.model
            assert (ours.train.route_rate, theirs.train.route_rate) == (8.0, 1.0)
