"""A decoding step as a program computes what the decoder computes, and gives way where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from depthroute.infer import Session
from depthroute.model import Decoder
from depthroute.ops import kernel_unavailable
from tests.infer.models import decoder

pytestmark = pytest.mark.skipif(kernel_unavailable() is not None, reason="there is no C compiler")

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [5, 8, 9, 7, 9, 3, 2, 3]]
RESIDUALS = (
    "prenorm", "full", "block:3", "rd:3", "rd:2,rank=4", "block:2,weighting=sigmoid", "block:2,heads=4",
    "block:2,sum_reads=true,roles=separate", "block:2,count_prior=0.5", "full,window=3", "rd-frozen-value:2", "rd:2,first_read=true",
)  # fmt: skip
BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"qk_norm": True, "biases": ("query", "value", "output", "gate", "down")},
    {"attention_window": 5, "windowed_layers": (1,), "head_width": 10, "tied_embeddings": False},
    {"width": 12, "mlp_width": 33, "heads": 2, "key_value_heads": 1},
)


class Unprepared(Session):
    """The decoder itself, step by step."""

    def _prepared(self, rows: int) -> None:
        return None


def has_program(session: Session) -> bool:
    return session._program is not None and session._program[1] is not None


@pytest.mark.parametrize("fields", BODIES, ids=str)
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_is_the_decoder(residual: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    """In a batch with padding, beyond the context, and after rows have left, it is as near to the truth as the decoder itself."""
    if fields.get("width") == 12 and "rank" in residual:
        fields = {**fields, "width": 24}
    model, exact = decoder(residual, dtype, context=16, **fields), decoder(residual, context=16, **fields)
    exact.load_state_dict(model.state_dict())
    sessions, generator = (Session(model, chunk=5), Unprepared(model, chunk=5), Session(exact)), torch.Generator().manual_seed(2)
    for session in sessions:
        session.prefill(PROMPTS)
    errors = []
    for step in range(40):
        if step == 20:
            for session in sessions:
                session.keep([2, 0])
        tokens = torch.randint(40, (3 if step < 20 else 2,), generator=generator)
        found, expected, truth = (session.step(tokens) for session in sessions)
        errors.append([((one - truth).abs().max() / truth.abs().max()).item() for one in (found, expected)])
    assert has_program(sessions[0]) and not has_program(sessions[1])
    mine, decoders = torch.tensor(errors).mean(0)
    assert mine < 1.3 * decoders + 1e-7 and mine < (5e-6 if dtype == torch.float32 else 0.05)


def hooked(model: Decoder) -> None:
    model.layers[1].mlp.up.register_forward_hook(lambda module, given, output: output * 2)


def strided(model: Decoder) -> None:
    projection = model.layers[0].attention.query
    projection.weight = torch.nn.Parameter(projection.weight.detach().t().contiguous().t())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("residual", "fields", "change"),
    [
        ("prenorm", {}, hooked), ("prenorm", {}, strided), ("prenorm", {"norms": "sandwich"}, None), ("block:2", {"norms": "hybrid"}, None),
        ("hc:2", {}, None), ("value-residual", {}, None), ("rd-average:2", {}, None), ("block:2,values=normed", {}, None),
    ],
)  # fmt: skip
def test_what_has_no_program_decodes_without_one(residual: str, fields: dict[str, Any], change: Any) -> None:
    model = decoder(residual, torch.float32, **fields)
    if change is not None:
        change(model)
    session = Session(model)
    session.prefill([PROMPTS[0]])
    found = session.step(torch.tensor([7]))
    assert not has_program(session)
    with torch.no_grad():
        torch.testing.assert_close(found[0], model.logits(torch.tensor([[*PROMPTS[0], 7]]))[0, -1], rtol=1e-4, atol=1e-4)


def test_who_watches_sees_the_operators() -> None:
    """A mode that counts arithmetic, and autocast, get the decoder's own modules."""
    model = decoder("block:3", torch.float32)
    session = Session(model)
    session.prefill([PROMPTS[0]])
    session.step(torch.tensor([7]))
    assert has_program(session)
    with FlopCounterMode(display=False) as counted:
        session.step(torch.tensor([8]))
    assert counted.get_total_flops() > 2 * sum(layer.mlp.up.weight.numel() for layer in model.layers)
    with torch.autocast("cpu", torch.bfloat16):
        assert session.step(torch.tensor([8])).isfinite().all()


def test_more_rows_than_a_step_takes() -> None:
    model, session = decoder("block:3", torch.float32), Session(decoder("block:3", torch.float32))
    prompts = [[row, 1, 2] for row in range(11)]
    session.prefill(prompts)
    found = session.step(torch.arange(11))
    assert not has_program(session)
    with torch.no_grad():
        expected = model.logits(torch.tensor([[*prompt, row] for row, prompt in enumerate(prompts)]))[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
