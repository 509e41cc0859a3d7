"""From a study folder to its report."""

from __future__ import annotations

from pathlib import Path

from depthroute.common.files import explain_os_errors, write_text
from depthroute.report.content import compose
from depthroute.report.html_page import render_html
from depthroute.report.markdown_page import figure_files, render_markdown
from depthroute.report.stored import read_study
from depthroute.report.theme import standalone


def write_report(study: Path) -> Path:
    """Write `study/report/index.html`, one self-contained page, and `report.md` with its figures beside it; return the page's path.

    Reads what docs/run-folder.md describes and nothing else: no model is built and nothing is trained. A study that is only partly run is
    reported as far as it goes, with the missing runs named. The same study gives the same bytes. Drawings (*.svg) in the report's folder
    that this report does not show are removed: they are an earlier report's.

    Raises:
        RequestError: `study` is not a study folder.
        FailureError: a file in it is cut short, or the disk refuses the report.
    """
    document = compose(read_study(study))
    folder = study / "report"
    figures = figure_files(document)
    for name, panel in figures.items():
        write_text(folder / name, standalone(panel.svg, panel.description))
    write_text(folder / "report.md", render_markdown(document))
    write_text(folder / "index.html", render_html(document))
    for drawing in folder.glob("*.svg"):
        if drawing.name not in figures:
            with explain_os_errors(drawing, "removing"):
                drawing.unlink()
    return folder / "index.html"
