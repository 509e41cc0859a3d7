"""Whole numbers in proportion to weights."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction


def exact(value: Fraction | float) -> Fraction:
    """The number; of a float the shortest decimal that stands for it, which is what somebody wrote."""
    return Fraction(Decimal(repr(value))) if isinstance(value, float) else Fraction(value)


def shares(total: int, weights: Sequence[Fraction | float], most: Sequence[int] | None = None) -> list[int]:
    """Cut `total` into whole numbers in proportion to `weights`: rounded down, and what is left to the largest remainders, of equal ones
    to the first. The sum is exact, and so is the arithmetic.

    Args:
        weights: 0 or more, and not all 0.
        most: what each can have at most, together `total` or more. What one cannot have is shared by the others in the same way.
    """
    exactly, found = list(map(exact, weights)), [0] * len(weights)
    open_ = list(range(len(weights)))
    while True:
        rest, whole = total - sum(found), sum(exactly[i] for i in open_)
        quotas = {i: rest * exactly[i] / whole for i in open_}
        full = [] if most is None else [i for i in open_ if quotas[i] > most[i]]
        if most is None or not full:
            break
        for i in full:
            found[i] = most[i]
        open_ = [i for i in open_ if i not in full]
    for i in open_:
        found[i] = int(quotas[i])
    for i in sorted(open_, key=lambda i: found[i] - quotas[i])[: total - sum(found)]:
        found[i] += 1
    return found
