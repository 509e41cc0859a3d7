"""Going on with a cache is the full forward pass, whatever the residual method, the chunks and the batch."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.infer import Session
from depthroute.model import Decoder
from depthroute.residual import InPlace, PreNorm
from tests.infer.models import METHODS, decoder

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]]


def literal(model: Decoder, text: list[int]) -> Tensor:
    with torch.no_grad():
        return model.logits(torch.tensor([text]))[0, -1]


def largest_error(model: Decoder, session: Session, prompts: list[list[int]], steps: int) -> float:
    """Of the logits behind the prompts and behind each of some further tokens, relative to the largest."""
    texts = [list(prompt) for prompt in prompts]
    generator, found, largest = torch.Generator().manual_seed(1), session.prefill(prompts), 0.0
    for _ in range(steps + 1):
        for row, text in enumerate(texts):
            expected = literal(model, text)
            largest = max(largest, ((found[row] - expected).abs().max() / expected.abs().max()).item())
        tokens = torch.randint(model.config.vocabulary, (len(texts),), generator=generator)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        found = session.step(tokens)
    return largest


@pytest.mark.parametrize("method", METHODS)
def test_cached_decoding_is_the_full_forward(method: str) -> None:
    model = decoder(method)
    assert largest_error(model, Session(model, chunk=4), PROMPTS, 8) < 1e-12


@pytest.mark.parametrize("method", ["prenorm", "rd:3", "value-residual", "depth-attention"])
@pytest.mark.parametrize(
    "fields",
    [
        {"attention_window": 5}, {"attention_window": 3, "windowed_layers": (1, 3)}, {"qk_norm": True, "key_value_heads": None},
        {"biases": ("query", "key", "value", "output", "gate", "up", "down")}, {"norms": "hybrid"}, {"norms": "sandwich", "head_width": 6},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_the_body(method: str, fields: dict[str, object]) -> None:
    model = decoder(method, **fields)
    assert largest_error(model, Session(model, chunk=3), PROMPTS, 6) < 1e-12


@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 1000])
def test_the_chunks_of_a_prompt_do_not_matter(chunk: int) -> None:
    model = decoder("block:3", attention_window=6)
    assert largest_error(model, Session(model, chunk=chunk), PROMPTS, 2) < 1e-12


@pytest.mark.parametrize("fields", [{}, {"attention_window": 3, "windowed_layers": (0, 2)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_beyond_the_context_a_token_sees_the_last_context_tokens(dtype: torch.dtype, fields: dict[str, object]) -> None:
    """Literally: a model of a longer context whose attention has the short one as its window."""
    model, prompts = decoder("rd:3", dtype, context=8, **fields), [prompt[:8] for prompt in PROMPTS]
    session, texts = Session(model, chunk=3), [list(prompt) for prompt in prompts]
    if fields:
        assert model.config.has_window(0) and not model.config.has_window(1)
    session.prefill(prompts)
    for token in range(35):
        found = session.step(torch.full((3,), token))
        for text in texts:
            text.append(token)
    long = decoder("rd:3", dtype, context=64, attention_window=8)
    long.load_state_dict(model.state_dict())
    for layer, mine in zip(long.layers, model.layers, strict=True):
        layer.attention.windowed, layer.attention.narrow = True, mine.attention.windowed  # type: ignore[union-attr]
    for row, text in enumerate(texts):
        sight = long.sight(torch.tensor([text]))
        if fields:  # two windows: hand each layer its own
            narrow = decoder("prenorm", dtype, context=64, attention_window=3).sight(torch.tensor([text])).windowed
            sight = sight._replace(full=narrow)
            for layer in long.layers:
                layer.attention.windowed = not layer.attention.narrow  # type: ignore[union-attr]
        with torch.no_grad():
            expected = long.unembed(long.connect(long.embedded(torch.tensor([text])), sight))[0, -1]
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-11 if dtype == torch.float64 else 2e-5)


def test_rows_may_leave_and_change_places() -> None:
    model = decoder("rd:3")
    session = Session(model)
    session.prefill(PROMPTS)
    session.step(torch.tensor([1, 2, 3]))
    session.keep([2, 0])
    found = session.step(torch.tensor([7, 8]))
    torch.testing.assert_close(found[0], literal(model, [*PROMPTS[2], 3, 7]), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], literal(model, [*PROMPTS[0], 1, 8]), rtol=0, atol=1e-12)
    session.keep([1])
    torch.testing.assert_close(session.step(torch.tensor([5]))[0], literal(model, [*PROMPTS[0], 1, 8, 5]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_is_allocated_for_a_token(dtype: torch.dtype) -> None:
    """Buffers double, and slide once they hold twice the context; the depth memory is the same size throughout."""
    model = decoder("rd:3", dtype, context=100)
    session = Session(model)
    session.prefill([[1, 2, 3]])
    places, depth, sizes = set(), set(), []
    for token in range(700):
        session.step(torch.tensor([token % 40]))
        assert session._cache is not None and session._routing is not None and isinstance(session._routing[1], InPlace)
        places.add(tuple(buffer.data_ptr() for part in session._cache._parts.values() for buffer, _ in part.buffers.values()))
        depth.add((id(session._routing[1]), session.depth_bytes))
        sizes.append(session.cache_bytes)
    assert len(places) <= 3 and len(depth) == 1
    assert sizes[-1] == 2 * 4 * 200 * model.embedding.weight.element_size() * 2 * 4  # two of 4 layers, 200 tokens, 2 heads x 4


def test_new_weights_are_seen_by_the_next_prompt() -> None:
    model = decoder("block:3", torch.float32)
    session = Session(model)
    session.prefill([[1, 2]])
    before = session.step(torch.tensor([3]))
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.mul_(-2)
    session.prefill([[1, 2]])
    after = session.step(torch.tensor([3]))
    torch.testing.assert_close(after[0], literal(model, [1, 2, 3]), rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_that_does_not_fit_is_refused_and_harms_nothing(dtype: torch.dtype) -> None:
    """With a program there would be nobody else to notice: addresses are not checked."""
    model = decoder("block:3", dtype)
    session = Session(model)
    session.prefill([[1, 2], [3]])
    for tokens in (torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([[1, 2]]), torch.tensor([1.0, 2.0])):
        with pytest.raises(RequestError, match=r"a step takes int64 tokens \[2\], one a row"):
            session.step(tokens)
    for token in (40, -1):
        with pytest.raises(RequestError, match="this model has 0 to 39"):
            session.step(torch.tensor([3, token]))
    for rows in ([], [2], [-1], [True, False]):
        with pytest.raises(RequestError, match="the batch has the rows 0 to 1"):
            session.keep(rows)
    session.keep([1, 1, 0])
    found = session.step(torch.tensor([5, 6, 7]))
    for row, text in enumerate(([3, 5], [3, 6], [1, 2, 7])):
        torch.testing.assert_close(found[row], literal(model, text), rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-4)


def test_a_model_that_was_cast_is_noticed() -> None:
    model = decoder("block:3", torch.float32)
    session = Session(model)
    session.prefill([[1, 2]])
    session.step(torch.tensor([3]))
    model.cast_body(torch.bfloat16)
    with pytest.raises(RequestError, match="cast or moved"):
        session.step(torch.tensor([3]))
    session.prefill([[1, 2]])
    assert session.step(torch.tensor([3])).isfinite().all()


def test_a_session_leaves_the_model_in_its_mode() -> None:
    model = decoder().train()
    Session(model).prefill([[1]])
    assert model.training


class Pooled(PreNorm):
    per_token: ClassVar[bool] = False


def test_what_cannot_be_done_is_refused() -> None:
    model = decoder()
    with pytest.raises(RequestError, match="chunk = 0"):
        Session(model, chunk=0)
    session = Session(model)
    with pytest.raises(RequestError, match="call prefill first"):
        session.step(torch.tensor([1]))
    with pytest.raises(RequestError, match="no prompt"):
        session.prefill([])
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        session.prefill([[1], []])
    for token in (40, -1):
        with pytest.raises(RequestError, match=f"prompt 0 has the token id {token}; this model has 0 to 39"):
            session.prefill([[3, token]])
    for method in (lambda: session.keep([0]), lambda: session.step(torch.tensor([1]))):
        with pytest.raises(RequestError, match="call prefill first"):
            method()
    model.residual = Pooled(model.config.body)
    with pytest.raises(RequestError, match="'prenorm' cannot decode with a cache"):
        Session(model)
