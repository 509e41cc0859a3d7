"""The cells of a grid of rank and blocks, and which of them may be the best.

Seeds that repeat over cells are a block effect, and a fixed one: two or three seeds hardly say how far seeds spread, and no comparison of
cells needs it. A cell with fewer seeds is compared through the seeds that it shares with others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthroute.common.errors import RequestError
from depthroute.study.statistics import CONFIDENCE

if TYPE_CHECKING:
    import numpy

# Nodes of the quadratures behind a critical value, good to 1e-5 of probability at 2 degrees of freedom and better above.
NORMAL_NODES = 64
SPREAD_NODES = 200


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A place in the grid. `blocks` of full routing is the number of sub-layers.

    Raises:
        RequestError: a rank or blocks that is not positive and finite.
    """

    rank: float
    blocks: float

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("blocks", self.blocks)):
            if not (math.isfinite(value) and value > 0):
                raise RequestError(f"{name} is {value}; it must be positive and finite. Full routing has as many blocks as sub-layers.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's loss in nats per token."""

    cell: Cell
    seed: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Replicates:
    """How far repeated runs of a cell spread: the sd of a single run, and the degrees of freedom it was estimated with.

    Where cells share their seeds it is what is left once each seed's own level is taken out: the sd of paired differences of two cells,
    divided by sqrt(2).

    Raises:
        RequestError: an sd that is negative or not finite, or no degree of freedom.
    """

    sd: float
    freedom: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sd) and self.sd >= 0):
            raise RequestError(f"sd of replicates is {self.sd}; it must be finite and not negative.")
        if self.freedom < 1:
            raise RequestError(f"freedom of replicates is {self.freedom}; two runs of a cell give 1, and fewer give no spread.")


@dataclass(frozen=True, kw_only=True)
class RankedCell:
    """A cell against the best one.

    `mean` is over all seeds, through those the cell has; `excess` is above the lowest mean. `contender`: the cell cannot be told from the
    best. `behind_at_most`: its true loss is at most this much above that of the truly best cell. Both are None where nothing says how far
    repeated runs spread. That the best is among the contenders and that all these bounds hold is one statement, with 95 %.
    """

    cell: Cell
    seeds: int
    mean: float
    excess: float
    contender: bool | None
    behind_at_most: float | None


@dataclass(frozen=True, kw_only=True)
class BestCells:
    """The cells from the lowest mean up, and the spread of single runs they were judged by: None where there is none."""

    cells: tuple[RankedCell, ...]
    replicates: Replicates | None


@dataclass(frozen=True, kw_only=True)
class FreeMeans:
    """A free mean for each cell with the seeds' levels beside them: no shape assumed.

    `covariance` is that of `means`, in units of a single run's variance. `replicates` is what the fit leaves over: None where the runs
    only just determine it.
    """

    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    means: numpy.ndarray  # [cells] float64
    covariance: numpy.ndarray  # [cells, cells] float64
    replicates: Replicates | None


def best_cells(runs: Sequence[Run], *, replicates: Replicates | None = None) -> BestCells:
    """Which cells may have the lowest loss: multiple comparisons with the best.

    Cell i is a contender unless some j has m_i - m_j > d_i e_ij, m being means and e_ij the standard error of their difference. d_i is the
    one-sided 95 % point of Dunnett's t for comparing i with all the others, so that the truly best cell is a contender in 95 % of studies.
    Were c the best, cell i would be at most m_i - m_c + d_c e_ic behind; `behind_at_most` is the largest of these over contenders c. Cells
    of one design have correlations of 1/2 in Dunnett's t. Where some have more seeds, the smallest correlation stands for all, which makes
    d too large rather than too small (Slepian's inequality). (J. C. Hsu, "Multiple Comparisons: Theory and Methods", 1996, chapter 4.)

    Args:
        runs: every run of the grid. The spread is that of the runs themselves where cells share at least two seeds.
        replicates: the spread of repeated runs from elsewhere, for runs that have none of their own.

    Raises:
        RequestError: no run, a cell with two runs of one seed, a loss that is not finite, seeds that do not connect the cells, or
            replicates given for runs that have their own.
    """
    free = free_means(runs)
    if free.replicates is not None and replicates is not None:
        raise RequestError("replicates are given for runs that have their own; leave them out.")
    spread = free.replicates or replicates
    count, lowest = len(free.cells), float(free.means.min())
    contender: list[bool | None] = [None] * count
    behind: list[float | None] = [None] * count
    if spread is not None:
        slack = _slack(free.covariance, spread)
        lead = free.means[:, None] - free.means[None, :]
        may = (lead <= slack + _rounding(free.means)).all(axis=1)
        contender = [bool(value) for value in may]
        behind = [max([0.0, *(float(lead[i, c] + slack[c, i]) for c in range(count) if may[c] and c != i)]) for i in range(count)]
    ranked = [
        RankedCell(
            cell=free.cells[i],
            seeds=free.seeds[i],
            mean=float(free.means[i]),
            excess=float(free.means[i]) - lowest,
            contender=contender[i],
            behind_at_most=behind[i],
        )
        for i in range(count)
    ]
    return BestCells(cells=tuple(sorted(ranked, key=lambda cell: cell.mean)), replicates=spread)


def free_means(runs: Sequence[Run]) -> FreeMeans:
    """Least squares of loss = cell + seed, the seeds' levels adding up to zero.

    Raises:
        RequestError: no run, a cell with two runs of one seed, a loss that is not finite, or seeds that do not connect the cells.
    """
    import numpy as np

    if not runs:
        raise RequestError("there is no run; a grid needs at least one.")
    seen = set()
    for run in runs:
        if not math.isfinite(run.loss):
            raise RequestError(f"a loss is {run.loss}; every run of a grid must have a finite loss.")
        if (run.cell, run.seed) in seen:
            raise RequestError(f"rank {run.cell.rank:g} with {run.cell.blocks:g} blocks has two runs of seed {run.seed}; give one.")
        seen.add((run.cell, run.seed))
    cells = tuple(dict.fromkeys(run.cell for run in runs))
    picks = np.zeros((len(runs), len(cells)))
    picks[np.arange(len(runs)), [cells.index(run.cell) for run in runs]] = 1
    design = np.hstack([picks, seed_columns(runs)])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise RequestError("some cells share no seed with the others, not even through a third cell; run one seed in all of them.")
    losses = np.array([run.loss for run in runs])
    inverse = np.linalg.inv(design.T @ design)
    fitted = inverse @ design.T @ losses
    freedom = len(runs) - design.shape[1]
    replicates = None
    if freedom > 0:
        left = losses - design @ fitted
        # Runs that agree exactly leave rounding, which is no spread.
        sd = math.sqrt(float(left @ left) / freedom) if np.abs(left).max() > _rounding(losses) else 0.0
        replicates = Replicates(sd=sd, freedom=freedom)
    count = len(cells)
    return FreeMeans(
        cells=cells,
        seeds=tuple(int(number) for number in picks.sum(axis=0)),
        means=fitted[:count],
        covariance=inverse[:count, :count],
        replicates=replicates,
    )


def seed_columns(runs: Sequence[Run]) -> numpy.ndarray:
    """[runs, seeds - 1] float64 columns of seed levels that add up to zero."""
    import numpy as np

    seeds = sorted({run.seed for run in runs})
    columns = np.zeros((len(runs), len(seeds)))
    columns[np.arange(len(runs)), [seeds.index(run.seed) for run in runs]] = 1
    levels: numpy.ndarray = columns[:, :-1] - columns[:, -1:]
    return levels


def _rounding(losses: numpy.ndarray) -> float:
    """What a difference of two of them, or of their means, may owe to rounding."""
    import numpy as np

    return float(16 * np.finfo(np.float64).eps * np.abs(losses).max())


def _slack(covariance: numpy.ndarray, spread: Replicates) -> numpy.ndarray:
    """[cells, cells]: d_i e_ij."""
    import numpy as np

    count = len(covariance)
    variance = np.diag(covariance)
    square = np.maximum(0.0, variance[:, None] + variance[None, :] - 2 * covariance)
    slack: numpy.ndarray = np.zeros_like(square)
    for i in range(count if count > 1 else 0):
        others = np.arange(count) != i
        # Covariance of m_i - m_j with m_i - m_k.
        shared = variance[i] - covariance[i, others][:, None] - covariance[i, others][None, :] + covariance[np.ix_(others, others)]
        error = np.sqrt(square[i, others])
        smallest = round(float((shared / np.outer(error, error)).min()), 9)  # cells of one design then share a cached point
        slack[i, others] = dunnett_point(count - 1, smallest, spread.freedom) * spread.sd * error
    return slack


@functools.lru_cache(maxsize=256)
def dunnett_point(comparisons: int, correlation: float, freedom: int) -> float:
    """d with P(max_j T_j <= d) = 0.95 for equally correlated t variables over one estimated spread.

    T_j = (sqrt(r) Z_0 + sqrt(1 - r) Z_j) / U, U^2 being chi-square over its degrees of freedom; the probability is the mean over Z_0 and U
    of Phi((d U - sqrt(r) Z_0) / sqrt(1 - r))^comparisons. For a negative correlation d is Bonferroni's. (C. W. Dunnett, "A multiple
    comparison procedure for comparing several treatments with a control", J. American Statistical Association 50, 1955.)
    """
    import numpy as np
    from scipy.optimize import brentq
    from scipy.special import chdtri, ndtr, stdtrit

    largest = float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / comparisons))  # Bonferroni
    if comparisons == 1 or correlation < 0:
        return largest
    at, weight = np.polynomial.hermite_e.hermegauss(NORMAL_NODES)
    weight = weight / weight.sum()
    nodes, spread_weight = np.polynomial.legendre.leggauss(SPREAD_NODES)
    spread = np.sqrt(chdtri(freedom, (1 - nodes) / 2) / freedom)  # equal shares of probability, so that few degrees of freedom do no harm

    def excess(point: float) -> float:
        inner = ndtr((point * spread[:, None] - math.sqrt(correlation) * at) / math.sqrt(1 - correlation)) ** comparisons
        return float(spread_weight / 2 @ inner @ weight) - CONFIDENCE

    return float(brentq(excess, 0.0, largest * 1.001, xtol=1e-9))
