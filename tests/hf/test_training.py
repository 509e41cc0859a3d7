"""The Trainer and PEFT train an exported model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from depthroute.hf import DepthrouteForCausalLM

from .conftest import MakeModel

PARTS = {"input_ids": torch.arange(4, 16), "labels": torch.arange(4, 16)}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of accelerate and the Trainer
@pytest.mark.parametrize("recompute", [False, True])
def test_the_trainer(exported: Path, tmp_path: Path, recompute: bool) -> None:
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(exported)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        gradient_checkpointing=recompute, save_strategy="no", disable_tqdm=True, logging_steps=1, bf16=recompute,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=[PARTS] * 8)
    assert trainer.model_accepts_loss_kwargs
    assert math.isfinite(trainer.train().training_loss)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        moves = not torch.equal(parameter, before[name])
        assert moves or ".sites." in name or "token" in name, name
    assert any(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters() if name.endswith("value_query"))
    trainer.save_model(str(tmp_path / "out"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert (tmp_path / "out" / "modeling_depthroute.py").exists()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lora(make: MakeModel, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = make("rd:2", dtype=torch.float32)
    tokens = torch.arange(4, 16)[None]
    plain = model(tokens).logits.detach()
    settings = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 3 and all(".attention." in name for name in trained)
    assert not torch.allclose(adapted(input_ids=tokens).logits, plain)
    loss = adapted(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained.values())
    adapted.save_pretrained(tmp_path)
    fresh = make("rd:2", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(again(input_ids=tokens).logits, adapted.eval()(input_ids=tokens).logits)
    merged = again.merge_and_unload()
    assert isinstance(merged, DepthrouteForCausalLM)
    torch.testing.assert_close(merged(tokens).logits, again(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
    assert merged.generate(tokens, max_new_tokens=2, do_sample=False).shape[1] > 12


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lora_with_the_routes_trained_whole(make: MakeModel) -> None:
    peft = pytest.importorskip("peft")
    tokens = torch.arange(4, 16)[None]
    settings = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["residual"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(make("block:2", dtype=torch.float32), settings)
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    routes = {name: parameter for name, parameter in adapted.named_parameters() if name.endswith("query") and parameter.requires_grad}
    assert routes and all(parameter.grad is not None for parameter in routes.values())
