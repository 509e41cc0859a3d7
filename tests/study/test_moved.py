"""A finished study is a folder: it can be moved to another machine and reported there."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from depthroute.report import write_report
from depthroute.study.live import read_live

write_study = runpy.run_path(str(Path(__file__).parents[1] / "report" / "synthetic_study.py"))["write_study"]


def test_a_moved_study_is_reported_as_it_was(tmp_path: Path) -> None:
    there = write_study(tmp_path / "there/study", seeds=(0, 1))
    before = write_report(there)
    page, text = before.read_bytes(), (before.parent / "report.md").read_bytes()
    assert b"there/study" not in page + text
    # As another machine gets it: other paths, other times, no data, no lock, not even the report.
    here = tmp_path / "elsewhere" / "copied"
    shutil.copytree(there, here, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("report", ".lock"))
    shutil.rmtree(there)
    after = write_report(here)
    assert after == here / "report/index.html"
    assert after.read_bytes() == page
    assert (here / "report/report.md").read_bytes() == text
    assert {cell.state for cell in read_live(here).cells} == {"complete"}
