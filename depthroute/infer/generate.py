"""Texts that continue prompts: all at once, or token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.infer.sampling import Draws, Sampling
from depthroute.infer.session import Session, check_prompts
from depthroute.infer.text import Decode, TextStream
from depthroute.model import Decoder

Finish = Literal["end", "stop", "limit"]


class Generation(NamedTuple):
    """What continues one prompt."""

    ids: list[int]
    """The tokens drawn, without the one that ended the text; those of a stop string are among them."""
    logprobs: list[float]
    """Of each id, in nats under the model itself, before temperature and filters."""
    text: str | None
    """What the ids add to the decoded prompt, cut before the stop string; None without `decode`."""
    finish: Finish
    """An id of `end` came, a `stop` string came, or `limit` was reached."""


class Piece(NamedTuple):
    """What one step adds to one row. Every row's last piece, and no other, has a `finish`."""

    row: int
    """The prompt's place among the prompts."""
    token: int | None
    """None where the text ended without one: an id of `end` came, or the limit is 0."""
    logprob: float | None
    text: str
    """Often empty: a character or what may be a stop string is held back until it is complete. Always empty without `decode`."""
    finish: Finish | None


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    end: Collection[int] = (),
    stop: Sequence[str] = (),
    decode: Decode | None = None,
    rows: Sequence[int] | None = None,
) -> list[Generation]:
    """Continue every prompt, in one batch; rows that have ended leave it.

    Row i depends on (seed, i) and its prompt, and not on the other rows (beyond the rounding of batched matrix products).

    Args:
        prompts: token ids, at least one each; of any lengths. Beyond the model's context a token attends
            to the last `context` tokens.
        limit: tokens to draw for each prompt, at most.
        end: ids that end a text and are no part of it.
        stop: strings that end a text and are no part of it, wherever the borders of tokens lie; see `first_stop`.
        decode: token ids to text, such as `TextTokenizer.decode`.
        rows: the prompts' numbers in a larger request of which they are a part, one each: i of (seed, i). None: 0, 1, 2 and so on.

    Raises:
        RequestError: an empty prompt, an id outside the vocabulary, a negative limit, another number of `rows` than of prompts, `stop`
            without `decode`, an empty stop string, or a residual method that cannot decode a token at a time.
        FailureError: the model's logits are not numbers.
    """
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    texts: list[list[str]] = [[] for _ in prompts]
    finishes: list[Finish] = ["limit"] * len(prompts)
    for row, token, logprob, text, finish in stream(
        model, prompts, limit=limit, sampling=sampling, end=end, stop=stop, decode=decode, rows=rows
    ):
        if token is not None and logprob is not None:
            ids[row].append(token)
            logprobs[row].append(logprob)
        texts[row].append(text)
        if finish is not None:
            finishes[row] = finish
    joined = ["".join(parts) if decode else None for parts in texts]
    return [Generation(*row) for row in zip(ids, logprobs, joined, finishes, strict=True)]


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    end: Collection[int] = (),
    stop: Sequence[str] = (),
    decode: Decode | None = None,
    rows: Sequence[int] | None = None,
) -> Iterator[Piece]:
    """`generate`, a `Piece` a time as tokens come, in the order of rows at each step. The prompts are read, or refused, at once."""
    if limit < 0:
        raise RequestError(f"limit = {limit} is not allowed; it takes 0 or more.")
    if stop and decode is None:
        raise RequestError("stop strings need text to look at: give `decode` too, such as tokenizer.decode.")
    if rows is not None and len(rows) != len(prompts):
        raise RequestError(f"rows has {len(rows)} numbers for {len(prompts)} prompts; give one for each, or none.")
    if isinstance(stop, str):
        raise RequestError(f"stop = {stop!r} is one text; give a list of them: [{stop!r}].")
    if isinstance(end, int):
        raise RequestError(f"end = {end} is one id; give a list of them: [{end}].")
    check_prompts(prompts, model.config.vocabulary)
    texts = [TextStream(decode or _no_text, prompt if decode else (), stop) for prompt in prompts]
    if limit == 0 or len(prompts) == 0:
        return (Piece(row, None, None, "", "limit") for row in range(len(prompts)))
    session = Session(model)
    logits = session.prefill(prompts)
    draws = Draws(sampling, prompts, vocabulary=logits.shape[-1], device=logits.device, rows=rows)
    return _pieces(session, logits, draws, texts, limit, frozenset(end))


@torch.no_grad()  # of a generator: between two pieces the caller's own mode is back
def _pieces(session: Session, logits: Tensor, draws: Draws, texts: list[TextStream], limit: int, end: frozenset[int]) -> Iterator[Piece]:
    rows = list(range(len(texts)))
    for number in range(1, limit + 1):
        drawn, logprobs = draws.draw(logits)
        staying = []
        for place, (row, token, logprob) in enumerate(zip(rows, drawn.tolist(), logprobs.tolist(), strict=True)):
            piece = _piece(row, token, logprob, texts[row], ended=token in end, last=number == limit)
            if piece.finish is None:
                staying.append(place)
            yield piece
        if not staying:
            return
        if len(staying) < len(rows):
            rows = [rows[place] for place in staying]
            session.keep(staying)
            draws.keep(staying)
            drawn = drawn[staying]
        logits = session.step(drawn)


def _piece(row: int, token: int, logprob: float, text: TextStream, *, ended: bool, last: bool) -> Piece:
    """What a drawn token adds to its row."""
    if ended:
        rest = text.finish()
        return Piece(row, None, None, rest, "stop" if text.stopped else "end")
    piece = text.add(token)
    if last:
        piece += text.finish()
    finish: Finish | None = "stop" if text.stopped else "limit" if last else None
    return Piece(row, token, logprob, piece, finish)


def _no_text(ids: Sequence[int]) -> str:
    return ""
