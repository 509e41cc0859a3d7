"""The fitted quadratic: exact recovery, scipy and numpy as oracles, and the Low-Rank paper's sweep."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from depthroute.common.errors import RequestError
from depthroute.study.grid import Cell, Replicates, Run
from depthroute.study.surface import TERMS, Surface, response_surface

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "low_rank_attnres_sweep.json").read_text(encoding="utf-8"))
PAIRS = GOLDEN["three_seed_pairs"]
SWEEP = [
    Run(cell=Cell(rank=row["rank"], blocks=row["blocks"] or 2 * GOLDEN["model"]["layers"]), seed=0, loss=row["validation_loss"])
    for row in GOLDEN["rows"]
    if row["method"] in ("Full AttnRes", "Block AttnRes", "Full LR-AttnRes", "Block LR-AttnRes")
]
RANKS, BLOCKS = (16, 32, 64, 128, 256), (4, 8, 16, 32)


def grid_of(coefficients: list[float], noise: np.ndarray | None = None) -> list[Run]:
    """One run a cell on the quadratic around log2 rank 6 and log2 blocks 3.5, which is the grid's centre."""
    result = []
    for index, (rank, blocks) in enumerate(itertools.product(RANKS, BLOCKS)):
        x, z = math.log2(rank) - 6, math.log2(blocks) - 3.5
        loss = float(np.dot(coefficients, [1, x, z, x * x, z * z, x * z]))
        result.append(Run(cell=Cell(rank=rank, blocks=blocks), seed=0, loss=loss + (0 if noise is None else float(noise[index]))))
    return result


def values(surface: Surface) -> list[float]:
    return [coefficient.value for coefficient in surface.coefficients]


@given(st.lists(st.integers(-30, 30), min_size=6, max_size=6))
@settings(deadline=None, max_examples=40)
def test_points_on_a_quadratic_give_it_back_and_its_lowest_point_is_that_of_a_fine_grid(whole: list[int]) -> None:
    coefficients = [value / 10 for value in whole]
    surface = response_surface(grid_of(coefficients))
    assert values(surface) == pytest.approx(coefficients, abs=1e-9)
    assert (surface.centre.rank, surface.centre.blocks) == pytest.approx((64, 2**3.5))
    assert tuple(coefficient.term for coefficient in surface.coefficients) == TERMS
    x, z = np.meshgrid(np.linspace(-2, 2, 161), np.linspace(-1.5, 1.5, 121))
    losses = np.tensordot(coefficients, [np.ones_like(x), x, z, x * x, z * z, x * z], axes=1)
    best = surface.optimum
    assert best.loss <= losses.min() + 1e-8
    assert best.loss == pytest.approx(losses.min(), abs=0.01)
    at = (math.log2(best.rank) - 6, math.log2(best.blocks) - 3.5)
    assert float(np.dot(coefficients, [1, *at, at[0] ** 2, at[1] ** 2, at[0] * at[1]])) == pytest.approx(best.loss, abs=1e-8)


def test_a_bowl_has_its_bottom_inside_and_a_slope_its_lowest_point_on_the_border() -> None:
    cases: list[tuple[list[float], str, float, float]] = [
        ([3, 0.2, 0.1, 0.1, 0.1, 0], "inside", 32, 8),  # a bowl with its bottom at x = -1, z = -0.5
        ([3, 0.2, -0.1, 0.01, 0, 0], "border", 16, 32),  # a slope
        ([3, 0.01, 0.02, -0.1, -0.1, 0], "border", 16, 4),  # a dome
        ([3, 0, 0.01, 0.1, -0.1, 0], "border", 64, 4),  # a saddle
    ]
    for coefficients, place, rank, blocks in cases:
        found = response_surface(grid_of(coefficients)).optimum
        assert found.place == place
        assert (found.rank, found.blocks) == pytest.approx((rank, blocks))
        assert found.inside_share == (place == "inside")
        assert found.rank_interval == pytest.approx((rank, rank))
    assert response_surface(grid_of(cases[0][0])).optimum.loss == pytest.approx(2.875)


def test_intervals_of_coefficients_are_those_of_least_squares() -> None:
    runs = grid_of([3, 0.2, 0.1, 0.1, 0.1, 0.05], np.random.default_rng(0).normal(0, 0.1, 20))
    surface = response_surface(runs)
    x, z = np.log2([run.cell.rank for run in runs]) - 6, np.log2([run.cell.blocks for run in runs]) - 3.5
    design = np.stack([np.ones(20), x, z, x * x, z * z, x * z], axis=1)
    found, residual, _, _ = np.linalg.lstsq(design, np.array([run.loss for run in runs]), rcond=None)
    error = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * residual[0] / 14)
    half = stats.t.ppf(0.975, 14) * error
    assert surface.freedom == 14
    assert surface.sd == pytest.approx(math.sqrt(residual[0] / 14))
    for coefficient, value, reach in zip(surface.coefficients, found, half, strict=True):
        assert coefficient.interval == pytest.approx((value - reach, value + reach))


def test_seed_levels_move_only_the_constant() -> None:
    # Two cells have three seeds; the levels of the seeds are -0.5, 0.2 and 0.3, and the surface is that of their mean.
    levels = {0: -0.5, 1: 0.2, 2: 0.3}
    runs = []
    for run in grid_of([3, 0.2, 0.1, 0.1, 0.1, 0.05]):
        seeds = (0, 1, 2) if run.cell in (Cell(rank=64, blocks=8), Cell(rank=16, blocks=32)) else (0,)
        runs += [Run(cell=run.cell, seed=seed, loss=run.loss + levels[seed]) for seed in seeds]
    surface = response_surface(runs)
    # The centre of the runs is not that of the grid.
    x, z = math.log2(surface.centre.rank) - 6, math.log2(surface.centre.blocks) - 3.5
    assert values(surface)[3:] == pytest.approx([0.1, 0.1, 0.05])
    assert values(surface)[1] == pytest.approx(0.2 + 0.2 * x + 0.05 * z)
    assert values(surface)[0] == pytest.approx(3 + 0.2 * x + 0.1 * z + 0.1 * x * x + 0.1 * z * z + 0.05 * x * z)


def test_lack_of_fit_by_nested_sums_of_squares() -> None:
    generator = np.random.default_rng(3)
    levels = generator.normal(0, 1, 3)
    runs = [
        Run(cell=run.cell, seed=seed, loss=run.loss + levels[seed] + generator.normal(0, 0.05))
        for run in grid_of([3, 0.2, 0.1, 0.1, 0.1, 0.05])
        for seed in range(3)
    ]
    surface = response_surface(runs)
    # With all seeds in all cells the seed levels are column means, and the rest is a fit of the cell means and a two-way table.
    table = np.array([run.loss for run in runs]).reshape(20, 3)
    interaction = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    pure = float((interaction**2).sum()) / 38
    cells = grid_of([0, 0, 0, 0, 0, 0], table.mean(axis=1))
    lost = 3 * response_surface(cells).sd ** 2
    assert surface.lack_of_fit is not None
    assert surface.lack_of_fit.freedom == (14, 38)
    assert surface.lack_of_fit.statistic == pytest.approx(lost / pure)
    assert surface.lack_of_fit.p == pytest.approx(stats.f.sf(lost / pure, 14, 38))


def test_lack_of_fit_sees_a_shape_that_is_no_quadratic() -> None:
    step = [Run(cell=run.cell, seed=0, loss=3 + 0.05 * (run.cell.rank == 64)) for run in grid_of([0] * 6)]
    lack = response_surface(step, replicates=Replicates(sd=0.002, freedom=6)).lack_of_fit
    assert lack is not None
    assert lack.freedom == (14, 6)
    assert lack.p < 0.001
    assert response_surface(step).lack_of_fit is None


def test_the_low_rank_papers_sweep() -> None:
    within = math.sqrt((np.var(PAIRS["attnres"], ddof=1) + np.var(PAIRS["low_rank"], ddof=1)) / 2)
    whole = response_surface(SWEEP, replicates=Replicates(sd=within, freedom=4))
    # Rank has a bottom near 90. Block counts have one only because full routing, at 48, is worse.
    assert whole.optimum.place == "inside"
    assert 70 < whole.optimum.rank_interval[0] < 90 < whole.optimum.rank_interval[1] < 110
    assert whole.sd == pytest.approx(0.0034, abs=5e-5)
    assert whole.lack_of_fit is not None
    assert whole.lack_of_fit.freedom == (26, 4)
    assert 0.01 < whole.lack_of_fit.p < 0.05
    # The paper's "block granularity and rank interact": more blocks want a larger rank.
    assert whole.coefficients[5].interval[1] < 0
    blocks = response_surface([run for run in SWEEP if run.cell.blocks < 48])
    assert blocks.optimum.place == "border"
    assert blocks.optimum.blocks == pytest.approx(16)
    assert blocks.coefficients[4].interval[0] < 0 < blocks.coefficients[4].interval[1]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([run for run in SWEEP if run.cell.blocks < 16], "do not determine a quadratic"),
        (SWEEP[:5], "do not determine a quadratic"),
        ([], "no run"),
    ],
)
def test_what_has_no_surface_is_refused(runs: list[Run], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        response_surface(runs)


def test_six_cells_leave_nothing_for_an_interval() -> None:
    cells = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    with pytest.raises(RequestError, match="more than 6 runs"):
        response_surface([Run(cell=Cell(rank=rank, blocks=blocks), seed=0, loss=3.0) for rank, blocks in cells])


def test_replicates_beside_the_runs_own_are_refused() -> None:
    twice = [Run(cell=run.cell, seed=seed, loss=run.loss) for run in SWEEP for seed in (0, 1)]
    with pytest.raises(RequestError, match="leave them out"):
        response_surface(twice, replicates=Replicates(sd=0.1, freedom=1))
