"""The causal probes: what taking a source out of a read does to the loss, beside the weight that the source has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas
from depthroute.report.analysis_depth_plots import HUES, depth_panel, finite, line, linear_axis, role_words, short
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Probe = Mapping[str, Any]
FAR = 20  # times the median: from there on a linear axis would press all other effects onto zero
PROBES = {"knock_out": "taken out", "uniform": "made uniform", "frozen": "frozen at its mean"}


def probe_words(probe: object) -> str:
    """A probe in words; one that this page does not know keeps its name."""
    return PROBES.get(str(probe), str(probe).replace("_", " "))


def excludes_zero(probe: Probe) -> bool:
    """Whether the interval of a probe's effect lies on one side of zero."""
    low, high = finite(probe.get("low")), finite(probe.get("high"))
    return low is not None and high is not None and (low > 0 or high < 0)


def scatter_figure(sites: Sequence[Probe]) -> FigureBlock | None:
    """Effect against mean weight, one panel a probe of single sources."""
    measured = [p for p in sites if p.get("source") and finite(p.get("mean_weight")) is not None and finite(p.get("delta")) is not None]
    probes = dict.fromkeys(p.get("probe") for p in measured)
    of_probes = {probe: [p for p in measured if p.get("probe") == probe] for probe in probes}
    panels = [_scatter_panel(probe, points) for probe, points in of_probes.items()]
    effects = [_sizes(points) for points in of_probes.values()]
    caption = (
        "A mark is one source, or one group of sources, at one site. To the right it has more weight; upwards, the loss is higher "
        "without it. Bars are 95 % intervals over documents; a mark is hollow where its interval includes zero. "
        "If weight were effect, the marks would lie on a rising line."
        + (" The vertical axis is linear near zero and logarithmic beyond." if any(map(_far_apart, effects)) else "")
    )
    return FigureBlock("Effect against mean weight.", caption, panels) if panels else None


def reads_figure(sites: Sequence[Probe]) -> FigureBlock | None:
    """Probes of whole reads by site, one panel a probe, one line a role."""
    whole = [p for p in sites if not p.get("source") and finite(p.get("delta")) is not None]
    panels = []
    for probe in dict.fromkeys(p.get("probe") for p in whole):
        of_probe = [p for p in whole if p.get("probe") == probe]
        roles = list(dict.fromkeys(p.get("role") for p in of_probe))
        lines = [line(role_words(role), [p for p in of_probe if p.get("role") == role], "delta", low="low", high="high") for role in roles]
        name, title = f"probe-{canvas.slug(str(probe))}", f"The read {probe_words(probe)}"
        panel = depth_panel(name, title, "change of the loss, nats per token", lines, zero=True)
        panels += [panel] if panel is not None else []
    caption = (
        "One site at a time, everything else untouched. Above zero the model is worse for it: a uniform read loses what the site prefers, "
        "a frozen one only what it decides token by token. Bars are 95 % intervals over documents."
    )
    return FigureBlock("What the choice of a read is worth.", caption, panels) if panels else None


def _scatter_panel(probe: object, points: Sequence[Probe]) -> Panel:
    roles = list(dict.fromkeys(p.get("role") for p in points))
    entries = [(HUES[index % len(HUES)], role_words(role)) for index, role in enumerate(roles)]
    title = f"A source {probe_words(probe)}"
    legend = canvas.legend_height([label for _, label in entries]) if len(roles) > 1 else 0.0

    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, title, "change of the loss, nats per token")
        top = canvas.legend(figure, top, entries, markers=True) if len(roles) > 1 else top
        ax = canvas.axes(figure, left=66, top=top + 6)
        ax.axhline(0, color=color("ink"), linewidth=1.1, zorder=1)
        values = [0.0]
        for point in points:
            hue, _ = entries[roles.index(point.get("role"))]
            x, y, low, high = (finite(point.get(name)) for name in ("mean_weight", "delta", "low", "high"))
            assert x is not None and y is not None
            values.append(y)
            if low is not None and high is not None:
                ax.vlines([x], low, high, color=arm_color(hue), linewidth=1.4, alpha=0.6)
                values += [low, high]
            fill = arm_color(hue) if excludes_zero(point) else color("paper")
            ax.plot([x], [y], canvas.marker(hue), color=arm_color(hue), markerfacecolor=fill, markersize=6, zorder=3)
        _effect_axis(ax, values, _sizes(points))
        weights = [x for p in points for x in [finite(p.get("mean_weight"))] if x is not None]
        right = max(*weights, 0.05) * 1.05
        ax.set_xlim(min(0.0, *weights) - 0.03 * right, right)
        canvas.decimal_ticks(ax.xaxis, *ax.get_xlim())
        ax.set_xlabel("mean weight over tokens", color=color("muted"), fontsize=canvas.TEXT_SIZE)

    strongest = max(points, key=lambda p: abs(finite(p.get("delta")) or 0.0))
    words = f"The largest change, {short(strongest['delta'])} nats, is that of {strongest['source']} at site {strongest.get('site')}"
    description = f"{title}: change of the loss against mean weight, {len(points)} sources. {words}."
    height = 280 + canvas.heading_height(title) + legend
    return canvas.draw(f"probe-weight-{canvas.slug(str(probe))}", description, paint, height=height)


def _sizes(points: Sequence[Probe]) -> list[float]:
    """How large the effects are that are not zero."""
    return [abs(y) for point in points for y in [finite(point.get("delta"))] if y]


def _far_apart(sizes: Sequence[float]) -> bool:
    return bool(sizes) and max(sizes) > FAR * median(sizes)


def _effect_axis(ax: Axes, values: Sequence[float], sizes: Sequence[float]) -> None:
    """Linear; where the largest effect dwarfs the others, linear near zero and logarithmic beyond."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if not _far_apart(sizes):
        linear_axis(ax, values)
        return
    least = next(10.0**power for power in range(-12, 12) if 10.0**power >= median(sizes) / 3)
    ax.set_yscale("symlog", linthresh=least)
    ends = [sign * least * 10**power for sign in (-1, 1) for power in range(12)]
    low = 0.0 if min(values) >= 0 else max((e for e in ends if e <= min(values)), default=min(values))
    high = 0.0 if max(values) <= 0 else min((e for e in ends if e >= max(values)), default=max(values))
    ax.set_ylim(1.1 * low if low else -0.3 * least, 1.1 * high if high else 0.3 * least)
    ax.yaxis.set_major_locator(FixedLocator(sorted({0.0, *(e for e in ends if low <= e <= high)})))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
