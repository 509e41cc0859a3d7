"""A tiny study, and a worker that writes made-up run folders without torch."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig
from depthroute.study import processes
from depthroute.study.plan import Arm, Cell, Study
from depthroute.train import RunConfig, TrainConfig

FAKE = Path(__file__).with_name("fake_worker.py")


def routed(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, residual=AttnResConfig(block=2)))


@pytest.fixture
def study() -> Study:
    base = RunConfig(
        model=ModelConfig(vocabulary=300, width=8, layers=2, heads=2, mlp_width=16, context=8),
        train=TrainConfig(steps=6, sequences=2, learning_rate=1e-2, threads=1, precision="float32", device="cpu", checkpoint_every=2),
        data="no-such-data",
        data_fingerprint="f" * 64,
    )
    return Study(
        name="tiny",
        question="Does the fake learn?",
        base=base,
        arms={"plain": Arm(label="Plain", config=base), "block": Arm(label="Block", config=routed)},
        comparisons=(("block", "plain"),),
        seeds=(7, 3),
        milestones=(3, 6),
    )


@pytest.fixture(scope="session")
def fake() -> SimpleNamespace:
    """The functions of the fake worker."""
    return SimpleNamespace(**runpy.run_path(str(FAKE)))


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(directory: Path, cell: Cell, workers: int, sinks: Sequence[str] = ()) -> list[str]:
        return [sys.executable, str(FAKE), str(directory), cell[0], str(cell[1])]

    monkeypatch.setattr(processes, "worker_command", command)
