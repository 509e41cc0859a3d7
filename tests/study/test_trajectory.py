"""The gap over milestones: hand computation, scipy's lines and intervals, and what the Role-Decoupled paper prints of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from depthroute.common.errors import RequestError
from depthroute.study.statistics import t_interval
from depthroute.study.trajectory import trajectory

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "role_decoupled_attnres.json").read_text(encoding="utf-8"))
TOKENS = GOLDEN["milestones_tokens"]
TABLES = st.integers(2, 5).flatmap(
    lambda width: st.lists(st.lists(st.integers(-1000, 1000), min_size=width, max_size=width), min_size=2, max_size=6)
)


@pytest.mark.parametrize(("scale", "spread_that_would_hide_it"), [("S", 0.0277), ("M", 0.0336)])
def test_the_papers_printed_means(scale: str, spread_that_would_hide_it: float) -> None:
    # The paper prints each seed at the last milestone, and only the mean at the first: its seeds are set to that mean here.
    first, last = GOLDEN["mean_gap_first_and_last_milestone"][scale]
    ends = np.subtract(GOLDEN["role_decoupled_nll"][scale], GOLDEN["block_nll"][scale])
    result = trajectory([TOKENS[0], TOKENS[-1]], [[first, end] for end in ends.tolist()])
    assert round(result.points[-1].mean, 4) == last
    assert result.points[-1].t_interval == pytest.approx(tuple(GOLDEN["statistics"][scale]["t_interval"]), abs=5.1e-6)
    assert result.trend is not None
    assert result.trend.first_to_last.mean == pytest.approx(last - first, abs=5.1e-5)
    assert result.trend.slope.mean == pytest.approx((last - first) / math.log2(TOKENS[-1] / TOKENS[0]), abs=2e-5)
    assert result.trend.verdict == "closing"
    # How far five seeds' changes would have to spread for the closing to be undecided.
    assert (last - first) * math.sqrt(5) / stats.t.ppf(0.975, 4) == pytest.approx(spread_that_would_hide_it, abs=5e-5)


def test_one_seed_of_the_paper_narrows_and_proves_nothing() -> None:
    # M, seed 123 at 0.5B tokens (appendix, main run) and at 2B.
    controls = GOLDEN["controls_500M_tokens_seed_123"]["M"]
    middle = controls["role_decoupled"] - controls["block"]
    last = GOLDEN["role_decoupled_nll"]["M"][0] - GOLDEN["block_nll"]["M"][0]
    result = trajectory([TOKENS[1], TOKENS[3]], [[middle, last]])
    assert result.trend is not None
    assert result.trend.size_slope is not None
    assert result.trend.size_slope.mean == pytest.approx((0.01813 - 0.0388) / 2, abs=2e-6)
    assert (result.trend.size_slope.interval, result.trend.verdict) == (None, "undecided")
    assert (result.points[0].band, result.points[0].t_interval, result.points[0].sd) == (None, None, None)


@given(TABLES)
def test_intervals_and_slopes_are_scipys(table: list[list[int]]) -> None:
    rows = [[value / 1000 for value in row] for row in table]
    tokens = [3.0 * 1.7**index for index in range(len(rows[0]))]
    result = trajectory(tokens, rows)
    seeds, width = len(rows), len(tokens)
    for point, column in zip(result.points, zip(*rows, strict=True), strict=True):
        assert point.t_interval == t_interval(column)
        half = stats.t.ppf(1 - 0.025 / width, seeds - 1) * np.std(column, ddof=1) / math.sqrt(seeds)
        assert point.band == pytest.approx((point.mean - half, point.mean + half), abs=1e-9)
    assert result.trend is not None
    slopes = [stats.linregress(np.log2(tokens), row).slope for row in rows]
    assert result.trend.slope.differences == pytest.approx(tuple(slopes), abs=1e-12)
    assert result.trend.slope.interval == pytest.approx(t_interval(slopes), abs=1e-9)
    assert result.trend.first_to_last.differences == pytest.approx(tuple(row[-1] - row[0] for row in rows))


@given(TABLES)
def test_exchanging_the_arms_keeps_the_verdict_and_mirrors_the_slope(table: list[list[int]]) -> None:
    tokens = [2.0**index for index in range(len(table[0]))]
    one, other = trajectory(tokens, table).trend, trajectory(tokens, [[-value for value in row] for row in table]).trend
    assert one is not None and other is not None
    assert one.verdict == other.verdict
    assert one.slope.mean == -other.slope.mean
    if one.size_slope is not None and other.size_slope is not None:
        assert one.size_slope.differences == other.size_slope.differences


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([[-0.06, -0.05, -0.04], [-0.07, -0.055, -0.043], [-0.065, -0.052, -0.041]], "closing"),
        ([[0.06, 0.05, 0.04], [0.07, 0.055, 0.043], [0.065, 0.052, 0.041]], "closing"),
        ([[-0.01, -0.02, -0.04], [-0.012, -0.022, -0.041], [-0.011, -0.025, -0.043]], "widening"),
        ([[-0.06, -0.05, -0.04], [-0.04, -0.05, -0.06], [-0.05, -0.05, -0.05]], "undecided"),
        # The arms change places: the slope is clear, and there is no side it could close from.
        ([[-0.06, 0.001, 0.06], [-0.062, -0.001, 0.061], [-0.061, 0.0, 0.06]], "undecided"),
        ([[-0.5, 0.5], [-0.5, 0.5]], "undecided"),
    ],
)
def test_verdicts(rows: list[list[float]], verdict: str) -> None:
    result = trajectory([1.0, 2.0, 4.0][: len(rows[0])], rows)
    assert result.trend is not None
    assert result.trend.verdict == verdict


def test_a_mean_gap_of_zero_has_no_size() -> None:
    trend = trajectory([1, 2], [[-0.5, 0.5], [-0.25, 0.25]]).trend
    assert trend is not None
    assert trend.size_slope is None
    assert trend.slope.mean == 0.75


def test_one_milestone_has_no_trend_and_its_band_is_its_t_interval() -> None:
    result = trajectory([100], [[0.1], [0.2], [0.4]])
    assert result.trend is None
    assert result.points[0].band == pytest.approx(result.points[0].t_interval)


@pytest.mark.parametrize(
    ("tokens", "rows", "message"),
    [
        ([], [[]], "no milestone"),
        ([1], [], "no seed"),
        ([1, 1], [[0, 0]], "rising"),
        ([0, 1], [[0, 0]], "positive"),
        ([1, 2], [[0.0]], "2 milestones, not 1"),
        ([1, 2], [[0.0, math.nan]], "finite"),
    ],
)
def test_what_is_no_trajectory_is_refused(tokens: list[float], rows: list[list[float]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        trajectory(tokens, rows)
