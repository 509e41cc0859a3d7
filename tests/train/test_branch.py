"""A branch ends as the same run trained alone, bit for bit, or is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, read_json_lines
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, branch_run, branch_step, shared_steps, train
from depthroute.train import checkpoint as checkpoints

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def wsd(config: Config) -> Config:
    """Eight steps, of which the last two decay: the first six are those of any longer run."""

    def make(**fields: Any) -> RunConfig:
        settings = {
            "schedule": "wsd", "warmup_fraction": None, "warmup_steps": 2, "decay_fraction": 0.25, "steps": 8, "checkpoint_every": 0,
            "milestones": (4,), "model": {"residual": parse_residual("rd:2")},
        }
        return config(**settings | fields)

    return make


@pytest.fixture(scope="module")
def trunk(wsd: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """16 steps, evaluated and kept at more of them than a branch needs."""
    settings = wsd(steps=16, milestones=(2, 4, 8), keep_checkpoints=(3, 6, 10))
    folder = tmp_path_factory.mktemp("study") / "trunk"
    train(settings, folder, console=False)
    return settings, folder


@pytest.fixture(scope="module")
def alone(wsd: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(wsd(), folder, console=False)
    return folder


def assert_same_run(ours: Path, theirs: Path) -> None:
    def untimed(name: str, run: Path) -> list[dict[str, object]]:
        return [{key: value for key, value in line.items() if key != "seconds"} for line in read_json_lines(run / name)]

    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert untimed(name, ours) == untimed(name, theirs)
    assert read_json(ours / "config.json") == read_json(theirs / "config.json")
    kept = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (ours, theirs)]
    assert kept[0] == kept[1]
    for checkpoint in kept[0]:
        for name in ("model.safetensors", "optimizer.safetensors"):
            left, right = (load_file(run / "checkpoints" / checkpoint / name) for run in (ours, theirs))
            assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_a_branch_is_the_run_trained_alone(wsd: Config, trunk: tuple[RunConfig, Path], alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert branch_run(wsd(), run, trunk[1]) == 6
    assert len(read_json_lines(run / "metrics.jsonl")) == 6 and not (run / "result.json").exists()
    result = train(wsd(), run, console=False)
    assert_same_run(run, alone)
    environment = read_json(run / "environment.json")
    origin = environment.pop("branched_from")
    assert origin["step"] == 6 and (run / origin["folder"]).resolve() == trunk[1].resolve()
    assert environment == read_json(trunk[1] / "environment.json")
    seconds = [line["seconds"] for line in read_json_lines(trunk[1] / "metrics.jsonl")]
    assert result["training_seconds"] > sum(seconds[:6])
    assert f"the first 6 steps are those of {origin['folder']}" in (run / "log.txt").read_text()


def test_what_the_branch_keeps_and_evaluates_below_the_branching_is_taken_over(
    wsd: Config, trunk: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    settings = wsd(steps=14, milestones=(2, 8, 12), keep_checkpoints=(6, 11), checkpoint_every=4)
    train(settings, tmp_path / "alone", console=False)
    assert branch_run(settings, tmp_path / "branch", trunk[1]) == 10
    train(settings, tmp_path / "branch", console=False)
    assert_same_run(tmp_path / "branch", tmp_path / "alone")
    # and so it can be a trunk itself
    shorter = wsd(milestones=(2,))
    assert branch_run(shorter, tmp_path / "twig", tmp_path / "branch") == 6
    train(shorter, tmp_path / "twig", console=False)
    train(shorter, tmp_path / "twig alone", console=False)
    assert_same_run(tmp_path / "twig", tmp_path / "twig alone")


class Kill(BaseException):
    """Nothing cleans up after a kill, so neither may what raises this."""


@pytest.mark.parametrize("then", ["branch", "train"])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_branch_killed_on_the_way_recovers(
    wsd: Config, trunk: tuple[RunConfig, Path], alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, then: str
) -> None:
    run = tmp_path / "run"
    real = {"copyfile": shutil.copyfile, "rmtree": shutil.rmtree, "rename": Path.rename}
    calls = 0

    def die(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (1 if moment == "before" else 3):
            raise Kill
        return real["copyfile"](*arguments, **options)

    def die_after(self: Path, target: Path) -> None:
        real["rename"](self, target)  # type: ignore[operator]
        if target.name == "checkpoints":
            raise Kill

    if moment == "after":
        monkeypatch.setattr(Path, "rename", die_after)
    else:
        monkeypatch.setattr(shutil, "copyfile", die)
        monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(Kill):
        branch_run(wsd(), run, trunk[1])
    monkeypatch.undo()
    assert (checkpoints.latest(run) is not None) == (moment == "after")
    if then == "branch":
        if moment == "after":
            with pytest.raises(RequestError, match="has already started"):
                branch_run(wsd(), run, trunk[1])
        else:
            assert branch_run(wsd(), run, trunk[1]) == 6
    train(wsd(), run, console=False)
    assert_same_run(run, alone)
    branched = then == "branch" or moment == "after"
    assert ("branched_from" in read_json(run / "environment.json")) == branched


def test_a_run_that_has_started_is_left_as_it_is(wsd: Config, trunk: tuple[RunConfig, Path], alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match="has already started"):
        branch_run(wsd(), tmp_path / "run", trunk[1])
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(RequestError, match="has already started"):
        branch_run(wsd(), tmp_path / "run", trunk[1])
    for path in tmp_path.rglob("*.json*"):
        assert path.read_bytes() == before[path]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 6),  # the decay takes the last 2 of 8
        ({"steps": 12}, 9),
        ({"decay_fraction": 0.0, "steps": 40}, 12),  # as far as the trunk stays at its peak
        ({"final_fraction": 0.0, "milestones": (5,), "checkpoint_every": 1, "keep_checkpoints": (1,)}, 6),
        ({"steps": 20, "warmup_steps": None, "warmup_fraction": 0.1}, 12),  # of 20: two steps as well
        ({"steps": 50, "warmup_steps": None, "warmup_fraction": 0.1}, 0),
        ({"learning_rate": 1e-3}, 0),
        ({"schedule": "cosine", "decay_fraction": None}, 2),
        ({"seed": 1}, 0),
        ({"route_rate": 2.0}, 0),
        ({"optimiser": "muon"}, 0),
        ({"model": {"width": 32}}, 0),
    ],
)
def test_the_steps_that_are_shared(wsd: Config, trunk: tuple[RunConfig, Path], changes: dict[str, Any], steps: int) -> None:
    assert shared_steps(wsd(**changes), trunk[0]) == steps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "no step is shared with the trunk: train.seed is 1, and 0 in the trunk. Make them equal, or declare no trunk."),
        ({"model": {"residual": parse_residual("block:2")}}, "model.residual.roles is 'shared', and 'decoupled' in the trunk"),
        ({"evaluation_tokens": 48}, "train.evaluation_tokens is 48, and 64 in the trunk"),
        ({"threads": 2}, "train.threads is 2, and 1 in the trunk"),
        ({"warmup_steps": 3}, "the learning rate of step 1 is 0.001 and 0.0015 in the trunk"),
        ({"steps": 3, "milestones": ()}, "the first 2 steps are the trunk's, and it keeps no checkpoint among them; its"),
        ({"milestones": (5,)}, "train.milestones holds 5, and the trunk, whose first 6 steps are taken over, does not have it"),
        ({"keep_checkpoints": (4,)}, "train.keep_checkpoints holds 4, and the trunk, whose first 6 steps"),
    ],
)
def test_a_branch_that_does_not_fit_is_refused_with_the_reason(
    wsd: Config, trunk: tuple[RunConfig, Path], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        branch_run(wsd(**changes), tmp_path / "run", trunk[1])
    assert words in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_branch_has_steps_of_its_own(wsd: Config, trunk: tuple[RunConfig, Path]) -> None:
    settings = wsd(steps=6, milestones=(), decay_fraction=0.0)
    assert (shared_steps(settings, trunk[0]), branch_step(settings, trunk[0])) == (6, 3)


def test_a_trunk_that_is_not_there_or_damaged_is_refused(wsd: Config, trunk: tuple[RunConfig, Path], tmp_path: Path) -> None:
    with pytest.raises(FailureError, match="holds no run to start from"):
        branch_run(wsd(), tmp_path / "run", tmp_path / "nowhere")
    damages: dict[str, Callable[[Path], object]] = {
        "step-00000006.*model.safetensors has .* truncated": lambda run: _cut(run / "checkpoints" / "step-00000006" / "model.safetensors"),
        "step-00000006.*is missing": lambda run: shutil.rmtree(run / "checkpoints" / "step-00000006"),
        "metrics.jsonl does not hold the first 6 steps": lambda run: (run / "metrics.jsonl").unlink(),
        "evaluations.jsonl lacks step 4": lambda run: (run / "evaluations.jsonl").unlink(),
    }
    for number, (words, damage) in enumerate(damages.items()):
        copy = tmp_path / str(number)
        shutil.copytree(trunk[1], copy)
        damage(copy)
        with pytest.raises(FailureError, match=words):
            branch_run(wsd(), tmp_path / "run", copy)
    assert not (tmp_path / "run").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])
