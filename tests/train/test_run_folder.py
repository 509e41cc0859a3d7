"""Who may write into a run folder, and what is cut off when a run continues."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, on_one, recorded_config, resolve, train
from depthroute.train.run_folder import RunFolder

Config = Callable[..., RunConfig]


def test_a_complete_run_is_skipped(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(config(), tmp_path, console=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(on_one, "Decoder", None)  # nothing is built
    assert train(config(), tmp_path, console=False) == result
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda make: make(learning_rate=1e-3), "train.learning_rate = 0.003, not 0.001"),
        (lambda make: make(model={"residual": parse_residual("full")}), "model.residual.method = 'prenorm', not 'attnres'"),
        (lambda make: make(milestones=(3,)), "train.milestones = [], not [3]"),
        (lambda make: dataclasses.replace(make(), data_fingerprint="abc"), "data_fingerprint = '"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_a_folder_of_another_configuration_is_refused_with_the_first_field_and_both_values(
    tmp_path: Path, config: Config, other: Callable[[Config], RunConfig], words: str, complete: bool
) -> None:
    train(config(), tmp_path, console=False)
    if not complete:
        (tmp_path / "result.json").unlink()
    with pytest.raises(RequestError) as refusal:
        train(other(config), tmp_path, console=False)
    assert words in str(refusal.value) and "choose another folder, or delete it" in str(refusal.value)


def test_the_recorded_configuration_repeats_the_run_by_itself(tmp_path: Path, config: Config) -> None:
    first = train(config(precision="auto", device="auto", microbatch=None), tmp_path / "first", console=False)
    recorded = recorded_config(tmp_path / "first")
    assert recorded is not None and recorded == resolve(recorded)
    assert train(recorded, tmp_path / "second", console=False)["nll"] == first["nll"]


def test_data_that_moved_is_the_same_data(tmp_path: Path, config: Config, data: Path) -> None:
    result = train(config(), tmp_path / "run", console=False)
    moved = tmp_path / "moved"
    moved.symlink_to(data)
    assert train(dataclasses.replace(config(), data=str(moved)), tmp_path / "run", console=False) == result


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, config: Config) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RequestError, match=r"is not a run folder \(it holds 'thesis.tex'\)"):
        train(config(), tmp_path, console=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path, config: Config) -> None:
    settings = resolve(config())
    with (
        RunFolder(tmp_path).claimed(settings, {}),
        pytest.raises(RequestError, match="another process is training in"),
        RunFolder(tmp_path).claimed(settings, {}),
    ):
        raise AssertionError
    with RunFolder(tmp_path).claimed(settings, {}):
        pass


def test_lines_after_the_checkpoint_are_cut_and_a_last_half_line_is_forgiven(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.add_metrics({"step": step, "loss": 0.1 + step})
        folder.add_evaluation({"step": step})
    folder.flush()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    folder.cut_back(3)
    assert folder.metrics() == [{"step": step, "loss": 0.1 + step} for step in (1, 2, 3)]
    assert [line["step"] for line in folder.evaluations()] == [1, 2, 3]


def test_metrics_that_lack_a_step_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 3):
        folder.add_metrics({"step": step})
    folder.flush()
    with pytest.raises(FailureError, match="holds 2 of the 3 steps before the checkpoint"):
        folder.cut_back(3)


def test_metrics_wait_in_memory_for_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("depthroute.train.run_folder.time.perf_counter", lambda: now)
    folder = RunFolder(tmp_path)
    folder.add_metrics({"step": 1})
    assert not (tmp_path / "metrics.jsonl").exists()
    now = 101.0
    folder.add_metrics({"step": 2})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_loss_is_written_with_every_digit(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_metrics({"step": 1, "loss": 0.1 + 0.2})
    folder.flush()
    assert folder.metrics()[0]["loss"] == 0.1 + 0.2


def test_a_configuration_of_another_format_is_refused(tmp_path: Path, config: Config) -> None:
    train(config(steps=1), tmp_path, console=False)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"format": 2}))
    with pytest.raises(RequestError, match="has the format 2 and this version reads 1"):
        train(config(steps=1), tmp_path, console=False)
