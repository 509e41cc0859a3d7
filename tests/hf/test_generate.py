"""`generate` gives the same tokens with and without a cache, alone and in a padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.common.errors import RequestError
from depthroute.hf import DepthrouteForCausalLM
from depthroute.residual import SPECIFICATIONS

from .conftest import EOS, FAST, PAD, SIZED, MakeModel

WAYS = {"greedy": {"do_sample": False}, "sampling": {"do_sample": True, "top_k": 0}, "beams": {"do_sample": False, "num_beams": 3}}


def generated(model: DepthrouteForCausalLM, tokens: Tensor, **settings: Any) -> Tensor:
    torch.manual_seed(5)
    mask = tokens.ne(PAD).long()
    usual = {"max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": EOS, "do_sample": False}
    return model.generate(tokens, attention_mask=mask, **usual | settings)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["block:2", "muddformer"])
def test_a_cache_changes_nothing(make: MakeModel, tokens: Tensor, method: str, way: str) -> None:
    model = make(method)
    found = generated(model, tokens, **WAYS[way])
    assert found.shape[1] > tokens.shape[1] + 2
    assert torch.equal(found, generated(model, tokens, use_cache=False, **WAYS[way]))


def same_with_a_cache(model: DepthrouteForCausalLM, tokens: Tensor) -> None:
    assert torch.equal(generated(model, tokens), generated(model, tokens, use_cache=False))


@pytest.mark.parametrize("method", FAST)
def test_every_common_method_has_a_cache(make: MakeModel, tokens: Tensor, method: str) -> None:
    same_with_a_cache(make(method), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("method", SPECIFICATIONS)
def test_every_method_has_a_cache(make: MakeModel, tokens: Tensor, method: str) -> None:
    same_with_a_cache(make(SIZED.get(method, method), width=32, layers=6), tokens)


@pytest.mark.parametrize("windowed", [None, (0, 2)], ids=["all layers", "some layers"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_window(make: MakeModel, tokens: Tensor, windowed: tuple[int, ...] | None, beams: int) -> None:
    model = make("rd:2", attention_window=4, windowed_layers=windowed, heads=2, key_value_heads=1)
    found = generated(model, tokens, num_beams=beams)
    assert torch.equal(found, generated(model, tokens, num_beams=beams, use_cache=False))
    if beams == 1:
        assert torch.equal(found, generated(model, tokens, cache_implementation="static"))


@pytest.mark.parametrize("fields", [{}, {"attention_window": 4}], ids=["full", "window"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_of_a_padded_batch_are_rows_alone(make: MakeModel, tokens: Tensor, use_cache: bool, fields: dict[str, Any]) -> None:
    model = make("rd:2", **fields)
    short = tokens[:1, :4]
    batch = torch.cat([torch.cat([torch.full((1, 5), PAD), short], 1), tokens[1:]])
    found = generated(model, batch, use_cache=use_cache)[:, 9:]
    for row, alone in enumerate((short, tokens[1:])):
        expected = generated(model, alone, use_cache=use_cache)[0, alone.shape[1] :]
        assert found[row, : len(expected)].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "settings", [{"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 4}, {"cache_implementation": "static"}], ids=str
)
def test_other_ways_to_the_same_tokens(make: MakeModel, tokens: Tensor, settings: dict[str, Any]) -> None:
    model = make("block:2")
    assert torch.equal(generated(model, tokens[:1], **settings), generated(model, tokens[:1]))


def test_an_assistant(make: MakeModel, tokens: Tensor) -> None:
    """Rejected tokens are cut from both caches."""
    model, assistant = make("block:2"), make("prenorm")
    assert torch.equal(generated(model, tokens[:1], assistant_model=assistant), generated(model, tokens[:1]))


def test_a_method_that_cannot_cache_generates_without(make: MakeModel, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated(make("block:2"), tokens, use_cache=False)
    monkeypatch.setattr("depthroute.residual.attnres.AttnRes.per_token", False)
    model = make("block:2")
    assert torch.equal(generated(model, tokens), expected)
    with pytest.raises(RequestError, match="several tokens at once"):
        model(tokens, use_cache=True)
