"""The view over scales: against scipy's tests, hand computation, and the Role-Decoupled paper's two scales."""

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
from depthroute.study.scales import across_scales
from depthroute.study.statistics import t_interval

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "role_decoupled_attnres.json").read_text(encoding="utf-8"))
PAPER = {scale: np.subtract(GOLDEN["role_decoupled_nll"][scale], GOLDEN["block_nll"][scale]).tolist() for scale in ("S", "M")}
SIZES = {scale: GOLDEN["models"][scale]["parent_parameters"] for scale in ("S", "M")}
SEEDWISE = st.lists(st.integers(-1000, 1000), min_size=2, max_size=6).filter(lambda whole: len(set(whole)) > 1)
SCALES = st.lists(SEEDWISE, min_size=2, max_size=5)


def named(rows: list[list[int]]) -> dict[str, list[float]]:
    return {f"scale {index}": [value / 1000 for value in row] for index, row in enumerate(rows)}


def test_the_papers_two_scales_have_a_clear_mean_and_no_visible_difference() -> None:
    result = across_scales(PAPER, SIZES)
    for gap in result.scales:
        assert gap.t_interval == t_interval(PAPER[gap.scale])
        assert round(gap.mean, 6) == pytest.approx(GOLDEN["statistics"][gap.scale]["mean"], abs=5.1e-6)
    assert result.mean.value == pytest.approx((-0.030118 - 0.024691) / 2, abs=5.1e-6)
    # M's seeds spread four times as far as S's, so M's four degrees of freedom are nearly all there are.
    assert result.mean.freedom is not None
    assert 4 < result.mean.freedom < 5
    assert result.mean.interval is not None
    assert result.mean.interval[1] < 0
    assert result.equal_gaps is not None
    assert result.equal_gaps.p > 0.3
    assert result.slope_per_doubling is not None
    assert result.slope_per_doubling.value == pytest.approx((-0.024691 + 0.030118) / math.log2(343039424 / 119791296), abs=5e-6)
    assert result.slope_per_doubling.interval is not None
    assert result.slope_per_doubling.interval[0] < 0 < result.slope_per_doubling.interval[1]
    assert result.another_scale is None
    assert result.unknown == ("2 scales say nothing of a scale not studied; 3 are the fewest.",)


@given(SCALES)
def test_the_test_of_equal_gaps_is_scipys_welch_anova(rows: list[list[int]]) -> None:
    found = across_scales(named(rows)).equal_gaps
    expected = stats.f_oneway(*named(rows).values(), equal_var=False)
    assert found is not None
    assert found.statistic == pytest.approx(float(expected.statistic), rel=1e-7, abs=1e-12)
    assert found.p == pytest.approx(float(expected.pvalue), rel=1e-6, abs=1e-9)


@given(SEEDWISE, SEEDWISE)
def test_the_slope_between_two_scales_is_scipys_welch_interval(small: list[int], large: list[int]) -> None:
    rows = named([small, large])
    result = across_scales(rows, {"scale 0": 1e8, "scale 1": 4e8})
    expected = stats.ttest_ind(rows["scale 1"], rows["scale 0"], equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert result.slope_per_doubling is not None
    assert result.slope_per_doubling.interval == pytest.approx((low / 2, high / 2), rel=1e-7, abs=1e-12)
    assert result.slope_per_doubling.freedom == pytest.approx(float(expected.df), rel=1e-7)
    assert result.equal_gaps is not None
    assert result.equal_gaps.p == pytest.approx(float(expected.pvalue), rel=1e-6, abs=1e-9)


def test_the_slope_of_three_scales_is_the_least_squares_line_of_their_means() -> None:
    rows = {"a": [0.1, 0.2, 0.3], "b": [0.3, 0.1], "c": [-0.1, -0.4, 0.0, 0.1]}
    result = across_scales(rows, {"a": 1e6, "b": 3e6, "c": 2e7})
    line = stats.linregress(np.log2([1e6, 3e6, 2e7]), [np.mean(row) for row in rows.values()])
    assert result.slope_per_doubling is not None
    assert result.slope_per_doubling.value == pytest.approx(line.slope)
    assert result.unknown == ()


def test_the_mean_of_equal_scales_by_hand() -> None:
    # Each scale has sd 1 and three seeds: the error is sqrt(2 / 3) / 2, with 4 degrees of freedom.
    result = across_scales({"a": [-1, 0, 1], "b": [4, 5, 6]})
    assert result.mean.value == 2.5
    assert result.mean.error == pytest.approx(math.sqrt(2 / 3) / 2)
    assert result.mean.freedom == pytest.approx(4)
    assert result.mean.interval == pytest.approx((2.5 - 2.776445 * math.sqrt(1 / 6), 2.5 + 2.776445 * math.sqrt(1 / 6)), abs=1e-6)


def test_another_scale_by_hand() -> None:
    # Means 1, 2, 6 have sd sqrt(7); each within variance is 1 / 3. t(0.975, 2) = 4.302653.
    result = across_scales({"a": [0, 1, 2], "b": [1, 2, 3], "c": [5, 6, 7]}).another_scale
    assert result is not None
    assert result.mean == 3
    assert result.tau == pytest.approx(math.sqrt(7 - 1 / 3))
    half = 4.302653 * math.sqrt(7 / 3)
    assert result.interval == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert result.prediction_interval == pytest.approx((3 - 2 * half, 3 + 2 * half), abs=1e-5)


def test_equal_means_have_no_spread_between_scales() -> None:
    result = across_scales({"a": [0, 1, 2], "b": [-3, 1, 5], "c": [1, 1, 1.0]})
    assert result.another_scale is not None
    assert result.another_scale.tau == 0
    assert result.equal_gaps is None
    assert any("c are all equal" in reason for reason in result.unknown)


def test_one_seed_a_scale_still_has_means_a_slope_and_another_scale() -> None:
    result = across_scales({"a": [0.1], "b": [0.2], "c": [0.6]}, {"a": 1, "b": 2, "c": 4})
    assert result.mean.value == pytest.approx(0.3)
    assert result.mean.interval is None
    assert result.slope_per_doubling is not None
    assert result.slope_per_doubling.value == pytest.approx(0.25)
    assert result.slope_per_doubling.interval is None
    assert result.another_scale is not None
    assert result.another_scale.tau is None
    assert result.another_scale.interval == pytest.approx(t_interval([0.1, 0.2, 0.6]))
    assert result.equal_gaps is None
    assert any("a, b, c needs another" in reason for reason in result.unknown)


def test_one_scale_is_its_t_interval_and_says_what_it_cannot() -> None:
    result = across_scales({"S": [0.1, 0.2, 0.4]})
    assert result.mean.interval == pytest.approx(t_interval([0.1, 0.2, 0.4]))
    assert (result.equal_gaps, result.another_scale, result.slope_per_doubling) == (None, None, None)
    assert len(result.unknown) == 3


def test_scales_of_one_size_have_no_slope() -> None:
    result = across_scales({"a": [0.1, 0.2], "b": [0.2, 0.4]}, {"a": 5, "b": 5})
    assert result.slope_per_doubling is None
    assert any("differ in size" in reason for reason in result.unknown)


@given(SCALES)
def test_exchanging_the_arms_mirrors_everything(rows: list[list[int]]) -> None:
    sizes = {name: 2.0**index for index, name in enumerate(named(rows))}
    one, other = across_scales(named(rows), sizes), across_scales({name: [-v for v in row] for name, row in named(rows).items()}, sizes)
    for mine, theirs in ((one.mean, other.mean), (one.slope_per_doubling, other.slope_per_doubling)):
        assert mine is not None and theirs is not None
        assert mine.interval is not None and theirs.interval is not None
        assert mine.interval == pytest.approx((-theirs.interval[1], -theirs.interval[0]), abs=1e-12)
    assert one.equal_gaps is not None and other.equal_gaps is not None
    assert one.equal_gaps.p == pytest.approx(other.equal_gaps.p)


def test_differences_too_small_to_square_keep_their_degrees_of_freedom() -> None:
    small = across_scales({"a": [1e-90, 2e-90, 4e-90], "b": [1e-90, -1e-90]}).mean.freedom
    assert small == pytest.approx(across_scales({"a": [1, 2, 4], "b": [1, -1]}).mean.freedom)


@pytest.mark.parametrize(
    ("differences", "parameters", "message"),
    [
        ({}, None, "no scale"),
        ({"S": []}, None, "no seed"),
        ({"S": [math.nan]}, None, "finite"),
        ({"S": [0.1]}, {"M": 1.0}, "M, S"),
        ({"S": [0.1]}, {"S": 0.0}, "parameters of S is 0"),
    ],
)
def test_what_is_no_scale_is_refused(differences: dict[str, list[float]], parameters: dict[str, float] | None, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        across_scales(differences, parameters)
