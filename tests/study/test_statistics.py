"""The paired statistics against the Role-Decoupled paper's table, and against the definitions they come from."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from depthroute.common.errors import RequestError
from depthroute.study.statistics import bootstrap_interval, paired, sign_flip_p, standard_deviation, t_interval

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "role_decoupled_attnres.json").read_text(encoding="utf-8"))
SEEDWISE = st.lists(st.floats(-1, 1).map(lambda value: round(value, 6)), min_size=2, max_size=5)


@pytest.mark.parametrize("scale", ["S", "M"])
def test_the_papers_statistics_follow_from_its_per_seed_table(scale: str) -> None:
    result = paired(GOLDEN["role_decoupled_nll"][scale], GOLDEN["block_nll"][scale])
    printed = GOLDEN["statistics"][scale]
    # The table prints NLLs to five digits, so a difference can be off by 1e-5. All ends but one agree within 5e-6: the lower end of
    # M's t interval is 5.07e-6 away.
    close = {"rel": 0, "abs": 5.1e-6}
    assert result.mean == pytest.approx(printed["mean"], **close)
    assert result.sd == pytest.approx(printed["sd"], **close)
    assert result.t_interval == pytest.approx(tuple(printed["t_interval"]), **close)
    assert result.bootstrap_interval == pytest.approx(tuple(printed["bootstrap_interval"]), **close)
    assert round(100 * result.mean_relative_perplexity_reduction, 2) == printed["mean_ppl_reduction_percent"]
    assert (result.wins, result.losses, result.ties) == (5, 0, 0)
    assert result.sign_flip_p == 0.0625


@pytest.mark.parametrize("scale", ["S", "M"])
def test_with_five_seeds_every_quantile_definition_gives_the_same_interval(scale: str) -> None:
    differences = np.subtract(GOLDEN["role_decoupled_nll"][scale], GOLDEN["block_nll"][scale])
    means = np.array([np.mean(pick) for pick in itertools.product(differences, repeat=5)])
    for method in ("linear", "inverted_cdf", "weibull", "hazen", "lower", "higher", "median_unbiased"):
        quantiles = np.quantile(means, [0.025, 0.975], method=method)
        assert bootstrap_interval(differences.tolist()) == pytest.approx(tuple(quantiles), rel=0, abs=1e-9)


@given(SEEDWISE)
def test_t_interval_and_sd_equal_scipys(differences: list[float]) -> None:
    sd = standard_deviation(differences)
    assert sd == pytest.approx(np.std(differences, ddof=1), abs=1e-12)
    expected = np.mean(differences) + np.array([-1, 1]) * stats.t.ppf(0.975, len(differences) - 1) * sd / math.sqrt(len(differences))
    assert t_interval(differences) == pytest.approx(tuple(expected), abs=1e-9)


@given(SEEDWISE)
def test_sign_flip_p_counts_every_pattern(differences: list[float]) -> None:
    whole = [round(value * 10**6) for value in differences]  # integers have no rounding to forgive
    patterns = list(itertools.product((1, -1), repeat=len(whole)))
    hits = sum(abs(sum(s * v for s, v in zip(signs, whole, strict=True))) >= abs(sum(whole)) for signs in patterns)
    assert sign_flip_p(differences) == hits / len(patterns)


@given(SEEDWISE)
def test_intervals_mirror_when_the_arms_change_places(differences: list[float]) -> None:
    low, high = bootstrap_interval(differences)
    mirrored = bootstrap_interval([-value for value in differences])
    assert mirrored == pytest.approx((-high, -low), abs=1e-12)
    assert min(differences) - 1e-12 <= low <= high <= max(differences) + 1e-12


@pytest.mark.parametrize(("seeds", "smallest"), [(1, 1.0), (2, 0.5), (3, 0.25), (5, 0.0625), (6, 0.03125), (20, 2 / 2**20)])
def test_the_smallest_p_is_set_by_the_number_of_seeds(seeds: int, smallest: float) -> None:
    assert sign_flip_p([-0.01 - 0.001 * seed for seed in range(seeds)]) == smallest


def test_equal_means_that_differ_by_rounding_are_ties() -> None:
    # The first three add up to zero, but to 5.6e-17 in float64; with their signs flipped the mean is as far from zero, and rounds below.
    assert sign_flip_p([0.1, 0.2, -0.3, 0.05]) == 1.0
    assert sign_flip_p([1e-9, 2e-9, -3e-9]) == 1.0
    assert sign_flip_p([0.0, 0.0]) == 1.0


def test_bootstrap_of_two_seeds_is_their_range() -> None:
    assert bootstrap_interval([-0.02, -0.01]) == (-0.02, -0.01)


def test_many_seeds_use_draws_that_repeat_and_agree_with_enumeration() -> None:
    generator = np.random.default_rng(3)
    seven, many = generator.normal(-0.02, 0.03, 7).tolist(), generator.normal(-0.02, 0.05, 22).tolist()
    assert bootstrap_interval(seven) == bootstrap_interval(seven)
    means = np.array(seven)[np.indices((7,) * 7).reshape(7, -1)].mean(axis=0)
    assert bootstrap_interval(seven) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=5e-4)
    assert sign_flip_p(many) == sign_flip_p(many)
    # The sums of random signs are near normal with 22 seeds.
    normal = 2 * stats.norm.sf(abs(sum(many)) / math.sqrt(sum(value * value for value in many)))
    assert sign_flip_p(many) == pytest.approx(normal, rel=0.15)


def test_one_seed_has_a_difference_and_no_interval() -> None:
    result = paired([3.0], [3.1])
    assert result.sd is None
    assert result.t_interval is None
    assert result.bootstrap_interval == pytest.approx((-0.1, -0.1))
    assert result.sign_flip_p == 1.0


def test_wins_losses_and_ties_and_the_perplexity_of_each_seed() -> None:
    result = paired([3.0, 3.2, 3.1, 2.9], [3.1, 3.1, 3.1, 3.0])
    assert (result.wins, result.losses, result.ties) == (2, 1, 1)
    direct = [(math.exp(p) - math.exp(a)) / math.exp(p) for a, p in [(3.0, 3.1), (3.2, 3.1), (3.1, 3.1), (2.9, 3.0)]]
    assert result.relative_perplexity_reduction == pytest.approx(tuple(direct))
    assert result.mean_relative_perplexity_reduction == pytest.approx(sum(direct) / 4)


@pytest.mark.parametrize(
    ("arm", "parent", "message"),
    [
        ([], [], "no seed"),
        ([1.0], [1.0, 2.0], "1 of the arm and 2 of the parent"),
        ([math.nan], [1.0], "finite"),
        ([math.inf], [1.0], "finite"),
    ],
)
def test_what_cannot_be_paired_is_refused(arm: list[float], parent: list[float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        paired(arm, parent)
