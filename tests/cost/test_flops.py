"""The FLOP formulas against the Low-Rank paper's tables, and the source counts against a literal simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthroute.common.errors import RequestError
from depthroute.cost.flops import (
    core_flops,
    kernel_reduction,
    projected_cache_increase,
    projected_key_flops,
    routing_flops,
    source_counts,
)
from depthroute.residual.schedule import block_ends

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "low_rank_attnres_sweep.json").read_text(encoding="utf-8"))
SHAPE = {name: GOLDEN["model"][name] for name in ("layers", "width", "mlp_width")}
ROWS = [row for row in GOLDEN["rows"] if row["rank"] is not None]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['method']}-{row['blocks']}-{row['rank']}" for row in ROWS])
def test_added_flops_reproduce_the_paper_to_its_printed_digits(row: dict) -> None:
    sublayers = 2 * SHAPE["layers"]
    counts = source_counts(sublayers, block_ends(sublayers, num_blocks=row["blocks"]))
    added = routing_flops(SHAPE["width"], row["rank"], counts)
    if "Projected" in row["method"]:
        added += projected_key_flops(**SHAPE, rank=row["rank"])
    percent = 100 * added / core_flops(**SHAPE)
    assert float(f"{percent:.4g}") == row["added_flops_percent"]


def test_the_table_is_whole() -> None:
    assert len(ROWS) == 39


def test_projected_example_of_appendix_f() -> None:
    example = GOLDEN["projected_example"]
    shape = {name: example[name] for name in ("layers", "width", "mlp_width")}
    assert projected_key_flops(**shape, rank=example["rank"]) == example["projected_key_multiply_adds_per_token"]
    assert round(100 * kernel_reduction(example["width"], example["rank"]), 2) == example["kernel_reduction_percent"]
    assert 100 * projected_cache_increase(example["width"], example["rank"]) == example["extra_source_cache_percent"]


@given(st.integers(1, 40), st.integers(1, 45))
def test_source_counts_equal_the_papers_pseudo_code(sublayers: int, num_blocks: int) -> None:
    ends = block_ends(sublayers, num_blocks=num_blocks)
    blocks, partial, expected = 1, 0, [1]
    for t in range(1, sublayers + 1):
        partial = 1
        if t in ends:
            blocks, partial = blocks + 1, 0
        expected.append(blocks + partial)
    assert source_counts(sublayers, ends) == tuple(expected)


def test_full_routing_reads_every_earlier_output() -> None:
    assert source_counts(4, block_ends(4)) == (1, 2, 3, 4, 5)
    assert source_counts(5, block_ends(5, block=2)) == (1, 2, 2, 3, 3, 4)


def test_a_read_of_one_source_costs_nothing_and_a_second_role_costs_again() -> None:
    assert routing_flops(8, 8, (1, 2)) == routing_flops(8, 8, (2,)) == 32
    assert routing_flops(8, 8, (1, 2, 3, 2)) == 112


@pytest.mark.parametrize("ends", [(), (0, 4), (2, 2, 4), (3, 2, 4), (2, 3), (2, 5)])
def test_wrong_block_ends_are_refused(ends: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="block ends"):
        source_counts(4, ends)


@pytest.mark.parametrize("rank", [0, 9])
def test_a_rank_that_the_width_does_not_hold_is_refused(rank: int) -> None:
    with pytest.raises(RequestError, match=rf"rank = {rank} .* 1 to 8"):
        routing_flops(8, rank, (2,))
    with pytest.raises(RequestError, match=rf"rank = {rank} .* 1 to 8"):
        kernel_reduction(8, rank)
