"""`depthroute cost`: the same numbers as the library, for recipes, runs and published shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from depthroute.cli.main import main
from depthroute.cost.traffic import least_traffic
from depthroute.recipes import recipe
from depthroute.residual import SPECIFICATIONS


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["cost", *arguments, "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_a_recipe_with_another_method_and_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "small", "--residual", "block:4", "--set", "model.layers=4", "--dtype", "float32")
    model = recipe("small").resolve("block:4")
    assert found["shape"] == {"layers": 4, "width": 96, "residual": "attnres, block 4"}
    assert found["traffic"]["table_widths"] == 2 / 4 + 5
    assert found["traffic"]["bytes"] == found["traffic"]["widths"] * 96 * 4
    assert found["traffic"]["widths"] == least_traffic(replace(model, layers=4)).total / 8 / 96


def test_device_numbers_scale_times(capsys: pytest.CaptureFixture[str]) -> None:
    once = facts(capsys, "rd-s", "--sequence", "64")
    twice = facts(capsys, "rd-s", "--sequence", "64", "--bandwidth", "6000", "--flops", "2000")
    assert twice["decode"]["seconds"] == pytest.approx(once["decode"]["seconds"] / 2)
    assert twice["training"]["seconds"] == pytest.approx(once["training"]["seconds"] / 2)


def test_a_run_has_the_parameters_that_it_was_trained_with(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((trained_run / "result.json").read_text())
    assert facts(capsys, str(trained_run))["parameters"]["total"] == result["parameters"]["total"]
    assert main(["cost", str(trained_run), "--residual", "rd"]) == 2
    assert "--residual and --set change recipes only" in capsys.readouterr().err
    assert main(["cost", str(trained_run.parent)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_a_published_shape_in_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "kimi-linear-48b", "--pipeline", "3", "--virtual", "3", "--residual", "block:6")
    pipeline = found["pipeline"]
    assert (pipeline["formula_naive"], pipeline["formula_cached"]) == (36, 21)
    assert (pipeline["keeps_none_blocks"], pipeline["keeps_received_blocks"], pipeline["keeps_all_blocks"]) == (36, 21, 15)
    assert main(["cost", "kimi-k3", "--set", "model.width=64"]) == 2
    assert "--set changes recipes only" in capsys.readouterr().err
    assert main(["cost", "kimi-k3", "--residual", "hc", "--pipeline", "2"]) == 2
    assert "has no blocks to send" in capsys.readouterr().err


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "kimi-k3", "--sequence", "131072", "--devices", "8", "--chunk", "16384"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert [lines[f"{name}_bytes"] for name in ("whole", "sharded", "chunked")] == [["15.03", "GB"], ["1.879", "GB"], ["234.9", "MB"]]
    assert main(["cost", "small", "--methods"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == list(SPECIFICATIONS)
    assert rows[1].split() == ["prenorm", "0", "0", "3", "1"]


def test_wrong_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "kimi-k2"]) == 2
    assert "perhaps you meant 'kimi-k3'" in capsys.readouterr().err
    assert main(["cost", "small", "--bandwidth", "-1"]) == 2
    assert "bandwidth = -1.0 is not allowed" in capsys.readouterr().err
    assert main(["cost", "small", "--sequence", "0"]) == 2
    assert "sequence = 0 is not allowed" in capsys.readouterr().err
    assert main(["cost", "small", "--pipeline", "40"]) == 2
    assert "40 chunks are not allowed; 16 sub-layers" in capsys.readouterr().err
