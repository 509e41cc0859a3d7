"""Exported tables say what the report says, and exported data are what the figures were drawn from."""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from depthroute.cli.main import main
from depthroute.common.errors import RequestError
from depthroute.report import canvas, write_report
from depthroute.report.document import Details, Document, Section, Table
from depthroute.report.export import csv_text, escape_latex, export_report, latex_table, table_rows, tables_of
from depthroute.report.theme import PALETTE, color

WriteStudy = Callable[..., Path]
ATTACK = "<b>\\input{x}</b> & $a_b$ #1 100 % ~ ^ {c} | --x,, ''y `z\" \n[*]"


def read_rows(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))


def records(path: Path) -> list[dict[str, str]]:
    head, *rows = read_rows(path)
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    """The drawings behind the panels of `exported`, by name."""
    return {}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, write_study: WriteStudy) -> Path:
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def exported(study: Path, figures: dict[str, Figure], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    draw = canvas.draw

    def spy(name: str, description: str, paint: Callable[[Figure], None], **size: Any) -> Any:
        def keep(figure: Figure) -> None:
            paint(figure)
            figures.setdefault(name, figure)  # the PDF is painted on a second one

        return draw(name, description, keep, **size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "draw", spy)
        folder = tmp_path_factory.mktemp("exported") / "for paper"
        files = export_report(study, folder)
    assert set(files) == set(folder.iterdir())
    yield folder


def lines(figure: Figure, width: float | None = None) -> list[tuple[list[float], list[float]]]:
    found = [line for line in figure.axes[0].get_lines() if width is None or line.get_linewidth() == width]
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in found]


def test_tables_are_those_of_the_report_in_its_order(study: Path, exported: Path) -> None:
    markdown = write_report(study).with_name("report.md").read_text(encoding="utf-8")
    count = markdown.count("**Table\u00a0")
    assert count > 3 and sorted(path.name for path in exported.glob("table-*.csv")) == sorted(f"table-{n + 1}.csv" for n in range(count))
    for number in range(1, count + 1):
        printed = markdown.split(f"**Table\u00a0{number}.**")[1].split("**Table\u00a0")[0].replace("\\", "").replace("**", "")
        printed = printed.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        head, *rows = read_rows(exported / f"table-{number}.csv")
        head, rows = (head[1:], [row[1:] for row in rows]) if head[0] == "Group" else (head, rows)
        assert rows
        assert all("| " + " | ".join(row) + " |" in printed for row in (head, *rows))


def test_every_figure_is_the_reports_own(study: Path, exported: Path) -> None:
    report = write_report(study).parent
    drawings = {path.name: path.read_bytes() for path in report.glob("*.svg")}
    assert drawings and {path.name: path.read_bytes() for path in exported.glob("*.svg")} == drawings
    with_data = {path.stem for path in exported.glob("*.csv") if not path.stem.startswith("table-")}
    assert with_data == {name.removesuffix(".svg").removesuffix("-whole").removesuffix("-late") for name in drawings}


def test_every_figure_is_a_pdf_in_light_colours_with_its_font_and_its_text(exported: Path) -> None:
    """Read from the uncompressed streams of the file itself: no reader of PDF is a dependency."""
    names = {path.stem for path in exported.glob("*.svg")}
    assert names and {path.stem for path in exported.glob("*.pdf")} == names
    for name in sorted(names)[:3]:
        raw = (exported / f"{name}.pdf").read_bytes()
        assert raw.startswith(b"%PDF-") and b"/FontFile2" in raw and b"CreationDate" not in raw and b"Producer" not in raw
        streams = [zlib.decompress(found) for found in re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", raw, re.DOTALL)]
        page = b"\n".join(stream for stream in streams if b" Tf" in stream)
        assert b"Tj" in page or b"TJ" in page, "text was drawn as paths"
        assert b"0.996" not in page, "a sentinel colour was left in the drawing"
        ink = tuple(int(PALETTE["ink"][0][i : i + 2], 16) / 255 for i in (1, 3, 5))
        colors = {tuple(map(float, found.split())) for found in re.findall(rb"((?:[\d.]+ ){3})(?=rg)", page)}
        assert any(color == pytest.approx(ink, abs=1e-3) for color in colors)


def test_the_same_panel_gives_the_same_pdf(exported: Path) -> None:
    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, "Title \u2212 $x$", "nats")
        canvas.axes(figure, left=40, top=top).plot([0, 1], [1, 2], color=color("arm-1"))

    panel = canvas.draw("p", "A line.", paint, height=200, data=[["x"], [1]])
    first = canvas.pdf(panel)
    assert first == canvas.pdf(panel) and "fe00" in panel.svg, "drawing a PDF leaves the page's colours alone"
    assert panel == canvas.draw("p", "A line.", paint, height=200)


def test_loss_curves_hold_every_drawn_point(exported: Path, figures: dict[str, Figure]) -> None:
    """Thin lines are the seeds: all of them, point by point, the second half cut from the same data."""
    for name in ("training", "validation"):
        curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for line in records(exported / f"{name}.csv"):
            curves.setdefault((line["arm"], line["seed"]), []).append((float(line["step"]), float(line["loss"])))
        whole = [list(zip(*line, strict=True)) for line in lines(figures[f"{name}-whole"], 0.8)]
        assert len(whole) == 9 and whole == list(curves.values())
        late = [list(zip(*line, strict=True)) for line in lines(figures[f"{name}-late"], 0.8)]
        assert late == [[point for point in curve if point[0] >= 200] for curve in curves.values()]


def test_endpoints_and_differences_hold_every_drawn_point(exported: Path, figures: dict[str, Figure]) -> None:
    found = [float(line["nll"]) for line in records(exported / "endpoints.csv")]
    drawn = [x for line in figures["endpoints"].axes[0].get_lines() if line.get_markersize() == 6.5 for x in line.get_xdata()]
    assert len(found) == 9 and found == drawn
    rows = records(exported / "differences.csv")
    marks = {size: [] for size in (6.5, 8.5)}
    for line in figures["differences"].axes[0].get_lines():
        if line.get_marker() != "None":
            marks[line.get_markersize()].extend(map(float, line.get_xdata()))
    assert marks[6.5] == [float(row["nats"]) for row in rows if row["quantity"] == "difference"]
    assert marks[8.5] == [float(row["nats"]) for row in rows if row["quantity"] == "mean"] and len(marks[8.5]) == 3
    bars = [x for line in lines(figures["differences"], 7) for x in line[0]]
    assert bars == [float(row["nats"]) for row in rows if row["quantity"] in ("t_low", "t_high")]


def test_gaps_hold_lines_and_band(exported: Path, figures: dict[str, Figure]) -> None:
    for name in ("gap-2-1", "gap-1-0", "gap-2-0"):
        rows = [(row["quantity"], row["seed"], float(row["step"]), float(row["nats"])) for row in records(exported / f"{name}.csv")]
        thin = [list(zip(*line, strict=True)) for line in lines(figures[name], 0.9)]
        assert thin == [[(step, y) for what, seed, step, y in rows if (what, seed) == ("difference", of)] for of in ("0", "1", "2")]
        [thick] = lines(figures[name], 2.4)
        assert list(zip(*thick, strict=True)) == [(step, y) for what, _, step, y in rows if what == "mean"]
        [band] = [item for item in figures[name].axes[0].collections if isinstance(item, PolyCollection)]
        edge = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
        assert edge == {(step, y) for what, _, step, y in rows if what in ("t_low", "t_high")}


def test_heat_maps_hold_every_weight(exported: Path, figures: dict[str, Figure]) -> None:
    heats = {name: figure for name, figure in figures.items() if name.startswith("routing-")}
    assert len(heats) == 4  # shared of one arm; shared, query-key and value of the other
    for name, figure in heats.items():
        cells = [item for item in figure.artists if isinstance(item, Rectangle) and to_hex(item.get_facecolor()) == color("heat")]
        rows = records(exported / f"{name}.csv")
        weights = [float(row["value"]) for row in rows if row["quantity"] == "weight"]
        assert weights and [cell.get_alpha() for cell in cells] == weights
        shown = [text.get_text() for text in figure.texts]
        assert all(f"{float(row['value']):.2f}" in shown for row in rows if row["quantity"] == "effective sources")


def test_divergence_holds_every_dot(exported: Path, figures: dict[str, Figure]) -> None:
    dots = [line for line in figures["divergence"].axes[0].get_lines() if line.get_markersize() == 4.5]
    drawn = [(float(x), float(y)) for dot in dots for x, y in zip(dot.get_xdata(), dot.get_ydata(), strict=True)]
    found = [(float(row["layer"]), float(row["nats"])) for row in records(exported / "divergence.csv")]
    assert drawn and sorted(found) == sorted(drawn)


def test_an_unfinished_study_exports_what_its_report_shows(write_study: WriteStudy, tmp_path: Path) -> None:
    nothing = {(arm, seed): 0 for arm in ("prenorm", "block", "rd") for seed in (0, 1)}
    study = write_study(tmp_path / "study", seeds=(0, 1), unfinished=nothing)
    files = export_report(study, tmp_path / "out")
    assert files and {path.suffix for path in files} == {".csv", ".tex"} and all(path.stem.startswith("table-") for path in files)
    one = write_study(tmp_path / "one", seeds=(4,))
    export_report(one, tmp_path / "one-out")
    quantities = {row["quantity"] for row in records(tmp_path / "one-out" / "differences.csv")}
    assert quantities == {"difference", "mean"}  # one seed has no spread, and an empty number is no row


def test_folded_tables_are_numbered_where_they_stand() -> None:
    first, second, third = (Table(name, ["A"], [(None, [["x"]], [])]) for name in ("first", "second", "third"))
    sections = [Section("s", "S", [Details("more", [Details("deeper", [second])]), third])]
    document = Document("t", "k", "q", "l", [first], sections)
    assert tables_of(document) == [first, second, third]


GROUPED = Table(
    "Share & count, 95 %",
    ["Name", "Value"],
    [("one", [["[a", "\u22120.5"], ["*b", "1"]], [["Mean", "0.25"]]), (None, [["c,d", "e\n\"f\""]], [])],
)  # fmt: skip


def test_groups_become_a_column() -> None:
    assert table_rows(GROUPED) == [
        ["Group", "Name", "Value"],
        ["one", "[a", "\u22120.5"],
        ["one", "*b", "1"],
        ["one", "Mean", "0.25"],
        ["", "c,d", 'e\n"f"'],
    ]
    assert list(csv.reader(io.StringIO(csv_text(table_rows(GROUPED))))) == table_rows(GROUPED)
    assert csv_text([["x", 0.1 + 0.2, None]]) == "x,0.30000000000000004,\n"


def test_a_table_in_latex() -> None:
    assert latex_table(GROUPED).splitlines() == [
        r"% Share \& count, 95 \%",
        r"\begin{tabular}{lr}",
        r"\hline",
        r"Name & Value \\",
        r"\hline",
        r"\multicolumn{2}{l}{\textit{one}} \\",
        r"{}[a & $-$0.5 \\",
        r"{}*b & 1 \\",
        r"\hline",
        r"Mean & 0.25 \\",
        r"\hline",
        r"c,d & e \symbol{34}f\symbol{34} \\",
        r"\hline",
        r"\end{tabular}",
    ]


def test_nothing_in_a_text_is_read_as_latex() -> None:
    escaped = escape_latex(ATTACK)
    assert escaped == (
        r"\textless{}b\textgreater{}\textbackslash{}input\{x\}\textless{}/b\textgreater{} \& \$a\_b\$ \#1 100 \% \textasciitilde{} "
        r"\textasciicircum{} \{c\} \textbar{} -{}-x,{}, '{}'y \textasciigrave{}z\symbol{34}  [*]"
    )
    assert escape_latex("\u22120.5\u00a0% \u2013 a\u2026---") == r"$-$0.5~\% -- a\ldots{}-{}-{}-"
    assert escape_latex("RD-AttnRes, parent's") == "RD-AttnRes, parent's"


def test_labels_of_a_study_stay_text(write_study: WriteStudy, tmp_path: Path) -> None:
    arms = {"a": (ATTACK, {"method": "prenorm"}, 0.0), "b": ("B", {"method": "prenorm"}, -0.1)}
    export_report(write_study(tmp_path / "s", seeds=(0,), arms=arms, comparisons=[("b", "a")]), tmp_path / "out")
    tables = list((tmp_path / "out").glob("*.tex"))
    assert any(escape_latex(ATTACK) in table.read_text() for table in tables)
    for table in tables:
        rows = [line for line in table.read_text().splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert len({len(re.findall(r"(?<!\\)&", row)) for row in rows}) == 1
        assert not any("input{" in row for row in rows)


def test_the_command_writes_the_report_and_the_export(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["report", str(study), "--export", str(out)]) == 0
    assert capsys.readouterr().out == f"{study / 'report' / 'index.html'}\n{len(list(out.iterdir()))} files in {out}\n"
    (tmp_path / "file").write_text("kept")
    assert main(["report", str(study), "--export", str(tmp_path / "file")]) == 2
    assert "name a folder for the exported tables" in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"plan\.json"):
        export_report(tmp_path, tmp_path / "never")
    assert not (tmp_path / "never").exists() and (tmp_path / "file").read_text() == "kept"
