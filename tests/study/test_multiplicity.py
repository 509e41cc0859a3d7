"""Holm's procedure against hand computation, its definition by steps, and the error rate it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from depthroute.common.errors import RequestError
from depthroute.study.multiplicity import holm, paired_t_p
from depthroute.study.statistics import t_interval

PS = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def named(values: list[float]) -> dict[str, float]:
    return {f"arm{index}": value for index, value in enumerate(values)}


def test_four_arms_by_hand() -> None:
    # Rising: 0.005 x 4, 0.01 x 3, 0.03 x 2 = 0.06, 0.04 x 1 held at 0.06 by the one before.
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}, abs=1e-15)


def test_one_arm_is_left_alone_and_large_p_stop_at_one() -> None:
    assert holm({"a": 0.2}) == {"a": 0.2}
    assert holm({"a": 0.6, "b": 0.7, "c": 1.0}) == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_equal_p_get_equal_adjusted_p() -> None:
    assert holm({"a": 0.01, "b": 0.01, "c": 0.5}) == pytest.approx({"a": 0.03, "b": 0.03, "c": 0.5})


@given(PS, st.floats(0.001, 0.999))
def test_an_arm_is_claimed_exactly_when_the_step_down_test_rejects_it(values: list[float], alpha: float) -> None:
    rejected = set()
    for step, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        if (len(values) - step) * values[index] > alpha:
            break
        rejected.add(f"arm{index}")
    assert {arm for arm, p in holm(named(values)).items() if p <= alpha} == rejected


@given(PS)
def test_holm_lies_between_the_p_and_bonferroni(values: list[float]) -> None:
    for arm, adjusted in holm(named(values)).items():
        assert named(values)[arm] <= adjusted <= min(1.0, len(values) * named(values)[arm])


def test_six_seeds_cannot_claim_one_of_two_arms_by_sign_flips_and_seven_serve_three() -> None:
    assert min(holm({"a": 2 / 2**6, "b": 2 / 2**6}).values()) > 0.05
    assert min(holm({"a": 2 / 2**7, "b": 1.0, "c": 1.0}).values()) < 0.05 < min(holm(named([2 / 2**7] * 4)).values())


def test_the_chance_of_any_false_claim_stays_at_the_level() -> None:
    # Six arms without effect that share their parent, so their differences correlate by one half.
    generator = np.random.default_rng(0)
    repeats, arms, seeds = 600, 6, 5
    parent = generator.normal(size=(repeats, 1, seeds))
    differences = generator.normal(size=(repeats, arms, seeds)) - parent
    raw = stats.ttest_1samp(differences, 0, axis=-1).pvalue
    false = np.mean([min(holm(named(row)).values()) <= 0.05 for row in raw.tolist()])
    assert np.mean(raw.min(axis=1) <= 0.05) > 0.12
    assert false <= 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / repeats)


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=7).filter(lambda whole: len(set(whole)) > 1))
def test_t_p_equals_scipys_and_agrees_with_the_interval(whole: list[int]) -> None:
    differences = [value / 1000 for value in whole]
    p = paired_t_p(differences)
    assert p == pytest.approx(float(stats.ttest_1samp(differences, 0).pvalue), rel=1e-9)
    low, high = t_interval(differences) or (0.0, 0.0)
    if abs(p - 0.05) > 1e-9:
        assert (p < 0.05) == (low > 0 or high < 0)


def test_differences_without_spread() -> None:
    assert paired_t_p([0.0, 0.0]) == 1.0
    assert paired_t_p([0.25, 0.25]) == 0.0


@pytest.mark.parametrize(
    ("ps", "message"), [({}, "no p value"), ({"a": -0.1}, "of a is -0.1"), ({"b": 1.5}, "of b"), ({"c": float("nan")}, "of c")]
)
def test_what_is_no_p_value_is_refused(ps: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        holm(ps)


def test_one_seed_has_no_t_p() -> None:
    with pytest.raises(RequestError, match="two seeds"):
        paired_t_p([0.1])
