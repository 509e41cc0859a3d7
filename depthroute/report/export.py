"""A report's tables and figures as files for a paper: tables as CSV and LaTeX, figures as SVG and PDF with the data they show as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.common.files import write_bytes, write_text
from depthroute.report import canvas
from depthroute.report.content import compose
from depthroute.report.curve_plots import smooth
from depthroute.report.document import Block, Details, Document, Table
from depthroute.report.featured import featured_arms
from depthroute.report.markdown_page import figure_files
from depthroute.report.numbers import MINUS, NO_BREAK, NONE
from depthroute.report.outcome_plots import simultaneous_band
from depthroute.report.routing_plots import average_sites
from depthroute.report.stored import Comparison, StoredStudy, read_study
from depthroute.report.theme import standalone

Rows = list[list[Any]]  # the head first


def export_report(study: Path, folder: Path) -> list[Path]:
    """Write the tables and figures of a study's report into `folder`; return the files, tables first.

    `table-N.csv` and `table-N.tex` are the report's Table N, cell by cell as the report prints it. A figure is `NAME.svg`, named as beside
    report.md, and `NAME.pdf`, in light colours with its font embedded. `NAME.csv` (the same data for `training-whole` and `training-late`:
    `training.csv`) holds what it shows: exact floats of every seed, and of statistics what is drawn. Means over seeds that no file of the
    study holds are left to the reader where the seeds themselves are there. Other files in `folder` are left alone.

    Raises:
        RequestError: `study` is not a study folder, or `folder` is a file.
        FailureError: a file of the study is cut short, or the disk refuses a file.
    """
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; name a folder for the exported tables and figures.")
    stored = read_study(study)
    document = compose(stored)
    figures = figure_files(document)
    files: dict[str, str | bytes] = {}
    for number, table in enumerate(tables_of(document), start=1):
        files[f"table-{number}.csv"] = csv_text(table_rows(table))
        files[f"table-{number}.tex"] = latex_table(table)
    files |= {name: standalone(panel.svg, panel.description) for name, panel in figures.items()}
    files |= {f"{panel.name}.pdf": canvas.pdf(panel) for panel in figures.values()}
    shown = {panel.name.removesuffix("-whole") for panel in figures.values()}
    files |= {f"{name}.csv": csv_text(rows) for name, rows in figure_data(stored).items() if name in shown}
    files |= {f"{panel.name}.csv": csv_text(panel.data) for panel in figures.values() if panel.data is not None}
    for name, content in files.items():
        if isinstance(content, str):
            write_text(folder / name, content)
        else:
            write_bytes(folder / name, content)
    return [folder / name for name in files]


def tables_of(document: Document) -> list[Table]:
    """Every table in the order in which the report numbers them, folded ones among them."""
    return list(_tables(chain(document.lead_blocks, *(section.blocks for section in document.sections))))


def table_rows(table: Table) -> Rows:
    """The cells as they are printed. Where rows are grouped, the heading of each row's group is a first column of its own."""
    grouped = any(heading for heading, _, _ in table.groups)
    rows = [[heading or "", *row] if grouped else list(row) for heading, body, closing in table.groups for row in (*body, *closing)]
    return [["Group", *table.columns] if grouped else list(table.columns), *rows]


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV in the sense of RFC 4180, but with single line feeds; floats with all their digits."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def latex_table(table: Table) -> str:
    """A `tabular` that needs no package, its caption in a comment above it: the document around it says where a caption goes."""
    columns = "".join("l" if index < table.text_columns else "r" for index in range(len(table.columns)))
    lines = [f"% {escape_latex(table.caption)}", f"\\begin{{tabular}}{{{columns}}}", "\\hline", _latex_row(table.columns)]
    for heading, rows, closing in table.groups:
        lines.append("\\hline")
        if heading:
            lines.append(f"\\multicolumn{{{len(columns)}}}{{l}}{{\\textit{{{escape_latex(heading)}}}}} \\\\")
        lines += map(_latex_row, rows)
        lines += ["\\hline", *map(_latex_row, closing)] if closing else []
    return "\n".join([*lines, "\\hline", "\\end{tabular}", ""])


def escape_latex(words: str) -> str:
    """Text that LaTeX prints as it is, in the encodings OT1 and T1 alike. Control characters become spaces."""
    words = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", words)
    words = re.sub(r"(?<=([-,']))(?=\1)", "\0", words)  # between two of a kind, which LaTeX would make one character
    return "".join(_LATEX.get(character, character) for character in words)


def figure_data(study: StoredStudy) -> dict[str, Rows]:
    """What the figures show, by panel, one value a row; the two halves of a loss curve share one entry."""
    return {"endpoints": _endpoints(study), "differences": _differences(study), **_gaps(study), **_curves(study), **_routing(study)}


_LATEX = {
    **{character: f"\\{character}" for character in "{}$&#_%"},
    "\0": "{}",
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "`": "\\textasciigrave{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    '"': "\\symbol{34}",
    MINUS: "$-$",
    NONE: "--",
    NO_BREAK: "~",
    "…": "\\ldots{}",
}


def _tables(blocks: Iterable[Block]) -> Iterator[Table]:
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Details):
            yield from _tables(block.blocks)


def _latex_row(cells: Sequence[str]) -> str:
    row = " & ".join(map(escape_latex, cells)) + " \\\\"
    return "{}" + row if row.startswith(("[", "*")) else row  # the \\ before it would take them as its own arguments


def _endpoints(study: StoredStudy) -> Rows:
    cells = [(arm, cell) for arm in study.arms for cell in study.complete(arm)]
    return [["arm", "seed", "nll"], *([arm.name, cell.seed, cell.nll] for arm, cell in cells if cell.nll is not None)]


def _differences(study: StoredStudy) -> Rows:
    rows: Rows = [["arm", "parent", "quantity", "seed", "nats"]]
    for comparison in study.comparisons:
        if comparison.endpoint is not None:
            rows += ([comparison.arm.name, comparison.parent.name, *row] for row in _milestone(comparison.endpoint))
    return rows


def _gaps(study: StoredStudy) -> dict[str, Rows]:
    return {
        f"gap-{comparison.arm.index}-{comparison.parent.index}": [
            ["step", "quantity", "seed", "nats"],
            *([milestone["step"], *row] for milestone in comparison.milestones for row in _milestone(milestone)),
            *_simultaneous(comparison),
        ]
        for comparison in study.comparisons
    }


def _milestone(milestone: Any) -> Rows:
    """(quantity, seed or nothing, nats): the difference of every seed, and their statistics where they exist."""
    low, high = milestone["t_interval"] or (None, None)
    statistics = {"mean": milestone["mean"], "sd": milestone["sd"], "t_low": low, "t_high": high}
    differences = [["difference", seed, value] for seed, value in zip(milestone["seeds"], milestone["differences"], strict=True)]
    return differences + [[quantity, "", value] for quantity, value in statistics.items() if value is not None]


def _simultaneous(comparison: Comparison) -> Rows:
    sides = zip(("band_low", "band_high"), simultaneous_band(comparison), strict=False)  # there is none with fewer than three seeds
    return [[step, quantity, "", value] for quantity, side in sides for step, value in side]


def _curves(study: StoredStudy) -> dict[str, Rows]:
    cells = [(arm, cell) for arm in featured_arms(study) for cell in study.complete(arm)]
    last = max((cell.metrics[-1]["step"] for _, cell in cells if cell.metrics), default=0)
    window = max(1, last // 50)  # of curves_figure; the test holds the two together
    head: Rows = [["arm", "seed", "step", "loss"]]
    training, validation = list(head), list(head)
    for arm, cell in cells:
        smoothed = smooth([(line["step"], line["loss"]) for line in cell.metrics], window)
        training += ([arm.name, cell.seed, step, loss] for step, loss in smoothed)
        validation += ([arm.name, cell.seed, step, loss] for step, loss in cell.validation())
    return {"training": training, "validation": validation}


def _routing(study: StoredStudy) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    divergence: Rows = [["arm", "seed", "layer", "nats"]]
    for arm in study.arms:
        cells = [(cell.seed, cell.routing) for cell in study.complete(arm) if cell.routing]
        for seed, routing in cells:
            values = [(entry["layer"], entry["nats"]) for entry in routing.get("divergence") or ()]
            divergence += ([arm.name, seed, layer, nats] for layer, nats in values if nats is not None)
        runs = [routing for _, routing in cells if routing.get("sites")]
        for role in {role: None for run in runs[:1] for site in run["sites"] for role in site["roles"]}:
            rows: Rows = [["site", "quantity", "source", "value"]]
            for site in average_sites(runs, role):
                rows += ([site.label, "weight", source, weight] for source, weight in site.weights.items())
                rows += [[site.label, "effective sources", "", site.effective]] if site.effective is not None else []
            found[f"routing-{arm.index}-{canvas.slug(role)}"] = rows
    return found | {"divergence": divergence}
