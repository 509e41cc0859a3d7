"""The document bootstrap: against the ratio estimator's formula, full enumeration, and coverage by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from depthroute.common.errors import RequestError
from depthroute.study.clusters import cluster_bootstrap, noise


def documents(generator: np.random.Generator, count: int, loss: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Documents of unequal length whose own losses spread by 0.3."""
    counts = generator.integers(50, 150, count)
    return counts * (loss + generator.normal(0, 0.3, count)), counts


def test_the_mean_is_per_token_not_per_document() -> None:
    result = cluster_bootstrap([2.0, 90.0], [1, 30])
    assert result.mean == pytest.approx(92 / 31)
    assert result.documents == 2


def test_three_documents_agree_with_all_twenty_seven_resamples() -> None:
    sums, counts = np.array([3.0, 8.0, 30.0]), np.array([1, 2, 6])
    means = [sums[list(pick)].sum() / counts[list(pick)].sum() for pick in itertools.product(range(3), repeat=3)]
    result = cluster_bootstrap(sums.tolist(), counts.tolist(), resamples=20_000)
    assert result.error == pytest.approx(np.std(means), rel=0.03)
    assert result.interval == pytest.approx((3.0, 5.0))  # three times the first, three times the last


def test_the_error_is_that_of_the_ratio_estimator() -> None:
    sums, counts = documents(np.random.default_rng(0), 300)
    residuals = sums - sums.sum() / counts.sum() * counts
    formula = math.sqrt(np.sum(residuals**2)) / counts.sum()
    assert cluster_bootstrap(sums.tolist(), counts.tolist()).error == pytest.approx(formula, rel=0.05)


def test_documents_of_one_loss_have_no_noise_whatever_their_lengths() -> None:
    result = cluster_bootstrap([4.0, 8.0, 400.0], [2, 4, 200])
    assert result.mean == 2
    assert result.error == pytest.approx(0, abs=1e-15)
    assert result.interval == pytest.approx((2, 2), abs=1e-15)


def test_the_draws_are_fixed_by_the_seed_and_memory_limits_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, counts = (values.tolist() for values in documents(np.random.default_rng(1), 30))
    whole = cluster_bootstrap(sums, counts, resamples=500)
    assert cluster_bootstrap(sums, counts, resamples=500) == whole
    assert cluster_bootstrap(sums, counts, resamples=500, seed=1) != whole
    monkeypatch.setattr("depthroute.study.clusters.DRAWS_AT_ONCE", 400)
    assert cluster_bootstrap(sums, counts, resamples=500) == whole


@pytest.mark.parametrize(("count", "least"), [(20, 0.87), (80, 0.91)])
def test_the_interval_covers(count: int, least: float) -> None:
    generator = np.random.default_rng(count)
    hits = []
    for repeat in range(300):
        sums, counts = documents(generator, count)
        low, high = cluster_bootstrap(sums.tolist(), counts.tolist(), resamples=400, seed=repeat).interval
        hits.append(low <= 3 <= high)
    assert least <= np.mean(hits) <= 0.98


def test_treating_tokens_as_independent_would_be_far_too_narrow() -> None:
    # What clustering is for: each document split into its tokens gives an error that is several times too small.
    sums, counts = documents(np.random.default_rng(3), 60)
    by_token = np.repeat(sums / counts, counts)
    split = cluster_bootstrap(by_token.tolist(), [1] * len(by_token), resamples=200)
    assert cluster_bootstrap(sums.tolist(), counts.tolist()).error > 5 * split.error


def test_a_difference_on_the_same_documents_loses_what_the_arms_share() -> None:
    generator = np.random.default_rng(4)
    parent, counts = documents(generator, 100)
    arm = parent + counts * (-0.02 + generator.normal(0, 0.01, 100))
    alone = cluster_bootstrap(arm.tolist(), counts.tolist())
    difference = cluster_bootstrap((arm - parent).tolist(), counts.tolist())
    assert difference.error < alone.error / 10
    assert difference.interval[1] < 0 < alone.interval[1] - parent.sum() / counts.sum()


def test_seed_and_document_errors_are_kept_apart() -> None:
    generator = np.random.default_rng(5)
    _, counts = documents(generator, 200)
    own, seeds = generator.normal(0, 0.3, 200), np.array([-0.01, 0.0, 0.02, 0.01])
    sums = counts * (3 + seeds[:, None] + own)
    result = noise(sums.tolist(), counts.tolist())
    assert result.seed_error == pytest.approx(np.std(seeds, ddof=1) / 2)
    average = cluster_bootstrap((counts * (3 + own + seeds.mean())).tolist(), counts.tolist())
    assert result.document_error == pytest.approx(average.error)
    assert result.mean == pytest.approx(np.mean(sums.sum(axis=1)) / counts.sum())
    assert result.total_error == pytest.approx(math.hypot(np.std(seeds, ddof=1) / 2, result.document_error))
    # Sixteen times the seeds quarter (nearly) the one and leave the other.
    more = noise(np.tile(sums, (16, 1)).tolist(), counts.tolist())
    assert more.seed_error == pytest.approx(result.seed_error / 4, rel=0.15)
    assert more.document_error == pytest.approx(result.document_error)


def test_the_total_error_covers_new_seeds_and_new_documents() -> None:
    # Eight seeds and 60 documents drawn anew each time, with an interaction of both.
    generator = np.random.default_rng(6)
    misses, claimed = [], []
    for repeat in range(300):
        _, counts = documents(generator, 60)
        losses = 3 + generator.normal(0, 0.05, (8, 1)) + generator.normal(0, 0.1, (1, 60)) + generator.normal(0, 0.1, (8, 60))
        result = noise((losses * counts).tolist(), counts.tolist(), resamples=200, seed=repeat)
        misses.append(result.mean - 3)
        claimed.append(result.total_error or 0.0)
    spread = np.std(misses)
    assert 0.88 * spread < np.sqrt(np.mean(np.square(claimed))) < 1.2 * spread


def test_one_seed_has_document_noise_and_no_seed_error() -> None:
    sums, counts = documents(np.random.default_rng(7), 20)
    result = noise([sums.tolist()], counts.tolist())
    assert (result.seeds, result.documents, result.seed_error, result.total_error) == (1, 20, None, None)
    assert result.document_interval == cluster_bootstrap(sums.tolist(), counts.tolist()).interval


@pytest.mark.parametrize(
    ("sums", "counts", "resamples", "message"),
    [
        ([1.0], [1], 100, "two documents, not 1"),
        ([1.0, 2.0], [1], 100, "2 sums and 1 counts"),
        ([1.0, 2.0], [1, 0], 100, "at least one predicted token"),
        ([1.0, math.nan], [1, 1], 100, "not a finite number"),
        ([1.0, 2.0], [1, 1], 99, "resamples is 99"),
    ],
)
def test_what_cannot_be_resampled_is_refused(sums: list[float], counts: list[int], resamples: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        cluster_bootstrap(sums, counts, resamples=resamples)


def test_seeds_with_other_documents_are_refused() -> None:
    with pytest.raises(RequestError, match="3 sums and 2 counts"):
        noise([[1.0, 2.0], [1.0, 2.0, 3.0]], [1, 1])
    with pytest.raises(RequestError, match="no seed"):
        noise([], [1, 1])
