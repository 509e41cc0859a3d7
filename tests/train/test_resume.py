"""A run that was killed or interrupted ends as one that never stopped, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from depthroute.common.files import read_json, read_json_lines, write_json
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, loop, on_one, train
from depthroute.train import checkpoint as checkpoints
from depthroute.train.evaluation import evaluate

Config = Callable[..., RunConfig]
EXIT_INTERRUPTED = 130


def run_in_child(config: RunConfig, directory: Path, slower: float) -> None:
    """`train`, a little slower, so that a signal finds it at work; exits with 130 when it was interrupted."""
    real = on_one.accumulate_gradients

    def slow(model: torch.nn.Module, batch: torch.Tensor, settings: RunConfig) -> torch.Tensor:
        time.sleep(slower)
        return real(model, batch, settings)  # type: ignore[arg-type]

    on_one.accumulate_gradients = slow  # type: ignore[assignment]
    try:
        train(config, directory, console=False)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def start(config: RunConfig, directory: Path, slower: float = 0.0) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "safetensors.torch", "pytest"])  # what takes long to import, once
    process = context.Process(target=run_in_child, args=(config, directory, slower))
    process.start()
    return process


def checkpointed(directory: Path) -> int:
    found = checkpoints.latest(directory)
    return int(found.name.removeprefix("step-")) if found else 0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the run did not get there"
        time.sleep(0.001)


def assert_same_run(ours: Path, theirs: Path) -> None:
    def without_seconds(name: str, run: Path) -> list[dict[str, object]]:
        return [{key: value for key, value in line.items() if key != "seconds"} for line in read_json_lines(run / name)]

    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_seconds(name, ours) == without_seconds(name, theirs)
    for name in ("model.safetensors", "optimizer.safetensors"):
        left, right = (load_file(checkpoints.latest(run) / name) for run in (ours, theirs))  # type: ignore[operator]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("arm", ["prenorm", "rd:2"])
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(tmp_path: Path, config: Config, arm: str) -> None:
    settings = config(model={"residual": parse_residual(arm)}, steps=40, milestones=(7, 18), checkpoint_every=3, microbatch=4)
    train(settings, tmp_path / "whole", console=False)
    random_moments = random.Random(arm)
    killed = tmp_path / "killed"
    kills = 0
    for _ in range(5):
        target = checkpointed(killed) + random_moments.randrange(3, 9)
        process = start(settings, killed, slower=0.002)
        wait_for(lambda target=target, process=process: checkpointed(killed) >= target or not process.is_alive())  # type: ignore[misc]
        time.sleep(random_moments.random() * 0.02)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 3 and not (killed / "result.json").exists()
    train(settings, killed, console=False)
    assert_same_run(killed, tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_continue_and_continues(tmp_path: Path, config: Config, number: signal.Signals) -> None:
    settings = config(steps=40, checkpoint_every=0, milestones=(20,))
    run = tmp_path / "run"
    process = start(settings, run, slower=0.01)
    wait_for(lambda: (run / "log.txt").exists() and "parameters" in (run / "log.txt").read_text())
    time.sleep(0.1)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == EXIT_INTERRUPTED
    step = checkpointed(run)
    assert 0 < step < 40 and len(read_json_lines(run / "metrics.jsonl")) == step
    assert f"interrupted after step {step}; run the same command again to continue in {run}" in (run / "log.txt").read_text()
    train(settings, run, console=False)
    assert f"continuing after step {step}" in (run / "log.txt").read_text()
    train(settings, tmp_path / "whole", console=False)
    assert_same_run(run, tmp_path / "whole")


@pytest.mark.parametrize("step", [5, 12])
def test_an_interruption_during_an_evaluation_is_caught_up_on(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    settings = config(milestones=(5,), checkpoint_every=0)
    train(settings, tmp_path / "whole", console=False)
    evaluations = 0

    def interrupted(*arguments: object, **options: object) -> object:
        nonlocal evaluations
        evaluations += 1
        if evaluations == (1 if step == 5 else 2):
            signal.raise_signal(signal.SIGINT)
        return evaluate(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"interrupted after step {step}"):
        train(settings, tmp_path / "run", console=False)
    monkeypatch.setattr(loop, "evaluate", evaluate)
    train(settings, tmp_path / "run", console=False)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resuming_is_exact_with_several_threads_and_in_bf16(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    wide = {"width": 64, "context": 64, "residual": parse_residual("rd:2")}  # large enough for torch to split sums between threads
    settings = config(model=wide, threads=2, precision=precision, steps=5, sequences=16, microbatch=8, checkpoint_every=0)
    train(settings, tmp_path / "whole", console=False)
    real = on_one.accumulate_gradients

    def interrupted(*arguments: object) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(on_one, "accumulate_gradients", interrupted)
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt, match=f"interrupted after step {step};"):
            train(settings, tmp_path / "run", console=False)
    monkeypatch.setattr(on_one, "accumulate_gradients", real)
    train(settings, tmp_path / "run", console=False)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_another_environment_is_mentioned_when_a_run_continues(tmp_path: Path, config: Config) -> None:
    train(config(), tmp_path, console=False)
    (tmp_path / "result.json").unlink()
    environment = read_json(tmp_path / "environment.json")
    write_json(tmp_path / "environment.json", environment | {"threads": 64})
    train(config(), tmp_path, console=False)
    assert "threads was 64 and is 1: the last bits of the losses may differ" in (tmp_path / "log.txt").read_text()


def test_the_signals_are_given_back(tmp_path: Path, config: Config) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(config(steps=1), tmp_path, console=False)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_interruption_acts_at_once(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    real = on_one.accumulate_gradients
    calls = 0

    def twice(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(on_one, "accumulate_gradients", twice)
    with pytest.raises(KeyboardInterrupt):
        train(config(), tmp_path / "run", console=False)
    assert checkpointed(tmp_path / "run") == 3  # the one of before, not one of step 5
    train(config(), tmp_path / "run", console=False)
    train(config(), tmp_path / "whole", console=False)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
