"""What a run does and writes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import TokenDataset, evaluation_windows
from depthroute.model import Decoder
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, evaluate, initialise, load_trained, on_one, train
from depthroute.train.on_one import accumulate_gradients

Config = Callable[..., RunConfig]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_folder_holds_what_the_documentation_says(tmp_path: Path, config: Config) -> None:
    result = train(config(milestones=(4, 8)), tmp_path, console=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints", "config.json", "documents.npz", "environment.json", "evaluations.jsonl", "log.txt", "metrics.jsonl", "result.json",
    ]
    metrics, evaluations = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "evaluations.jsonl")
    assert [set(line) for line in metrics] == [{"step", "tokens", "loss", "learning_rate", "gradient_norm", "seconds"}] * 12
    assert [(line["step"], line["tokens"]) for line in metrics] == [(step, step * 128) for step in range(1, 13)]
    assert [line["learning_rate"] for line in metrics][-1] == pytest.approx(3e-4)
    assert [(line["step"], line["split"], line["evaluated_tokens"]) for line in evaluations] == [(s, "validation", 64) for s in (4, 8, 12)]
    assert all(line["perplexity"] == math.exp(line["nll"]) and line["seconds"] > 0 for line in evaluations)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (result["status"], result["step"], result["tokens"], result["nll"]) == ("complete", 12, 12 * 128, evaluations[-1]["nll"])
    assert result["parameters"] == Decoder(config().model).parameter_counts()
    assert result["training_seconds"] == sum(line["seconds"] for line in metrics)
    assert result["tokens_per_second"]["mean"] == pytest.approx(12 * 128 / result["training_seconds"])
    assert result["gradient_norm"]["maximum"] == max(line["gradient_norm"] for line in metrics)
    assert result["gradient_norm"]["fraction_clipped"] == sum(line["gradient_norm"] > 1 for line in metrics) / 12
    assert result["peak_memory_bytes"] > 10_000_000
    written = json.loads((tmp_path / "config.json").read_text())
    assert list(written) == ["format", "model", "train", "data", "data_fingerprint"] and written["train"]["microbatch"] == 8
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["threads"] == 1 and environment["packages"]["torch"] and environment["data"]["dtype"] == "uint16"


def test_training_lowers_the_loss(tmp_path: Path, config: Config) -> None:
    result = train(config(steps=80, learning_rate=0.01, evaluation_tokens=None), tmp_path, console=False)
    first = lines(tmp_path / "metrics.jsonl")[0]["loss"]
    assert first == pytest.approx(math.log(300), abs=0.1)
    assert result["nll"] < first - 2


def test_two_arms_read_the_same_batches(tmp_path: Path, config: Config, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    real = on_one.OnOne.batch

    def spy(self: on_one.OnOne, tokens: np.ndarray) -> torch.Tensor:
        seen.append(tokens)
        return real(self, tokens)

    monkeypatch.setattr(on_one.OnOne, "batch", spy)
    for arm in ("prenorm", "rd:2"):
        train(config(model={"residual": parse_residual(arm)}), tmp_path / arm, console=False)
    assert len(seen) == 24
    dataset = TokenDataset.open(data)
    order = dataset.order(16, 8, 0)
    for step, (ours, theirs) in enumerate(zip(seen[:12], seen[12:], strict=True)):
        assert np.array_equal(ours, theirs) and np.array_equal(ours, order.batch(dataset.tokens("train"), step))


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_accumulating_microbatches_equals_one_big_batch(config: Config, z_loss: float) -> None:
    gradients, losses = [], []
    for microbatch in (8, 2, 1):
        settings = config(model={"residual": parse_residual("rd:2")}, microbatch=microbatch, z_loss=z_loss)
        model = Decoder(settings.model).double()
        initialise(model, 0)
        batch = torch.arange(8 * 17).view(8, 17) % 300
        losses.append(accumulate_gradients(model, batch, settings).item())
        gradients.append([parameter.grad for parameter in model.parameters()])
    for other in (1, 2):
        assert losses[other] == pytest.approx(losses[0], rel=1e-13)
        for one, many in zip(gradients[0], gradients[other], strict=True):
            torch.testing.assert_close(many, one, rtol=1e-11, atol=1e-15)


def test_the_gradient_is_that_of_the_mean_loss_with_its_z_term(config: Config) -> None:
    settings = config(microbatch=4, z_loss=0.1)
    model = Decoder(settings.model).double()
    initialise(model, 0)
    batch = torch.arange(8 * 17).view(8, 17) % 300
    nll = accumulate_gradients(model, batch, settings)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    logits = model.logits(batch[:, :-1]).flatten(0, 1)
    cross_entropy = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
    (cross_entropy + 0.1 * logits.logsumexp(-1).square().mean()).backward()
    assert nll.item() / 128 == pytest.approx(cross_entropy.item(), rel=1e-12)
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-13)


def test_clipping_bounds_the_step_and_reports_the_norm_before_it(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    real = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *arguments: Any) -> Any:
        gradients = [parameter.grad.flatten() for group in self.param_groups for parameter in group["params"]]
        norms.append(torch.cat(gradients).norm().item())
        return real(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    for clip in (0.05, None):
        norms.clear()
        result = train(config(gradient_clip=clip), tmp_path / str(clip), console=False)
        reported = [line["gradient_norm"] for line in lines(tmp_path / str(clip) / "metrics.jsonl")]
        assert min(reported) > 0.05
        expected = [0.05] * 12 if clip else reported
        assert norms == pytest.approx(expected, rel=1e-4)
        assert result["gradient_norm"]["fraction_clipped"] == (1.0 if clip else 0.0)


def test_the_scheduled_learning_rate_reaches_every_group_and_is_what_is_written(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    real = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *arguments: Any) -> Any:
        rates.append([group["lr"] for group in self.param_groups])
        return real(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    train(config(steps=12, warmup_fraction=0.25), tmp_path, console=False)
    assert [group[0] for group in rates[:3]] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert rates == [[line["learning_rate"]] * 2 for line in lines(tmp_path / "metrics.jsonl")]


def test_the_losses_that_are_written_leave_the_z_term_out(tmp_path: Path, config: Config) -> None:
    for z_loss in (0.0, 10.0):
        train(config(steps=1, z_loss=z_loss), tmp_path / str(z_loss), console=False)
    without, with_term = (lines(tmp_path / name / "metrics.jsonl")[0] for name in ("0.0", "10.0"))
    assert without["loss"] == with_term["loss"] and without["gradient_norm"] != with_term["gradient_norm"]


def test_bf16_autocast_keeps_float32_parameters_and_stays_near_float32(tmp_path: Path, config: Config) -> None:
    results = {precision: train(config(precision=precision), tmp_path / precision, console=False) for precision in ("float32", "bf16")}
    _, model = load_trained(tmp_path / "bf16")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert results["bf16"]["nll"] != results["float32"]["nll"]
    assert results["bf16"]["nll"] == pytest.approx(results["float32"]["nll"], abs=0.02)


def test_a_loss_that_is_not_finite_stops_the_run_before_the_step_is_taken(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config(), tmp_path / "whole", console=False)
    real = accumulate_gradients
    calls = 0

    def broken(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return real(*arguments) * (math.nan if calls == 8 else 1)

    monkeypatch.setattr(on_one, "accumulate_gradients", broken)
    with pytest.raises(FailureError, match=r"the loss is nan at step 8 of .*the last checkpoint is that of step 6"):
        train(config(), tmp_path / "run", console=False)
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 8))
    monkeypatch.setattr(on_one, "accumulate_gradients", real)
    assert train(config(), tmp_path / "run", console=False)["nll"] == whole["nll"]


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_one, "get_total_norm", lambda gradients: torch.tensor(math.inf))
    with pytest.raises(FailureError, match="the norm of the gradient is inf at step 1 of"):
        train(config(), tmp_path, console=False)


def test_an_evaluation_is_the_mean_token_loss_of_the_fixed_windows(config: Config, data: Path) -> None:
    model = Decoder(config().model)
    initialise(model, 0)
    tokens = TokenDataset.open(data).tokens("validation")
    measured = {
        microbatch: evaluate(model, tokens, context=16, microbatch=microbatch, device="cpu", precision="float32")
        for microbatch in (1, 7)
    }
    batches = [torch.from_numpy(one) for one in evaluation_windows(tokens, 16)]
    assert (len(tokens) - 1) % 16, "the last window is a shorter one"
    model.double()
    with torch.no_grad():
        rows = [(model.logits(one[:, :-1]).flatten(0, 1), one[:, 1:].flatten()) for one in batches]
    sums = [torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item() for logits, targets in rows]
    expected = sum(sums) / (len(tokens) - 1)
    for found in measured.values():
        assert found is not None
        line = found.splits["validation"]
        assert line["nll"] == pytest.approx(expected, rel=1e-6)
        assert line["evaluated_tokens"] == len(tokens) - 1
    assert model.training  # as it was before


def test_threads_are_those_asked_for_and_put_back(tmp_path: Path, config: Config) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(config(threads=1, steps=1), tmp_path, console=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert json.loads((tmp_path / "environment.json").read_text())["threads"] == 1


def test_another_end_of_documents_than_that_of_the_data_is_refused(tmp_path: Path, config: Config, data: Path) -> None:
    end = TokenDataset.open(data).end
    with pytest.raises(RequestError, match=rf"model.document_end is {end + 1} and the documents in .* end with the token {end}; set that"):
        train(config(model={"document_end": end + 1}), tmp_path / "run", console=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "lacking", "says"),
    [
        ({"sequences": 100_000}, None, "less than a batch of 100000 sequences"),
        ({}, "validation", "the split has 0 tokens, and an evaluation needs one"),
    ],
)
def test_too_little_data_is_refused_before_the_folder_is_there(
    changes: dict[str, int], lacking: str | None, says: str, tmp_path: Path, config: Config, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenDataset.tokens
    monkeypatch.setattr(TokenDataset, "tokens", lambda self, split: tokens(self, split)[: 0 if split == lacking else None])
    with pytest.raises(RequestError, match=says):
        train(config(**changes), tmp_path / "run", console=False)
    assert not (tmp_path / "run").exists()


def test_other_data_than_the_configuration_names_is_refused(tmp_path: Path, config: Config) -> None:
    with pytest.raises(RequestError, match=r"the configuration asks for abc; give the folder of that data"):
        train(dataclasses.replace(config(), data_fingerprint="abc"), tmp_path, console=False)
    with pytest.raises(RequestError, match=r"model.vocabulary is 299 and the tokenizer of .* has 300 entries"):
        train(config(model={"vocabulary": 299}), tmp_path, console=False)
    assert not list(tmp_path.iterdir())
