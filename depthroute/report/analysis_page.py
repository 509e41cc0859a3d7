"""From the folder of an analysis to its page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, write_text
from depthroute.report.analysis_content import TEXT, compose_analysis
from depthroute.report.analysis_text import script_policy, token_view
from depthroute.report.html_page import POLICY, render_html

FORMAT = 1


def write_analysis(folder: Path) -> Path:
    """Write `folder/index.html`, one self-contained page, from `folder/analysis.json`; return the page's path.

    What the JSON lacks is left out of the page. The same file gives the same bytes. The page runs one script, that of the token view, and
    its policy allows that one alone; without a text to show it has none.

    Raises:
        RequestError: no analysis.json, or one of another format.
        FailureError: it is cut short, or the disk refuses the page.
    """
    path = folder / "analysis.json"
    data = read_json(path)
    found = data.get("format", FORMAT) if isinstance(data, dict) else None
    if found != FORMAT:
        raise RequestError(f"{path} has format {found!r}; this version of depthroute reads format {FORMAT}.")
    write_text(folder / "index.html", render_analysis(data))
    return folder / "index.html"


def render_analysis(data: Mapping[str, Any]) -> str:
    """The whole page."""
    view = token_view(data.get("text") or {})
    page = render_html(compose_analysis(data, with_text=view is not None))
    style = (Path(__file__).parent / "analysis.css").read_text(encoding="utf-8")
    page = _put(page, "</style>\n</head>", f"{style}</style>\n</head>")
    if view is None:
        return page
    page = _put(page, f'content="{POLICY}"', f'content="{POLICY}; {script_policy()}"')
    # The document knows no scripts, and its texts are escaped: the section's own tags are found for certain.
    start, opening, rest = page.partition(f'<section id="{TEXT}" ')
    section, closing, end = rest.partition("</section>")
    return start + opening + section + view + "\n" + closing + end


def _put(page: str, place: str, text: str) -> str:
    """The page with the only occurrence of `place` replaced."""
    assert page.count(place) == 1, place
    return page.replace(place, text)
