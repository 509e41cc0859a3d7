"""The page of runs side by side: validation loss, and what layers hand on and its gradient by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, write_text
from depthroute.report import numbers
from depthroute.report.analysis_depth_plots import Line, depth_panel, finite
from depthroute.report.document import Bullets, Document, FigureBlock, Section, Table
from depthroute.report.html_page import render_html

FORMAT = 1
MOST = 10  # runs: as many as there are colours
LIMITS = (
    "One seed a run: a difference between two lines may be one of seeds. A study has pairs of seeds, and intervals.",
    "Gradients and magnitudes are those of the last checkpoint; only the loss is of the whole training.",
)


def write_dynamics(folder: Path) -> Path:
    """Write `folder/index.html`, one self-contained page, from `folder/dynamics.json`; return the page's path.

    Raises:
        RequestError: no dynamics.json, one of another format, or more runs than can be told apart.
        FailureError: it is cut short, or the disk refuses the page.
    """
    path = folder / "dynamics.json"
    data = read_json(path)
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise RequestError(f"{path} has format {found!r}; this version of depthroute reads format {FORMAT}.")
    check_runs(len(data["runs"]))
    write_text(folder / "index.html", render_html(_document(data)))
    return folder / "index.html"


def check_runs(number: int) -> None:
    """Refuse more runs than have colours of their own."""
    if number > MOST:
        raise RequestError(f"{number} runs cannot be told apart in one figure; give {MOST} or fewer.")


def _document(data: Mapping[str, Any]) -> Document:
    runs: Sequence[Mapping[str, Any]] = data["runs"]
    panels = [
        depth_panel("loss", "Validation loss", "nats per token", _curves(runs), xlabel="step"),
        depth_panel(
            "carried", "Magnitude by depth", "what a layer hands on, root mean square", _by_layer(runs, "carried"), log=True, xlabel="layer"
        ),
        depth_panel(
            "gradient", "Gradient by depth", "of the loss, by what a layer wrote", _by_layer(runs, "gradient"), log=True, xlabel="layer"
        ),
    ]
    figure = FigureBlock(
        "Training dynamics.",
        "The three panels of Attention Residuals, Fig. 5. A plain stream hands on all that was written so far, and grows; a block hands on "
        "its own sum, which begins anew with the next block. Logarithmic axes by depth.",
        [panel for panel in panels if panel is not None],
    )
    rows = [(str(run["name"]), str(run["residual"]), *_facts(run)) for run in runs]
    columns = ("run", "residual method", "last validation NLL", "largest / smallest magnitude", "largest / smallest gradient")
    table = Table("Runs, and how uneven their layers are.", columns, [(None, rows, [])], text_columns=2)
    return Document(
        title="Training dynamics",
        kicker=f"{numbers.plural(len(runs), 'run')} side by side",
        question="How does the loss fall, and how large are outputs and gradients by depth?",
        lead=f"Magnitudes and gradients are averaged over {data['tokens']:,} tokens of held-out text.",
        lead_blocks=[],
        sections=[Section("dynamics", "Loss, magnitude, gradient", [figure, table]), Section("limits", "Limits", [Bullets(LIMITS)])],
    )


def _curves(runs: Sequence[Mapping[str, Any]]) -> list[Line]:
    return [
        Line(str(run["name"]), [(step, y) for step, loss in run["validation"] for y in [finite(loss)] if y is not None]) for run in runs
    ]


def _by_layer(runs: Sequence[Mapping[str, Any]], field: str) -> list[Line]:
    return [
        Line(str(run["name"]), [(layer, y) for layer, value in enumerate(run[field]) for y in [finite(value)] if y is not None])
        for run in runs
    ]


def _facts(run: Mapping[str, Any]) -> list[str]:
    last = run["validation"][-1][1] if run["validation"] else None
    return ["" if last is None else f"{last:.4f}", *(_spread(run[field]) for field in ("carried", "gradient"))]


def _spread(values: Sequence[Any]) -> str:
    known = [value for value in map(finite, values) if value]
    return f"{max(known) / min(known):.1f}" if known else ""
