"""Power laws: exact recovery, hand-computed jackknife, coverage, and the Attention Residuals paper's fits from its table."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthroute.common.errors import RequestError
from depthroute.study.scaling import Curve, PowerLaw, compute_advantage, fit, fit_advantage, power_law

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "attention_residuals.json").read_text(encoding="utf-8"))
RUNS = [dict(zip(GOLDEN["scaling_runs"]["columns"], row, strict=True)) for row in GOLDEN["scaling_runs"]["rows"]]
FITS = GOLDEN["scaling_fits"]
PUBLISHED = {arm: PowerLaw(scale=FITS[arm][0], exponent=FITS[arm][1]) for arm in ("baseline", "block", "full")}
PFLOPS_DAY = 1e15 * 86400
# The table prints no compute. 6 N D over the active parameters (without embeddings) leaves out attention and the head.
SIX_N_D = [6 * run["active_parameters_M"] * 1e6 * run["tokens_B"] * 1e9 / PFLOPS_DAY for run in RUNS]


def curve(compute: Sequence[float] | np.ndarray, loss: Sequence[float] | np.ndarray, sizes: list[Hashable] | None = None) -> Curve:
    return Curve(
        compute=tuple(float(value) for value in compute),
        loss=tuple(float(value) for value in loss),
        sizes=None if sizes is None else tuple(sizes),
    )


def of_law(law: PowerLaw, compute: list[float]) -> Curve:
    return curve(compute, [law.loss(value) for value in compute])


def published(arm: str, compute: list[float] | np.ndarray = SIX_N_D) -> Curve:
    return curve(compute, [run[arm] for run in RUNS])


# What the papers' numbers determine.


def test_the_published_fits_give_the_published_compute_advantage() -> None:
    assert round(PUBLISHED["baseline"].loss(5.6), 3) == 1.714
    assert round(PUBLISHED["block"].loss(5.6), 3) == 1.692
    factor = compute_advantage(PUBLISHED["block"], PUBLISHED["baseline"], 5.6)
    assert round(factor, 2) == FITS["compute_advantage_at_5_6"]
    assert round(compute_advantage(PUBLISHED["full"], PUBLISHED["baseline"], 5.6), 2) == 1.27


@pytest.mark.parametrize("arm", ["baseline", "block", "full"])
def test_the_published_exponents_lie_in_the_intervals_from_six_n_d_but_the_compute_is_not_six_n_d(arm: str) -> None:
    result = fit(published(arm))
    assert result.law.exponent == pytest.approx({"baseline": 0.0549, "block": 0.0565, "full": 0.0558}[arm], abs=5e-5)
    assert result.exponent_interval[0] < PUBLISHED[arm].exponent < result.exponent_interval[1]
    # By the paper's own fits each run cost 1.2 to 1.4 times that, and two of the three scales lie outside the intervals.
    if arm != "full":
        assert result.scale_interval[1] < PUBLISHED[arm].scale
    for run, compute in zip(RUNS, SIX_N_D, strict=True):
        assert 1.2 < PUBLISHED[arm].compute_for(run[arm]) / compute < 1.42


def test_one_compute_axis_of_two_constants_brings_all_six_published_numbers() -> None:
    # C = 1.314 (6 N D)^0.972: two constants for six numbers, to one unit of the last digit. The losses have three decimals themselves.
    axis = 1.314 * np.array(SIX_N_D) ** 0.972
    for arm, law in PUBLISHED.items():
        fitted = power_law(published(arm, axis))
        assert fitted.scale == pytest.approx(law.scale, abs=1e-3)
        assert round(fitted.exponent, 3) == law.exponent


def test_at_the_largest_run_the_points_agree_with_the_published_advantage_and_leave_it_wide() -> None:
    # Nothing here depends on the unit of compute, and the published factor is one of those the points allow.
    block = fit_advantage(published("block"), published("baseline"), SIX_N_D[-1])
    assert block.factor == pytest.approx(1.283, abs=1e-3)
    assert block.interval == pytest.approx((1.111, 1.481), abs=1e-3)
    assert block.interval[0] < FITS["compute_advantage_at_5_6"] < block.interval[1]


def test_the_five_points_do_not_determine_an_irreducible_loss() -> None:
    result = fit(published("baseline"), irreducible=True)
    assert result.floor_interval is not None
    assert result.floor_interval[0] == 0
    assert result.floor_interval[1] > min(run["baseline"] for run in RUNS)


# What holds of any numbers.


@given(st.floats(0.5, 20), st.floats(0.01, 0.5), st.integers(2, 6))
def test_points_on_a_law_give_it_back(scale: float, exponent: float, count: int) -> None:
    law = PowerLaw(scale=scale, exponent=exponent)
    compute = [3.0 * 2**index for index in range(count)]
    found = power_law(of_law(law, compute))
    assert (found.scale, found.exponent, found.floor) == (pytest.approx(scale, rel=1e-9), pytest.approx(exponent, rel=1e-9), 0)
    assert found.compute_for(law.loss(7.0)) == pytest.approx(7.0, rel=1e-6)


@given(st.floats(0.3, 3), st.floats(0.1, 0.6), st.floats(0.0, 2.5), st.sampled_from([1.0, 1e18]))
@settings(max_examples=15, deadline=None)
def test_points_with_an_irreducible_loss_give_it_back_in_any_unit(scale: float, exponent: float, floor: float, unit: float) -> None:
    law = PowerLaw(scale=scale * unit**exponent, exponent=exponent, floor=floor)
    found = power_law(of_law(law, [unit * 4.0**index for index in range(6)]), irreducible=True)
    assert found.floor == pytest.approx(floor, abs=1e-3)
    assert found.exponent == pytest.approx(exponent, rel=1e-2)
    assert found.loss(unit * 9) == pytest.approx(law.loss(unit * 9), rel=1e-6)


@given(st.lists(st.floats(1, 4), min_size=5, max_size=5))
@settings(max_examples=15, deadline=None)
def test_an_irreducible_term_never_fits_worse(loss: list[float]) -> None:
    runs = curve([1, 2, 4, 8, 16], loss)

    def misfit(law: PowerLaw) -> float:
        return sum((math.log(law.loss(c)) - math.log(value)) ** 2 for c, value in zip(runs.compute, runs.loss, strict=True))

    assert misfit(power_law(runs, irreducible=True)) <= misfit(power_law(runs)) + 1e-12


def test_three_sizes_by_hand() -> None:
    # log C = 0, 1, 2 and log loss = 0, -1, -1: slope -1/2, centre -2/3, so log scale = -2/3 + 1/2 = -1/6.
    # Without a size: slopes -0, -1/2, -1. se^2 = 2/3 (1/4 + 0 + 1/4) = 1/3. t(0.975) with 1 degree of freedom is tan(0.475 pi).
    result = fit(curve(np.exp([0, 1, 2]), np.exp([0.0, -1.0, -1.0])))
    assert result.law.exponent == pytest.approx(0.5)
    assert result.law.scale == pytest.approx(math.exp(-1 / 6))
    half = math.tan(0.475 * math.pi) / math.sqrt(3)
    assert result.exponent_interval == pytest.approx((0.5 - half, 0.5 + half))
    assert result.residuals == pytest.approx((1 / 6, -1 / 3, 1 / 6))
    assert result.floor_interval is None


@given(st.floats(0.01, 100))
def test_the_unit_of_compute_changes_no_exponent_and_no_advantage(unit: float) -> None:
    other = [unit * value for value in SIX_N_D]
    assert fit(published("block", other)).exponent_interval == pytest.approx(fit(published("block")).exponent_interval, rel=1e-8)
    here = fit_advantage(published("block"), published("baseline"), 2.0)
    there = fit_advantage(published("block", other), published("baseline", other), 2.0 * unit)
    assert (there.factor, *there.interval) == pytest.approx((here.factor, *here.interval), rel=1e-7)


def test_an_arm_against_itself_saves_nothing_and_parallel_laws_save_the_same_everywhere() -> None:
    same = fit_advantage(published("full"), published("full"), 3.0)
    assert (same.factor, *same.interval) == pytest.approx((1, 1, 1))
    base, better = PowerLaw(scale=2.0, exponent=0.1), PowerLaw(scale=2.0 * 1.5**-0.1, exponent=0.1)
    for budget in (0.1, 1.0, 1000.0):
        assert compute_advantage(better, base, budget) == pytest.approx(1.5)
        assert compute_advantage(base, better, budget) == pytest.approx(1 / 1.5)


def test_sizes_are_left_out_whole_and_arms_may_differ_in_compute_at_a_size() -> None:
    sizes: list[Hashable] = ["a", "a", "b", "b", "c", "c", "d", "d"]
    compute = np.array([1, 1, 2, 2, 4, 4, 8, 8.0])
    noise = np.array([0.01, -0.01, 0.02, 0.0, -0.01, 0.0, 0.01, 0.0])
    runs = curve(compute, 2 * compute**-0.1 + noise, sizes)
    assert runs.without("b").compute == (1, 1, 4, 4, 8, 8)
    slopes = [power_law(runs.without(size)).exponent for size in "abcd"]
    error = math.sqrt(3 / 4 * sum((slope - np.mean(slopes)) ** 2 for slope in slopes))
    low, high = fit(runs).exponent_interval
    assert (high - low) / 2 == pytest.approx(4.302653 * error, rel=1e-6)  # t(0.975) with 4 - 2 degrees of freedom
    costlier = curve(1.1 * compute, 1.9 * compute**-0.1 + noise, sizes)
    assert fit_advantage(costlier, runs, 4.0).factor > 1
    with pytest.raises(RequestError, match="different sizes"):
        fit_advantage(curve(1.1 * compute, runs.loss), runs, 4.0)


def test_labelled_by_seed_the_jackknife_is_the_t_interval_of_the_seeds() -> None:
    # Every seed runs at every size: the exponent is the mean of the seeds' exponents, and its jackknife error theirs over sqrt n.
    generator = np.random.default_rng(4)
    base = np.array([1.0, 2.0, 4.0, 8.0])
    losses = 2 * base**-0.1 * np.exp(generator.normal(0, 0.01, (3, 4)))
    runs = curve(np.tile(base, 3), losses.ravel(), [seed for seed in range(3) for _ in base])
    exponents = [power_law(curve(base, row)).exponent for row in losses]
    half = 4.302653 * np.std(exponents, ddof=1) / math.sqrt(3)
    assert fit(runs).exponent_interval == pytest.approx((np.mean(exponents) - half, np.mean(exponents) + half), rel=1e-6)


def test_a_scale_that_nothing_bounds_has_an_interval_without_end() -> None:
    # In FLOPs the scale is the loss at one FLOP, eighteen decades from these runs.
    result = fit(curve([1e18, 2e18, 4e18, 8e18], [3.0, 2.0, 1.95, 1.2]), irreducible=True)
    assert result.scale_interval == (0, math.inf)
    assert math.isfinite(result.law.scale)


@pytest.mark.parametrize("sizes", [4, 5, 7])
def test_intervals_of_the_plain_fit_cover(sizes: int) -> None:
    generator = np.random.default_rng(sizes)
    compute = np.logspace(0, 1.2, sizes)
    repeats = 400
    results = [fit(curve(compute, 1.9 * compute**-0.057 * np.exp(row))) for row in generator.normal(0, 0.003, (repeats, sizes))]
    exponent = np.mean([result.exponent_interval[0] <= 0.057 <= result.exponent_interval[1] for result in results])
    scale = np.mean([result.scale_interval[0] <= 1.9 <= result.scale_interval[1] for result in results])
    assert 0.92 <= exponent <= 0.99
    assert 0.92 <= scale <= 0.99


def test_the_interval_of_the_advantage_covers_and_gains_from_what_arms_share() -> None:
    generator = np.random.default_rng(5)
    compute = np.array(SIX_N_D)
    repeats = 300
    truth = compute_advantage(PUBLISHED["block"], PUBLISHED["baseline"], 4.0)

    def simulate(shared: np.ndarray) -> list[tuple[float, float]]:
        intervals = []
        for common in shared:
            arm, base = (
                curve(compute, law.scale * compute**-law.exponent * np.exp(common + generator.normal(0, 0.001, 5)))
                for law in (PUBLISHED["block"], PUBLISHED["baseline"])
            )
            intervals.append(fit_advantage(arm, base, 4.0).interval)
        return intervals

    paired = simulate(generator.normal(0, 0.003, (repeats, 5)))
    apart = simulate(np.zeros((repeats, 5)))
    assert 0.92 <= np.mean([low <= truth <= high for low, high in paired]) <= 0.995
    # Noise that both arms share three times over hardly widens the interval.
    assert np.median(np.diff(np.log(paired), axis=1)) < 1.3 * np.median(np.diff(np.log(apart), axis=1))


@pytest.mark.parametrize(
    ("compute", "loss", "message"),
    [
        ([1.0, 2.0], [1.0], "one compute, one loss"),
        ([0.0, 1.0], [1.0, 1.0], "a compute is 0"),
        ([1.0, 2.0], [1.0, math.nan], "a loss is nan"),
    ],
)
def test_what_is_no_curve_is_refused(compute: list[float], loss: list[float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        curve(compute, loss)


def test_too_few_sizes_are_refused() -> None:
    with pytest.raises(RequestError, match="needs 2 sizes of compute, not 1"):
        power_law(curve([3, 3], [1, 1.1]))
    with pytest.raises(RequestError, match="irreducible term needs 3"):
        power_law(curve([1, 2], [2, 1]), irreducible=True)
    with pytest.raises(RequestError, match="need 3 sizes"):
        fit(curve([1, 2], [2, 1]))
    with pytest.raises(RequestError, match="need 4 sizes"):
        fit(curve([1, 2, 4], [2, 1.5, 1.2]), irreducible=True)


def test_a_loss_that_is_never_reached_is_refused() -> None:
    law = PowerLaw(scale=1.0, exponent=0.1, floor=1.5)
    for loss in (1.5, 1.0):
        with pytest.raises(RequestError, match="never reaches"):
            law.compute_for(loss)
    with pytest.raises(RequestError, match="does not fall"):
        PowerLaw(scale=1.0, exponent=-0.1).compute_for(0.9)
    with pytest.raises(RequestError, match="too large for a number"):
        PowerLaw(scale=1.0, exponent=1e-5).compute_for(0.9)
    with pytest.raises(RequestError, match="budget is 0"):
        compute_advantage(law, law, 0.0)
