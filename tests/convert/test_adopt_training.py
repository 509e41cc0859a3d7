"""An adopted checkpoint is trained on from step 0, its routing at a rate of its own; its training can be chosen until a step is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from public_models import ids, public_model
from stored_runs import stored
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from depthroute.cli.main import main
from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, read_json_lines, write_json
from depthroute.convert.adopt import adopt_checkpoint, adopted_routing
from depthroute.data import BOS, EOS, TokenDataset
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
    assert "names no data; give the token shards (--data)." in message
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


@pytest.fixture
def with_tokenizer(source: Path, tokens: Path) -> Path:
    """The checkpoint with the tokenizer of the shards, which puts <bos> in front of a text here."""
    own = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    own.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    own.save(str(source / "tokenizer.json"))
    write_json(source / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>"})
    return source


def test_an_adopted_checkpoint_speaks_and_leaves_before_it_is_trained(
    with_tokenizer: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what its tokenizer puts in front of a text, as it was trained."""
    out = tmp_path / "run"
    assert main(["adopt", str(with_tokenizer), str(out), "--residual", "block:2", "--skip-original"]) == 0
    assert "--begin-of-document '<bos>'" in capsys.readouterr().out
    assert read_json(out / "adoption.json")["begin_of_document"] == "<bos>"
    sample = ["sample", str(out), "--prompt", "abcd", "--tokens", "6", "--temperature", "0", "--json"]
    assert main(sample) == 0
    (row,) = json.loads(capsys.readouterr().out)
    model, tokenizer = load_trained(out)[1].eval(), TokenDataset.open(tokens).tokenizer()
    ids = [BOS, *tokenizer.encode("abcd")]
    for _ in row["ids"]:
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    assert row["ids"] == ids[-len(row["ids"]):]
    assert main([*sample, "--data", str(tokens)]) == 0  # these shards begin with nothing
    capsys.readouterr()

    assert main(["export", "hf", str(out), str(tmp_path / "hf")]) == 0
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs("abcd")["input_ids"] == [BOS, *tokenizer.encode("abcd")]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (BOS, EOS)
    assert main(["export", "hf", str(out), str(tmp_path / "other"), "--data", str(tokens)]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "other").bos_token_id == EOS


def test_the_others_ask_an_adopted_checkpoint_for_its_data(
    with_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    adopt_checkpoint(with_tokenizer, out, residual=adopted_routing("block:2"), original=False)
    convert = ["convert", "low-rank", str(out), str(tmp_path / "low")]
    for command in (["analyse", str(out)], ["boundaries", str(out)], convert, ["train", str(out)]):
        assert main(command) == 2, command
        message = capsys.readouterr().err
        assert "names no data; give the token shards (--data), made with" in message, message
        assert f"--tokenizer {out / 'tokenizer.json'}" in message


def test_a_start_that_kept_no_step_leaves_no_environment(source: Path, tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    adopt_checkpoint(source, out, residual=adopted_routing("block:2"), data=tokens, settings=SETTINGS, original=False)
    write_json(out / "environment.json", {"processor": "of a start that was killed"})
    assert main(["train", str(out)]) == 0
    assert "data" in read_json(out / "environment.json")
    (out / "result.json").unlink()
    write_json(out / "environment.json", {"processor": "of the start that kept a step"})
    assert main(["train", str(out)]) == 0
    assert read_json(out / "environment.json") == {"processor": "of the start that kept a step"}


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
