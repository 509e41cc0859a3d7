"""The traffic formulas against the paper's table, and against what every method touches as it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from touched import counted
from tried import EVERY, MORE, TYPICAL, parsed

from depthroute.common.errors import RequestError
from depthroute.cost.traffic import FORMULAS, least_traffic, table_traffic
from depthroute.model import ModelConfig
from depthroute.residual import SPECIFICATIONS, AttnResConfig, PreNormConfig, ResidualConfig
from depthroute.residual.mhc import MHCConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "attention_residuals.json").read_text(encoding="utf-8"))["memory_io_per_layer"]


def shape(residual: ResidualConfig, layers: int = 6) -> ModelConfig:
    return ModelConfig(
        vocabulary=13, width=16, layers=layers, heads=4, key_value_heads=2, head_width=6, mlp_width=20, context=16, residual=residual
    )


@pytest.mark.parametrize("text", [*EVERY, *MORE])
def test_the_formula_is_what_a_run_touches(text: str) -> None:
    config = shape(parsed(text))
    traffic = least_traffic(config)
    assert (traffic.read, traffic.written) == counted(config)


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("text", ["denseformer", "muddformer", "mrla-base", "mrla-light", "unet", "x0", "full", "delta", "mhc", "static"])
def test_the_formula_holds_at_other_depths(text: str, layers: int) -> None:
    config = shape(parsed(text), layers)
    traffic = least_traffic(config)
    assert (traffic.read, traffic.written) == counted(config)


def test_every_method_has_a_formula() -> None:
    assert set(FORMULAS) == {type(method.configure(TYPICAL)) for method in SPECIFICATIONS.values()}


def test_the_plain_stream_moves_three_widths_in_both_ways_of_counting() -> None:
    assert least_traffic(shape(PreNormConfig())).total / 12 == table_traffic(PreNormConfig(), width=16, sublayers=12) == 3 * 16


def test_the_table_of_the_paper() -> None:
    width, sublayers = 7_168, GOLDEN["sublayers"]
    methods = {
        "standard": PreNormConfig(), "mhc": MHCConfig(streams=GOLDEN["mhc_streams"]), "full_two_phase": AttnResConfig(),
        "block_two_phase": AttnResConfig(block=GOLDEN["sublayers_per_block"]),
    }  # fmt: skip
    scalars = {"mhc": 2 * 4**2 + 4 * 4}
    for name, expected in GOLDEN["typical_in_units_of_d"].items():
        found = table_traffic(methods[name], width=width, sublayers=sublayers, groups=GOLDEN["blocks"])
        assert found == expected * width + scalars.get(name, 0)


@pytest.mark.parametrize(("groups", "size"), [(8, 16), (3, 5), (1, 4)])
def test_the_table_by_its_operations(groups: int, size: int) -> None:
    """Attention Residuals, Table 1 and Eqs. 11-17, an operation at a time, in the table's conventions."""
    width, sublayers = 10, groups * size
    full = block = 0
    for group in range(groups):
        full += 2 * group * size + size  # phase 1: keys and values of earlier groups once, an output for every sub-layer
        block += groups + size  # as many sources as the last block has
        for earlier in range(size):
            full += 2 * earlier + 1  # phase 2: keys and values within the group
            block += 3 + 1  # the read ahead, the partial sum and the output, and the partial sum again
    assert table_traffic(AttnResConfig(), width=width, sublayers=sublayers, groups=groups) == full * width / sublayers
    assert table_traffic(AttnResConfig(block=size), width=width, sublayers=sublayers) == pytest.approx(block * width / sublayers)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_table_s_row_of_streams_by_its_operations(n: int) -> None:
    d = 10
    coefficients = n * d + (n * n + 2 * n)
    read = (n * d + n) + d
    spread = (d + n) + n * d
    mix = (n * d + n * n) + n * d
    merge = 2 * n * d + n * d
    assert table_traffic(MHCConfig(streams=n), width=d, sublayers=6) == coefficients + read + spread + mix + merge


def test_the_table_has_no_other_rows() -> None:
    assert table_traffic(parsed("rd:4"), width=16, sublayers=12) is None
    assert table_traffic(parsed("window"), width=16, sublayers=12) is None
    assert table_traffic(parsed("denseformer"), width=16, sublayers=12) is None


def test_a_method_from_outside_is_refused_by_name() -> None:
    class Other(PreNormConfig):
        name = "other"

    with pytest.raises(RequestError, match="'other' has no formula"):
        least_traffic(shape(Other()))
