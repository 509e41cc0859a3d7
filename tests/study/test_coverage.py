"""Every interval a report leads with, by simulation: does 95 % mean 95 %?

Where an interval is exact for normal differences its coverage is held to the level on both sides; where it errs on the safe side, from
below. Tolerances are four binomial standard errors at fixed draws. The jackknife of power laws is covered in `test_scaling`, the document
bootstrap in `test_clusters`, and cells with uneven seeds in `test_grid`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from depthroute.study.equivalence import equivalence
from depthroute.study.grid import Cell, Replicates, Run, best_cells
from depthroute.study.scales import across_scales
from depthroute.study.statistics import bootstrap_interval, t_interval
from depthroute.study.surface import response_surface
from depthroute.study.trajectory import trajectory

LEVEL = 0.95


def tolerance(repeats: int, share: float = LEVEL) -> float:
    return 4 * math.sqrt(share * (1 - share) / repeats)


def share(hits: Iterable[bool]) -> float:
    return float(np.mean(list(hits)))


def holds(interval: Sequence[float] | None, truth: float) -> bool:
    assert interval is not None
    return interval[0] <= truth <= interval[1]


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_t_interval(seeds: int) -> None:
    repeats = 2000
    rows = np.random.default_rng(seeds).normal(-0.03, 0.01, (repeats, seeds)).tolist()
    assert share(holds(t_interval(row), -0.03) for row in rows) == pytest.approx(LEVEL, abs=tolerance(repeats))


def test_the_bootstrap_of_five_seeds_covers_far_less_than_it_says() -> None:
    repeats = 1500
    rows = np.random.default_rng(5).normal(0, 1, (repeats, 5)).tolist()
    assert share(holds(bootstrap_interval(row), 0) for row in rows) == pytest.approx(0.845, abs=tolerance(repeats, 0.845))


@pytest.mark.parametrize(("seeds", "true"), [(3, -0.01), (3, 0.01), (8, 0.01)])
def test_equivalence_is_claimed_wrongly_at_the_level(seeds: int, true: float) -> None:
    # With seeds this close together only one of the two tests can fail, so that the level is reached.
    repeats = 2000
    rows = np.random.default_rng(seeds).normal(true, 0.002, (repeats, seeds)).tolist()
    assert share(equivalence(row, 0.01).verdict == "equivalent" for row in rows) == pytest.approx(0.05, abs=tolerance(repeats, 0.05))


def milestones(
    generator: np.random.Generator, repeats: int, seeds: int, means: Sequence[float], together: float
) -> list[list[list[float]]]:
    """Tables of seeds by milestones: later gaps spread less, and a seed's milestones are correlated."""
    common, own = generator.standard_normal((repeats, seeds, 1)), generator.standard_normal((repeats, seeds, len(means)))
    noise = (math.sqrt(together) * common + math.sqrt(1 - together) * own) * np.linspace(2, 1, len(means))
    tables: list[list[list[float]]] = (np.asarray(means) + 0.005 * noise).tolist()
    return tables


@pytest.mark.parametrize("together", [0.0, 0.9])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_simultaneous_band(seeds: int, together: float) -> None:
    means, tokens, repeats = [-0.06, -0.05, -0.04, -0.03], [1, 2, 4, 8], 1500
    tables = milestones(np.random.default_rng(seeds), repeats, seeds, means, together)
    results = [trajectory(tokens, table).points for table in tables]
    covered = share(all(holds(point.band, mean) for point, mean in zip(points, means, strict=True)) for points in results)
    assert LEVEL - tolerance(repeats) <= covered <= 0.985
    # Pointwise intervals do not hold together, which is why there is a band.
    assert share(all(holds(point.t_interval, mean) for point, mean in zip(points, means, strict=True)) for points in results) < 0.94


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_slope_of_the_gap_and_its_change(seeds: int) -> None:
    repeats = 4000
    tables = milestones(np.random.default_rng(seeds), repeats, seeds, [-0.06, -0.05, -0.04], 0.5)
    trends = [trend for table in tables if (trend := trajectory([1, 2, 4], table).trend) is not None]
    assert share(holds(trend.slope.interval, 0.01) for trend in trends) == pytest.approx(LEVEL, abs=tolerance(repeats))
    assert share(holds(trend.first_to_last.interval, 0.02) for trend in trends) == pytest.approx(LEVEL, abs=tolerance(repeats))
    assert not any(trend.verdict == "widening" for trend in trends)
    assert share(trend.verdict == "closing" for trend in trends) > 0.3


@pytest.mark.parametrize("gap", [0.0, 0.004, -0.05])
def test_a_gap_that_stays_is_called_closing_or_widening_at_most_at_the_level(gap: float) -> None:
    tables = milestones(np.random.default_rng(1), 2000, 4, [gap] * 4, 0.5)
    verdicts = [trend.verdict for table in tables if (trend := trajectory([1, 2, 4, 8], table).trend) is not None]
    wrong = share(verdict != "undecided" for verdict in verdicts)
    assert wrong <= 0.05 + tolerance(2000, 0.05)
    assert gap != -0.05 or wrong >= 0.05 - tolerance(2000, 0.05)  # a gap with a clear side: nothing else is undecided


def scales_of(generator: np.random.Generator, true: Sequence[float], sds: Sequence[float], seeds: int) -> dict[str, list[float]]:
    return {str(index): generator.normal(mean, sd, seeds).tolist() for index, (mean, sd) in enumerate(zip(true, sds, strict=True))}


@pytest.mark.parametrize(
    ("sds", "seeds", "most"), [((1, 1), 3, 0.985), ((1, 4), 3, 0.985), ((1, 4), 5, 0.97), ((1, 1, 1), 5, 0.975), ((0.3, 1, 2), 3, 0.985)]
)
def test_the_mean_over_scales_and_the_slope(sds: tuple[float, ...], seeds: int, most: float) -> None:
    # Satterthwaite's degrees of freedom are an approximation: two percentage points below the level are let pass for three seeds.
    generator, repeats = np.random.default_rng(seeds), 2000
    true = [-3 + 0.5 * index for index in range(len(sds))]
    sizes = {str(index): 2.0 ** (2 * index) for index in range(len(sds))}
    results = [across_scales(scales_of(generator, true, sds, seeds), sizes) for _ in range(repeats)]
    for covered in (
        share(holds(result.mean.interval, sum(true) / len(true)) for result in results),
        share(holds(result.slope_per_doubling.interval, 0.25) for result in results if result.slope_per_doubling),
    ):
        assert 0.93 - tolerance(repeats) / 2 <= covered <= most


@pytest.mark.parametrize(("sds", "seeds"), [((1, 1), 3), ((1, 4), 5), ((1, 1, 1), 5), ((0.3, 1, 2), 3)])
def test_equal_gaps_are_rejected_about_at_the_level(sds: tuple[float, ...], seeds: int) -> None:
    generator, repeats = np.random.default_rng(seeds), 2000
    results = [across_scales(scales_of(generator, [-0.5] * len(sds), sds, seeds)).equal_gaps for _ in range(repeats)]
    assert 0.02 <= share(result.p < 0.05 for result in results if result is not None) <= 0.07 + tolerance(repeats, 0.07) / 2


@pytest.mark.parametrize("tau", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("sds", [(1.0, 1.0, 1.0), (0.3, 1.0, 2.0), (0.3, 1.0, 2.0, 0.3, 1.0)])
def test_a_scale_not_studied(sds: tuple[float, ...], tau: float) -> None:
    generator, repeats = np.random.default_rng(len(sds)), 1500
    mean, seen = [], []
    for _ in range(repeats):
        result = across_scales(scales_of(generator, generator.normal(-1, tau, len(sds)).tolist(), sds, 3)).another_scale
        assert result is not None
        mean.append(holds(result.interval, -1))
        seen.append(holds(result.prediction_interval, float(generator.normal(-1, tau))))
    assert share(mean) >= LEVEL - tolerance(repeats)
    assert share(seen) >= LEVEL - tolerance(repeats)
    if len(set(sds)) == 1:  # equally precise scales: exact
        assert share(mean) == pytest.approx(LEVEL, abs=tolerance(repeats))


PLACES = [(rank, blocks) for rank in (16, 32, 64, 128, 256) for blocks in (4, 8, 16, 48)]
BOWL = [3.0, 0.002, -0.001, 0.004, 0.003, -0.001]


def bowl(rank: float, blocks: float) -> float:
    x, z = math.log2(rank) - 6, math.log2(blocks) - 3.5
    return float(np.dot(BOWL, [1, x, z, x * x, z * z, x * z]))


def grid(generator: np.random.Generator, seeds_of: dict[tuple[int, int], int], sd: float) -> list[Run]:
    levels = generator.normal(0, 0.02, 3)
    return [
        Run(cell=Cell(rank=rank, blocks=blocks), seed=seed, loss=bowl(rank, blocks) + levels[seed] + generator.normal(0, sd))
        for rank, blocks in PLACES
        for seed in range(seeds_of.get((rank, blocks), 1))
    ]


def test_the_surface_its_optimum_and_its_lack_of_fit() -> None:
    # One seed in most cells, three in four of them.
    generator, repeats = np.random.default_rng(8), 500
    thrice = {(32, 8): 3, (128, 8): 3, (64, 16): 3, (16, 48): 3}
    results = [response_surface(grid(generator, thrice, 0.002)) for _ in range(repeats)]
    for term in (3, 4, 5):  # free of where the centre is and of the seeds' levels
        assert share(holds(result.coefficients[term].interval, BOWL[term]) for result in results) == pytest.approx(
            LEVEL, abs=tolerance(repeats)
        )
    # The bottom of the bowl by hand: the gradient is zero there.
    x, z = np.linalg.solve([[2 * BOWL[3], BOWL[5]], [BOWL[5], 2 * BOWL[4]]], [-BOWL[1], -BOWL[2]])
    rank, blocks = float(2 ** (6 + x)), float(2 ** (3.5 + z))
    assert 0.92 <= share(holds(result.optimum.rank_interval, rank) for result in results) <= 0.98
    assert 0.92 <= share(holds(result.optimum.blocks_interval, blocks) for result in results) <= 0.98
    assert share(result.optimum.place == "inside" for result in results) > 0.98
    rejected = share(result.lack_of_fit.p < 0.05 for result in results if result.lack_of_fit)
    assert rejected == pytest.approx(0.05, abs=tolerance(repeats, 0.05))


def test_the_set_of_best_cells_keeps_a_tie_exactly_at_the_level() -> None:
    # All cells equal is the hardest truth: each is as truly the best as any other.
    generator, repeats = np.random.default_rng(9), 1200
    kept = []
    for _ in range(repeats):
        levels = generator.normal(0, 1, 3)
        losses = levels + generator.normal(0, 0.1, (6, 3))
        runs = [Run(cell=Cell(rank=i + 1, blocks=1), seed=s, loss=float(losses[i, s])) for i in range(6) for s in range(3)]
        kept.append(next(bool(cell.contender) for cell in best_cells(runs).cells if cell.cell.rank == 1))
    assert share(kept) == pytest.approx(LEVEL, abs=tolerance(repeats))


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_best_cell_is_kept_and_no_cell_is_further_behind_than_said(seeds: int) -> None:
    generator, repeats, sd = np.random.default_rng(seeds), 600, 0.004
    truth = {Cell(rank=rank, blocks=blocks): bowl(rank, blocks) for rank, blocks in PLACES}
    least = min(truth.values())
    good, sizes = [], []
    for _ in range(repeats):
        replicates = Replicates(sd=sd * math.sqrt(generator.chisquare(4) / 4), freedom=4) if seeds == 1 else None
        result = best_cells(grid(generator, dict.fromkeys(PLACES, seeds), sd), replicates=replicates)
        kept = all(cell.contender for cell in result.cells if truth[cell.cell] == least)
        bounds = {cell.cell: cell.behind_at_most for cell in result.cells}
        good.append(kept and all(bound is not None and truth[cell] - least <= bound for cell, bound in bounds.items()))
        sizes.append(sum(bool(cell.contender) for cell in result.cells))
    assert share(good) >= LEVEL - tolerance(repeats)
    assert 1 < np.mean(sizes) < len(PLACES) - 2  # and it does leave cells out
