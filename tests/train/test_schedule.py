"""The learning rate's multiplier at the steps that define it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthroute.train.schedule import learning_rate_multiplier


def multipliers(steps: int, warmup_fraction: float = 0.02, final_fraction: float = 0.1) -> list[float]:
    return [
        learning_rate_multiplier(step, steps=steps, warmup_fraction=warmup_fraction, final_fraction=final_fraction)
        for step in range(steps)
    ]


def test_warm_up_starts_at_one_part_and_reaches_the_peak_with_its_last_step() -> None:
    assert multipliers(200)[:5] == [0.25, 0.5, 0.75, 1.0, pytest.approx(1.0, abs=1e-3)]


def test_the_middle_of_the_cosine_is_half_way_and_the_last_step_has_the_final_fraction() -> None:
    values = multipliers(104, warmup_fraction=4 / 104)
    assert values[53] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.1, abs=1e-15)


def test_without_warm_up_the_first_step_is_already_on_the_cosine() -> None:
    assert multipliers(4, warmup_fraction=0.0, final_fraction=0.0) == [pytest.approx(x) for x in (0.853553390593, 0.5, 0.146446609407, 0)]


@given(steps=st.integers(1, 300), warmup=st.floats(0, 0.99), final=st.floats(0, 1))
def test_it_rises_to_at_most_one_then_falls_and_is_never_below_zero(steps: int, warmup: float, final: float) -> None:
    values = multipliers(steps, warmup, final)
    peak = max(0, round(warmup * steps) - 1)
    assert values[: peak + 1] == sorted(values[: peak + 1])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert min(values) >= 0 and max(values) <= 1
