"""Log-probabilities of answers behind contexts, in batches of like length.

Shapes: B batch, T tokens, D width, N answer tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import PAD
from depthroute.model import Decoder
from depthroute.model.loss import likeliest, token_nll
from depthroute.train.config import Device, Precision
from depthroute.train.devices import autocast

BATCH_TOKENS = 16_384


class Request(NamedTuple):
    """Token ids of a text, and of what is to be scored behind it. Neither is empty."""

    context: Sequence[int]
    answer: Sequence[int]


class Score(NamedTuple):
    """Of one answer: the sum of its tokens' log-probabilities in nats, and whether each of them is the likeliest token of its place."""

    log_probability: float
    greedy: bool


def is_cut(request: Request, context: int) -> bool:
    """Whether a model of so many tokens of context cannot see all of the request. Its last token is never read."""
    return len(request.context) + len(request.answer) > context + 1


def score(
    model: Decoder, requests: Sequence[Request], *, device: Device, precision: Precision, batch_tokens: int = BATCH_TOKENS
) -> list[Score]:
    """Score every answer given its context, in the order of the requests.

    A request longer than the model's context loses tokens at its left end; the answer is always whole. Padding is at the right end, where
    a causal model does not see it. Layers run in `precision`; the head and the log-probabilities, of answer tokens only, in the
    parameters' dtype. Requests with the same inputs, such as answers of one token behind one context, share a pass.

    Args:
        batch_tokens: inputs of a pass with their padding, at most, where one request is not longer by itself.

    Raises:
        RequestError: an empty context or answer, or an answer longer than the model's context.
        FailureError: a log-probability is not finite.
    """
    context = model.config.context
    sharing: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        _check(request, context)
        sharing.setdefault(tuple([*request.context, *request.answer][-(context + 1):-1]), []).append(number)
    found: dict[int, Score] = {}
    with torch.no_grad():
        for batch in _batches(sorted(sharing, key=len, reverse=True), batch_tokens):
            members = [(row, number) for row, inputs in enumerate(batch) for number in sharing[inputs]]
            scores = _score_batch(model, batch, [(row, requests[number].answer) for row, number in members], device, precision)
            found.update(zip((number for _, number in members), scores, strict=True))
    return [found[number] for number in range(len(requests))]


def _check(request: Request, context: int) -> None:
    if not request.context or not request.answer:
        raise RequestError("a request needs at least one token of context and one of answer.")
    if len(request.answer) > context:
        raise RequestError(
            f"an answer has {len(request.answer)} tokens and the model's context {context}; it cannot be scored whole. Evaluate a model "
            "with a longer context, or leave this task out."
        )


def _batches(inputs: Sequence[tuple[int, ...]], tokens: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """Runs of `inputs`, which are in falling order of length: the longest come first, so memory that does not suffice shows at once."""
    start = 0
    while start < len(inputs):
        stop = start + max(1, tokens // len(inputs[start]))
        yield inputs[start:stop]
        start = stop


def _score_batch(
    model: Decoder, batch: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, Sequence[int]]], device: Device, precision: Precision
) -> list[Score]:
    """Scores of `answers`, each with its row in the batch, at the end of which it stands."""
    tokens = torch.full((len(batch), len(batch[0])), PAD, dtype=torch.int64)
    for row, inputs in enumerate(batch):
        tokens[row, : len(inputs)] = torch.tensor(inputs)
    rows = torch.tensor([row for row, answer in answers for _ in answer])
    ends = [(len(batch[row]), len(answer)) for row, answer in answers]
    places = torch.cat([torch.arange(end - length, end) for end, length in ends])
    targets = torch.tensor([token for _, answer in answers for token in answer]).to(device)
    with autocast(device, precision):
        hidden = model(tokens.to(device))  # [B, T, D]
    weight = model.head_weight
    chosen = hidden[rows.to(device), places.to(device)].to(weight.dtype)  # [N, D]
    losses = token_nll(chosen, weight, targets).double().cpu()
    hits = (likeliest(chosen, weight) == targets).cpu()
    lengths = [length for _, length in ends]
    scores = [
        Score(-loss.sum().item(), bool(hit.all()))
        for loss, hit in zip(torch.split(losses, lengths), torch.split(hits, lengths), strict=True)
    ]
    if not all(math.isfinite(found.log_probability) for found in scores):
        raise FailureError("a log-probability is not finite: the weights of this model give no probabilities any more.")
    return scores
