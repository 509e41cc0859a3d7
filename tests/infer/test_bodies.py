"""Going on with a cache is the full forward pass on every body: softmax attention, latent attention, states, experts, documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.infer import Sampling, Session, generate
from depthroute.model import Decoder
from depthroute.model.sight import Seen, band
from depthroute.ops import kernel_unavailable
from tests.bodies import BODIES, K3, KIMI
from tests.infer.models import METHODS, decoder

END = 7
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 1]]
MIXED: dict[str, Any] = {**KIMI, "mixers": ("softmax", "kda", "mla", "softmax"), "last_mixer": None}


def body(residual: str, fields: dict[str, Any], dtype: torch.dtype = torch.float64, **others: Any) -> Decoder:
    heads = {} if set(fields.get("mixers", ["softmax"])) == {"softmax"} else {"key_value_heads": None}
    return decoder(residual, dtype, **heads | fields | others)


def literal(model: Decoder, text: list[int]) -> Tensor:
    with torch.no_grad():
        return model.logits(torch.tensor([text]))[0, -1]


def go_on(model: Decoder, session: Session, prompts: list[list[int]], steps: list[list[int]]) -> None:
    """The logits behind the prompts, and behind each of the steps' tokens a row, are those of the whole texts."""
    tolerance = 1e-10 if model.embedding.weight.dtype == torch.float64 else 2e-5
    texts = [list(prompt) for prompt in prompts]
    found = session.prefill(prompts)
    for number in range(len(steps) + 1):
        expected = torch.stack([literal(model, text) for text in texts])
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        if number < len(steps):
            found = session.step(torch.tensor(steps[number]))
            for text, token in zip(texts, steps[number], strict=True):
                text.append(token)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", [MIXED, K3], ids=["mixed", "k3"])
def test_cached_decoding_is_the_full_forward(fields: dict[str, Any], method: str) -> None:
    """In passes of five tokens one row begins with the last token of a pass, and one with the first: states begin there."""
    model = body(method, fields)
    go_on(model, Session(model, chunk=5), PROMPTS, [[1, 2, 3], [7, 8, 9], [4, 5, 6]])


@pytest.mark.parametrize("chunk", [1, 3, 10, 1000])
def test_the_chunks_of_a_prompt_do_not_matter(chunk: int) -> None:
    model = body("rd:3", {**MIXED, "attention_window": 4, "windowed_layers": (3,)})
    go_on(model, Session(model, chunk=chunk), PROMPTS, [[1, 2, 3], [7, 8, 9]])


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("name", [*BODIES, "mixed", "windowed"])
def test_documents_do_not_see_each_other(name: str, chunk: int) -> None:
    """An end within a prompt, at its end, and among what follows."""
    fields = {**BODIES, "mixed": MIXED, "windowed": {"attention_window": 3, "windowed_layers": (1, 3)}}[name]
    model = body("block:3", fields, document_end=END)
    prompts = [[3, 1, END, 1, 5, 9, 2], [6, 5, END], [5, END, 9, 3, END, END, 8, 2, 4, 6]]
    go_on(model, Session(model, chunk=chunk), prompts, [[1, 2, END], [END, 8, END], [4, 5, 6], [1, 2, 3]])


@pytest.mark.skipif(kernel_unavailable() is not None, reason="there is no C compiler")
def test_a_program_goes_on_with_another_document() -> None:
    """Its rows have no padding before, rows leave, and buffers slide."""
    model, plain = (body("block:3", {}, torch.float32, document_end=end) for end in (END, None))
    plain.load_state_dict(model.state_dict())
    session = Session(model)
    session.prefill([[3, 1, 4], [1, 5, 9]])
    session.step(torch.tensor([END, 2]))
    assert session._program is not None and session._program[1] is not None
    session.step(torch.tensor([6, END]))
    session.keep([1, 0])
    found = session.step(torch.tensor([8, 5]))
    torch.testing.assert_close(found, torch.stack([literal(model, [8]), literal(model, [6, 5])]), rtol=2e-5, atol=2e-5)
    assert session._program[1] is not None
    for _ in range(70):
        session.step(torch.tensor([2, 2]))
    session.step(torch.tensor([END, 2]))
    found = session.step(torch.tensor([8, 2]))
    torch.testing.assert_close(found[0], literal(plain, [8]), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fields", [KIMI, K3], ids=["kimi", "k3"])
def test_beyond_the_context_attention_slides_and_states_go_on(fields: dict[str, Any]) -> None:
    """Literally: a model of a longer context whose attention has the short one as its window."""
    model, long = body("rd:3", fields, context=8), body("rd:3", fields, context=64)
    long.load_state_dict(model.state_dict())
    session, texts = Session(model, chunk=3), [prompt[:8] for prompt in PROMPTS]
    session.prefill(texts)
    for token in range(30):
        found = session.step(torch.full((3,), token))
        texts = [[*text, token] for text in texts]
    for row, text in enumerate(texts):
        tokens = torch.tensor([text])
        sight = long.sight(tokens)._replace(full=Seen(band(len(text), len(text), 8, tokens.device), causal=False))
        with torch.no_grad():
            expected = long.unembed(long.connect(long.embedded(tokens), sight))[0, -1]
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-10)


def test_rows_may_leave_and_change_places() -> None:
    model = body("block:3", MIXED)
    session = Session(model)
    session.prefill(PROMPTS)
    session.step(torch.tensor([1, 2, 3]))
    session.keep([2, 0, 0])
    found = session.step(torch.tensor([7, 8, 9]))
    expected = [literal(model, text) for text in ([*PROMPTS[2], 3, 7], [*PROMPTS[0], 1, 8], [*PROMPTS[0], 1, 9])]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-10)


def test_what_a_cache_holds() -> None:
    """Of latent attention a latent vector and the shared key a token, of KDA the same whatever the length."""
    heads, width, channels, number = 4, 4, 16, 8  # bytes of a number
    state = 2 * (heads * width * width + 3 * 2 * channels) * number  # two layers: a matrix a head, two tokens of three convolutions
    for length in (100, 300):
        for method, latents in (("prenorm", 10), ("rd:3", 10 + 10)):  # values that are read apart have their own latents
            session = Session(body(method, KIMI, context=300))
            session.prefill([[1] * length])
            assert session.cache_bytes == state + 2 * (length + 1) * (latents + 4) * number
    only = Session(body("rd:3", {"mixers": ("kda",), "kda": KIMI["kda"]}, context=300))
    for length in (2, 300):
        only.prefill([[1] * length])
        only.step(torch.tensor([2]))
        assert only.cache_bytes == 2 * state
        assert only._cache is not None
        states = (part for layer in range(4) for part in only._cache.state(layer) or ())
        assert sum(part.untyped_storage().nbytes() for part in states) == 2 * state  # no view of what the pass has made
    own = Session(body("value-residual", KIMI, context=300))
    own.prefill([[1] * 100])
    assert own.cache_bytes == state + 2 * 101 * heads * (width + 4 + width) * number


@pytest.mark.skipif(kernel_unavailable() is not None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [{"mixers": ("softmax", "kda"), "kda": KIMI["kda"]}, {"mixers": ("mla",), "mla": KIMI["mla"]}, {"experts": KIMI["experts"]},
     {"activation": "situ"}],
    ids=["kda", "mla", "experts", "situ"],
)  # fmt: skip
def test_what_has_no_steps_has_no_program(fields: dict[str, Any], dtype: torch.dtype) -> None:
    model = body("block:3", fields, dtype)
    session = Session(model)
    session.prefill(PROMPTS[:1])
    found = session.step(torch.tensor([7]))[0]
    assert session._program is not None and session._program[1] is None
    exact = body("block:3", fields)
    exact.load_state_dict(model.state_dict())
    error = (found - literal(exact, [*PROMPTS[0], 7])).norm() / found.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("fields", [KIMI, K3], ids=["kimi", "k3"])
def test_a_batch_generates_what_each_prompt_would(fields: dict[str, Any]) -> None:
    model = body("rd:3", fields, document_end=END)
    sampling = Sampling(seed=3)
    together = generate(model, PROMPTS, limit=12, sampling=sampling, end=[END])
    alone = [generate(model, [prompt], limit=12, sampling=sampling, end=[END], rows=[row])[0] for row, prompt in enumerate(PROMPTS)]
    assert [one.ids for one in together] == [one.ids for one in alone]
