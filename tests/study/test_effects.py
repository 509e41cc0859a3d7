"""Main effects of a factorial: exact on made gaps, refused where a design cannot give them, and covered by their intervals."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from depthroute.common.errors import RequestError
from depthroute.study.effects import Condition, main_effects

HALF = [(a, b, -a * b) for a, b in product((-1, 1), repeat=2)]


def condition(signs: tuple[int, ...], *differences: float) -> Condition:
    return Condition(levels={name: sign * 2.0 + 5 for name, sign in zip("abc", signs, strict=False)}, differences=differences)


def test_an_effect_is_the_difference_of_means_at_the_two_levels() -> None:
    """Gaps made of known effects, with seeds spread evenly around them: a by 0.2, b by -0.1, c by nothing."""
    made = [condition(signs, *(0.5 + 0.1 * signs[0] - 0.05 * signs[1] + noise for noise in (-0.01, 0.01))) for signs in HALF]
    a, b, c = main_effects(made)
    assert [(found.factor, found.low, found.high) for found in (a, b, c)] == [("a", 3.0, 7.0), ("b", 3.0, 7.0), ("c", 3.0, 7.0)]
    assert (a.effect, b.effect, c.effect) == pytest.approx((0.2, -0.1, 0.0), abs=1e-12)
    # sd 0.0141 in every condition: the error is sqrt(4 x 2e-4 x 4 / 2) / 4 = 0.01, and t(4 degrees) is 2.776
    assert a.interval == pytest.approx((0.2 - 0.027764, 0.2 + 0.027764), abs=1e-5)


def test_uneven_seeds_count_a_condition_once() -> None:
    made = [condition((1,), 1.0, 3.0), condition((-1,), 0.0)]
    assert main_effects(made)[0].effect == 2.0


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([condition((1,), 0.1, 0.2)], "two conditions or more, not 1"),
        ([condition((1,), 0.1), condition((-1,), 0.2)], "two seeds or more in at least one"),
        ([condition((1,), 0.1, 0.2), condition((-1,))], "a difference in every condition"),
        ([condition((1,), 0.1, 0.2), condition((1,), 0.2)], "the factor a needs two levels"),
        ([condition((1,), 0.1, 0.2), condition((-1,), 0.2), condition((-1,), 0.2)], "each in half of the conditions"),
        ([condition((1, 1), 0.1, 0.2), condition((-1, -1), 0.2)], "a and b are not balanced"),
        ([condition((1,), 0.1, 0.2), condition((-1, 1), 0.2)], "every condition needs a level of a"),
    ],
)
def test_what_cannot_be_told_is_refused(made: list[Condition], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        main_effects(made)


def test_the_interval_covers_the_effect() -> None:
    draws, covered = 3000, 0
    noise = np.random.default_rng(1).normal(0, 0.02, size=(draws, 4, 2))
    for draw in noise:
        made = [condition(signs, *(0.03 * signs[0] + draw[place])) for place, signs in enumerate(HALF)]
        low, high = main_effects(made)[0].interval
        covered += low <= 0.06 <= high
    assert covered / draws == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / draws))
