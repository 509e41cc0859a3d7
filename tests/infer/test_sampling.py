"""Sampling: greedy, seeded, bounded, and refused where it cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.infer import sample_tokens
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig
from depthroute.train import initialise

NEVER = -1  # no token has this id


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = Decoder(ModelConfig(vocabulary=17, width=12, layers=2, heads=2, mlp_width=16, context=6, init_std=0.5, residual=AttnResConfig()))
    initialise(made, 1)
    return made


def drawn(model: Decoder, **options: Any) -> list[int]:
    return list(sample_tokens(model, [3, 5], **{"count": 12, "end": NEVER, **options}))


def test_greedy_is_the_likeliest_token_of_a_window_that_moves(model: Decoder) -> None:
    found = drawn(model, temperature=0)
    ids = [3, 5]
    for token in found:
        assert token == int(model.logits(torch.tensor([ids[-6:]]))[0, -1].argmax())
        ids.append(token)
    assert len(found) == 12  # twice the context
    assert drawn(model, temperature=0, seed=9) == found


def test_the_seed_decides(model: Decoder) -> None:
    first = drawn(model, seed=4)
    torch.rand(5)  # draws elsewhere do not matter
    assert drawn(model, seed=4) == first
    assert len({tuple(drawn(model, seed=seed)) for seed in range(6)}) == 6


def test_a_choice_among_one_and_a_vanishing_temperature_are_greedy(model: Decoder) -> None:
    greedy = drawn(model, temperature=0)
    assert drawn(model, top_k=1) == greedy
    assert drawn(model, temperature=1e-40) == greedy


def test_top_k_bounds_the_choice(model: Decoder) -> None:
    likeliest = set(model.logits(torch.tensor([[3, 5]]))[0, -1].topk(3).indices.tolist())
    found = {drawn(model, count=1, top_k=3, temperature=3.0, seed=seed)[0] for seed in range(60)}
    assert found == likeliest
    assert len({drawn(model, count=1, top_k=100, temperature=3.0, seed=seed)[0] for seed in range(60)}) > 3


def test_frequencies_follow_the_softmax(model: Decoder) -> None:
    expected = (model.logits(torch.tensor([[3, 5]]))[0, -1] / 2).softmax(-1)
    counts = torch.zeros(17)
    for seed in range(600):
        counts[drawn(model, count=1, temperature=2.0, seed=seed)[0]] += 1
    assert (counts / 600 - expected).abs().max().item() < 0.08


def test_the_end_is_not_yielded(model: Decoder) -> None:
    greedy = drawn(model, temperature=0)
    assert drawn(model, temperature=0, end=greedy[3]) == greedy[: greedy.index(greedy[3])]
    assert drawn(model, count=0) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -0.1}, "temperature = -0.1 is not allowed; it takes 0 or more"),
        ({"temperature": float("nan")}, "temperature = nan is not allowed"),
        ({"top_k": 0}, "top_k = 0 is not allowed; it takes 1 or more"),
    ],
)
def test_wrong_values_are_refused(model: Decoder, options: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        drawn(model, **options)


def test_an_empty_prompt_is_refused(model: Decoder) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        list(sample_tokens(model, [], count=3, end=NEVER))
