"""The run as a model of the lm-evaluation-harness: what it is asked and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.utils import get_rolling_token_windows

from depthroute.common.errors import RequestError
from depthroute.data import EOS
from depthroute.evals.harness import DepthrouteLM
from depthroute.evals.subject import Subject

CONTEXT = 64
LONG = "The old river sees the garden near the café. " * 20


@pytest.fixture
def lm(subject: Subject) -> DepthrouteLM:
    return DepthrouteLM(subject=subject, batch_tokens=500)


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0, metadata=("task", i, 1)) for i, pair in enumerate(arguments)]


def naive(lm: DepthrouteLM, context: Sequence[int], answer: Sequence[int]) -> float:
    """The log-probability of an answer that fits, from all logits."""
    with torch.no_grad():
        rows = lm.subject.model.logits(torch.tensor([[*context, *answer][:-1]]))[0].log_softmax(-1)
    return sum(rows[len(context) - 1 + i, token].item() for i, token in enumerate(answer))


def test_an_empty_text_stands_behind_the_end_of_a_document(lm: DepthrouteLM) -> None:
    assert lm.eot_token_id == lm.prefix_token_id == EOS and lm.max_length == CONTEXT
    ids = lm.tok_encode("The river")
    ((found, _),) = lm.loglikelihood(asked("loglikelihood", ("", "The river")))
    assert found == pytest.approx(naive(lm, [EOS], ids), abs=1e-12)


def test_documents_that_begin_with_a_token(lm: DepthrouteLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in front of every text, once."""
    plain, begin = lm.tok_encode("The river"), 2
    monkeypatch.setattr(lm._text, "begin", begin)
    assert lm.prefix_token_id == begin and lm.eot_token_id == EOS and lm.tok_encode("The river") == [begin, *plain]
    empty, one = lm.loglikelihood(asked("loglikelihood", ("", "The river"), ("The", " river")))
    assert empty[0] == pytest.approx(naive(lm, [begin], plain), abs=1e-12)
    before, behind = lm.tok_encode("The"), lm.tok_encode(" river", add_special_tokens=False)
    assert before[0] == begin and one[0] == pytest.approx(naive(lm, before, behind), abs=1e-12)
    (rolling,) = lm.loglikelihood_rolling(asked("loglikelihood_rolling", ("The river",)))
    assert rolling == pytest.approx(empty[0], abs=1e-12)


def test_spaces_at_the_end_of_a_text_belong_to_the_answer(lm: DepthrouteLM) -> None:
    pairs = [("The old", " river"), ("The old ", "river"), ("  ", "river"), ("", "  river")]
    one, other, spaces, alone = lm.loglikelihood(asked("loglikelihood", *pairs))
    assert one[0] == pytest.approx(other[0], abs=1e-12) and spaces[0] == pytest.approx(alone[0], abs=1e-12)
    assert one[0] == pytest.approx(naive(lm, lm.tok_encode("The old"), lm.tok_encode(" river")), abs=1e-12)


def test_cut_texts_are_counted_and_keep_their_answer(lm: DepthrouteLM) -> None:
    text, answer = LONG.rstrip(), lm.tok_encode(" The river")
    whole, _ = lm.loglikelihood(asked("loglikelihood", (text, " The river"), ("The", " river")))
    assert lm.cut == 1
    assert whole[0] == pytest.approx(naive(lm, lm.tok_encode(text)[-(CONTEXT + 1 - len(answer)):], answer), abs=1e-12)


def test_an_answer_without_a_token_is_refused(lm: DepthrouteLM) -> None:
    with pytest.raises(RequestError, match="the task task asks for the log-probability of an empty answer"):
        lm.loglikelihood(asked("loglikelihood", ("The", "")))
    with pytest.raises(RequestError, match="the answer 'e' has no token of its own behind 'Th'"):
        lm.loglikelihood(asked("loglikelihood", ("Th", "e")))


def test_a_rolling_likelihood_is_the_sum_over_the_stream(lm: DepthrouteLM) -> None:
    short = "The old river sees the garden."
    texts = [short, LONG, ""]
    found = lm.loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in texts)))
    assert found[0] == pytest.approx(naive(lm, [EOS], lm.tok_encode(short)), abs=1e-12) and found[2] == 0
    ids = lm.tok_encode(LONG)
    assert len(ids) > 2 * CONTEXT
    windows = list(get_rolling_token_windows(ids, EOS, CONTEXT, 1))
    assert [token for _, target in windows for token in target] == ids, "every token is predicted once"
    expected = []
    for inputs, targets in windows:
        with torch.no_grad():
            rows = lm.subject.model.logits(torch.tensor([inputs]))[0].log_softmax(-1)[-len(targets):]
        expected += [row[token].item() for row, token in zip(rows, targets, strict=True)]
    assert found[1] == pytest.approx(math.fsum(expected), abs=1e-10)
    assert lm.cut == 0


def test_texts_are_generated_greedily_until_they_end(lm: DepthrouteLM) -> None:
    ids = lm.tok_encode("The old river")
    expected = list(ids)
    for _ in range(8):
        with torch.no_grad():
            expected.append(int(lm.subject.model.logits(torch.tensor([expected]))[0, -1].argmax()))
    assert EOS not in expected
    text = lm.tok_decode(expected)[len("The old river"):]
    whole, stopped, other = lm.generate_until(
        asked(
            "generate_until", ("The old river", {"until": [], "max_gen_toks": 8}),
            ("The old river", {"until": text[3:5], "max_gen_toks": 8}),
            ("", {"until": ["\n\n"], "do_sample": True, "temperature": 0.7, "max_gen_toks": 4}),
        )
    )  # fmt: skip
    assert whole == text and stopped == text[: text.index(text[3:5])] and isinstance(other, str)


def test_sampled_texts_depend_on_seed_and_place_and_not_on_batches(subject: Subject) -> None:
    prompts = asked("generate_until", *[("The old river", {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": 8})] * 5)
    whole, alone, other = (
        DepthrouteLM(subject=subject, batch_tokens=tokens, seed=seed).generate_until(prompts)
        for tokens, seed in ((500, 3), (64, 3), (500, 4))
    )
    assert whole == alone and len(set(whole)) == 5 and not set(whole) & set(other)


def test_a_prompt_leaves_room_for_what_is_generated(lm: DepthrouteLM) -> None:
    (found,) = lm.generate_until(asked("generate_until", (LONG, {"max_gen_toks": 20})))
    kept = lm.tok_decode(lm.tok_encode(LONG)[-(CONTEXT - 20):])
    assert lm.cut == 1 and found == lm.generate_until(asked("generate_until", (kept, {"max_gen_toks": 20})))[0]
    with pytest.raises(RequestError, match="a task generates 64 tokens and the model's context is 64"):
        lm.generate_until(asked("generate_until", ("The", {"max_gen_toks": 64})))
    with pytest.raises(RequestError, match="unknown generation setting 'num_beams'"):
        lm.generate_until(asked("generate_until", ("The", {"max_gen_toks": 4, "num_beams": 3})))


def test_the_harness_knows_it_by_name(run: Path) -> None:
    found = get_model("depthroute")
    assert found is DepthrouteLM
    made = found.create_from_arg_string(f"run={run},precision=float32,batch_tokens=128", {"batch_size": 1, "device": "cuda:0"})
    assert made.batch_size == 2 and made.subject.precision == "float32" and made.device in ("cpu", "cuda")
    with pytest.raises(RequestError, match="--model_args run=RUN"):
        found.create_from_arg_string("precision=float32")
    with pytest.raises(RequestError, match="unknown device 'mps'"):
        found(run, device="mps")
    with pytest.raises(RequestError, match="batch_tokens = 0 is not allowed"):
        found(run, device="cpu", batch_tokens=0)


def test_the_harness_finds_the_same_on_the_exported_model(run: Path, tmp_path: Path) -> None:
    """Its own route for models of transformers, on the run in that form."""
    from lm_eval.models.huggingface import HFLM

    import depthroute.hf  # noqa: F401  # registers the model class
    from depthroute.hf.export import export_hf

    export_hf(run, tmp_path / "hf")
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=3, max_length=CONTEXT)
    ours = DepthrouteLM(run, device="cpu", precision="float32")
    pairs = [
        ("", "The river"), ("The old", " river sees"), ("The old ", "garden"), (LONG, " the river"), (LONG, " the garden near the market."),
        ("Q", "?"), ("The river wants the old café near the", " kitchen!\n\nThe"), ("a", LONG[:90]),
    ]  # fmt: skip
    assert theirs.prefix_token_id == ours.prefix_token_id
    a, b = (model.loglikelihood(asked("loglikelihood", *pairs)) for model in (ours, theirs))
    assert [value for value, _ in a] == pytest.approx([value for value, _ in b], abs=1e-4)
    assert [greedy for _, greedy in a] == [greedy for _, greedy in b]
    texts = [("The old river sees the garden.",), (LONG,)]
    rolled = [model.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)) for model in (ours, theirs)]
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-6)
    prompts = [("The old river", {"until": ["\n\n"], "max_gen_toks": 12}), (LONG, {"until": ["the"], "max_gen_toks": 12})]
    a, b = (model.generate_until(asked("generate_until", *prompts)) for model in (ours, theirs))
    # The text of ours ends with a whole character; transformers writes one that was cut as U+FFFD.
    assert [one.rstrip("\ufffd") for one in a] == [other.rstrip("\ufffd") for other in b] and all(a)
