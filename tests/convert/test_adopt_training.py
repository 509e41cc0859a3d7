"""An adopted checkpoint is trained on from step 0, its routing at a rate of its own; its training can be chosen until a step is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from public_models import ids, public_model
from stored_runs import stored
from tokenizers import Tokenizer

from depthroute.cli.main import main
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, read_json_lines
from depthroute.convert.adopt import adopt_checkpoint, adopted_routing
from depthroute.data import TokenDataset
from depthroute.train import load_trained, recorded_config, train
from depthroute.train.checkpoint import latest

SETTINGS = {
    "train.steps": "3", "train.sequences": "4", "train.microbatch": "4", "train.learning_rate": "1e-3", "train.route_rate": "7",
    "train.warmup_fraction": "0", "train.evaluation_tokens": "64", "train.device": "cpu", "train.precision": "float32",
    "model.context": "16",
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    public_model("llama", tmp_path / "public", vocab_size=300, rms_norm_eps=1e-6)
    return tmp_path / "public"


def test_training_starts_from_the_weights_and_with_two_rates(source: Path, tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = SETTINGS | {"train.final_fraction": "1"}
    adopt_checkpoint(source, out, residual=adopted_routing("block:2"), data=tokens, settings=settings, original=False)
    before = stored(out)
    assert main(["train", str(out), "--set", "train.steps=1"]) == 0
    after = stored(out)
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    queries = [name for name in moved if name.startswith("residual.") and name.endswith("query")]
    # Adam's first step is the learning rate, whatever the gradient
    assert queries and all(moved[name] == pytest.approx(7e-3, rel=1e-2) for name in queries)
    bodies = [name for name in moved if name.endswith("norm.weight")]
    assert bodies and all(moved[name] == pytest.approx(1e-3, rel=1e-2) for name in bodies)
    losses = read_json_lines(out / "metrics.jsonl")
    assert [line["step"] for line in losses] == [1]


def test_the_first_loss_is_that_of_the_original(source: Path, tokens: Path, tmp_path: Path) -> None:
    losses = []
    for text in ("prenorm", "rd:2"):
        out = tmp_path / text
        adopt_checkpoint(source, out, residual=adopted_routing(text), data=tokens, settings=SETTINGS, original=False)
        assert main(["train", str(out)]) == 0
        losses.append([line["loss"] for line in read_json_lines(out / "metrics.jsonl")])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert losses[0][2] != pytest.approx(losses[1][2], rel=1e-6)


def test_data_is_given_to_the_training(source: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    adopt_checkpoint(source, out, residual=adopted_routing("block:2"), settings=SETTINGS, original=False)
    assert main(["train", str(out)]) == 2
    message = capsys.readouterr().err
    assert "names no data" in message and f"--tokenizer {out / 'tokenizer.json'}" in message
    assert main(["train", str(out), "--data", str(tokens), "--set", "train.learning_rate=5e-4"]) == 0
    config = recorded_config(out)
    assert config is not None and config.train.learning_rate == 5e-4 and config.data == str(tokens)
    assert config.data_fingerprint == TokenDataset.open(tokens).fingerprint
    assert read_json(out / "result.json")["step"] == 3 and (out / "environment.json").exists()
    found = latest(out)
    assert found is not None and found.name == "step-00000003"


def test_training_is_fixed_once_a_step_is_kept(source: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    adopt_checkpoint(source, out, residual=adopted_routing("block:2"), data=tokens, settings=SETTINGS, original=False)
    config = recorded_config(out)
    assert config is not None
    assert main(["train", str(out), "--set", "model.norm_eps=1e-3"]) == 2  # the model never was free
    assert "model.norm_eps = 1e-06, not 0.001" in capsys.readouterr().err
    assert main(["train", str(out), "--set", "train.steps=4"]) == 0
    assert main(["train", str(out), "--set", "train.steps=5"]) == 2
    assert "train.steps = 4, not 5" in capsys.readouterr().err
    assert main(["train", str(out), "--recipe", "small", "--data", str(tokens)]) == 2
    assert "holds a run with model." in capsys.readouterr().err


def test_train_without_a_recipe_goes_on_with_the_run(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recorded_config(trained_run)
    assert config is not None
    train(config, tmp_path / "run", console=False)
    (tmp_path / "run" / "result.json").unlink()
    assert main(["train", str(tmp_path / "run")]) == 0
    assert read_json(tmp_path / "run" / "result.json")["nll"] == read_json(trained_run / "result.json")["nll"]
    assert main(["train", str(tmp_path / "new")]) == 2
    assert "a new run needs --data" in capsys.readouterr().err


def test_shards_of_another_tokenizer(source: Path, tokens: Path, tmp_path: Path) -> None:
    own = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    own.save(str(source / "tokenizer.json"))
    adopt_checkpoint(source, tmp_path / "run", residual=adopted_routing("block:2"), data=tokens, settings=SETTINGS, original=False)
    own.add_tokens(["another"])
    own.save(str(source / "tokenizer.json"))
    with pytest.raises(RequestError, match="were made with another tokenizer"):
        adopt_checkpoint(source, tmp_path / "other", residual=adopted_routing("block:2"), data=tokens, settings=SETTINGS, original=False)


def test_shards_with_more_tokens_than_the_model(tokens: Path, tmp_path: Path) -> None:
    public_model("llama", tmp_path / "public")
    with pytest.raises(RequestError, match=r"model.vocabulary is 64 and the tokenizer of .* has 300 entries"):
        adopt_checkpoint(tmp_path / "public", tmp_path / "run", residual=adopted_routing("block:2"), data=tokens)


@pytest.mark.parametrize("name", ["model.norm_eps", "model.width", "data", "train"])
def test_settings_that_are_the_checkpoints_own(name: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"--set {name}: the checkpoint says what the model is"):
        adopt_checkpoint(source, tmp_path / "run", residual=adopted_routing("block:2"), settings={name: "1"})


def test_a_shorter_context_changes_no_logit(source: Path, tmp_path: Path) -> None:
    found = []
    for context in ("64", "8"):
        settings = {"model.context": context}
        adopt_checkpoint(source, tmp_path / context, residual=adopted_routing("block:2"), settings=settings, original=False)
        found.append(load_trained(tmp_path / context)[1].eval().logits(ids(2, 8)).detach())
    assert torch.equal(*found)
    assert json.loads((tmp_path / "8" / "config.json").read_text())["model"]["context"] == 8
