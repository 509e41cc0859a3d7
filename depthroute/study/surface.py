"""The loss over a grid of rank and blocks: a quadratic fitted to it, where that is lowest, and what it misses.

Both axes are in log2, since a grid doubles them. Which cells may be the best is `grid.best_cells`, which assumes no shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from depthroute.common.errors import RequestError
from depthroute.study.grid import Cell, Replicates, Run, free_means, seed_columns
from depthroute.study.statistics import CONFIDENCE

if TYPE_CHECKING:
    import numpy

TERMS = ("constant", "rank", "blocks", "rank^2", "blocks^2", "rank blocks")
OPTIMUM_DRAWS = 4000


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """One term of the quadratic with its 95 % t interval, in nats per token and doubling (constant: nats per token)."""

    term: str
    value: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The lowest point of the fitted quadratic within the grid's bounds.

    `place` says whether it is a bowl's bottom "inside" them or only their lowest "border", beyond which it may be lower still. `loss` and
    `loss_interval` are of the fit at that point. `rank_interval` and `blocks_interval` are 95 % percentile intervals, and `inside_share`
    the share of fits with a bottom inside, over 4000 fixed draws of the coefficients from their t distribution; they too end at
    the grid's bounds.
    """

    rank: float
    blocks: float
    loss: float
    loss_interval: tuple[float, float]
    place: Literal["inside", "border"]
    rank_interval: tuple[float, float]
    blocks_interval: tuple[float, float]
    inside_share: float


@dataclass(frozen=True, kw_only=True)
class LackOfFit:
    """F of what the quadratic misses against replicates. With a small p the shape is wrong, and its optimum a summary, not a place."""

    statistic: float
    freedom: tuple[int, int]
    p: float


@dataclass(frozen=True, kw_only=True)
class Surface:
    """The fitted quadratic. `centre` is where log2 rank and log2 blocks are measured from, `sd` the residual one with `freedom` degrees.

    `lack_of_fit` is None where no cell is repeated and no replicates are given.
    """

    coefficients: tuple[Coefficient, ...]
    centre: Cell
    sd: float
    freedom: int
    optimum: Optimum
    lack_of_fit: LackOfFit | None


def response_surface(runs: Sequence[Run], *, replicates: Replicates | None = None) -> Surface:
    """Fit loss = b0 + b1 x + b2 z + b3 x^2 + b4 z^2 + b5 x z + seed by least squares, x = log2(rank / centre), z = log2(blocks / centre).

    Seed effects add up to zero over the seeds, so the surface is that of their mean. Intervals use the residual variance, which holds what
    the quadratic misses beside the noise. Lack of fit: the residual sum of squares less that of a free mean per cell, against the latter,
    or against the given replicates. (G. E. P. Box and N. R. Draper, "Response Surfaces, Mixtures, and Ridge Analyses", 2007.)

    Args:
        runs: every run of the grid, cells in any order.
        replicates: the spread of repeated runs from elsewhere, for runs that repeat no cell.

    Raises:
        RequestError: a cell with two runs of one seed, a loss that is not finite, seeds that do not connect the cells, too few runs or
            levels for the six terms, or replicates given for runs that have their own.
    """
    import numpy as np
    from scipy.special import stdtrit

    free = free_means(runs)
    if free.replicates is not None and replicates is not None:
        raise RequestError("replicates are given for runs that repeat cells themselves; leave them out.")
    places = np.log2([[run.cell.rank, run.cell.blocks] for run in runs])
    centre = places.mean(axis=0)
    design = np.hstack([_terms(places - centre), seed_columns(runs)])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise RequestError(
            "the cells do not determine a quadratic: it needs three ranks, three numbers of blocks, and six cells spread over them."
        )
    freedom = len(runs) - design.shape[1]
    if freedom < 1:
        raise RequestError(f"a quadratic with its seeds has {design.shape[1]} numbers to fit; give more than {len(runs)} runs.")
    losses = np.array([run.loss for run in runs])
    inverse = np.linalg.inv(design.T @ design)
    fitted = inverse @ design.T @ losses
    remaining = float(np.sum((losses - design @ fitted) ** 2))
    variance = remaining / freedom
    covariance = variance * inverse[: len(TERMS), : len(TERMS)]
    values = fitted[: len(TERMS)]
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * np.sqrt(np.diag(covariance))
    return Surface(
        coefficients=tuple(
            Coefficient(term=term, value=float(value), interval=(float(value - reach), float(value + reach)))
            for term, value, reach in zip(TERMS, values, half, strict=True)
        ),
        centre=Cell(rank=float(2 ** centre[0]), blocks=float(2 ** centre[1])),
        sd=math.sqrt(variance),
        freedom=freedom,
        optimum=_optimum(values, covariance, freedom, places, centre),
        lack_of_fit=_lack_of_fit(remaining, freedom, free.replicates, replicates),
    )


def _terms(places: numpy.ndarray) -> numpy.ndarray:
    """[..., 2] coordinates to [..., 6] terms."""
    import numpy as np

    x, z = places[..., 0], places[..., 1]
    return np.stack([np.ones_like(x), x, z, x * x, z * z, x * z], axis=-1)


def _lack_of_fit(remaining: float, freedom: int, own: Replicates | None, given: Replicates | None) -> LackOfFit | None:
    """`remaining` is the quadratic's residual sum of squares, which holds that of the runs' own replicates but not of given ones."""
    pure = own or given
    if pure is None or pure.sd == 0:
        return None
    missed, lost = remaining, freedom
    if own is not None:
        missed, lost = max(0.0, remaining - own.sd**2 * own.freedom), freedom - own.freedom
    if lost == 0:
        return None
    from scipy.special import fdtrc

    statistic = missed / lost / pure.sd**2
    return LackOfFit(statistic=statistic, freedom=(lost, pure.freedom), p=float(fdtrc(lost, pure.freedom, statistic)))


def _optimum(values: numpy.ndarray, covariance: numpy.ndarray, freedom: int, places: numpy.ndarray, centre: numpy.ndarray) -> Optimum:
    import numpy as np
    from scipy.special import stdtrit

    low, high = places.min(axis=0) - centre, places.max(axis=0) - centre
    at, inside = _lowest(values[None], low, high)
    terms = _terms(at[0])
    loss = float(terms @ values)
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(max(0.0, float(terms @ covariance @ terms)))
    generator = np.random.default_rng(0)
    scale = np.sqrt(freedom / generator.chisquare(freedom, OPTIMUM_DRAWS))
    normal = generator.standard_normal((OPTIMUM_DRAWS, len(values)))
    level, axes = np.linalg.eigh(covariance)
    draws = values + scale[:, None] * (normal * np.sqrt(np.maximum(level, 0))) @ axes.T
    drawn, drawn_inside = _lowest(draws, low, high)
    tail = (1 - CONFIDENCE) / 2
    ends = 2 ** (np.quantile(drawn, [tail, 1 - tail], axis=0) + centre)
    rank, blocks = 2 ** (at[0] + centre)
    return Optimum(
        rank=float(rank),
        blocks=float(blocks),
        loss=loss,
        loss_interval=(loss - half, loss + half),
        place="inside" if inside[0] else "border",
        rank_interval=(float(ends[0, 0]), float(ends[1, 0])),
        blocks_interval=(float(ends[0, 1]), float(ends[1, 1])),
        inside_share=float(drawn_inside.mean()),
    )


def _lowest(values: numpy.ndarray, low: numpy.ndarray, high: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The lowest points of quadratics [n, 6] within a rectangle: [n, 2] places, and [n] whether each is inside."""
    import numpy as np

    _, b1, b2, b3, b4, b5 = values.T
    candidates = []
    with np.errstate(divide="ignore", invalid="ignore"):
        curvature = 4 * b3 * b4 - b5**2
        bottom = np.stack([(b5 * b2 - 2 * b4 * b1) / curvature, (b5 * b1 - 2 * b3 * b2) / curvature], axis=-1)
        # On a side one coordinate is fixed, and the other is at the side's own bottom or at one of its ends.
        for fixed, bend, tilt in ((0, b4, b2), (1, b3, b1)):
            free = 1 - fixed
            for end in (low[fixed], high[fixed]):
                own = np.clip(np.nan_to_num(-(tilt + b5 * end) / (2 * bend)), low[free], high[free])
                for other in (own, np.full_like(own, low[free]), np.full_like(own, high[free])):
                    candidates.append(np.stack([np.full_like(own, end), other][:: 1 if fixed == 0 else -1], axis=-1))
    inside = (curvature > 0) & (b3 > 0) & np.all((bottom > low) & (bottom < high), axis=-1)
    table = np.stack(candidates)  # [12, n, 2]
    heights = np.einsum("cnt,nt->cn", _terms(table), values)
    border = table[np.argmin(heights, axis=0), np.arange(len(values))]
    return np.where(inside[:, None], bottom, border), inside
