"""Seeds needed, from a made-up pilot."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from depthroute.cli.main import main
from depthroute.common.files import read_json, write_json
from depthroute.study.power import seeds_for_equivalence, seeds_needed

SYNTHETIC = Path(__file__).parents[1] / "report" / "synthetic_study.py"


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = runpy.run_path(str(SYNTHETIC))["write_study"](tmp_path_factory.mktemp("pilot"), seeds=(0, 1, 2, 3))
    return folder


def test_every_comparison_has_its_seeds(pilot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", str(pilot), "--margin", "0.01", "--power", "0.9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recorded = read_json(pilot / "statistics.json")["comparisons"]
    assert len(found) == len(recorded) == 3
    for needed, comparison in zip(found.values(), recorded, strict=True):
        expected = seeds_needed(comparison["milestones"][-1]["differences"], 0.01, power=0.9)
        assert (needed["seeds"], needed["cautious_seeds"]) == (expected.seeds, expected.cautious_seeds)
        assert needed["pilot_seeds"] == 4 and needed["cautious_seeds"] >= needed["seeds"] >= 2


def test_in_words(pilot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", str(pilot), "--margin", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "seeds for 0.01" in text and "Block AttnRes against PreNorm" in text and "cautious:" in text
    assert len({len(line) for line in text.splitlines()[:4]}) == 1


def test_one_seed_knows_no_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = runpy.run_path(str(SYNTHETIC))["write_study"](tmp_path, seeds=(0,))
    assert main(["power", str(study), "--margin", "0.01"]) == 2
    assert "no comparison with two seeds that differ" in capsys.readouterr().err
    assert main(["power", str(study), "--margin", "0"]) == 2


def test_seeds_for_equivalence(pilot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", str(pilot), "--margin", "0.01", "--equivalence", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for needed, comparison in zip(found.values(), read_json(pilot / "statistics.json")["comparisons"], strict=True):
        assert needed["seeds"] == seeds_for_equivalence(comparison["milestones"][-1]["differences"], 0.01).seeds
    assert main(["power", str(pilot), "--margin", "0.01", "--equivalence", "--one-sided"]) == 2
    assert "different tests" in capsys.readouterr().err


def test_a_control_that_is_its_parent_has_no_spread_and_does_not_stop_the_others(
    pilot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pilot, tmp_path / "pilot")
    statistics = read_json(pilot / "statistics.json")
    for milestone in statistics["comparisons"][0]["milestones"]:
        milestone["differences"] = [0.0] * 4
    write_json(tmp_path / "pilot" / "statistics.json", statistics)
    assert main(["power", str(tmp_path / "pilot"), "--margin", "0.01", "--json"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 2 and "without spread, so without a number of seeds: RD-AttnRes against" in said.err
