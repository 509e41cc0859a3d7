"""Power and seeds needed: against published tables, scipy's noncentral t where it has digits, and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad

from depthroute.common.errors import RequestError
from depthroute.study.equivalence import equivalence
from depthroute.study.power import equivalence_power, paired_t_power, seeds_for_equivalence, seeds_needed


def test_textbook_sample_sizes() -> None:
    # Standardised effect 0.5: 34 pairs for 80 % and 44 for 90 % two-sided; 27 one-sided for 80 %. Effect 0.8: 15 pairs for 80 %.
    pilot = [-1.0, 0.0, 1.0]  # sd 1
    assert seeds_needed(pilot, 0.5).seeds == 34
    assert seeds_needed(pilot, 0.5, power=0.9).seeds == 44
    assert seeds_needed(pilot, 0.5, two_sided=False).seeds == 27
    assert seeds_needed(pilot, 0.8).seeds == 15


@given(st.integers(2, 40), st.floats(0.05, 2.5), st.sampled_from([0.01, 0.05]))
@settings(max_examples=40, deadline=None)
def test_one_sided_power_is_scipys_noncentral_t(seeds: int, effect: float, alpha: float) -> None:
    critical = stats.t.ppf(1 - alpha, seeds - 1)
    expected = float(stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds)))
    assert paired_t_power(seeds, effect, 1.0, alpha=alpha, two_sided=False) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("seeds", [2, 5, 1000, 100_000])
@pytest.mark.parametrize("alpha", [1e-4, 0.05, 0.3])
@pytest.mark.parametrize("two_sided", [True, False])
def test_without_an_effect_the_power_is_the_level(seeds: int, alpha: float, two_sided: bool) -> None:
    assert paired_t_power(seeds, 0.0, 1.0, alpha=alpha, two_sided=two_sided) == pytest.approx(alpha, rel=1e-6)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 100, 100_000])
def test_power_is_sane_and_rises_where_scipys_distribution_is_nan(seeds: int) -> None:
    powers = [paired_t_power(seeds, shift / math.sqrt(seeds), 1.0) for shift in (0, 1, 3, 10, 30, 1000, 1e6, 1e9)]
    assert all(0 <= power <= 1 for power in powers)
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(powers))
    assert powers[-1] == pytest.approx(1, abs=1e-6)


def test_with_many_seeds_power_is_that_of_the_normal_test() -> None:
    seeds, effect = 50_000, 0.0125
    shift = effect * math.sqrt(seeds)
    assert paired_t_power(seeds, effect, 1.0) == pytest.approx(
        stats.norm.sf(1.959964 - shift) + stats.norm.cdf(-1.959964 - shift), abs=1e-4
    )


def test_power_is_the_share_of_simulated_studies_that_find_the_margin() -> None:
    generator = np.random.default_rng(2)
    repeats = 20_000
    found = stats.ttest_1samp(generator.normal(-0.02, 0.015, (repeats, 5)), 0, axis=1).pvalue <= 0.05
    assert paired_t_power(5, 0.02, 0.015) == pytest.approx(np.mean(found), abs=0.012)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6).filter(lambda whole: len(set(whole)) > 1), st.integers(5, 200), st.booleans())
@settings(max_examples=30, deadline=None)
def test_seeds_are_the_fewest_that_reach_the_power(whole: list[int], margin: int, two_sided: bool) -> None:
    pilot = [value / 1000 for value in whole]
    result = seeds_needed(pilot, margin / 1000, two_sided=two_sided)
    assert result.sd == pytest.approx(np.std(pilot, ddof=1))
    for seeds, sd, power in ((result.seeds, result.sd, result.power), (result.cautious_seeds, result.cautious_sd, result.cautious_power)):
        assert power == paired_t_power(seeds, margin / 1000, sd, two_sided=two_sided) >= 0.8
        assert seeds == 2 or paired_t_power(seeds - 1, margin / 1000, sd, two_sided=two_sided) < 0.8
    assert result.cautious_seeds >= result.seeds
    assert seeds_needed(pilot, -margin / 1000, two_sided=two_sided).seeds == result.seeds


def test_the_pilots_mean_plays_no_part() -> None:
    assert seeds_needed([-0.5, 0.0, 0.25], 0.125).seeds == seeds_needed([0.5, 1.0, 1.25], 0.125).seeds


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
def test_the_cautious_sd_is_above_the_true_one_in_four_pilots_of_five(seeds: int) -> None:
    generator = np.random.default_rng(seeds)
    pilots = generator.normal(0, 1, (10_000, seeds))
    result = seeds_needed(pilots[0].tolist(), 3.0)
    factor = result.cautious_sd / result.sd
    assert np.mean(factor * pilots.std(axis=1, ddof=1) >= 1) == pytest.approx(0.8, abs=0.015)


def test_the_cautious_sd_of_five_seeds_by_the_table() -> None:
    # Chi-square with 4 degrees of freedom has the 20 % quantile 1.6488.
    result = seeds_needed([-0.02, -0.01, 0.0, 0.01, 0.02], 0.02)
    assert result.cautious_sd == pytest.approx(result.sd * math.sqrt(4 / 1.6488), rel=1e-4)
    assert result.pilot_seeds == 5


@pytest.mark.parametrize(
    ("pilot", "options", "message"),
    [
        ([0.1], {}, "one difference has no spread"),
        ([], {}, "no seed"),
        ([0.25, 0.25], {}, "without spread"),
        ([0.1, math.inf], {}, "finite"),
        ([0.1, 0.2], {"margin": 0.0}, "margin is 0"),
        ([0.1, 0.2], {"margin": math.nan}, "margin is nan"),
        ([0.1, 0.2], {"power": 1.0}, "power is 1"),
        ([0.1, 0.2], {"power": 0.04}, "alpha 0.05"),
        ([0.1, 0.2], {"alpha": 0.6}, "alpha is 0.6|alpha 0.6"),
        ([0.1, 0.2], {"margin": 1e-5}, "more than 100000 seeds"),
    ],
)
def test_what_has_no_answer_is_refused(pilot: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        seeds_needed(pilot, **{"margin": 0.1, **options})


@pytest.mark.parametrize(
    ("seeds", "margin", "sd", "message"), [(1, 0.1, 0.1, "seeds is 1"), (5, 0.1, 0.0, "sd is 0"), (5, math.nan, 0.1, "margin is nan")]
)
def test_power_of_nonsense_is_refused(seeds: int, margin: float, sd: float, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        paired_t_power(seeds, margin, sd)


@pytest.mark.parametrize("seeds", [2, 3, 5, 12, 60])
@pytest.mark.parametrize("true", [0.0, 0.4, -0.9, 1.0])
def test_equivalence_power_is_owens_integral_over_the_sd(seeds: int, true: float) -> None:
    # The other order of integration: over u = s / sigma outside, the normal mean inside.
    margin, sd = 1.0, 0.8
    freedom, root = seeds - 1, math.sqrt(seeds) / sd
    critical = stats.t.ppf(0.95, freedom)
    top = margin * root / critical

    def inner(u: float) -> float:
        reach = margin * root - critical * u
        density = stats.chi.pdf(u * math.sqrt(freedom), freedom) * math.sqrt(freedom)
        return float(density * (stats.norm.cdf(reach - true * root) - stats.norm.cdf(-reach - true * root)))

    expected = quad(inner, 0, min(top, 12), points=[1.0] if top > 1 else None, epsabs=1e-12, limit=200)[0]
    assert equivalence_power(seeds, margin, sd, true=true) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("seeds", "true"), [(3, 0.0), (6, 0.5), (6, -0.5), (20, 1.0)])
def test_equivalence_power_is_the_share_of_simulated_studies_that_conclude_it(seeds: int, true: float) -> None:
    generator = np.random.default_rng(seeds)
    repeats = 40_000
    rows = generator.normal(true, 0.7, (repeats, seeds))
    half = stats.t.ppf(0.95, seeds - 1) * rows.std(axis=1, ddof=1) / math.sqrt(seeds)
    found = float(np.mean(np.abs(rows.mean(axis=1)) + half < 1))
    power = equivalence_power(seeds, 1.0, 0.7, true=true)
    assert power == pytest.approx(found, abs=4 * math.sqrt(power * (1 - power) / repeats))
    # And the studies are judged as `equivalence` judges them.
    judged = [equivalence(row, 1.0).verdict == "equivalent" for row in rows[:200].tolist()]
    assert judged == (np.abs(rows.mean(axis=1)) + half < 1)[:200].tolist()


@pytest.mark.parametrize("seeds", [2, 10, 1000, 100_000])
def test_equivalence_is_never_claimed_above_the_level_at_the_margin(seeds: int) -> None:
    power = equivalence_power(seeds, 1.0, 1.0, true=1.0)
    assert 0 < power <= 0.05 + 1e-9
    assert seeds < 1000 or power == pytest.approx(0.05, rel=1e-6)
    assert equivalence_power(seeds, 1.0, 1e-6) == pytest.approx(1, abs=1e-4 if seeds == 2 else 1e-9)


@given(
    st.lists(st.integers(-50, 50), min_size=2, max_size=6).filter(lambda whole: len(set(whole)) > 1),
    st.integers(5, 200),
    st.sampled_from([0.0, 0.3, -0.6]),
)
@settings(max_examples=25, deadline=None)
def test_seeds_for_equivalence_are_the_fewest_that_reach_the_power(whole: list[int], margin: int, part: float) -> None:
    pilot, true = [value / 1000 for value in whole], part * margin / 1000
    result = seeds_for_equivalence(pilot, margin / 1000, true=true)
    for seeds, sd, power in ((result.seeds, result.sd, result.power), (result.cautious_seeds, result.cautious_sd, result.cautious_power)):
        assert power == equivalence_power(seeds, margin / 1000, sd, true=true) >= 0.8
        # Every smaller number near it falls short, and so do the smallest ones, where this power is not monotone.
        for fewer in {2, 3, 4, seeds // 2, seeds - 2, seeds - 1}:
            assert not 2 <= fewer < seeds or equivalence_power(fewer, margin / 1000, sd, true=true) < 0.8
    assert (result.sd, result.cautious_sd) == (seeds_needed(pilot, 1.0).sd, seeds_needed(pilot, 1.0).cautious_sd)


def test_equivalence_takes_more_seeds_than_a_difference_of_the_margin_and_more_off_centre() -> None:
    pilot = [-1.0, 0.0, 1.0]
    assert seeds_for_equivalence(pilot, 0.5).seeds > seeds_needed(pilot, 0.5).seeds
    assert 2.5 < seeds_for_equivalence(pilot, 0.25, true=0.125).seeds / seeds_for_equivalence(pilot, 0.25).seeds < 3.2


@pytest.mark.parametrize(
    ("pilot", "options", "message"),
    [
        ([0.1], {}, "one difference has no spread"),
        ([0.25, 0.25], {}, "without spread"),
        ([0.1, 0.2], {"margin": -0.1}, "margin is -0.1"),
        ([0.1, 0.2], {"true": 0.1}, "true is 0.1"),
        ([0.1, 0.2], {"true": math.nan}, "true is nan"),
        ([0.1, 0.2], {"power": 0.04}, "alpha 0.05"),
        ([0.1, 0.2], {"margin": 1e-5}, "more than 100000 seeds"),
    ],
)
def test_what_cannot_become_equivalent_is_refused(pilot: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        seeds_for_equivalence(pilot, **{"margin": 0.1, **options})


@pytest.mark.parametrize(
    ("seeds", "options", "message"),
    [
        (1, {}, "seeds is 1"),
        (5, {"sd": 0.0}, "sd is 0"),
        (5, {"margin": math.inf}, "margin is inf"),
        (5, {"true": math.inf}, "true is inf"),
        (5, {"alpha": 0.5}, "alpha is 0.5"),
    ],
)
def test_equivalence_power_of_nonsense_is_refused(seeds: int, options: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        equivalence_power(seeds, **{"margin": 0.1, "sd": 0.1, **options})
