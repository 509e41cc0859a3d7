"""Where the numbers of a run also go: the same lines, no step twice, and never the run with it."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json_lines
from depthroute.train import RunConfig, loop, sinks, train
from depthroute.train.sinks import Sinks, check_sinks, run_name

MakeConfig = Callable[..., RunConfig]
TRAINED = ("loss", "learning_rate", "gradient_norm")


class FakeRun:
    """A run of either service; `rows` outlives it, as the service would."""

    def __init__(self, rows: list[dict[str, Any]], fail_at: int | None) -> None:
        self.offline, self.url = False, "https://example.invalid/run"
        self.finished: list[Any] = []
        self._rows, self._fail_at = rows, fail_at

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        row = dict(values) if step is None else {"step": step, **values}
        if self._fail_at is not None and row["step"] >= self._fail_at:
            raise ConnectionError("the network is gone\nand more")
        self._rows.append(row)

    def finish(self, **said: Any) -> None:
        self.finished.append(said)


@pytest.fixture(params=["wandb", "trackio"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One of the services as a module that records its calls."""
    made = SimpleNamespace(name=request.param, rows=[], inits=[], runs=[], fail_at=None, refuses=None)

    def init(**settings: Any) -> FakeRun:
        made.inits.append(settings)
        print("a service that talks")
        if made.refuses is not None:
            raise made.refuses
        made.runs.append(FakeRun(made.rows, made.fail_at))
        return made.runs[-1]

    module = ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.init = init  # type: ignore[attr-defined]
    module.finish = lambda: made.runs[-1].finish()  # type: ignore[attr-defined]
    module.Settings = lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, request.param, module)
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return made


def expected(run: Path) -> list[dict[str, Any]]:
    """The rows that the run's files stand for, by step, the training first."""
    rows = [(line["step"], 0, {f"train/{name}": line[name] for name in TRAINED}) for line in read_json_lines(run / "metrics.jsonl")]
    rows += [(line["step"], 1, {f"{line['split']}/nll": line["nll"]}) for line in read_json_lines(run / "evaluations.jsonl")]
    return [{"step": step, **row} for step, _, row in sorted(rows, key=lambda row: row[:2])]


def essence(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [*(f"train/{name}" for name in TRAINED), "validation/nll", "step"]
    return [{name: value for name, value in row.items() if name in kept} for row in rows]


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the run die at the beginning of a step, as a kill would."""
    batch_at = loop.Loader.batch_at

    def dying(self: Any, index: int) -> Any:
        if index == step:
            raise FailureError("killed")
        return batch_at(self, index)

    monkeypatch.setattr(loop.Loader, "batch_at", dying)


def test_a_service_is_given_the_lines_of_the_run(service: SimpleNamespace, config: MakeConfig, tmp_path: Path) -> None:
    train(config(steps=6, milestones=(3,)), tmp_path / "run", console=False, sinks=(service.name,))
    assert essence(service.rows) == expected(tmp_path / "run") and len(service.rows) == 6 + 2
    assert service.inits[0]["config"]["train"]["steps"] == 6
    assert service.runs[0].finished == ([{"exit_code": 0}] if service.name == "wandb" else [{}])


def test_where_the_run_is_stands_in_the_log(service: SimpleNamespace, config: MakeConfig, tmp_path: Path) -> None:
    train(config(), tmp_path / "run", console=False, sinks=(service.name,))
    assert ("https://example.invalid/run" in (tmp_path / "run/log.txt").read_text()) == (service.name == "wandb")


def test_no_step_is_handed_over_twice(
    service: SimpleNamespace, config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, wanted = tmp_path / "run", config(steps=8, milestones=(4, 5), checkpoint_every=3)
    with monkeypatch.context() as patch:
        crash_at(patch, 5)
        with pytest.raises(FailureError):
            train(wanted, run, console=False, sinks=(service.name,))
    assert [row["step"] for row in service.rows] == [1, 2, 3, 4, 4, 5, 5]  # the checkpoint is that of step 3
    train(wanted, run, console=False, sinks=(service.name,))
    assert essence(service.rows) == expected(run)
    names = [settings["id" if service.name == "wandb" else "name"] for settings in service.inits]
    assert names[0] == names[1] and all(settings["resume"] == "allow" for settings in service.inits)
    if service.name == "wandb":
        assert [run.finished[0]["exit_code"] for run in service.runs] == [1, 0]


def test_a_service_asked_for_later_is_given_what_came_before(service: SimpleNamespace, config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config(), run, console=False)
    assert service.inits == []
    for _ in range(2):
        train(config(), run, console=False, sinks=(service.name,))
    assert essence(service.rows) == expected(run)


@pytest.mark.parametrize("when", ["at the start", "on the way"])
def test_a_service_that_fails_does_not_take_the_run_with_it(
    service: SimpleNamespace, config: MakeConfig, tmp_path: Path, when: str
) -> None:
    service.refuses = ValueError("no API key") if when == "at the start" else None
    service.fail_at = 4
    result = train(config(), tmp_path / "run", console=False, sinks=(service.name,))
    alone = train(config(), tmp_path / "alone", console=False)
    assert (result["step"], result["nll"]) == (12, alone["nll"])
    said = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "left out" in line]
    why = "ValueError: no API key" if when == "at the start" else "ConnectionError: the network is gone"
    assert said == [f"--log {service.name} is left out from here on, the run goes on: {why}"]


def test_sinks_change_no_number(service: SimpleNamespace, config: MakeConfig, tmp_path: Path) -> None:
    train(config(), tmp_path / "with", console=False, sinks=(service.name,))
    train(config(), tmp_path / "without", console=False)
    one, other = ([{**line, "seconds": 0} for line in read_json_lines(tmp_path / name / "metrics.jsonl")] for name in ("with", "without"))
    assert one == other
    assert (tmp_path / "with/config.json").read_bytes() == (tmp_path / "without/config.json").read_bytes()


def test_the_environment_of_the_user_holds(
    service: SimpleNamespace, config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs/block/seed-3"
    run.mkdir(parents=True)
    Sinks((service.name,), config(), run, print).close(complete=True)
    assert service.inits[0]["project"] == "depthroute" and service.inits[0]["name"].startswith("block/seed-3")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "called so")
    Sinks((service.name,), config(), run, print).close(complete=True)
    again = service.inits[1]
    # wandb reads its variables itself, and an argument would win over them
    assert "project" not in again and "name" not in again if service.name == "wandb" else again["project"] == "mine"


def test_a_broken_mark_drops_the_sink(service: SimpleNamespace, config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "sinks").mkdir()
    (tmp_path / f"sinks/{service.name}.json").write_text("{")
    said: list[str] = []
    Sinks((service.name,), config(), tmp_path, said.append).close(complete=True)
    assert len(said) == 1 and "not valid JSON" in said[0] and service.rows == []


def test_a_sink_that_is_unknown_or_not_installed_is_refused_before_anything(config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown sink 'tensorbored'; perhaps you meant 'tensorboard'"):
        train(config(), tmp_path / "run", sinks=("tensorbored",))
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"--log wandb needs the package wandb: pip install 'depthroute\[wandb\]'"):
        check_sinks(("wandb",))


def test_names() -> None:
    assert check_sinks(()) == ()
    assert run_name(Path("/s/runs/block/seed-3")) == "block/seed-3" and run_name(Path("/s/mine")) == "mine"


def test_tensorboard_holds_the_numbers_of_the_run_once(config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    run, wanted = tmp_path / "run", config(steps=8, milestones=(4,), checkpoint_every=3)
    with monkeypatch.context() as patch:
        crash_at(patch, 5)
        with pytest.raises(FailureError):
            train(wanted, run, console=False, sinks=("tensorboard",))
    train(wanted, run, console=False, sinks=("tensorboard",))

    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    read: dict[str, list[tuple[int, float, float]]] = {}
    for file in sorted((run / "tensorboard").iterdir()):  # every event that is on the disk, whatever a viewer would leave out
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag != "config/text_summary":
                    read.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0], event.wall_time))
    metrics, evaluations = (read_json_lines(run / f"{name}.jsonl") for name in ("metrics", "evaluations"))
    for name in (*TRAINED, "tokens", "seconds"):
        found = read[f"train/{name}"]
        assert [step for step, _, _ in found] == list(range(1, 9))
        assert [value for _, value, _ in found] == pytest.approx([line[name] for line in metrics], rel=1e-6)
    assert [(step, pytest.approx(value, rel=1e-6)) for step, value, _ in read["validation/nll"]] == [
        (line["step"], line["nll"]) for line in evaluations
    ]
    times = [at for _, _, at in read["train/loss"]]
    assert times == sorted(times)


def test_the_mark_is_whole_at_every_moment(tmp_path: Path) -> None:
    mark = sinks._Mark(tmp_path / "sinks/wandb.json")
    for count in (9, 10, 99_999):
        mark.note("metrics", count)
        found = json.loads((tmp_path / "sinks/wandb.json").read_text())
        assert found == {"run": mark.run, "metrics": count, "evaluations": 0}
    mark.close()
    again = sinks._Mark(tmp_path / "sinks/wandb.json")
    assert (again.run, again.had["metrics"]) == (mark.run, 99_999)
    again.close()
