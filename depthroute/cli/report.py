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


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "report", arguments)
    from depthroute.report import write_report

    print(write_report(options.study))
