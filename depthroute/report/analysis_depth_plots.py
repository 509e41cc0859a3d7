"""Quantities by depth: one panel of lines over sites, on a linear or a logarithmic axis, and the figures that are made of such panels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

HUES = (2, 1, 3, 4, 5, 9, 7, 6, 8, 0)  # of the arms' colours: the grey of a baseline comes last
PLOT_HEIGHT = 232
SITES = "site (two a layer, the last one before the head)"
GRID = (1, 2, 5)


@dataclass(frozen=True)
class Line:
    """A quantity over sites: (x, y), and beside each point the ends of its bar, or None where it has none."""

    label: str
    points: Sequence[tuple[float, float]]
    bars: Sequence[tuple[float, float] | None] = ()


def finite(value: Any) -> float | None:
    """A stored value as a number; None for what is missing or not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def line(label: str, rows: Sequence[Mapping[str, Any]], field: str, *, low: str = "", high: str = "") -> Line:
    """One field of a section's rows over their sites, with the interval between two others; what is not a finite number is left out."""
    kept = [(row, y) for row in rows for y in [finite(row.get(field))] if y is not None]
    ends = [(finite(row.get(low)), finite(row.get(high))) for row, _ in kept]
    bars = [(a, b) if a is not None and b is not None else None for a, b in ends]
    return Line(label, [(row["site"], y) for row, y in kept], bars)


def lines_by_role(label: str, rows: Sequence[Mapping[str, Any]], field: str) -> list[Line]:
    """One line a role, named `label` alone where the rows have no roles or only one."""
    roles = list(dict.fromkeys(row.get("role") for row in rows))
    return [
        line(label if len(roles) == 1 else f"{label}, {role_words(role)}", [row for row in rows if row.get("role") == role], field)
        for role in roles
    ]


def role_words(role: object) -> str:
    """A role in the words of the page; a head of it by its number."""
    name, _, head = str(role).partition(", ")
    known = {"query_key": "query-key role", "shared": "one read for all roles", "None": "all roles"}
    words = known.get(name, f"{name} role")
    return words if not head else head if name == "shared" else f"{words}, {head}"


def place_words(row: Mapping[str, Any]) -> str:
    """Where a site is: `site 5, MLP of layer 2`."""
    kind = {"attention": "attention", "mlp": "MLP"}.get(row.get("kind", ""))
    layer = row.get("layer")
    where = f"{kind} of layer {layer}" if kind and layer is not None else "before the head" if row.get("kind") == "output" else ""
    return f"site {row.get('site')}" + (f", {where}" if where else "")


def depth_panel(
    name: str,
    title: str,
    subtitle: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    floor: float | None = None,
    zero: bool = False,
    reference: tuple[str, float] | None = None,
    limit: Line | None = None,
    xlabel: str = SITES,
) -> Panel | None:
    """One panel with a line for each quantity; None where no line has a point.

    Args:
        log: a logarithmic axis, from which values of zero and below are left out.
        floor: the lower end of a linear axis.
        zero: whether to draw the zero line.
        reference: a dashed horizontal line, and the words on it.
        limit: a dotted line that none of the others can cross.
    """
    drawn = [_positive(one) if log else one for one in lines]
    drawn = [one for one in drawn if one.points]
    if not drawn:
        return None
    entries = [(HUES[index % len(HUES)], one.label) for index, one in enumerate(drawn)]
    legend = canvas.legend_height([label for _, label in entries]) if len(drawn) > 1 else 0.0

    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, title, subtitle)
        top = canvas.legend(figure, top, entries, markers=True) if len(drawn) > 1 else top
        ax = canvas.axes(figure, left=58, top=top + 6)
        values = [y for one in drawn for (_, y), bar in zip(one.points, _bars(one), strict=True) for y in (y, *(bar or ()))]
        if limit is not None and limit.points:
            ax.plot(*zip(*limit.points, strict=True), color=color("muted"), linewidth=1.2, linestyle=(0, (1.2, 1.8)), zorder=1)
            values += [y for _, y in limit.points]
        if zero:
            ax.axhline(0, color=color("ink"), linewidth=1.1, zorder=1)
            values.append(0.0)
        if reference is not None:
            values.append(reference[1])
        for (hue, _), one in zip(entries, drawn, strict=True):
            _paint_line(ax, one, hue)
        if log:
            log_axis(ax, values)
        else:
            linear_axis(ax, values, floor)
        if reference is not None:
            _reference(ax, *reference)
        site_axis(ax.xaxis)
        ax.set_xlabel(xlabel, color=color("muted"), fontsize=canvas.TEXT_SIZE)

    words = "; ".join(f"{one.label}: {_ends(one)}" for one in drawn)
    return canvas.draw(name, f"{title}, {subtitle}. {words}.", paint, height=PLOT_HEIGHT + canvas.heading_height(title) + legend)


def magnitudes_figure(rows: Sequence[Mapping[str, Any]]) -> FigureBlock | None:
    """What sub-layers write, what sites read, and the gradients of what was written."""
    sizes = depth_panel(
        "magnitudes",
        "Magnitude by depth",
        "root mean square over coordinates and tokens",
        [line("read at the site", rows, "read_rms"), line("written by its sub-layer", rows, "output_rms")],
        log=True,
    )
    gradients = depth_panel(
        "gradients",
        "Gradient by depth",
        "root mean square of the loss's gradient",
        [line("gradient of what the sub-layer wrote", rows, "output_gradient_rms")],
        log=True,
    )
    panels = [panel for panel in (sizes, gradients) if panel is not None]
    caption = (
        "Logarithmic axes. The magnitude read is that of the mixture before the norm. On a plain residual stream it grows with depth, "
        "and the first sub-layers get the largest gradients."
    )
    return FigureBlock("Magnitudes by depth.", caption, panels) if panels else None


def feedback_figure(rows: Sequence[Mapping[str, Any]]) -> FigureBlock | None:
    """The two parts of a source's gradient through a read, and the second relative to the first."""
    parts = [*lines_by_role("direct value gradient", rows, "direct"), *lines_by_role("routing feedback", rows, "routed")]
    both = depth_panel("feedback", "Both parts of the gradient", "root mean square over tokens", parts, log=True)
    ratios = lines_by_role("routing feedback", rows, "ratio")
    ratio = depth_panel("feedback-ratio", "Routing feedback, relative", "routing feedback / direct value gradient", ratios, floor=0.0)
    panels = [panel for panel in (both, ratio) if panel is not None]
    caption = (
        "A source's gradient through a read has two parts: the read's own gradient times the weight, and what comes of moving the scores "
        "(Low-Rank Attention Residuals, Eq. 15). A site with one source has no feedback; the logarithmic axis leaves zeros out."
    )
    return FigureBlock("Routing feedback against the direct value gradient.", caption, panels) if panels else None


def lens_figure(rows: Sequence[Mapping[str, Any]]) -> FigureBlock | None:
    """What the head would predict from every read."""
    final = next((y for row in reversed(rows) for y in [finite(row.get("nll"))] if y is not None), None)
    reference = ("the model", final) if final is not None else None
    losses = [line("NLL", rows, "nll")]
    loss = depth_panel("lens-nll", "Loss of every read", "NLL through the last norm and the head, nats", losses, reference=reference)
    agrees = [line("agreement", rows, "agrees")]
    agreement = depth_panel("lens-agrees", "Agreement with the model", "share of tokens with its most likely token", agrees, floor=0.0)
    panels = [panel for panel in (loss, agreement) if panel is not None]
    caption = (
        "The last norm and the head are put on the read of every site, as if the model ended there. They were trained on the last read "
        "alone: a high loss at an early site says that the read is not in the head's language, not that it knows nothing."
    )
    return FigureBlock("The reads through the head (logit lens).", caption, panels) if panels else None


def site_axis(axis: Axis) -> None:
    """A horizontal axis that counts sites."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(9, integer=True))


def linear_axis(ax: Axes, values: Sequence[float], floor: float | None = None) -> None:
    """Limits around the values, from `floor` where one is given, and decimal ticks."""
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.01
    low = low - pad if floor is None else min(floor, low)
    ax.set_ylim(low, high + pad)
    canvas.decimal_ticks(ax.yaxis, low, high + pad)


def log_axis(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis that begins and ends at 1, 2 or 5 times a power of ten, so that it never has less than two ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    places = [digit * 10.0**power for power in range(-40, 40) for digit in GRID]
    low = max(place for place in places if place <= min(values) * 1.0001)
    high = min(place for place in places if place >= max(values) * 0.9999)
    if low == high:
        low, high = places[places.index(low) - 1], places[places.index(high) + 1]
    inside = [place for place in places if low <= place <= high]
    if len(inside) > 8:
        stride = math.ceil(len(inside) / 3 / 7)
        inside = [place for place in inside if round(math.log10(place), 9) % stride == 0]
    ax.set_yscale("log")
    ax.set_ylim(low * 0.96, high * 1.04)
    ax.yaxis.set_major_locator(FixedLocator(inside))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    """A number with few digits and a true minus sign: `0.02`, `1,410`, `1e-6`."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, power = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(power)}".replace("-", numbers.MINUS)
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", numbers.MINUS)


def _paint_line(ax: Axes, one: Line, hue: int) -> None:
    xs, ys = zip(*one.points, strict=True)
    for x, bar in zip(xs, _bars(one), strict=True):
        if bar is not None:
            ax.vlines([x], bar[0], bar[1], color=arm_color(hue), linewidth=5, alpha=0.25)
    ax.plot(xs, ys, color=arm_color(hue), linewidth=1.9, linestyle=canvas.dashes(hue), marker=canvas.marker(hue), markersize=5)


def _reference(ax: Axes, words: str, value: float) -> None:
    ax.axhline(value, color=color("muted"), linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    ax.annotate(
        f"{words} {short(value)}",
        (0, value),
        (4, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=canvas.SMALL_SIZE,
        color=color("muted"),
        zorder=5,
        bbox={"facecolor": color("paper"), "edgecolor": "none", "pad": 1.2, "alpha": 0.9},
    )


def _positive(one: Line) -> Line:
    kept = [(point, bar) for point, bar in zip(one.points, _bars(one), strict=True) if point[1] > 0]
    return Line(one.label, [point for point, _ in kept], [bar if bar and bar[0] > 0 else None for _, bar in kept])


def _bars(one: Line) -> Sequence[tuple[float, float] | None]:
    return one.bars or [None] * len(one.points)


def _ends(one: Line) -> str:
    first, last = one.points[0], one.points[-1]
    return f"{short(first[1])} at {first[0]:g}, {short(last[1])} at {last[0]:g}"
