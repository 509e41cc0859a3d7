"""The drawing board of every figure: a panel of given pixels with a title, a legend and axes, in the theme's sentinel colours.

One Matplotlib unit is one CSS pixel: figures are laid out at 72 dots an inch, and a font size of 12 is 12 pixels where the page shows a
panel at its natural width.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from depthroute.report.document import Panel
from depthroute.report.numbers import MINUS
from depthroute.report.theme import arm_color, color, light_colors, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH = 420
MARGIN = 2
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 14.0, 12.5, 11.5
LINE_HEIGHT = 18.0
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES: tuple[Any, ...] = ("-", "-", "-", "-", "-", (0, (5, 2)), (0, (5, 2)), (0, (5, 2)), (0, (2, 1.5)), (0, (2, 1.5)))
PDF_FONT = 0.88  # the font that comes with Matplotlib is wider than the system fonts a page is laid out for
CHARACTER_WIDTH = 0.56  # of the font size: what a character of a system sans-serif takes on average, rounded up


def draw(
    name: str,
    description: str,
    paint: Callable[[Figure], None],
    *,
    width: float = WIDTH,
    height: float,
    data: Sequence[Sequence[Any]] | None = None,
) -> Panel:
    """Make a figure of `width` x `height` pixels, let `paint` fill it, and return it as a tidied SVG.

    `paint` may be called again, on a fresh figure. `data` goes with the panel (document.py). Nothing outside changes what is drawn: a
    user's matplotlibrc is set aside, and the salt of the ids is fixed.
    """
    buffer = io.StringIO()
    with _settings():
        figure = _figure(width, height)
        paint(figure)
        figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    svg = tidy(buffer.getvalue(), name)
    return Panel(name=name, svg=svg, description=description, width=round(width), height=math.ceil(height), paint=paint, data=data)


def pdf(panel: Panel) -> bytes:
    """A panel as one PDF page in the light palette on a transparent ground, its font embedded and its text as text; no date, so that the
    same panel gives the same bytes. The page has the panel's size, a CSS pixel to a point."""
    from matplotlib.text import Text

    buffer = io.BytesIO()
    with _settings(), light_colors():
        import matplotlib

        matplotlib.rcParams.update({"text.color": color("ink"), "pdf.fonttype": 42})
        figure = _figure(panel.width, panel.height)
        panel.paint(figure)
        figure.draw_without_rendering()  # tick labels come into being
        for words in figure.findobj(lambda artist: isinstance(artist, Text)):
            assert isinstance(words, Text)
            words.set_fontsize(float(words.get_fontsize()) * PDF_FONT)
        figure.savefig(buffer, format="pdf", facecolor="none", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return buffer.getvalue()


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "depthroute",
                "text.parse_math": False,
                "text.color": color("ink"),
                "font.size": TEXT_SIZE,
                "lines.solid_capstyle": "round",
                "path.simplify": False,
            }
        )
        yield


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
    FigureCanvasSVG(figure)
    return figure


def axes(figure: Figure, *, left: float, top: float, right: float = 14.0, bottom: float = 44.0) -> Axes:
    """Axes at given distances in pixels from the figure's edges: horizontal grid lines, no box, small muted tick labels."""
    width, height = figure.get_size_inches() * 72
    place = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    ax = figure.add_axes(place, facecolor="none")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(color("muted"))
    ax.spines["bottom"].set_linewidth(0.8)
    ax.tick_params(axis="both", length=0, pad=6, labelsize=TEXT_SIZE, labelcolor=color("muted"))
    ax.grid(axis="y", color=color("rule"), linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def step_axis(ax: Axes, last: int) -> None:
    """A horizontal axis that counts optimiser steps."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_xlim(right=last * 1.015)
    ax.set_xlabel("optimiser step", color=color("muted"), fontsize=TEXT_SIZE, labelpad=3)


def decimal_ticks(axis: Axis, low: float, high: float, ticks: int = 5) -> None:
    """At most `ticks` intervals between `low` and `high`; all numbers with the decimals that the interval needs, and a true minus sign."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    places = [place for place in MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= place <= high]
    gap = places[1] - places[0] if len(places) > 1 else high - low
    decimals = next((d for d in range(1, 6) if abs(round(gap, d) - gap) < 1e-3 * gap), 6)
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{0.0 if abs(value) < 1e-9 else value:.{decimals}f}".replace("-", MINUS)))


def heading(figure: Figure, title: str, subtitle: str) -> float:
    """A bold title and a muted line under it, which says what the vertical axis shows; returns the pixels used from the top."""
    width = figure.get_size_inches()[0] * 72
    y = MARGIN + 12.0
    for line in wrapped(title, width, TITLE_SIZE * 1.08):
        text(figure, MARGIN, y, line, fontsize=TITLE_SIZE, fontweight="bold")
        y += LINE_HEIGHT
    text(figure, MARGIN, y, cut(subtitle, width, TEXT_SIZE), color=color("muted"))
    return heading_height(title, width)


def heading_height(title: str, width: float = WIDTH) -> float:
    """The pixels that `heading` will use."""
    return MARGIN + LINE_HEIGHT * (len(wrapped(title, width, TITLE_SIZE * 1.08)) + 1) + 4


def legend_rows(labels: Sequence[str], width: float) -> list[list[tuple[int, float, str]]]:
    """Break legend entries into rows: (entry, x in pixels, its text), the text cut where it alone is wider than a row."""
    rows: list[list[tuple[int, float, str]]] = [[]]
    x = float(MARGIN)
    for index, label in enumerate(labels):
        shown = cut(label, width - 2 * MARGIN - 30, TEXT_SIZE)
        needed = 30 + len(shown) * TEXT_SIZE * CHARACTER_WIDTH + 14
        if rows[-1] and x + needed > width:
            rows.append([])
            x = float(MARGIN)
        rows[-1].append((index, x, shown))
        x += needed
    return rows


def legend(figure: Figure, top: float, entries: Sequence[tuple[int, str]], *, markers: bool) -> float:
    """A legend of arms, (index, label), below `top`; returns the pixels used from the figure's top."""
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches() * 72
    for row in legend_rows([label for _, label in entries], width):
        y = top + LINE_HEIGHT / 2
        for entry, x, shown in row:
            arm = entries[entry][0]
            figure.add_artist(
                Line2D(
                    [x / width, (x + 11) / width, (x + 22) / width],
                    [1 - y / height] * 3,
                    color=arm_color(arm),
                    linewidth=2.2,
                    linestyle=dashes(arm),
                    marker=marker(arm) if markers else None,
                    markersize=6,
                    markevery=[1],
                    transform=figure.transFigure,
                )
            )
            text(figure, x + 29, y + 4.5, shown)
        top += LINE_HEIGHT + 1
    return top + 4


def legend_height(labels: Sequence[str], width: float = WIDTH) -> float:
    """The pixels that `legend` will use."""
    return (LINE_HEIGHT + 1) * len(legend_rows(labels, width)) + 4


def text(figure: Figure, x: float, y: float, shown: str, **style: Any) -> None:
    """Text with its baseline's start at (x, y) pixels from the top left corner."""
    width, height = figure.get_size_inches() * 72
    figure.text(x / width, 1 - y / height, shown, **{"fontsize": TEXT_SIZE, "va": "baseline", "ha": "left", **style})


def marker(index: int) -> str:
    """The marker of an arm, so that colour is never the only difference."""
    return MARKERS[index % len(MARKERS)]


def dashes(index: int) -> Any:
    """The line style of an arm."""
    return DASHES[index % len(DASHES)]


def cut(label: str, width: float, size: float) -> str:
    """A label that fits into `width` pixels, with an ellipsis where it had to be cut."""
    room = max(4, int(width / (size * CHARACTER_WIDTH)))
    return label if len(label) <= room else label[: room - 1].rstrip() + "…"


def wrapped(words: str, width: float, size: float) -> list[str]:
    """Text broken into at most two lines of `width` pixels."""
    import textwrap

    room = max(8, int(width / (size * CHARACTER_WIDTH)))
    return textwrap.wrap(words, room, max_lines=2, placeholder="…")


def slug(words: str) -> str:
    """A name as part of a file name and of an id: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "x"
