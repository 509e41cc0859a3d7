"""The commands on a tiny run: the same facts as the library, in words and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from depthroute.cli.data import Prepare
from depthroute.cli.main import main
from depthroute.data import MultiHopConfig, PrepareConfig
from depthroute.residual import SPECIFICATIONS, AttnResConfig, Body, Degenerate, PreNormConfig, parse_residual
from depthroute.residual.values import ValueResidualConfig


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
    assert "prompt 0 is empty" in capsys.readouterr().err


def test_standard_input_is_one_prompt(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(trained_run), "--prompt", "-", "--prompt", "-"]) == 2
    assert "standard input can be read once" in capsys.readouterr().err


def test_sample_writes_several_texts_and_says_how_each_ended(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    options = ["sample", str(trained_run), "--prompt", "abcd", "--prompt", "-", "--count", "2", "--tokens", "4", "--seed", "3"]
    assert main([*options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["prompt"] for row in rows] == ["abcd", "abcd", "from a pipe", "from a pipe"]
    assert rows[0]["ids"] != rows[1]["ids"] and all(len(row["ids"]) == len(row["logprobs"]) == 4 for row in rows)
    assert {row["finish"] for row in rows} == {"limit"}
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert main(options) == 0
    assert capsys.readouterr().out == "\n---\n".join(row["prompt"] + row["text"] for row in rows) + "\n"
    stop = rows[0]["text"][-1]
    assert main(["sample", str(trained_run), "--prompt", "abcd", "--tokens", "4", "--seed", "3", "--stop", stop]) == 0
    assert capsys.readouterr().out == "abcd" + rows[0]["text"][: rows[0]["text"].index(stop)] + "\n"
    filters = ["--top-k", "9", "--top-p", "0.5", "--min-p", "0.1", "--repetition-penalty", "1.2", "--precision", "bf16", "--device", "cpu"]
    assert main([*options[:4], *filters]) == 0 and capsys.readouterr().out.startswith("abcd")
    assert main(options[:2]) == 2
    assert "there is no prompt" in capsys.readouterr().err
    assert main([*options, "--count", "0"]) == 2
    assert "count = 0 is not allowed" in capsys.readouterr().err


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


@pytest.mark.parametrize("command", ["analyse", "boundaries", "convert", "eval", "export", "sample"])
def test_other_data_under_the_name_of_those_of_the_training_are_refused(
    command: str, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "data_fingerprint": "0" * 64}))
    out = str(tmp_path / "out")
    words = {
        "convert": ["low-rank", str(run), out], "eval": [str(run), "--tasks", "perplexity"], "export": ["hf", str(run), out],
        "sample": [str(run), "--prompt", "abcd"],
    }  # fmt: skip
    assert main([command, *words.get(command, [str(run)])]) == 2
    message = capsys.readouterr().err
    assert config["data_fingerprint"] in message and "0" * 64 in message, message


def test_data_is_prepared_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"body": f"word{i} and more words {i * 7}"}) + "\n" for i in range(80)), encoding="utf-8")
    options = ["data", "prepare", str(text), "--out", str(tmp_path / "tokens"), "--text-column", "body", "--vocabulary", "280"]
    options += ["--sample-one-in", "1", "--validation-share", "0.2", "--json"]
    assert main(options) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vocabulary"] <= 280 and sum(facts[f"{split}_documents"] for split in ("train", "validation", "test")) == 80
    assert main(options) == 0 and json.loads(capsys.readouterr().out) == facts


def test_the_options_of_data_are_those_of_its_configuration() -> None:
    options, config = dataclasses.asdict(Prepare(out=Path())), dataclasses.asdict(PrepareConfig())
    assert config.pop("multi_hop") is None and [source["path"] for source in config.pop("sources")] == ["docstrings"]
    assert {name: options[name] for name in config} == config
    of_multi_hop, of_sources = dataclasses.asdict(MultiHopConfig()), {"sources", "weights", "text_column", "id_column"}
    assert options.keys() - config.keys() - of_multi_hop.keys() == {*of_sources, "out", "workers", "json"}
    assert {name: options[name] for name in of_sources} == dict.fromkeys(of_sources, ())
    assert {name: options[name] for name in of_multi_hop} == dict.fromkeys(of_multi_hop)


def test_data_makes_a_multi_hop_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["data", "prepare", "multi-hop", "--out", str(tmp_path / "tokens"), "--documents", "100", "--hops", "3", "--json"]
    assert main(options) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["corpus"] == "multi-hop" and sum(facts[f"{split}_documents"] for split in ("train", "validation", "test")) == 100
    made = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert made["prepare"]["multi_hop"] == dataclasses.asdict(MultiHopConfig(documents=100, hops=3))
    assert main(["data", "prepare", "--out", str(tmp_path / "other"), "--hops", "3"]) == 2
    assert "the sources docstrings and multi_hop" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_help_of_data_names_the_defaults_of_the_multi_hop_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "prepare", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, default in dataclasses.asdict(MultiHopConfig()).items():
        after = words[words.index(f"--{name} "):]
        assert f"Default: {default}." in after[: after.index("(default")], name


def test_methods_prints_a_row_for_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    table = capsys.readouterr().out
    first = [line.split(" ")[0] for line in table.splitlines() if line and line[0] != " "]
    assert first == ["--residual", *SPECIFICATIONS]
    assert main(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == list(SPECIFICATIONS)
    for row in rows:
        for field in ("equation", "parameters", "weights", "reads", "degenerate", "paper", "state", "cost", "share", "moves"):
            assert row[field], (row["method"], field)


def test_methods_tells_all_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "mhc", "delta-block"]) == 0
    text = capsys.readouterr().out
    assert "mhc:STREAMS,FIELD=VALUE,..." in text and "  iterations = 20" in text and "released" in text
    assert "delta-block:BLOCK" in text and "  gate = none" in text and "layers_per_block = 4" in text
    assert main(["methods", "mhcc"]) == 2
    assert "unknown residual method 'mhcc'; perhaps you meant 'mhc'" in capsys.readouterr().err


def test_methods_checks_degenerate_cases_live(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["methods", "block", "hc", "--check"]) == 0
    text = capsys.readouterr().out
    assert text.count("holds") == 3 and "queries zero: PreNorm" in text
    wrong = Degenerate(says="the mean of two values is one of them", config=ValueResidualConfig(), equals=PreNormConfig())
    monkeypatch.setitem(SPECIFICATIONS, "hc", replace(SPECIFICATIONS["hc"], degenerate=(wrong,)))
    assert main(["methods", "block", "hc", "--check"]) == 1
    captured = capsys.readouterr()
    assert "FAILS  hc" in captured.out and "the degenerate case of hc does not hold" in captured.err
    assert main(["methods", "block", "--check", "--json"]) == 0
    assert all(case["holds"] and case["logits"] < 1e-9 for case in json.loads(capsys.readouterr().out)["block"])


def test_boundaries_of_a_run_are_a_residual_method(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boundaries", str(trained_run), "--blocks", "3", "--tokens", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["similarity"]) == 5 and all(-1 <= cosine <= 1 for cosine in found["similarity"])
    assert len(found["ends"]) == 3 and found["ends"][-1] == 6
    config = parse_residual(found["residual"])
    assert config == AttnResConfig(ends=tuple(found["ends"]))
    config.check(Body(width=12, layers=3, attention_activation=12, mlp_activation=16))
    assert main(["boundaries", str(trained_run), "--blocks", "3", "--tokens", "64"]) == 0
    text = capsys.readouterr().out
    assert text.count("| block ends") == 2 and found["residual"] in text
    assert main(["boundaries", str(trained_run), "--blocks", "9"]) == 2
    assert "blocks = 9 is not allowed" in capsys.readouterr().err
