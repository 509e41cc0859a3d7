"""Pseudo-random permutations of any length that are computed where they are asked for: nothing is sorted or kept.

The permutation of n places under 12 round keys, exactly, so that it can be written again in another language. All numbers are whole
and not negative.

    key i     BLAKE2b with a digest of 8 bytes, without key or salt, of the ASCII text "feistel-1:SEED:STREAM:EPOCH:I", where seed, epoch
              and i, from 0 to 11, are decimal without leading zeros; the digest as a little-endian number
    side      a = the smallest number with a * a >= n
    mix(x)    the finaliser of splitmix64, modulo 2^64: x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB;
              x ^= x >> 31
    round i   (left, right) -> (right, (left + mix((right + key i) mod 2^64) mod a) mod a)
    pass      of a number x < a * a: left = x div a, right = x mod a, rounds 0 to 11, and then left * a + right
    value     of a place p < n: passes, beginning with x = p, until the result is below n

A round can be undone, so a pass permutes the numbers below a * a, and walking its cycle until it comes back below n permutes those
below n. Since a * a < n + 2 sqrt(n) + 1, a second pass is rare; halves of whole bits would need up to four passes a value on average.
Twelve rounds, since after eight it still shows at lengths below ten, over thousands of seeds, which values like to be neighbours.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

NAME = "feistel-1"
ROUNDS = 12

_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


@lru_cache(maxsize=256)
def round_keys(seed: int, stream: str, epoch: int) -> tuple[int, ...]:
    """The keys, each below 2^64, of one permutation of a run: different ones for every seed, stream and epoch."""
    texts = (f"{NAME}:{seed}:{stream}:{epoch}:{number}" for number in range(ROUNDS))
    return tuple(int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little") for text in texts)


def permuted(positions: np.ndarray, n: int, keys: tuple[int, ...]) -> np.ndarray:
    """The values, int64 and as many as `positions`, that a permutation of range(n) has at these positions.

    Args:
        positions: int64 [count], each from 0 to n - 1, in any order.
        n: 1 to 2^62.
        keys: what `round_keys` gives.
    """
    side, end = np.uint64(math.isqrt(n - 1) + 1), np.uint64(n)
    found = _pass(positions.astype(np.uint64), side, keys)
    outside = np.flatnonzero(found >= end)
    while len(outside):
        found[outside] = _pass(found[outside], side, keys)
        outside = outside[found[outside] >= end]
    return found.astype(np.int64)


def _pass(x: np.ndarray, side: np.uint64, keys: tuple[int, ...]) -> np.ndarray:
    left, right = np.divmod(x, side)
    for key in keys:
        mixed = right + np.uint64(key)  # arrays of uint64 wrap around without a warning
        for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
            mixed ^= mixed >> shift
            mixed *= multiplier
        mixed ^= mixed >> _SHIFTS[-1]
        mixed %= side
        mixed += left
        mixed %= side
        left, right = right, mixed
    return left * side + right
