"""Runs side by side: what is measured of a Kimi body and a dense one, the page, and what is refused before a model runs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from depthroute.analysis.dynamics import dynamics
from depthroute.cli.main import main
from depthroute.common.files import read_json
from depthroute.data import evaluation_windows
from depthroute.residual import PreNormConfig
from depthroute.train import load_trained, recorded_config, train
from depthroute.train.run_data import run_data
from tests.bodies import KIMI


@pytest.fixture(scope="module")
def kimi_run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain stream over KDA, latent attention and experts, on the data of the other run."""
    config = recorded_config(trained_run)
    assert config is not None
    model = dataclasses.replace(config.model, residual=PreNormConfig(), **KIMI)
    folder = tmp_path_factory.mktemp("kimi") / "plain"
    train(dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, milestones=(2, 4))), folder, console=False)
    return folder


def test_what_layers_hand_on(trained_run: Path, kimi_run: Path, tmp_path: Path) -> None:
    """The stream behind each layer, and of blocks the newest source, on the same text."""
    found = dynamics([trained_run, kimi_run], tmp_path, tokens=64)
    assert [run["name"] for run in found["runs"]] == ["run", "plain"] and read_json(tmp_path / "dynamics.json")["tokens"] == 64
    assert [step for step, _ in found["runs"][1]["validation"]] == [2, 4]
    for path, run in zip((trained_run, kimi_run), found["runs"], strict=True):
        config, model = load_trained(path)
        windows = torch.cat([torch.from_numpy(one) for one in evaluation_windows(run_data(path, config).tokens("validation")[:65], 16)])
        handed = []

        def observe(site: int, memory: object, model: torch.nn.Module = model, handed: list[float] = handed) -> None:
            newest = memory if isinstance(memory, torch.Tensor) else memory.sources()[-1]
            handed.append(newest.square().mean().sqrt().item())

        with torch.no_grad():
            model(windows[:, :-1], observe=observe)
        assert run["carried"] == pytest.approx(handed[2::2], rel=1e-5)
        assert len(run["gradient"]) == 3 and all(value > 0 for value in run["gradient"])


def test_runs_of_a_study_are_called_by_their_arms(kimi_run: Path, tmp_path: Path) -> None:
    for arm in ("plain", "routed"):
        shutil.copytree(kimi_run, tmp_path / arm / "seed-1")
    found = dynamics([tmp_path / "plain" / "seed-1", tmp_path / "routed" / "seed-1"], tmp_path / "out", tokens=16)
    assert [run["name"] for run in found["runs"]] == ["plain/seed-1", "routed/seed-1"] and found["tokens"] == 16


def test_the_page(trained_run: Path, kimi_run: Path, tmp_path: Path) -> None:
    assert main(["dynamics", str(trained_run), str(kimi_run), "--out", str(tmp_path), "--tokens", "64"]) == 0
    page = (tmp_path / "index.html").read_text()
    for words in ("Validation loss", "Magnitude by depth", "Gradient by depth", "plain", "attnres, block 2, roles decoupled"):
        assert words in page
    assert page.count("<svg") == 3


def test_refusals(trained_run: Path, kimi_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main(["dynamics", str(kimi_run), str(kimi_run), *out]) == 2
    assert "two of the runs are called 'plain'" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(kimi_run, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"context": 16', '"context": 8'))
    assert main(["dynamics", str(trained_run), str(other), *out]) == 2
    assert "other data or another context" in capsys.readouterr().err
    assert main(["dynamics", *map(str, [kimi_run] * 11), *out]) == 2
    assert "11 runs cannot be told apart" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
