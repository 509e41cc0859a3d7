"""Documents that share a sequence: each is as if it were alone, in every body and by every implementation of attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from depthroute.model import Decoder, ModelConfig
from depthroute.model.rotary import Rotary
from depthroute.model.sight import Sight, attend, packed_documents, whole_sequence
from depthroute.residual import AttnResConfig
from depthroute.train import initialise
from tests.bodies import K3, KIMI

END, LENGTH = 3, 15
DOCUMENTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window and groups": {"heads": 6, "key_value_heads": 2, "attention_window": 3, "windowed_layers": (1,)},
    "kimi": KIMI,
    "k3": K3,
    "all mixers": KIMI | {"mixers": ("softmax", "kda", "mla"), "last_mixer": None, "attention_window": 3},
}


def decoder(**fields: Any) -> Decoder:
    shape = {"vocabulary": 17, "width": 12, "layers": 3, "heads": 2, "mlp_width": 20, "context": 16, "init_std": 0.4, "document_end": END}
    model = Decoder(ModelConfig(**shape | {"residual": AttnResConfig(block=2, roles="decoupled")} | fields))
    initialise(model, 0)
    return model.double()


def packed() -> Tensor:
    """[4, T]: without an end; with ends at the start, side by side and as the last token; in the middle; and with the first alone."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(END + 1, 17, (4, LENGTH), generator=generator)
    tokens[1, [0, 5, 6, 7, LENGTH - 1]] = END
    tokens[2, [4, 9]] = END
    tokens[3, 0] = END
    return tokens


def parts(row: Tensor) -> list[slice]:
    """Every document with the end behind it."""
    bounds = [0, *(t + 1 for t, token in enumerate(row.tolist()) if token == END and t + 1 < len(row)), len(row)]
    return [slice(*pair) for pair in pairwise(bounds)]


def weights() -> Tensor:
    return torch.randn(4, LENGTH, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fields", DOCUMENTS.values(), ids=DOCUMENTS)
def test_packed_documents_are_documents_alone(fields: dict[str, Any]) -> None:
    """Logits, and the sum of every gradient."""
    model, alone, tokens, upstream = decoder(**fields), decoder(**fields, document_end=None), packed(), weights()
    assert [len(parts(row)) for row in tokens] == [1, 5, 3, 2]
    logits = model.logits(tokens)
    (logits * upstream).sum().backward()
    for number, row in enumerate(tokens):
        for part in parts(row):
            expected = alone.logits(row[None, part])
            torch.testing.assert_close(logits[number, part], expected[0], rtol=1e-11, atol=1e-12)
            (expected[0] * upstream[number, part]).sum().backward()
    for (name, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        if found.requires_grad:
            scale = expected.grad.abs().max().item()
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-11 * scale, msg=name)
    assert (alone.logits(tokens)[1] - logits[1]).abs().max() > 1e-2  # without the boundaries it is another text


@pytest.mark.parametrize("fields", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_document_feels_no_gradient_of_another(fields: dict[str, Any]) -> None:
    """Exactly none. What an end is followed by is another document's, and the end itself is its own's."""
    model, tokens = decoder(**fields), packed()
    embedded = model.embedding(tokens).detach().requires_grad_()
    logits = model.unembed(model.connect(embedded, model.sight(tokens)))
    for number, row in enumerate(tokens):
        for part in parts(row):
            (gradient,) = torch.autograd.grad((logits * weights())[number, part].sum(), embedded, retain_graph=True)
            felt = gradient.abs().sum(-1) > 0
            assert felt[number, part].all() and felt.sum() == part.stop - part.start


@pytest.mark.parametrize(
    "fields", [DOCUMENTS["window and groups"], KIMI | {"experts": None}, K3 | {"experts": None}], ids=["dense", "kimi", "k3"]
)
@torch.no_grad()
def test_a_document_moves_no_logit_of_another(fields: dict[str, Any]) -> None:
    """Bit for bit; experts alone sum by how many tokens come to them."""
    model, tokens = decoder(**fields), packed()
    expected = model.logits(tokens)
    for part in parts(tokens[2]):
        other = tokens.clone()
        other[2, part.start : part.stop - 1] = (tokens[2, part.start : part.stop - 1] - END) % 13 + END + 1
        changed = (model.logits(other) != expected).any(-1)
        assert changed[2, part.start : part.stop - 1].all() and changed.sum() <= part.stop - part.start


def test_positions_begin_again_with_every_document() -> None:
    rotary = Rotary(6, 16, 100.0)
    begins = torch.tensor([[False, False, True, True, False], [False] * 5])  # a sequence begins one whatever is said of it
    sight = packed_documents(rotary, begins, None)
    assert sight.begins is not None and sight.begins.tolist() == [[True, False, True, True, False], [True] + [False] * 4]
    for row, positions in enumerate(([0, 1, 0, 0, 1], [0, 1, 2, 3, 4])):
        assert torch.equal(sight.rotation.cos[row, 0], rotary.cos[positions])
        assert torch.equal(sight.rotation.sin[row, 0], rotary.sin[positions])
    assert torch.equal(sight.full.allowed[0, 0], torch.block_diag(*(torch.ones(n, n).tril() for n in (2, 1, 2))).bool())


def test_a_sequence_of_one_document_is_a_sequence() -> None:
    rotary = Rotary(6, 16, 100.0)
    sight, whole = packed_documents(rotary, torch.zeros(1, 9, dtype=torch.bool), 4), whole_sequence(rotary(0, 9), 9, 4)
    query, key, value = torch.randn(3, 1, 2, 9, 6)
    for found, expected in ((sight.full, whole.full), (sight.windowed, whole.windowed)):
        torch.testing.assert_close(attend(query, key, value, found), attend(query, key, value, expected))


def operands(device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of four heads, keys of two, values that are narrower, and where documents begin."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 4, LENGTH, 32), (4, 2, LENGTH, 32), (4, 2, LENGTH, 16))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    query, key, value = (x.to(device, dtype).requires_grad_() for x in drawn)
    begins = torch.nn.functional.pad(packed()[:, :-1] == END, (1, 0), value=True).to(device)
    return query, key, value, begins


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_flex_attention_sees_what_masks_do(window: int | None) -> None:
    *given, begins = operands()
    query, key, value = (x.detach() for x in given)
    one, other = (packed_documents(Rotary(6, 16, 100.0), begins, window, masking) for masking in ("flex", "sdpa"))
    for found, expected in ((one.full, other.full), (one.windowed, other.windowed)):
        torch.testing.assert_close(attend(query, key, value, found), attend(query, key, value, expected), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("masking", ["flex", "varlen"])
def test_implementations_on_a_gpu_see_what_masks_do(masking: Any) -> None:
    """Outputs and gradients."""
    *given, begins = operands("cuda", torch.bfloat16)
    rotary = Rotary(6, 16, 100.0).cuda()
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = attend(*exact, packed_documents(rotary, begins, None, "sdpa").full)
    found = attend(*given, packed_documents(rotary, begins, None, masking).full)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(found, given, upstream.to(found.dtype))
    for got, wanted in zip(gradients, torch.autograd.grad(expected, exact, upstream), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=3e-2, atol=3e-2)


def test_documents_are_seen_without_their_tokens() -> None:
    """Nothing depends on the data, so a compiler and a dry run can follow."""
    config = decoder(**KIMI).config
    with FakeTensorMode():
        model = Decoder(config)
        sight = model.sight(torch.zeros(2, LENGTH, dtype=torch.int64))
        assert isinstance(sight, Sight) and sight.begins is not None and sight.begins.shape == (2, LENGTH)
        assert model(torch.zeros(2, LENGTH, dtype=torch.int64)).shape == (2, LENGTH, 12)


def test_the_end_is_the_configs_own_token() -> None:
    model = decoder()
    other = replace(model.config, document_end=5)
    begins = Decoder(other).sight(torch.tensor([[5, 3, 5, 5, 1]])).begins
    assert begins is not None and begins.tolist() == [[True, True, False, True, True]]
