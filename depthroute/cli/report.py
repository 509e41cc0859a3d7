"""`depthroute report`: the report of a study folder, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write report/index.html and report/report.md from the run folders of a study, finished or not."""

    study: tyro.conf.Positional[Path]
    """The study folder."""
    export: Path | None = None
    """Also write every table as CSV and LaTeX, and every figure as SVG and PDF with its data as CSV, into this folder."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "report", arguments)
    from depthroute.report import write_report
    from depthroute.report.export import export_report

    # What cannot be exported is refused before the report is written anew.
    exported = export_report(options.study, options.export) if options.export is not None else []
    print(write_report(options.study))
    if exported:
        print(f"{len(exported)} files in {options.export}")
