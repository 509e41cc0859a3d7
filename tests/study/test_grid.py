"""The cells that may be the best: against Dunnett's table, scipy's multivariate t, least squares, and the Low-Rank paper's sweep."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from depthroute.common.errors import RequestError
from depthroute.study.grid import Cell, Replicates, Run, best_cells, dunnett_point, free_means

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "low_rank_attnres_sweep.json").read_text(encoding="utf-8"))
SUB_LAYERS = 2 * GOLDEN["model"]["layers"]
SLICED = ("Full AttnRes", "Block AttnRes", "Full LR-AttnRes", "Block LR-AttnRes")
SWEEP = [
    Run(cell=Cell(rank=row["rank"], blocks=row["blocks"] or SUB_LAYERS), seed=0, loss=row["validation_loss"])
    for row in GOLDEN["rows"]
    if row["method"] in SLICED
]
PAIRS = GOLDEN["three_seed_pairs"]


def runs(losses: dict[tuple[int, int], dict[int, float]]) -> list[Run]:
    return [
        Run(cell=Cell(rank=rank, blocks=blocks), seed=seed, loss=loss)
        for (rank, blocks), row in losses.items()
        for seed, loss in row.items()
    ]


def test_dunnetts_one_sided_table() -> None:
    # Dunnett 1955, table 1a, 95 %: 10 degrees of freedom with 1 to 4 treatments, 5 with 9, 60 with 9.
    for freedom, count, printed in ((10, 1, 1.81), (10, 2, 2.15), (10, 3, 2.34), (10, 4, 2.47), (5, 9, 3.30), (60, 9, 2.48)):
        assert round(dunnett_point(count, 0.5, freedom), 2) == printed


@pytest.mark.parametrize(("count", "correlation", "freedom"), [(3, 0.5, 2), (6, 0.25, 4), (4, 0.0, 3), (5, 0.8, 20)])
def test_the_point_has_its_probability_by_scipys_multivariate_t(count: int, correlation: float, freedom: int) -> None:
    shape = np.full((count, count), correlation) + (1 - correlation) * np.eye(count)
    point = dunnett_point(count, correlation, freedom)
    found = stats.multivariate_t.cdf(np.full(count, point), shape=shape, df=freedom, random_state=0, maxpts=200_000)
    assert found == pytest.approx(0.95, abs=3e-4)


@pytest.mark.parametrize("freedom", [1, 2, 4, 30])
def test_thirty_one_comparisons_with_few_degrees_of_freedom_by_simulation(freedom: int) -> None:
    generator = np.random.default_rng(freedom)
    repeats = 40_000
    shared, own = generator.standard_normal((repeats, 1)), generator.standard_normal((repeats, 31))
    largest = ((shared + own) / math.sqrt(2)).max(axis=1) / np.sqrt(generator.chisquare(freedom, repeats) / freedom)
    assert np.mean(largest <= dunnett_point(31, 0.5, freedom)) == pytest.approx(0.95, abs=4 * math.sqrt(0.0475 / repeats))


def test_a_negative_correlation_is_served_by_bonferroni() -> None:
    assert dunnett_point(4, -0.1, 10) == pytest.approx(stats.t.ppf(1 - 0.05 / 4, 10))
    assert dunnett_point(4, 0.0, 10) < dunnett_point(4, -0.1, 10)


def test_two_cells_are_the_one_sided_paired_t_test() -> None:
    one, other = [3.0, 3.1, 3.3, 3.2], [2.9, 3.05, 3.1, 3.2]
    result = best_cells(runs({(8, 2): dict(enumerate(one)), (16, 2): dict(enumerate(other))}))
    differences = np.subtract(one, other)
    assert result.replicates is not None
    assert result.replicates.freedom == 3
    assert result.replicates.sd == pytest.approx(differences.std(ddof=1) / math.sqrt(2))
    best, second = result.cells
    assert best.cell == Cell(rank=16, blocks=2)
    assert second.excess == pytest.approx(differences.mean())
    p = stats.ttest_1samp(differences, 0, alternative="greater").pvalue
    assert second.contender == (p >= 0.05)
    half = stats.t.ppf(0.95, 3) * differences.std(ddof=1) / 2
    assert second.behind_at_most == pytest.approx(differences.mean() + half)
    assert best.behind_at_most == pytest.approx(max(0, half - differences.mean()) if second.contender else 0)


def test_a_cell_that_is_clearly_the_best_stands_alone() -> None:
    noise = {4: (0.001, 0.002, 0.0), 8: (0.002, 0.0, 0.001), 16: (0.001, 0.002, 0.0)}
    losses = {(rank, 4): {seed: 3 + 0.1 * (rank != 8) + 0.2 * seed + row[seed] for seed in range(3)} for rank, row in noise.items()}
    result = best_cells(runs(losses))
    assert [cell.contender for cell in result.cells] == [True, False, False]
    assert result.cells[0].cell.rank == 8
    assert result.cells[0].behind_at_most == 0
    assert all(cell.behind_at_most is not None and 0.09 < cell.behind_at_most < 0.12 for cell in result.cells[1:])


def test_a_single_seed_is_compared_through_the_seed_it_shares() -> None:
    # Seed 1 runs 0.5 above seed 0. The third cell only has seed 1, and is the best: 3.3 there is 2.8 at seed 0.
    result = best_cells(runs({(2, 2): {0: 2.9, 1: 3.4}, (4, 2): {0: 3.0, 1: 3.5}, (8, 2): {1: 3.3}}))
    assert [(cell.cell.rank, cell.seeds) for cell in result.cells] == [(8, 1), (2, 2), (4, 2)]
    assert [cell.excess for cell in result.cells] == pytest.approx([0, 0.1, 0.2])
    assert result.cells[0].mean == pytest.approx(3.05)


def test_bounds_of_uneven_cells_come_from_a_fit_with_one_cell_as_the_reference() -> None:
    losses = {(2, 2): {0: 3.00, 1: 3.42, 2: 3.11}, (4, 2): {0: 3.01, 1: 3.40, 2: 3.13}, (8, 2): {0: 3.02}, (16, 2): {0: 3.015}}
    result = best_cells(runs(losses))
    assert all(cell.contender for cell in result.cells)
    points = {}  # by reference cell: the least-squares excess of the others over it, and the slack d e
    for reference in losses:
        others = [cell for cell in losses if cell != reference]
        rows = [(cell, seed) for cell, row in losses.items() for seed in row]
        design = np.array([[1.0, seed == 1, seed == 2] + [cell == other for other in others] for cell, seed in rows], dtype=float)
        target = np.array([losses[cell][seed] for cell, seed in rows])
        found, residual, _, _ = np.linalg.lstsq(design, target, rcond=None)
        covariance = np.linalg.inv(design.T @ design)[3:, 3:]
        error = np.sqrt(np.diag(covariance))
        d = dunnett_point(3, float((covariance / np.outer(error, error)).min()), 2)
        points[reference] = dict(zip(others, found[3:] + d * error * math.sqrt(residual[0] / 2), strict=True))
    for cell in result.cells:
        place = (int(cell.cell.rank), 2)
        assert cell.behind_at_most == pytest.approx(max(point[place] for reference, point in points.items() if reference != place))


def test_uneven_seeds_keep_the_chance_of_losing_the_best_at_the_level() -> None:
    # Three cells with three seeds, five with one. All are equal, so the first is as truly the best as any: it must stay in 95 %.
    generator = np.random.default_rng(4)
    design = [(rank, seed) for rank in range(1, 9) for seed in range(3 if rank <= 3 else 1)]
    repeats, kept = 400, {1: 0, 8: 0}
    for _ in range(repeats):
        levels, noise = generator.normal(0, 3, 3), generator.normal(0, 1, len(design))
        result = best_cells(
            [Run(cell=Cell(rank=rank, blocks=1), seed=seed, loss=levels[seed] + e) for (rank, seed), e in zip(design, noise, strict=True)]
        )
        for cell in result.cells:
            if cell.cell.rank in kept:
                kept[int(cell.cell.rank)] += bool(cell.contender)
    for count in kept.values():
        assert count / repeats >= 0.95 - 3 * math.sqrt(0.0475 / repeats)


def test_without_replicates_there_is_a_lowest_cell_and_no_set() -> None:
    result = best_cells(SWEEP)
    assert result.replicates is None
    assert result.cells[0].cell == Cell(rank=128, blocks=8)
    assert result.cells[0].mean == pytest.approx(2.944)
    assert all(cell.contender is None and cell.behind_at_most is None for cell in result.cells)


def test_the_low_rank_papers_sweep_leaves_eight_cells_or_twenty() -> None:
    within = math.sqrt((np.var(PAIRS["attnres"], ddof=1) + np.var(PAIRS["low_rank"], ddof=1)) / 2)
    wide = best_cells(SWEEP, replicates=Replicates(sd=within, freedom=4))
    contenders = {(cell.cell.rank, cell.cell.blocks) for cell in wide.cells if cell.contender}
    # All are block forms of rank 32 to 128; the full forms are out.
    assert contenders == {(r, n) for r, n in itertools.product((32, 64, 128), (4, 8, 16))} - {(32, 4)}
    # Were the three seeds shared by both arms, two degrees of freedom would be left, and 20 of 32 cells.
    differences = np.subtract(PAIRS["attnres"], PAIRS["low_rank"])
    paired = best_cells(SWEEP, replicates=Replicates(sd=float(differences.std(ddof=1)) / math.sqrt(2), freedom=2))
    assert sum(bool(cell.contender) for cell in paired.cells) == 20
    # Standard AttnRes with few blocks is out either way.
    for result in (wide, paired):
        assert not any(cell.contender for cell in result.cells if cell.cell.rank == 1024)


def test_free_means_are_least_squares() -> None:
    losses = {(2, 2): {0: 2.9, 1: 3.4, 2: 3.1}, (4, 2): {0: 3.0, 1: 3.5}, (8, 2): {1: 3.3, 2: 3.0}, (8, 4): {0: 3.2}}
    free = free_means(runs(losses))
    design, target = [], []
    for index, row in enumerate(losses.values()):
        for seed, loss in row.items():
            design.append([float(index == i) for i in range(4)] + [[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]][seed])
            target.append(loss)
    found, residual, _, _ = np.linalg.lstsq(np.array(design), np.array(target), rcond=None)
    assert free.means == pytest.approx(found[:4])
    assert free.replicates is not None
    assert free.replicates.freedom == 2
    assert free.replicates.sd == pytest.approx(math.sqrt(residual[0] / 2))
    assert free.seeds == (3, 2, 2, 1)


def test_runs_that_agree_exactly_leave_only_ties() -> None:
    result = best_cells(runs({(2, 2): {0: 2.9, 1: 3.4}, (4, 2): {0: 2.9, 1: 3.4}, (8, 2): {0: 3.0, 1: 3.5}}))
    assert result.replicates is not None
    assert result.replicates.sd == 0
    assert [cell.contender for cell in result.cells] == [True, True, False]


def test_one_cell_is_the_best() -> None:
    result = best_cells(runs({(2, 2): {0: 3.0}}), replicates=Replicates(sd=0.1, freedom=2))
    assert (result.cells[0].contender, result.cells[0].behind_at_most) == (True, 0.0)


@pytest.mark.parametrize(
    ("grid", "replicates", "message"),
    [
        ({}, None, "no run"),
        ({(2, 2): {0: math.nan}}, None, "loss is nan"),
        ({(2, 2): {0: 3.0}, (4, 2): {1: 3.0}}, None, "share no seed"),
        ({(2, 2): {0: 3.0, 1: 3.1}, (4, 2): {0: 3.0, 1: 3.2}}, Replicates(sd=0.1, freedom=2), "have their own"),
    ],
)
def test_what_is_no_grid_is_refused(grid: dict[tuple[int, int], dict[int, float]], replicates: Replicates | None, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        best_cells(runs(grid), replicates=replicates)


def test_two_runs_of_one_seed_in_a_cell_are_refused() -> None:
    run = Run(cell=Cell(rank=2, blocks=2), seed=7, loss=3.0)
    with pytest.raises(RequestError, match="two runs of seed 7"):
        best_cells([run, run])


def test_impossible_cells_and_replicates_are_refused() -> None:
    with pytest.raises(RequestError, match="blocks is 0"):
        Cell(rank=2, blocks=0)
    with pytest.raises(RequestError, match="sd of replicates is -1"):
        Replicates(sd=-1, freedom=2)
    with pytest.raises(RequestError, match="freedom of replicates is 0"):
        Replicates(sd=1, freedom=0)
