"""The permutation behind the order of batches, against a slow one written from its description."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthroute.data.permutation import permuted, round_keys

U64 = 2**64


def slow(place: int, n: int, seed: int, stream: str, epoch: int) -> int:
    """One value, in whole numbers without arrays."""
    a = math.isqrt(n)
    a += a * a < n
    x = place
    while True:
        left, right = x // a, x % a
        for i in range(12):
            text = "feistel-1:" + str(seed) + ":" + stream + ":" + str(epoch) + ":" + str(i)
            digest = hashlib.blake2b(text.encode("ascii"), digest_size=8).digest()
            key = sum(byte << (8 * number) for number, byte in enumerate(digest))
            left, right = right, (left + mix((right + key) % U64) % a) % a
        x = left * a + right
        if x < n:
            return x


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % U64
    return x ^ (x >> 31)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4000), st.integers(0, 2**70), st.integers(0, 2**40))
def test_every_value_comes_once(n: int, seed: int, epoch: int) -> None:
    found = permuted(np.arange(n), n, round_keys(seed, "source 0", epoch))
    assert found.dtype == np.int64 and sorted(found.tolist()) == list(range(n))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 2**70), st.sampled_from(["blocks", "source 7"]), st.integers(0, 2**40), st.data())
def test_it_is_the_one_that_is_described(n: int, seed: int, stream: str, epoch: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    found = permuted(np.array(places), n, round_keys(seed, stream, epoch))
    assert found.tolist() == [slow(place, n, seed, stream, epoch) for place in places]


def test_the_values_do_not_change_between_versions() -> None:
    assert round_keys(3, "source 0", 1)[:2] == GOLDEN_KEYS
    assert permuted(np.arange(12), 12, round_keys(3, "source 0", 1)).tolist() == GOLDEN_TWELVE
    assert permuted(np.array([0, 1, 2**62 - 1]), 2**62, round_keys(0, "blocks", 0)).tolist() == GOLDEN_LARGEST


def test_seeds_streams_and_epochs_have_orders_of_their_own() -> None:
    names = [(seed, stream, epoch) for seed in (0, 1, 10, 2**32) for stream in ("blocks", "source 0", "source 1") for epoch in (0, 1, 10)]
    orders = {tuple(permuted(np.arange(100), 100, round_keys(*name)).tolist()) for name in names}
    assert len(orders) == len(names)


def deviations(counts: np.ndarray, expected: float, freedom: int) -> float:
    """By how many standard deviations the chi-square of counts lies above its mean."""
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("n", [6, 9, 12])
def test_all_orders_are_as_likely(n: int) -> None:
    """Over the seeds, every place has every value as often, and every value every other one behind it. (Six rounds fail.)"""
    seeds = 5_000
    orders = np.array([permuted(np.arange(n), n, round_keys(seed, "t", 0)) for seed in range(seeds)])
    places = np.array([np.bincount(orders[:, place], minlength=n) for place in range(n)])
    assert deviations(places, seeds / n, (n - 1) ** 2) < 3
    behind = np.bincount((orders[:, :-1] * n + orders[:, 1:]).ravel(), minlength=n * n).reshape(n, n)
    assert deviations(behind[~np.eye(n, dtype=bool)], seeds / n, n * (n - 1) - 1) < 3


def test_neighbours_in_a_long_order_have_nothing_to_do_with_each_other() -> None:
    n = 100_003
    order = permuted(np.arange(n), n, round_keys(5, "source 0", 2))
    for distance in (1, 2, math.isqrt(n), math.isqrt(n) + 1):
        assert abs(np.corrcoef(order[distance:], order[:-distance])[0, 1]) < 4 / math.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 4 / math.sqrt(n)


GOLDEN_KEYS = (18387716660583374281, 5853941286596995578)
GOLDEN_TWELVE = [7, 5, 0, 4, 10, 6, 8, 11, 9, 2, 1, 3]
GOLDEN_LARGEST = [3065587963393344110, 1384191501849468434, 3399168757072286732]
