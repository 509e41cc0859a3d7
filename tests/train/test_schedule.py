"""The learning rate at the steps that define it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthroute.train.config import TrainConfig
from depthroute.train.schedule import learning_rate


def rates(steps: int, **fields: Any) -> list[float]:
    settings = TrainConfig(**{"steps": steps, "sequences": 1, "learning_rate": 1.0} | fields)
    return [learning_rate(step, settings) for step in range(steps)]


def test_warm_up_starts_at_one_part_and_reaches_the_peak_with_its_last_step() -> None:
    assert rates(200)[:5] == [0.25, 0.5, 0.75, 1.0, pytest.approx(1.0, abs=1e-3)]


def test_the_peak_scales_every_step() -> None:
    assert rates(200, learning_rate=3e-3) == [3e-3 * rate for rate in rates(200)]


def test_the_warm_up_is_the_same_in_steps_as_in_a_share_of_them() -> None:
    assert rates(200, warmup_fraction=None, warmup_steps=4) == rates(200, warmup_fraction=0.02)


def test_the_middle_of_the_cosine_is_half_way_and_the_last_step_has_the_final_fraction() -> None:
    values = rates(104, warmup_fraction=4 / 104)
    assert values[53] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.1, abs=1e-15)


def test_without_warm_up_the_first_step_is_already_on_the_cosine() -> None:
    assert rates(4, warmup_fraction=0.0, final_fraction=0.0) == [pytest.approx(x) for x in (0.853553390593, 0.5, 0.146446609407, 0)]


def test_wsd_warms_up_stays_and_falls_on_a_line_to_the_final_fraction() -> None:
    values = rates(10, schedule="wsd", warmup_fraction=None, warmup_steps=2, decay_fraction=0.4, final_fraction=0.2)
    assert values[:6] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert values[6:] == [pytest.approx(x) for x in (0.8, 0.6, 0.4, 0.2)] and values[-1] == 0.2


def test_wsd_without_a_decay_ends_at_the_peak() -> None:
    assert rates(3, schedule="wsd", warmup_fraction=0.0, decay_fraction=0.0) == [1.0] * 3


@given(steps=st.integers(1, 300), longer=st.integers(0, 300), warmup=st.integers(0, 40), share=st.floats(0, 1), final=st.floats(0, 1))
def test_a_wsd_run_is_the_first_part_of_any_longer_one_until_it_decays(
    steps: int, longer: int, warmup: int, share: float, final: float
) -> None:
    stable = steps - round(share * steps)
    if warmup > stable:
        return
    fields: dict[str, Any] = {"schedule": "wsd", "warmup_fraction": None, "warmup_steps": warmup, "learning_rate": 0.3}
    trunk = rates(steps + longer, decay_fraction=0.0, **fields)
    assert rates(steps, decay_fraction=share, final_fraction=final, **fields)[:stable] == trunk[:stable]


@given(
    steps=st.integers(1, 300), warmup=st.floats(0, 0.99), final=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "wsd"]), share=st.floats(0, 1),
)
def test_it_rises_to_at_most_one_then_falls_and_is_never_below_zero(
    steps: int, warmup: float, final: float, schedule: str, share: float
) -> None:
    room = 1 - round(warmup * steps) / steps
    decay = share * room * 0.99 if schedule == "wsd" else None
    if decay is not None and round(warmup * steps) + round(decay * steps) > steps:
        return
    values = rates(steps, warmup_fraction=warmup, final_fraction=final, schedule=schedule, decay_fraction=decay)
    peak = max(0, round(warmup * steps) - 1)
    assert values[: peak + 1] == sorted(values[: peak + 1])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert min(values) >= 0 and max(values) <= 1
