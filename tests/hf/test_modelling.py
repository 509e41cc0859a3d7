"""The model of transformers computes what the decoder computes, with padding, caches and recomputation too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from depthroute.common.errors import RequestError
from depthroute.hf import DepthrouteForCausalLM
from depthroute.model import Decoder

from .conftest import FAST, MakeModel

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("method", FAST)
def test_logits_are_the_decoders(make: MakeModel, decoder: Callable[..., Decoder], tokens: Tensor, method: str) -> None:
    torch.testing.assert_close(make(method)(tokens).logits, decoder(method).logits(tokens), **EXACT)


@pytest.mark.parametrize("fields", [{}, {"attention_window": 4}, {"attention_window": 4, "windowed_layers": (1,)}], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_rest(make: MakeModel, tokens: Tensor, side: str, fields: dict[str, Any]) -> None:
    model = make("rd:2", **fields)
    row, pad = tokens[:1, :6], torch.zeros(1, 3, dtype=torch.int64)
    real = slice(3, None) if side == "left" else slice(6)
    padded = torch.cat([tokens[1:], torch.cat([pad, row] if side == "left" else [row, pad], dim=1)])
    mask = torch.ones_like(padded)
    mask[1, : 3 if side == "left" else None] = 0
    mask[1, real] = 1
    found = model(padded, attention_mask=mask).logits
    torch.testing.assert_close(found[:1], model(tokens[1:]).logits, **EXACT)
    torch.testing.assert_close(found[1:, real], model(row).logits, **EXACT)


def test_embeddings_in_place_of_tokens(make: MakeModel, tokens: Tensor) -> None:
    model = make("block:2")
    found = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    torch.testing.assert_close(found, model(tokens).logits, **EXACT)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_taken_under_both_names(make: MakeModel, tokens: Tensor, name: str) -> None:
    model, cache = make("rd:2"), DynamicCache()
    whole = model(tokens).logits
    first = model(tokens[:, :5], **{name: cache}).logits
    second = model(tokens[:, 5:], **{name: cache}).logits
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **EXACT)
    assert cache.get_seq_length() == 9
    assert model(tokens, use_cache=True)[1].get_seq_length() == 9
    assert len(model(tokens, use_cache=False)) == 1


def test_a_given_cache_is_used_whatever_use_cache_says(make: MakeModel, tokens: Tensor) -> None:
    """As transformers' own models do; without it the rest of a text would be read as if nothing had been before."""
    model = make("rd")
    expected = model(tokens).logits[:, 3:]
    seen = model(tokens[:, :3], use_cache=True).past_key_values
    torch.testing.assert_close(model(tokens[:, 3:], past_key_values=seen, use_cache=False).logits, expected, rtol=0, atol=1e-12)
    seen = model(tokens[:, :3], use_cache=True).past_key_values
    recompute(model.train(), "enable")
    with pytest.raises(RequestError, match="a cache and gradient checkpointing exclude each other"):
        model(tokens[:, 3:], past_key_values=seen)


def test_some_positions_only(make: MakeModel, tokens: Tensor) -> None:
    model = make()
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, whole[:, -2:], **EXACT)
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([1, 3])).logits, whole[:, [1, 3]], **EXACT)
    assert isinstance(model(tokens, return_dict=False), tuple)


def test_the_loss_is_the_mean_over_what_follows(make: MakeModel, tokens: Tensor) -> None:
    model, labels = make(), tokens.clone()
    labels[0, 4:] = -100
    found = model(tokens, labels=labels)
    pairs = F.cross_entropy(found.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(found.loss, pairs.sum() / 11, rtol=1e-6, atol=0)
    torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=44).loss, found.loss / 4, rtol=1e-6, atol=0)


def test_what_does_not_go_is_said(make: MakeModel, tokens: Tensor) -> None:
    model = make()
    for given, words in (
        ({"input_ids": tokens, "inputs_embeds": torch.zeros(2, 9, 12)}, "one of the two"),
        ({"input_ids": tokens, "output_attentions": True}, "output_attentions = True"),
        ({"input_ids": tokens, "cache": DynamicCache(), "past_key_values": DynamicCache()}, "two names"),
    ):
        with pytest.raises(RequestError, match=words):
            model(**given)


def recompute(model: DepthrouteForCausalLM, what: str, *given: Any) -> None:
    """By the name that this version of transformers has for it."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_{what}")(*given)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["prenorm", "rd:2", "muddformer", "value-residual"])
def test_recomputed_layers_give_the_same_gradients(make: MakeModel, tokens: Tensor, method: str, reentrant: bool) -> None:
    model = make(method).train()
    model(tokens, labels=tokens).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    runs: list[int] = []
    model.decoder.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    recompute(model, "enable", {"use_reentrant": reentrant})
    found = model(tokens, labels=tokens)
    assert len(runs) == 1 and len(found) == 2  # no cache
    found.loss.backward()
    assert len(runs) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-6, atol=1e-9)
    recompute(model, "disable")
    model(tokens, labels=tokens).loss.backward()
    assert len(runs) == 3


@pytest.mark.parametrize("fields", [{}, {"tied_embeddings": False, "biases": ("query", "output"), "qk_norm": True}], ids=["tied", "untied"])
def test_what_is_saved_comes_back_bit_for_bit(make: MakeModel, tokens: Tensor, tmp_path: Path, fields: dict[str, Any]) -> None:
    model = make("rd:2,rank=4", **fields)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is DepthrouteForCausalLM and again.dtype == torch.float64
    assert model.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    for table in ("cos", "sin"):  # no file has them
        assert torch.equal(getattr(again.decoder.rotary, table), getattr(model.decoder.rotary, table))
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, **EXACT)  # its memory is aligned otherwise
    assert (again.get_output_embeddings() is None) == (not fields)


def test_loading_draws_no_initial_values(make: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory that takes longer than all the rest."""
    make().save_pretrained(tmp_path)
    drawn: list[Any] = []
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *given: drawn.append(given))
    DepthrouteForCausalLM.from_pretrained(tmp_path)
    assert not drawn


def test_what_a_checkpoint_lacks_has_its_initial_value(make: MakeModel, tmp_path: Path) -> None:
    model = make("rd:2", dtype=torch.float32)
    given = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("value_query")}
    model.save_pretrained(tmp_path, state_dict=given)
    again = DepthrouteForCausalLM.from_pretrained(tmp_path)
    sites = again.decoder.residual.sites
    assert torch.equal(sites["2"].query, model.decoder.residual.sites["2"].query)
    assert sites["2"].value_query.eq(0).all()


@pytest.mark.parametrize("method", ["count-prior,ends=[1,4,6]", "full"])
def test_counts_that_no_file_has(make: MakeModel, tokens: Tensor, tmp_path: Path, method: str) -> None:
    model = make(method)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(DepthrouteForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", FAST)
def test_in_half_precision_route_queries_stay_float32(
    make: MakeModel, tokens: Tensor, tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    model = make(method, dtype=torch.float32, init_std=0.1)
    model.save_pretrained(tmp_path)
    half = DepthrouteForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    kinds = {name: parameter.dtype for name, parameter in half.named_parameters()}
    queries = {name for name in kinds if name.startswith("decoder.residual.") and name.endswith("query")}
    assert {kinds[name] for name in queries} <= {torch.float32}
    assert {kinds[name] for name in kinds.keys() - queries} == {dtype}
    assert bool(queries) == (method.partition(":")[0] in ("block", "rd", "low-rank", "delta"))
    found, expected = half(tokens).logits, model(tokens).logits
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_more_tokens(make: MakeModel, tokens: Tensor, tmp_path: Path) -> None:
    model = make(tied_embeddings=False)
    before = model(tokens).logits
    model.resize_token_embeddings(26)
    torch.testing.assert_close(model(tokens).logits[..., :23], before, **EXACT)
    model.save_pretrained(tmp_path)
    again = DepthrouteForCausalLM.from_pretrained(tmp_path)
    assert again.config.decoder_config().vocabulary == again.config.vocab_size == 26
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, **EXACT)
