"""Filters against their definitions and against transformers; draws that follow the softmax, their seed and their row alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthroute.common.errors import FailureError, RequestError
from depthroute.infer import Sampling
from depthroute.infer.sampling import Draws, _inverse

V = 17


def logits(rows: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).to(dtype)


def kept(sampling: Sampling, row: Tensor) -> set[int]:
    return set(sampling.scores(row[None])[0].isfinite().nonzero()[:, 0].tolist())


def draws(sampling: Sampling, prompts: list[list[int]]) -> Draws:
    return Draws(sampling, prompts, vocabulary=V, device=torch.device("cpu"))


def drawn(sampling: Sampling, row: Tensor, times: int) -> list[int]:
    """So many draws from the same logits [V]."""
    one = draws(sampling, [[0]])
    return [int(one.draw(row[None])[0]) for _ in range(times)]


def test_top_k_keeps_the_likeliest_and_their_equals() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0])
    assert kept(Sampling(top_k=1), row) == {1, 3} == kept(Sampling(top_k=2), row)
    assert kept(Sampling(top_k=3), row) == {1, 2, 3, 4}
    assert kept(Sampling(top_k=50, top_p=1), row) == set(range(5))


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    row = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    for mass, expected in ((0.01, {1}), (0.49, {1}), (0.51, {1, 3}), (0.79, {1, 3}), (0.81, {0, 1, 3}), (0.96, {0, 1, 2, 3})):
        assert kept(Sampling(top_p=mass), row) == expected, mass


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = torch.tensor([0.16, 0.5, 0.04, 0.3]).log()
    for share, expected in ((0.01, {0, 1, 2, 3}), (0.1, {0, 1, 3}), (0.5, {1, 3}), (0.7, {1}), (1, {1})):
        assert kept(Sampling(min_p=share), row) == expected, share


def test_each_filter_sees_what_the_one_before_it_left() -> None:
    """Of (0.4, 0.3, 0.2, 0.1), top-k 2 leaves (4/7, 3/7): then the first token alone reaches 0.55, which it does not of all four."""
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(Sampling(top_p=0.55), row) == {0, 1}
    assert kept(Sampling(top_k=2, top_p=0.55), row) == {0}
    assert kept(Sampling(temperature=4, top_p=0.55), row) == {0, 1} and kept(Sampling(temperature=0.25, top_p=0.55), row) == {0}


def test_the_penalty_makes_what_was_seen_less_likely_whatever_its_sign() -> None:
    row, seen = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]]), torch.tensor([[True, True, False, False, True]])
    assert Sampling(repetition_penalty=4, temperature=0).scores(row, seen).tolist() == [[0.5, -8.0, 2.0, -2.0, 0.0]]


@given(
    st.integers(0, 2**20), st.sampled_from([0.3, 1.0, 1.7]), st.sampled_from([None, 1, 4, 11]), st.sampled_from([None, 0.2, 0.7, 0.95]),
    st.sampled_from([None, 0.02, 0.3]), st.sampled_from([1.0, 1.3, 0.8]),
)  # fmt: skip
def test_the_same_scores_as_transformers(
    seed: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, penalty: float
) -> None:
    """In float64, after a softmax: ours are shifted."""
    pytest.importorskip("transformers")
    from transformers.generation import logits_process as theirs

    row = logits(3, seed)
    ids = torch.randint(0, V, (3, 6), generator=torch.Generator().manual_seed(seed))
    found = theirs.RepetitionPenaltyLogitsProcessor(penalty)(ids, row) if penalty != 1 else row
    chain: list[tuple[Any, Callable[..., Any]]] = [
        (temperature, theirs.TemperatureLogitsWarper), (top_k, theirs.TopKLogitsWarper), (top_p, theirs.TopPLogitsWarper),
        (min_p, theirs.MinPLogitsWarper),
    ]  # fmt: skip
    for value, warper in chain:
        found = found if value is None else warper(value)(ids, found)
    seen = torch.zeros(3, V, dtype=torch.bool).scatter_(1, ids, True) if penalty != 1 else None
    ours = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    torch.testing.assert_close(ours.scores(row, seen).softmax(-1), found.softmax(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vanishing_temperature_and_a_choice_among_one_are_greedy(dtype: torch.dtype) -> None:
    rows = logits(dtype=dtype)
    for sampling in (Sampling(temperature=0), Sampling(temperature=1e-40), Sampling(temperature=5e-324), Sampling(top_k=1)):
        tokens, _ = draws(sampling, [[0]] * 5).draw(rows)
        assert tokens.tolist() == rows.argmax(-1).tolist()


def test_frequencies_follow_the_filtered_softmax() -> None:
    sampling = Sampling(temperature=2.0, top_k=6, seed=3)
    expected = sampling.scores(logits(1)).softmax(-1)[0]
    counts = torch.bincount(torch.tensor(drawn(sampling, logits(1)[0], 4000)), minlength=V)
    # Chi-squared over 6 tokens: 20.5 has a chance of 0.001 with 5 degrees of freedom.
    inside = expected > 0
    assert int(counts[~inside].sum()) == 0
    assert float(((counts - 4000 * expected)[inside] ** 2 / (4000 * expected)[inside]).sum()) < 20.5


def test_the_extremes_of_the_uniform_numbers_hit_tokens_that_are_allowed() -> None:
    probabilities = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.1, 0.0, 0.0, 0.0, 0.9]], dtype=torch.float64)
    assert _inverse(probabilities, torch.zeros(2, dtype=torch.float64)).tolist() == [1, 0]
    assert _inverse(probabilities, torch.full((2,), 1 - 2**-53, dtype=torch.float64)).tolist() == [3, 4]
    many = torch.rand(2000, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    many[:, 250:] = 0
    assert int(_inverse(many / many.sum(-1, keepdim=True), torch.full((2000,), 1 - 2**-53, dtype=torch.float64)).max()) == 249


def test_the_rule_of_the_draws_is_the_documented_one() -> None:
    seed = int.from_bytes(hashlib.blake2b(b"7:2", digest_size=8).digest(), "big")
    u = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = logits()
    tokens, _ = draws(Sampling(seed=7), [[0]] * 5).draw(rows)
    assert int(tokens[2]) == int((rows[2].softmax(-1).cumsum(-1) <= u).sum())


def test_a_row_draws_the_same_whatever_becomes_of_the_others() -> None:
    sampling = Sampling(repetition_penalty=1.5, seed=1)
    steps = [logits(5, seed) for seed in range(8)]
    prompts = [[1], [2, 3], [4], [5], [6, 7, 8]]
    whole = draws(sampling, prompts)
    together = torch.stack([whole.draw(step)[0] for step in steps])
    shrinking = draws(sampling, prompts)
    for number, step in enumerate(steps):
        rows = [0, 1, 2, 3, 4] if number < 3 else [1, 4] if number < 6 else [4]
        if number == 3:
            shrinking.keep([1, 4])
        if number == 6:
            shrinking.keep([1])
        torch.rand(3)  # draws elsewhere do not matter
        assert shrinking.draw(step[rows])[0].tolist() == together[number, rows].tolist()
    first = draws(sampling, prompts[:1])
    assert [int(first.draw(step[:1])[0]) for step in steps] == together[:, 0].tolist()


def test_a_part_of_a_request_draws_as_the_whole_does() -> None:
    sampling, row = Sampling(seed=2), torch.zeros(V)
    whole = draws(sampling, [[0]] * 5)
    part = Draws(sampling, [[0]] * 2, vocabulary=V, device=torch.device("cpu"), rows=[4, 1])
    for _ in range(8):
        assert part.draw(row.expand(2, V))[0].tolist() == whole.draw(row.expand(5, V))[0][[4, 1]].tolist()


def test_the_penalty_counts_the_prompt_and_the_text() -> None:
    one = draws(Sampling(temperature=0, repetition_penalty=10.0), [[3], [4]])
    row = torch.tensor([[1.0, 2.0, 3.0, 9.0, 8.0, *[0.0] * 12]] * 2)
    assert [one.draw(row)[0].tolist() for _ in range(3)] == [[4, 3], [2, 2], [1, 1]]


def test_the_seed_and_the_row_decide() -> None:
    row = torch.zeros(V)  # every token as likely
    assert drawn(Sampling(seed=4), row, 20) == drawn(Sampling(seed=4), row, 20)
    assert len({tuple(drawn(Sampling(seed=seed), row, 20)) for seed in range(6)}) == 6
    six = draws(Sampling(), [[0]] * 6)
    found = torch.stack([six.draw(row.expand(6, V))[0] for _ in range(20)], 1)
    assert len({tuple(text) for text in found.tolist()}) == 6


def test_log_probabilities_are_the_models_own() -> None:
    rows = logits()
    tokens, logprobs = draws(Sampling(temperature=0.1, top_k=2, repetition_penalty=2.0), [[1]] * 5).draw(rows)
    torch.testing.assert_close(logprobs, rows.log_softmax(-1)[torch.arange(5), tokens], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -0.1}, "temperature = -0.1 is not allowed; it takes 0 or more"),
        ({"temperature": float("nan")}, "temperature = nan is not allowed"),
        ({"temperature": float("inf")}, "temperature = inf is not allowed"),
        ({"top_k": 0}, "top_k = 0 is not allowed; it takes a whole number, 1 or more, or None"),
        ({"top_k": 2.5}, "top_k = 2.5 is not allowed"),
        ({"top_p": 0.0}, "top_p = 0.0 is not allowed; it takes a number above 0 and up to 1"),
        ({"top_p": 1.1}, "top_p = 1.1 is not allowed"),
        ({"min_p": -0.5}, "min_p = -0.5 is not allowed; it takes a number above 0 and up to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0 is not allowed; it takes a number above 0; 1 changes nothing"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        Sampling(**options)


def test_logits_that_are_not_numbers_are_a_failure() -> None:
    rows = logits()
    rows[3, 2] = float("nan")
    with pytest.raises(FailureError, match="logits are not numbers"):
        draws(Sampling(), [[0]] * 5).draw(rows)
