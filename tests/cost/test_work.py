"""The formulas for multiply-adds against the Low-Rank paper's accounting, and against what every method multiplies as it runs."""

from __future__ import annotations

import pytest
from multiplied import multiplied
from tried import EVERY, MORE, parsed

from depthroute.common.errors import RequestError
from depthroute.cost.summary import routing_percent
from depthroute.cost.work import FORMULAS, body_work, routing_work
from depthroute.model import ModelConfig
from depthroute.residual import SPECIFICATIONS, AttnResConfig, PreNormConfig, ResidualConfig


def shape(residual: ResidualConfig) -> ModelConfig:
    """Wide enough that no tensor of a token is taken for a few coefficients."""
    return ModelConfig(
        vocabulary=13, width=64, layers=6, heads=4, key_value_heads=2, mlp_width=20, context=16, residual=residual
    )


@pytest.mark.parametrize("text", [*EVERY, *MORE, "highway,gate=full", "highway,gate=scalar,coupled=false", "dynamic-query,query_rank=3"])
def test_the_formula_is_what_a_run_multiplies(text: str) -> None:
    model = shape(parsed(text))
    gains_of_norms = 28 * 64 if text == "muddformer-prepost" else 0  # 7 before the sums and 21 behind them
    assert routing_work(model).total == multiplied(model) - gains_of_norms


def test_every_method_has_a_formula() -> None:
    assert set(FORMULAS) == {type(method.configure(AttnResConfig())) for method in SPECIFICATIONS.values()}


def test_parts_and_the_share_of_the_body() -> None:
    model = shape(parsed("rd:4,rank=6"))
    work = routing_work(model)
    sources = 36 + 14  # of the 12 reads behind the first, and of the 5 attention sites among them once more
    assert (work.score, work.value, work.projection) == (6 * sources, 64 * sources, 0)
    assert body_work(model) == 6 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 20)
    assert routing_percent(model) == 100 * work.total / body_work(model)
    projected = routing_work(shape(parsed("low-rank:4,rank=6,keys=projected")))
    assert projected.projection == 6 * (6 * (64 + 20) + 64)


def test_a_method_from_outside_is_refused_by_name() -> None:
    class Other(PreNormConfig):
        name = "other"

    with pytest.raises(RequestError, match="'other' has no formula"):
        routing_work(shape(Other()))
