"""What a person sees of a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from depthroute.common.duration import duration
from depthroute.train import RunConfig, train
from depthroute.train import console as consoles
from depthroute.train.console import Console


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (185, "3m 05s"), (7620, "2h 07m")])
def test_a_duration_reads_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_lines_are_plain_and_the_log_has_the_same(
    tmp_path: Path, config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consoles, "LINE_SECONDS", 0.0)
    train(config(milestones=(6,)), tmp_path)
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "log.txt").read_text()
    assert "\x1b" not in shown and "\r" not in shown
    steps = [line for line in shown.splitlines() if " tokens/s  " in line]
    assert len(steps) == 12 and steps[0].startswith("step  1/12  loss  5.") and steps[-1].endswith("0s left")
    assert len({len(line) for line in steps}) == 1  # aligned
    assert "step 6/12  validation NLL 5." in shown and "complete: validation NLL" in shown


def test_lines_are_few(tmp_path: Path, config: Callable[..., RunConfig]) -> None:
    train(config(), tmp_path, console=False)
    assert sum(" tokens/s  " in line for line in (tmp_path / "log.txt").read_text().splitlines()) == 1  # the last step


def test_nothing_is_shown_when_it_is_not_wanted(
    tmp_path: Path, config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(steps=2), tmp_path, console=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("colour", "escapes"), [(True, True), (False, False)])
def test_on_a_terminal_there_is_one_live_line_and_no_color_is_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], colour: bool, escapes: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    console = Console(tmp_path / "log.txt", label="arm", steps=2, first_step=0, visible=True)
    for step in (1, 2):
        console.step(step, 3.5, 128, 0.5)
    console.line("step 2/2  validation NLL 3.5")
    console.close()
    shown = capsys.readouterr().out
    assert "arm" in shown and "2/2" in shown and "256 tokens/s" in shown and "validation NLL" in shown
    assert ("\x1b[38;" in shown or "\x1b[3" in shown or "\x1b[9" in shown) == escapes
    assert (tmp_path / "log.txt").read_text().count("validation NLL 3.5") == 1


def test_importing_the_console_does_not_import_rich() -> None:
    code = "import sys, depthroute.train.console; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0
