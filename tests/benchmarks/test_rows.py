"""A benchmark's --check names what is missed and exits with 1, and passes when all is met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rows import Row, finish, interleaved, parser, ratios


def test_check_exits_with_1_and_names_what_is_missed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [Row("memory", 1.2, 1.05, unit="x"), Row("speed", 12, 10, at_most=False), Row("context", 3)]
    with pytest.raises(SystemExit) as stop:
        finish(rows, parser(None).parse_args(["--check", "--json", str(tmp_path / "rows.json")]))
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert printed.err == "missed: memory\n" and "at most 1.05x  MISSED" in printed.out and "at least 10  met" in printed.out
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["met"] for row in written["rows"]] == [False, True, None]


def test_check_passes_when_all_is_met_and_nothing_is_checked_unasked() -> None:
    finish([Row("memory", 1.0, 1.05)], parser(None).parse_args(["--check"]))
    finish([Row("memory", 2.0, 1.05)], parser(None).parse_args([]))


def test_candidates_take_turns_and_ratios_are_pair_by_pair() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warm_up=1)
    assert order == ["b", "a", "a", "b"] * 2 and [len(times) for times in seconds.values()] == [3, 3]
    assert ratios({"a": [2.0, 9.0, 3.0], "b": [1.0, 3.0, 1.0]}, "a", "b") == (2.0, 3.0)
