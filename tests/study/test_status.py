"""The table of a study's cells, and the command that shows it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthroute.cli.main import main
from depthroute.study.live import CellLive, read_live
from depthroute.study.plan import Study, write_plan
from depthroute.study.status import status_lines


@pytest.fixture
def folder(study: Study, fake: SimpleNamespace, tmp_path: Path) -> Path:
    """One cell whole, one stopped half-way, one failed, one not begun."""
    write_plan(study, tmp_path)
    fake.write_run(tmp_path, "plain", 7)
    result = tmp_path / "runs/plain/seed-7/result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "step": 6, "peak_memory_bytes": 612_000_000}))
    fake.write_run(tmp_path, "block", 7, complete=False)
    missing = [{"arm": "plain", "seed": 3, "reason": "the disk is full."}]
    (tmp_path / "statistics.json").write_text(json.dumps({"missing": missing, "unanalysed": []}))
    return tmp_path


def rows(lines: list[str]) -> dict[tuple[str, str], list[str]]:
    return {(words[0], words[1]): words[2:] for words in map(str.split, lines[2:])}


def test_every_cell_has_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny; ")
    assert "37 % of all steps" in lines[0]
    assert lines[1].split() == ["arm", "seed", "state", "step", "loss", "validation", "tokens/s", "memory", "left"]
    found = rows(lines)
    assert found["plain", "7"] == ["complete", "6/6", "3.470", "3.4700", "160", "0.61", "GB"]
    assert found["block", "7"][:3] == ["running", "3/6", "3.743"]  # its files are seconds old
    assert found["plain", "3"][0] == "failed"
    assert lines[4].endswith("the disk is full.")
    assert found["block", "3"][:2] == ["waiting", "0/6"]


def test_as_json_it_is_what_python_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(cell["arm"], cell["seed"]) for cell in found["cells"]] == [("plain", 7), ("block", 7), ("plain", 3), ("block", 3)]
    assert found["cells"][0]["nll"] == read_live(folder).cells[0].nll
    assert main(["status", str(folder / "runs")]) == 2


def test_where_not_every_cell_fits_those_of_interest_are_shown(folder: Path) -> None:
    live = read_live(folder)

    def cell(index: int) -> CellLive:
        return dataclasses.replace(live.cells[0], seed=index, state="running" if index == 90 else "complete")

    many = dataclasses.replace(live, cells=tuple(map(cell, range(100))))
    lines = status_lines(many, width=40, height=10)
    assert len(lines) == 10
    assert lines[0][:40] == status_lines(many)[0][:40]
    assert any("running" in line for line in lines[2:9])
    assert lines[-1] == "and 93 more cells"
    assert len(status_lines(many)) == 102
