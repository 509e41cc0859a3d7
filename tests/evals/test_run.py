"""A run is evaluated task by task: what is finished stays, and what is not known is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from depthroute.cli import eval as command
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, read_json_lines, write_json
from depthroute.data import TokenDataset
from depthroute.evals import EvalConfig, compare_runs, evaluate_run, store, tasks
from depthroute.evals import harness as harness_module
from depthroute.evals import run as run_module
from depthroute.evals.subject import open_subject
from depthroute.study.clusters import cluster_bootstrap
from depthroute.train import evaluate

LOCAL = ("local_last_word", "local_sentence_order", "local_needle")


def config(*names: str, **settings: Any) -> EvalConfig:
    fields: dict[str, Any] = {"precision": "float32", "device": "cpu", "items": 12, "batch_tokens": 2_000}
    return EvalConfig(tasks=names, **{**fields, **settings})


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, so that its results are this test's own."""
    return Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evals")))


def test_perplexity_is_that_of_training_with_intervals_over_documents(own: Path) -> None:
    found = evaluate_run(own, config("perplexity"))
    entry = found["evaluations"]["perplexity"]["tasks"]["perplexity"]
    subject = open_subject(own, device="cpu", precision="float32")
    tokens, edges = subject.dataset.tokens("validation"), subject.dataset.boundaries("validation")
    direct = evaluate(subject.model, tokens, context=64, microbatch=3, device="cpu", precision="float32", boundaries=edges)
    assert direct is not None and direct.documents is not None
    metrics, line = entry["metrics"], direct.splits["validation"]
    assert metrics["nll"]["value"] == pytest.approx(line["nll"], rel=1e-6)
    assert metrics["perplexity"]["value"] == pytest.approx(line["perplexity"], rel=1e-5)
    drawn = cluster_bootstrap(direct.documents.sums.tolist(), direct.documents.counts.tolist())
    assert metrics["nll"]["interval"] == pytest.approx(drawn.interval, rel=1e-5)
    assert metrics["perplexity"]["interval"] == pytest.approx([math.exp(end) for end in drawn.interval], rel=1e-5)
    items = read_json_lines(own / "evals" / "perplexity.items.jsonl")
    evaluated = 1 + sum(item["tokens"] for item in items)
    tokenizer = subject.dataset.tokenizer()
    size = len(tokenizer.decode(tokens[1:evaluated].tolist()).encode())
    assert abs(sum(item["bytes"] for item in items) - size) <= 2  # a character that the last window cuts
    assert metrics["bits_per_byte"]["value"] == pytest.approx(line["nll"] * (evaluated - 1) / math.log(2) / size, rel=1e-3)
    whole = [item["bytes"] for item in items[1:-1]]
    texts = [tokenizer.decode(tokens[edges[i]:edges[i + 1] - 1].tolist()) for i in range(1, len(items) - 1)]
    assert whole == [len(text.encode()) for text in texts], "é takes two"
    assert entry["items"] == len(items) <= entry["of"] == len(edges) - 1


def test_documents_are_told_apart_from_the_first_token_on(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first document of one token has no target, and the next one has all of its own."""
    boundaries = TokenDataset.boundaries

    def with_a_short_first(self: TokenDataset, split: Any) -> Any:
        return np.array([0, 1, *boundaries(self, split)[1:]])

    evaluate_run(own, config("perplexity"))
    before = read_json_lines(own / "evals" / "perplexity.items.jsonl")
    monkeypatch.setattr(TokenDataset, "boundaries", with_a_short_first)
    evaluate_run(own, config("perplexity"), again=True)
    after = read_json_lines(own / "evals" / "perplexity.items.jsonl")
    assert [item["doc_id"] for item in after] == [item["doc_id"] + 1 for item in before]
    assert [(item["item"], item["bytes"]) for item in after] == [(item["item"], item["bytes"]) for item in before]


def test_local_tasks_are_run_by_the_harness_and_stay(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = evaluate_run(own, config("local"), report=said.append)
    assert tuple(found["evaluations"]) == LOCAL and found["left_out"] == {} and len(said) == 3
    folder = own / "evals"
    assert not (folder / "tasks" / "cache").exists()
    for name in LOCAL:
        stored, items = read_json(folder / f"{name}.json"), read_json_lines(folder / f"{name}.items.jsonl")
        assert stored == found["evaluations"][name] and stored["harness"].startswith("0.4.")
        entry = stored["tasks"][name]
        assert entry["items"] == entry["of"] == len(items) and entry["fewshot"] == 0 and entry["reported"] == "acc"
        acc = entry["metrics"]["acc"]
        assert acc["value"] == pytest.approx(sum(item["metrics"]["acc"] for item in items) / len(items))
        assert acc["interval"][0] <= acc["value"] <= acc["interval"][1]
        assert acc["chance"] == 0.25 if name != "local_last_word" else 0 < acc["chance"] < 1
        answers = 1 if name == "local_last_word" else 4
        assert all(len(item["answers"]) == answers and item["answers"][0][0] < 0 for item in items)
    assert len(found["evaluations"]["local_needle"]["tasks"]["local_needle"]["cells"]) > 3

    monkeypatch.setattr(harness_module, "score", lambda *arguments, **options: pytest.fail("a finished task was run again"))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json*")}
    assert evaluate_run(own, config("local_needle", "local"))["evaluations"] == {
        name: found["evaluations"][name] for name in (LOCAL[2], *LOCAL[:2])
    }
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.json*")} == before
    with pytest.raises(RequestError, match=r"local_last_word\.json was made with seed = 0, not 1; .* --again"):
        evaluate_run(own, config("local", seed=1))
    with pytest.raises(RequestError, match="was made with items = 12, not 13"):
        evaluate_run(own, config("local_needle", items=13))


def test_what_was_stopped_goes_on_with_the_task_it_stopped_at(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tasks.Tasks.run

    def stopped(self: tasks.Tasks, model: Any, name: str, **options: Any) -> Any:
        if name == LOCAL[1]:
            raise KeyboardInterrupt
        return real(self, model, name, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tasks.Tasks, "run", stopped)
        evaluate_run(own, config("perplexity", "local"))
    there = {path.name for path in (own / "evals").glob("*.json")}
    assert there == {"perplexity.json", f"{LOCAL[0]}.json"}
    said: list[str] = []
    found = evaluate_run(own, config("perplexity", "local"), report=said.append)
    assert [line.split(":")[0] for line in said] == [*LOCAL[1:]]
    assert list(found["evaluations"]) == ["perplexity", *LOCAL]


def test_numbers_that_are_none_are_null_and_what_cannot_be_written_leaves_what_was(tmp_path: Path) -> None:
    store.write_evaluation(tmp_path, "some", {"tasks": {"x": (math.nan, 1.0)}}, [{"doc_id": 0, "answers": [[-math.inf, True]]}])
    assert read_json(tmp_path / "some.json")["tasks"] == {"x": [None, 1.0]}
    assert store.read_items(tmp_path, "some") == [{"doc_id": 0, "answers": [[None, True]]}]
    for evaluation, item in (({"tasks": object()}, {}), ({}, {"answers": object()})):
        with pytest.raises(TypeError):
            store.write_evaluation(tmp_path, "some", evaluation, [item])
        assert read_json(tmp_path / "some.json")["tasks"] == {"x": [None, 1.0]}
        assert store.read_items(tmp_path, "some")[0]["doc_id"] == 0


def test_an_evaluation_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_evaluation(tmp_path, "some", {"tasks": {}}, [{"doc_id": 0}])
    assert store.read_evaluation(tmp_path, "some") == {"format": 1, "name": "some", "tasks": {}}
    with monkeypatch.context() as patch, pytest.raises(FailureError):
        patch.setattr(store, "write_json", lambda *arguments: (_ for _ in ()).throw(FailureError("the disk is full")))
        store.write_evaluation(tmp_path, "some", {"tasks": {}}, [{"doc_id": 1}])
    assert store.read_evaluation(tmp_path, "some") is None, "an old result beside new items would be neither"
    write_json(tmp_path / "some.json", {"format": 0})
    with pytest.raises(FailureError, match="no evaluation of the format 1"):
        store.read_evaluation(tmp_path, "some")


def test_a_checkpoint_has_a_folder_of_its_own(own: Path) -> None:
    (checkpoint,) = (own / "checkpoints").iterdir()
    found = evaluate_run(checkpoint, config("perplexity"))
    assert Path(found["folder"]) == own / "evals" / checkpoint.name and found["checkpoint"] == checkpoint.name
    assert evaluate_run(own, config("perplexity"), out=own / "here")["folder"] == str(own / "here")


def test_tasks_that_cannot_be_made_are_named(own: Path) -> None:
    found = evaluate_run(own, config("perplexity", "local", context=16))
    assert list(found["left_out"]) == ["local_sentence_order", "local_needle"]
    assert {path.stem for path in (own / "evals" / "tasks").glob("*.yaml")} == {"local_last_word"}
    with pytest.raises(RequestError, match=r"none of the tasks can be made of .*: no paragraph"):
        evaluate_run(own, config("local_sentence_order", context=16))


def test_a_finished_task_keeps_its_files_when_another_is_made(own: Path) -> None:
    evaluate_run(own, config("local_last_word"))
    before = (own / "evals" / "tasks" / "local_last_word.jsonl").read_bytes()
    evaluate_run(own, config("local_sentence_order", seed=1, items=3))
    assert (own / "evals" / "tasks" / "local_last_word.jsonl").read_bytes() == before
    moved = own.rename(own.parent / "moved")
    evaluate_run(moved, config("local_last_word"))
    files = read_json(moved / "evals" / "tasks" / "local_last_word.yaml")["dataset_kwargs"]["data_files"]
    assert files == {"validation": str((moved / "evals" / "tasks" / "local_last_word.jsonl").resolve())}


def test_a_context_beyond_the_models_is_refused(own: Path) -> None:
    with pytest.raises(RequestError, match=r"context = 65 is not allowed; the model of .* has a context of 64 tokens"):
        evaluate_run(own, config("local_last_word", context=65))


def test_lengths_of_the_needle_without_room_are_named(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", "local_needle", "--items", "12", "--limit", "3", "--precision", "float32", "--device", "cpu"]
    command.main([str(own), *options])
    entry = read_json(own / "evals" / "local_needle.json")["tasks"]["local_needle"]
    assert entry["left_out"].startswith("prompts of 16 and 32 tokens have no room")
    assert f"local_needle: {entry['left_out']}" in capsys.readouterr().out
    assert len(entry["cells"]) == entry["items"] == 3, "three items, three cells"


def test_without_the_harness_perplexity_is_still_there(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert evaluate_run(own, config("perplexity"))["evaluations"]
    with pytest.raises(RequestError, match=r"need the package lm_eval: pip install 'depthroute\[eval\]'"):
        evaluate_run(own, config("local"))
    with pytest.raises(RequestError, match="need the package lm_eval"):
        evaluate_run(own, config("piqa"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ()}, "tasks = '' is not allowed"),
        ({"tasks": ("piqa", "")}, "tasks = 'piqa,' is not allowed"),
        ({"tasks": ("../piqa",)}, r"task '\.\./piqa' is not allowed; tasks are asked for by name"),
        ({"tasks": ("sub/piqa",)}, "task 'sub/piqa' is not allowed"),
        ({"tasks": ("piqa",), "split": "train"}, "split = 'train' is not allowed; it takes validation or test"),
        ({"tasks": ("piqa",), "limit": 0}, "limit = 0 is not allowed; it takes 1 or more"),
        ({"tasks": ("piqa",), "fewshot": -1}, "fewshot = -1 is not allowed; it takes 0 or more"),
        ({"tasks": ("piqa",), "batch_tokens": 0}, "batch_tokens = 0 is not allowed"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EvalConfig(**settings)


def test_data_of_another_vocabulary_are_refused(own: Path, write_run: Any, tmp_path: Path) -> None:
    other = write_run(tmp_path / "small", vocabulary=300)
    with pytest.raises(RequestError, match=r"has 340 tokens and the model of .* 300; name the data that it was trained on"):
        evaluate_run(other, config("perplexity"))


def test_two_runs_are_compared_and_written(own: Path, write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "other", seed=1)
    options = ["--tasks", "perplexity,local_sentence_order", "--items", "12", "--precision", "float32", "--device", "cpu"]
    command.main([str(own), "--against", str(other), *options, "--json"])
    found = json.loads(capsys.readouterr().out)
    weights = open_subject(other, device="cpu", precision="float32").weights[:8]
    assert found == read_json(own / "evals" / f"against-{tmp_path.name}-other-step-00000002-{weights}.json") and found["left_out"] == {}
    assert found == json.loads(json.dumps(compare_runs(own, other, config("perplexity", "local_sentence_order", batch_tokens=16_384))))
    assert list(found["tasks"]) == ["perplexity", "local_sentence_order"]
    ours, theirs = (read_json(run / "evals" / "perplexity.json")["tasks"]["perplexity"]["metrics"]["nll"]["value"] for run in (own, other))
    assert found["tasks"]["perplexity"]["metrics"]["nll"]["difference"] == pytest.approx(ours - theirs, abs=1e-9)
    command.main([str(own), "--against", str(other), *options])
    said = capsys.readouterr().out
    assert "only a : b" in said and "local_sentence_order  acc" in said and "perplexity            nll" in said


def test_comparisons_of_other_runs_stay(own: Path, write_run: Any, tmp_path: Path) -> None:
    """Arms and seeds of a study end in the same folder name, and a run that goes on keeps its own."""
    for arm, seed in (("one", 1), ("two", 2), ("two", 3)):
        other = tmp_path / arm / "seed-0"
        shutil.rmtree(other, ignore_errors=True)
        other.parent.mkdir(exist_ok=True)
        compare_runs(own, write_run(other, seed=seed), config("perplexity", tokens=200))
    names = sorted(path.name for path in (own / "evals").glob("against-*"))
    assert len(names) == 3 and [name.split("-step")[0] for name in names] == ["against-one-seed-0", *["against-two-seed-0"] * 2]


def test_what_cannot_be_compared_is_said_before_it_is_evaluated(
    own: Path, write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = write_run(tmp_path / "longer", context=80)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_evaluate", lambda *arguments: pytest.fail("it was evaluated"))
        with pytest.raises(RequestError, match=r"local_needle cannot be .* context of .* is 64 and that of .* 80; give --context 64"):
            compare_runs(own, longer, config("local_needle"))
        with pytest.raises(RequestError, match=r"perplexity cannot be compared: the context of .*; leave it out"):
            compare_runs(own, longer, config("perplexity", context=50))
        opened = [open_subject(own, device="cpu", precision="float32")] * 2
        opened[1] = dataclasses.replace(opened[0], dataset=SimpleNamespace(fingerprint="other", directory=tmp_path))
        subjects = iter(opened)
        patch.setattr(run_module, "open_subject", lambda *arguments, **options: next(subjects))
        with pytest.raises(RequestError, match=r"perplexity cannot be compared: the data of .* with other tokens"):
            compare_runs(own, own, config("perplexity"))
    assert compare_runs(own, longer, config("local_last_word", context=48))["tasks"]


def test_tasks_that_one_of_the_two_lacks_are_named(
    own: Path, write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "other", seed=1)
    real = run_module._write_local_tasks

    def lacking(config: EvalConfig, subject: Any, *arguments: Any) -> Any:
        left_out, parts = real(config, subject, *arguments)
        return ({"local_needle": "there is no room."} if subject.path == other else left_out), parts

    monkeypatch.setattr(run_module, "_write_local_tasks", lacking)
    options = ["--tasks", "perplexity,local_needle", "--items", "12", "--precision", "float32", "--device", "cpu"]
    command.main([str(own), "--against", str(other), *options])
    assert "local_needle is left out: of b, there is no room." in capsys.readouterr().out
    (written,) = (own / "evals").glob("against-*")
    assert read_json(written)["left_out"] == {"local_needle": "of b, there is no room."}


def test_the_command_shows_what_it_found(own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    options = [str(own), "--items", "12", "--precision", "float32", "--device", "cpu", "--context", "48"]
    command.main([*options, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found["evaluations"]) == ["perplexity", *LOCAL] and found["precision"] == "float32" and found["averages"] == {}
    command.main(options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["task", "metric", "value", "95", "%", "interval", "chance", "items"]
    value = found["evaluations"]["perplexity"]["tasks"]["perplexity"]["metrics"]["bits_per_byte"]["value"]
    assert any(line.startswith("perplexity ") and "bits_per_byte" in line and f"{value:.4g}" in line for line in lines)
    assert "local_needle, acc" in lines or any(line.startswith("local_needle is left out") for line in lines)


def test_defaults_of_the_command_are_those_of_the_library() -> None:
    options, settings = command.Options(run=Path()), EvalConfig(tasks=("x",))
    for name in ("split", "tokens", "items", "context", "limit", "fewshot", "seed", "precision", "device", "batch_tokens", "download"):
        assert getattr(options, name) == getattr(settings, name), name


def test_the_harness_is_not_imported_for_perplexity(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate_run(own, config("perplexity"))["evaluations"]
    assert run_module.require_harness is tasks.require_harness
