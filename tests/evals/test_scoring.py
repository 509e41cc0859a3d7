"""Batched log-probabilities equal those of one item at a time, whatever is beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from depthroute.common.errors import FailureError, RequestError
from depthroute.evals.scoring import Request, Score, is_cut, score
from depthroute.evals.subject import Subject
from depthroute.model import Decoder
from depthroute.train.devices import autocast

CONTEXT = 64


def scored(model: Decoder, requests: Sequence[Request], batch_tokens: int = 400) -> list[Score]:
    return score(model, requests, device="cpu", precision="float32", batch_tokens=batch_tokens)


def naive(model: Decoder, request: Request) -> Score:
    """One request, all its logits, a token at a time."""
    whole = [*request.context, *request.answer][-(CONTEXT + 1):]
    with torch.no_grad():
        rows = model.logits(torch.tensor([whole[:-1]]))[0].log_softmax(-1)[-len(request.answer):]
    picked = [(row[token].item(), int(row.argmax()) == token) for row, token in zip(rows, request.answer, strict=True)]
    return Score(sum(value for value, _ in picked), all(hit for _, hit in picked))


def greedy_answer(model: Decoder, context: Sequence[int], length: int) -> list[int]:
    ids = list(context)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(context):]


@pytest.fixture
def requests(subject: Subject) -> list[Request]:
    """Of all lengths up to far too long ones; some share all inputs, some a context; of the last three, one is greedy in part, two all."""
    draw = random.Random(0)
    sizes = [(1, 1), (1, 5), (7, 3), (CONTEXT, 1), (CONTEXT - 1, 2), (CONTEXT, 2), (150, 9), (3, CONTEXT), (1, CONTEXT), (30, 1), (12, 12)]
    found = [Request([draw.randrange(340) for _ in range(a)], [draw.randrange(340) for _ in range(b)]) for a, b in sizes]
    shared = found[9].context
    found += [Request(shared, [token]) for token in (5, 6, 7)] + [Request([*shared, 5], [6]), Request(shared, [5, 6])]
    likeliest = greedy_answer(subject.model, found[2].context, 4)
    found.append(Request(found[2].context, [*likeliest[:3], (likeliest[3] + 1) % 340]))
    return [*found, Request(found[2].context, likeliest), Request(shared, greedy_answer(subject.model, shared, 1))]


def test_they_are_those_of_one_at_a_time(subject: Subject, requests: list[Request]) -> None:
    found, expected = scored(subject.model, requests), [naive(subject.model, request) for request in requests]
    assert [one.log_probability for one in found] == pytest.approx([one.log_probability for one in expected], abs=1e-12)
    assert [one.greedy for one in found] == [one.greedy for one in expected]
    assert [one.greedy for one in found[-4:]] == [False, False, True, True]


def test_padding_changes_nothing(subject: Subject, requests: list[Request]) -> None:
    alone, together = scored(subject.model, requests, batch_tokens=1), scored(subject.model, requests, batch_tokens=10**6)
    assert [one.log_probability for one in together] == pytest.approx([one.log_probability for one in alone], abs=1e-12)
    subject.model.float()
    single = scored(subject.model, requests, batch_tokens=10**6)
    assert [one.log_probability for one in single] == pytest.approx([one.log_probability for one in alone], abs=1e-4)
    assert [one.greedy for one in single] == [one.greedy for one in alone]


def test_a_long_text_loses_its_beginning_and_never_its_answer(subject: Subject) -> None:
    context, answer = list(range(100, 100 + 2 * CONTEXT)), [5, 6, 7]
    whole, kept = Request(context, answer), Request(context[-(CONTEXT - 2):], answer)
    more, less = Request(context[-(CONTEXT - 1):], answer), Request(context[-(CONTEXT - 3):], answer)
    found = scored(subject.model, [whole, kept, more, less])
    assert found[0] == found[1] == found[2] != found[3]
    assert [is_cut(request, CONTEXT) for request in (whole, kept, more, less)] == [True, False, True, False]


def test_an_answer_as_long_as_the_context_is_the_longest(subject: Subject) -> None:
    answer = [7] * CONTEXT
    assert scored(subject.model, [Request([3, 4], answer)]) == scored(subject.model, [Request([4], answer)])
    with pytest.raises(RequestError, match=f"an answer has {CONTEXT + 1} tokens and the model's context {CONTEXT}"):
        scored(subject.model, [Request([3], [5]), Request([3], [*answer, 7])])


@pytest.mark.parametrize("request_", [Request([], [1]), Request([1], [])])
def test_empty_parts_are_refused(subject: Subject, request_: Request) -> None:
    with pytest.raises(RequestError, match="at least one token of context and one of answer"):
        scored(subject.model, [request_])


def test_the_same_inputs_are_read_once_and_a_pass_holds_no_more_than_it_may(subject: Subject, requests: list[Request]) -> None:
    passes: list[torch.Size] = []
    subject.model.register_forward_pre_hook(lambda module, arguments: passes.append(arguments[0].shape))
    scored(subject.model, requests, batch_tokens=130)
    distinct = {tuple([*r.context, *r.answer][-(CONTEXT + 1):-1]) for r in requests}
    assert sum(shape[0] for shape in passes) == len(distinct) < len(requests) - 3
    assert all(shape.numel() <= 130 for shape in passes) and max(shape[0] for shape in passes) > 2


def test_in_bf16_the_head_is_float32(subject: Subject) -> None:
    model = subject.model.float()
    request = Request(list(range(20, 40)), [5, 6])
    with torch.no_grad(), autocast("cpu", "bf16"):
        hidden = model(torch.tensor([[*range(20, 40), 5]]))[0, -2:]
    rows = (hidden.float() @ model.head_weight.T).log_softmax(-1)
    (found,) = score(model, [request], device="cpu", precision="bf16")
    assert found.log_probability == pytest.approx((rows[0, 5] + rows[1, 6]).item(), abs=1e-5)
    assert found.log_probability != pytest.approx(scored(model, [request])[0].log_probability, abs=1e-5)


def test_weights_that_are_not_numbers_are_a_failure(subject: Subject) -> None:
    with torch.no_grad():
        subject.model.embedding.weight[9] = torch.nan
    with pytest.raises(FailureError, match="not finite"):
        scored(subject.model, [Request([3], [9])])
