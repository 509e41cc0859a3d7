"""Generation equals a literal loop that runs every text alone and whole; rows end by themselves; streaming is the same engine."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import train_tokenizer
from depthroute.infer import Finish, Generation, Piece, Sampling, Session, first_stop, generate, stream
from depthroute.infer.sampling import Draws
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig
from depthroute.train import initialise

TOKENIZER = train_tokenizer(["the residual stream of the network", "queries and keys", "a b c d e"] * 3, 300)
PROMPTS = [TOKENIZER.encode(text) for text in ("the network", "q", "residual stream of a network of keys", "b c")]


@pytest.fixture(scope="module")
def model() -> Decoder:
    shape = ModelConfig(
        vocabulary=300, width=12, layers=3, heads=2, mlp_width=16, context=10, init_std=0.5, residual=AttnResConfig(block=2)
    )
    made = Decoder(shape).double()
    initialise(made, 1)
    return made


def spelt(ids: Sequence[int]) -> str:
    """A decoder under which every random id has text that is whole, and stop strings part tokens."""
    return "".join(f"{id}," for id in ids)


def behind(model: Decoder, text: Sequence[int]) -> Tensor:
    """Logits [V] behind a text of any length, from one pass over all of it in which a token attends to the last `context` tokens."""
    span = model.config.context
    whole = Decoder(replace(model.config, context=100, attention_window=span)).double()
    whole.load_state_dict(model.state_dict())
    return whole.logits(torch.tensor([text]))[0, -1]


class WholeTexts:
    """What `Session` computes, without a cache: every step runs every text again, alone and whole."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.texts: list[list[int]] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.texts = [list(prompt) for prompt in prompts]
        return self._logits()

    def step(self, tokens: Tensor) -> Tensor:
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.append(token)
        return self._logits()

    def keep(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]

    @torch.no_grad()
    def _logits(self) -> Tensor:
        return torch.stack([behind(self.model, text) for text in self.texts])


@pytest.fixture(params=["session", "whole texts"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is asked of the session and of its definition."""
    if request.param == "whole texts":
        monkeypatch.setattr(importlib.import_module("depthroute.infer.generate"), "Session", WholeTexts)


@torch.no_grad()
def literal(
    model: Decoder, prompts: Sequence[Sequence[int]], row: int, limit: int, sampling: Sampling, end: Collection[int], stop: Sequence[str]
) -> Generation:
    """One row alone, to the letter: draw, look at the whole text, go on. The other rows only say which number this one has."""
    draws = Draws(sampling, prompts, vocabulary=300, device=torch.device("cpu"))
    draws.keep([row])
    ids: list[int] = []
    logprobs: list[float] = []
    finish: Finish = "limit"
    while len(ids) < limit:
        logits = behind(model, [*prompts[row], *ids])[None]
        token = int(draws.draw(logits)[0])
        if token in end:
            finish = "end"
            break
        ids.append(token)
        logprobs.append(float(logits[0].log_softmax(-1)[token]))
        if first_stop(spelt(ids), stop) is not None:
            finish = "stop"
            break
    text = spelt(ids)
    return Generation(ids, logprobs, text[: first_stop(text, stop)], finish)


def same(found: Generation, expected: Generation) -> None:
    assert found._replace(logprobs=[]) == expected._replace(logprobs=[])
    assert found.logprobs == pytest.approx(expected.logprobs, rel=1e-9)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0), Sampling(seed=3), Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=5)],
    ids=["greedy", "plain", "filtered"],
)
def test_every_row_is_what_it_is_alone(model: Decoder, sampling: Sampling) -> None:
    """Ragged prompts, some longer than the context; rows that end at different steps and in all three ways; texts beyond the context."""
    free = generate(model, PROMPTS, limit=25, sampling=sampling, decode=spelt)
    assert all(row.finish == "limit" and len(row.ids) == len(row.logprobs) == 25 for row in free)
    end = {free[0].ids[4]}
    text = free[2].text
    assert text is not None
    stop = [text[16:21], ",x"]  # the second never comes, and every comma could begin it
    found = generate(model, PROMPTS, limit=25, sampling=sampling, end=end, stop=stop, decode=spelt)
    for row in range(len(PROMPTS)):
        same(found[row], literal(model, PROMPTS, row, 25, sampling, end, stop))
    assert len({row.finish for row in found}) > 1 and len({len(row.ids) for row in found}) > 1
    same(generate(model, PROMPTS[:1], limit=25, sampling=sampling, end=end, stop=stop, decode=spelt)[0], found[0])


def test_a_request_in_parts_is_the_whole_request(model: Decoder) -> None:
    whole = generate(model, PROMPTS, limit=8, sampling=Sampling(seed=6))
    for start in range(0, len(PROMPTS), 2):
        rows = range(start, min(start + 2, len(PROMPTS)))
        part = generate(model, [PROMPTS[row] for row in rows], limit=8, sampling=Sampling(seed=6), rows=rows)
        assert [found.ids for found in part] == [whole[row].ids for row in rows]
    with pytest.raises(RequestError, match="rows has 1 numbers for 2 prompts"):
        generate(model, [[1], [2]], limit=1, rows=[0])


@pytest.mark.usefixtures("engine")
def test_a_greedy_token_is_the_likeliest_within_the_context_and_beyond(model: Decoder) -> None:
    [found] = generate(model, [[3, 5]], limit=24, sampling=Sampling(temperature=0))
    ids = [3, 5]
    for token in found.ids:
        assert token == int(behind(model, ids).argmax())
        assert len(ids) > 10 or token == int(model.logits(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    assert len(found.ids) == 24 and found.text is None and found.finish == "limit"


@settings(max_examples=30)
@given(st.integers(0, 1000), st.lists(st.text("abe th", min_size=1, max_size=2), max_size=2), st.integers(0, 12))
def test_pieces_add_up_to_what_generate_returns(model: Decoder, seed: int, stop: list[str], limit: int) -> None:
    options: dict[str, Any] = {"limit": limit, "sampling": Sampling(seed=seed, top_k=20), "end": range(10), "stop": stop}
    found = generate(model, PROMPTS, decode=TOKENIZER.decode, **options)
    pieces = list(stream(model, PROMPTS, decode=TOKENIZER.decode, **options))
    for row, generation in enumerate(found):
        mine = [piece for piece in pieces if piece.row == row]
        assert [piece.token for piece in mine if piece.token is not None] == generation.ids
        assert "".join(piece.text for piece in mine) == generation.text
        assert [piece.finish for piece in mine] == [None] * (len(mine) - 1) + [generation.finish]
        assert not any(string in (generation.text or "") for string in stop)
        assert not set(generation.ids) & set(range(10))


def test_pieces_come_before_the_text_is_finished(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = Session.step
    monkeypatch.setattr(Session, "step", lambda self, tokens: (steps.append(len(tokens)), step(self, tokens))[1])
    pieces = stream(model, PROMPTS[:2], limit=5)
    assert next(pieces).row == 0 and next(pieces).row == 1 and steps == []
    assert next(pieces).row == 0 and steps == [2]
    assert torch.is_grad_enabled()
    assert len(list(pieces)) == 7 and steps == [2] * 4  # nothing is computed behind the last token


def test_rows_that_have_ended_are_not_computed_on(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = Sampling(temperature=0)
    free = generate(model, PROMPTS, limit=6, sampling=greedy)
    end = free[1].ids[2]
    lengths = [row.ids.index(end) if end in row.ids else 6 for row in free]
    rows = []
    step = Session.step
    monkeypatch.setattr(Session, "step", lambda self, tokens: (rows.append(len(tokens)), step(self, tokens))[1])
    found = generate(model, PROMPTS, limit=6, sampling=greedy, end=[end])
    assert [len(row.ids) for row in found] == lengths and min(lengths) < max(lengths)
    assert rows == [sum(length > done for length in lengths) for done in range(5)]


def test_a_limit_of_nothing_and_no_prompts(model: Decoder) -> None:
    assert generate(model, PROMPTS[:2], limit=0, decode=TOKENIZER.decode) == [Generation([], [], "", "limit")] * 2
    assert list(stream(model, [[3]], limit=0)) == [Piece(0, None, None, "", "limit")]
    assert generate(model, [], limit=3) == []


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        ([[3], []], {}, "prompt 1 is empty"),
        ([[3, 300]], {}, "prompt 0 has the token id 300"),
        ([[]], {"limit": 0}, "prompt 0 is empty"),
        ([[300]], {"limit": 0}, "prompt 0 has the token id 300"),
        ([[3]], {"stop": "ab", "decode": TOKENIZER.decode}, r"stop = 'ab' is one text; give a list of them: \['ab'\]"),
        ([[3]], {"end": 4}, r"end = 4 is one id; give a list of them: \[4\]"),
        ([[3]], {"limit": -1}, "limit = -1 is not allowed; it takes 0 or more"),
        ([[3]], {"stop": ["a"]}, "stop strings need text to look at: give `decode` too"),
        ([[3]], {"stop": [""], "decode": TOKENIZER.decode}, "a stop string is empty"),
    ],
)
def test_wrong_requests_are_refused_at_once(model: Decoder, prompts: list[list[int]], options: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        stream(model, prompts, **{"limit": 3, **options})


def test_a_model_without_probabilities_is_a_failure(model: Decoder) -> None:
    broken = Decoder(model.config)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    with pytest.raises(FailureError, match="logits are not numbers"):
        generate(broken, [[3]], limit=2)
