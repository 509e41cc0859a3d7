"""The commands on a tiny run: the same facts as the library, in words and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from depthroute.cli.data import Options as DataOptions
from depthroute.cli.main import main
from depthroute.data import PrepareConfig


def test_info_of_a_run_and_of_its_data(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(trained_run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    result = json.loads((trained_run / "result.json").read_text())
    assert facts["complete"] and facts["steps"] == 4 and facts["validation_nll"] == result["nll"]
    assert facts["parameters"] == result["parameters"]["total"]
    assert main(["info", str(trained_run.parent / "tokens"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vocabulary"] == 300 and facts["train_tokens"] > 0 and len(facts["fingerprint"]) == 64
    assert main(["info", str(trained_run), "--residual", "rd"]) == 2
    assert "--residual and --set change recipes only" in capsys.readouterr().err


def test_sample_continues_the_prompt(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["sample", str(trained_run), "--prompt", "abcd efgh", "--tokens", "5"]
    assert main(options) == 0
    first = capsys.readouterr().out
    assert first.startswith("abcd efgh") and len(first) > len("abcd efgh\n")
    assert main(options) == 0 and capsys.readouterr().out == first
    assert main([*options, "--temperature", "-1"]) == 2
    assert main([*options[:2], "--prompt", ""]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_train_then_train_again(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = ("train.steps=2", "train.sequences=2", "train.threads=1", "train.precision=float32", "train.evaluation_tokens=32")
    shape = ("model.width=12", "model.heads=2", "model.layers=2", "model.mlp_width=16", "model.context=16")
    options = ["train", str(tmp_path / "run"), "--data", str(trained_run.parent / "tokens"), "--residual", "block:2"]
    options += [word for field in (*fields, *shape) for word in ("--set", field)]
    assert main(options) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert said == f"{tmp_path / 'run'}: {result['nll']:.4f} nats per token after 64 tokens"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["residual"]["block"] == 2 and config["model"]["vocabulary"] == 300
    before = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    assert main(options) == 0 and capsys.readouterr().out.splitlines()[-1] == said
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == before


def test_data_is_prepared_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"body": f"word{i} and more words {i * 7}"}) + "\n" for i in range(80)), encoding="utf-8")
    options = ["data", str(tmp_path / "tokens"), "--source", str(text), "--text-column", "body", "--vocabulary", "280"]
    options += ["--sample-one-in", "1", "--validation-share", "0.2", "--json"]
    assert main(options) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vocabulary"] <= 280 and sum(facts[f"{split}_documents"] for split in ("train", "validation", "test")) == 80
    assert main(options) == 0 and json.loads(capsys.readouterr().out) == facts


def test_the_options_of_data_are_those_of_its_configuration() -> None:
    options, config = dataclasses.asdict(DataOptions(out=Path())), dataclasses.asdict(PrepareConfig())
    assert {name: options[name] for name in config} == config
    assert options.keys() - config.keys() == {"out", "json"}
