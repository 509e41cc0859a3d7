"""The parameter formulas against the counts that the papers print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.cost.parameters import decoder_parameters, projected_key_parameters, routing_parameters

FOLDER = Path(__file__).parents[1] / "golden"
ROLES = json.loads((FOLDER / "role_decoupled_attnres.json").read_text(encoding="utf-8"))
RANKS = json.loads((FOLDER / "low_rank_attnres_sweep.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("scale", ["S", "M"])
def test_role_decoupled_counts_to_the_last_digit(scale: str) -> None:
    model = ROLES["models"][scale]
    layers, width = model["layers"], model["width"]
    body = decoder_parameters(
        layers=layers, width=width, mlp_width=model["mlp_width"], vocabulary=model["vocabulary"], tied=model["tied_embeddings"]
    )
    sites = 2 * layers + 1
    parent = body + routing_parameters(reads=sites, width=width, rank=width, key_gains=sites)
    assert parent == model["parent_parameters"]
    both = body + routing_parameters(reads=sites, width=width, rank=width, key_gains=sites, value_routes=layers)
    assert both == model["role_decoupled_parameters"]


def test_low_rank_and_projected_example_of_appendix_f() -> None:
    example = RANKS["projected_example"]
    layers, width, rank = example["layers"], example["width"], example["rank"]
    queries = routing_parameters(reads=2 * layers, width=width, rank=rank)
    assert queries == example["sliced_extra_parameters"]
    keys = projected_key_parameters(layers=layers, width=width, mlp_width=example["mlp_width"], rank=rank)
    assert keys + queries == example["projected_extra_parameters"]


def test_grouped_queries_qk_norm_and_an_untied_head_count() -> None:
    shape = {"layers": 3, "width": 8, "mlp_width": 20, "vocabulary": 50}
    plain = decoder_parameters(**shape, tied=True)
    assert decoder_parameters(**shape, tied=False) - plain == 50 * 8
    assert plain - decoder_parameters(**shape, tied=True, key_value_width=2) == 3 * 2 * 8 * 6
    assert decoder_parameters(**shape, tied=True, qk_norm_width=4) - plain == 3 * 2 * 4


def test_a_rank_that_the_width_does_not_hold_is_refused() -> None:
    with pytest.raises(RequestError, match=r"rank = 9 .* 1 to 8"):
        routing_parameters(reads=3, width=8, rank=9)
    with pytest.raises(RequestError, match=r"rank = 0 .* 1 to 8"):
        projected_key_parameters(layers=1, width=8, mlp_width=8, rank=0)
