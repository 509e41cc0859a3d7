"""TOST against hand computation, scipy's one-sided tests, and its error rates by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from depthroute.common.errors import RequestError
from depthroute.study.equivalence import equivalence

SPREAD = st.lists(st.integers(-100, 100), min_size=2, max_size=8).filter(lambda whole: len(set(whole)) > 1)


def test_three_seeds_by_hand() -> None:
    # mean 0.02, sd 0.01, se 0.01 / sqrt 3; t with 2 degrees of freedom has P(T <= t) = 1/2 + t / (2 sqrt(2 + t^2)) and
    # t(0.95) = 0.9 sqrt(2 / (1 - 0.81)).
    result = equivalence([0.01, 0.02, 0.03], 0.05)
    error = 0.01 / math.sqrt(3)
    upper, lower = 0.03 / error, 0.07 / error
    assert result.p_below_upper == pytest.approx(0.5 - upper / (2 * math.sqrt(2 + upper**2)))
    assert result.p_above_lower == pytest.approx(0.5 - lower / (2 * math.sqrt(2 + lower**2)))
    assert result.p == result.p_below_upper
    half = 0.9 * math.sqrt(2 / 0.19) * error
    assert result.interval == pytest.approx((0.02 - half, 0.02 + half))
    assert (result.seeds, result.margin, result.verdict) == (3, 0.05, "equivalent")


@given(SPREAD, st.floats(0.001, 0.2), st.sampled_from([0.01, 0.05, 0.1]))
def test_p_values_are_scipys_and_agree_with_the_interval(whole: list[int], margin: float, alpha: float) -> None:
    differences = [value / 1000 for value in whole]
    result = equivalence(differences, margin, alpha=alpha)
    assert result.p_above_lower == pytest.approx(float(stats.ttest_1samp(differences, -margin, alternative="greater").pvalue), rel=1e-7)
    assert result.p_below_upper == pytest.approx(float(stats.ttest_1samp(differences, margin, alternative="less").pvalue), rel=1e-7)
    assume(abs(result.p - alpha) > 1e-9)
    inside = -margin < result.interval[0] and result.interval[1] < margin
    assert (result.verdict == "equivalent") == inside


@given(SPREAD, st.floats(0.001, 0.2))
def test_exchanging_the_arms_mirrors_everything(whole: list[int], margin: float) -> None:
    one = equivalence([value / 1000 for value in whole], margin)
    other = equivalence([-value / 1000 for value in whole], margin)
    assert (one.p_above_lower, one.p_below_upper) == pytest.approx((other.p_below_upper, other.p_above_lower), abs=1e-12)
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert other.verdict == {"better": "worse", "worse": "better"}.get(one.verdict, one.verdict)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.001, -0.001, 0.002], "equivalent"),
        ([0.0051, 0.0049, 0.005], "equivalent"),  # clearly not zero, and clearly too small to matter
        ([-0.05, -0.051, -0.049], "better"),
        ([0.05, 0.051, 0.049], "worse"),
        ([0.05, -0.05, 0.0], "undecided"),
        ([0.011, 0.012, 0.0105], "undecided"),  # the mean is beyond the margin, the interval is not
    ],
)
def test_verdicts(differences: list[float], verdict: str) -> None:
    assert equivalence(differences, 0.01).verdict == verdict


def test_differences_without_spread_are_decided_by_their_side() -> None:
    assert equivalence([0.125, 0.125], 0.25).verdict == "equivalent"
    assert equivalence([0.5, 0.5], 0.25).verdict == "worse"
    on_the_margin = equivalence([0.25, 0.25], 0.25)
    assert (on_the_margin.p, on_the_margin.verdict) == (0.5, "undecided")


def test_equivalence_is_claimed_wrongly_at_most_at_the_level_and_the_interval_covers() -> None:
    # The hardest case is a true difference that is exactly the margin.
    generator = np.random.default_rng(1)
    repeats = 800
    results = [equivalence(row, 3.0) for row in generator.normal(3.0, 1.0, (repeats, 5)).tolist()]
    wrong = np.mean([result.verdict == "equivalent" for result in results])
    covers = np.mean([result.interval[0] <= 3.0 <= result.interval[1] for result in results])
    assert wrong == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / repeats))
    assert covers == pytest.approx(0.90, abs=3 * math.sqrt(0.09 / repeats))


@pytest.mark.parametrize(
    ("differences", "margin", "alpha", "message"),
    [
        ([0.1, 0.2], 0.0, 0.05, "margin is 0"),
        ([0.1, 0.2], math.inf, 0.05, "margin is inf"),
        ([0.1, 0.2], 0.1, 0.5, "alpha is 0.5"),
        ([0.1], 0.1, 0.05, "two seeds"),
        ([], 0.1, 0.05, "no seed"),
        ([0.1, math.nan], 0.1, 0.05, "finite"),
    ],
)
def test_what_cannot_be_tested_is_refused(differences: list[float], margin: float, alpha: float, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        equivalence(differences, margin, alpha=alpha)
