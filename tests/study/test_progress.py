"""What a running study shows, with and without a terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthroute.study import progress
from depthroute.study.plan import Study, write_plan
from depthroute.study.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def half_done(study: Study, fake: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Progress:
    """A study whose first cell was whole before, and whose second has made three of six steps since."""
    plan = write_plan(study, tmp_path)
    fake.write_run(tmp_path, "plain", 7)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    shown = Progress(plan, tmp_path, visible=True)
    fake.write_run(tmp_path, "block", 7, complete=False)
    with (tmp_path / "runs/block/seed-7/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a line that is being written
    return shown


def test_in_a_log_a_line_says_where_the_cells_are(half_done: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    with half_done:
        half_done.update([("block", 7), ("plain", 3)])
    out = capsys.readouterr().out
    assert "37 % of the study  block seed 7 step 3/6 loss 3.743, plain seed 3 step 0/6" in out
    assert "left" in out
    assert "\x1b" not in out


def test_on_a_terminal_bars_follow_the_cells(half_done: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with half_done:
        half_done.update([("block", 7)])
        half_done.ended(("block", 7), "the disk is full.")
        half_done.ended(("plain", 7), None)
    shown = terminal.getvalue()
    assert "all cells" in shown
    assert "3/6" in shown
    assert "block seed 7: no result: the disk is full." in shown
    assert "[1/4] plain seed 7: validation NLL 3.4700" in shown


def test_lines_are_kept_apart_in_time_and_an_invisible_one_says_nothing(
    half_done: Progress, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 1000.0)
    half_done.update([("block", 7)])
    hidden = Progress(json.loads((tmp_path / "plan.json").read_text()), tmp_path, visible=False)
    with hidden:
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        hidden.update([("block", 7)])
        hidden.say("nothing")
    assert capsys.readouterr().out == ""
