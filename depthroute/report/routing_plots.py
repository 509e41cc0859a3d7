"""What the trained models read: mean routing weights as heat maps, and how far the QK and V roles are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthroute.report import canvas, numbers
from depthroute.report.document import FigureBlock, Panel
from depthroute.report.featured import featured_arms
from depthroute.report.stored import Arm, StoredStudy
from depthroute.report.theme import arm_color, color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_NUMBERED, MIN_CELL, CELL_HEIGHT = 36.0, 14.0, 21
NUMBERED_SOURCES = 10  # with more sources the cells are narrow and carry no number
LABELS = 58
EFFECTIVE = 44
WHITE_FROM = 0.8  # weight from which white reads better on the heat colour than ink, in both themes
KINDS = {"attention": "attn", "mlp": "MLP", "output": "output"}
OPEN = " so far"  # how the residual methods name the partial sum of a block that is not closed yet
ROLES = {"query_key": "query-key role", "value": "value role"}


@dataclass(frozen=True)
class Site:
    """One row of a heat map, averaged over seeds: weight per column, and the mean number of effective sources.

    A block has one column, whether it is closed or still open; `open_block` names the column that holds a partial sum here.
    """

    label: str
    kind: str
    weights: Mapping[str, float]
    open_block: str | None
    effective: float | None


def heat_figures(study: StoredStudy) -> list[FigureBlock]:
    """One figure per arm that has routing weights, one panel per role; of a large study, those of the arms that are featured."""
    figures = []
    for arm in featured_arms(study):
        runs = [cell.routing for cell in study.complete(arm) if cell.routing and cell.routing.get("sites")]
        if not runs:
            continue
        roles = sorted({role for site in runs[0]["sites"] for role in site["roles"]}, key=lambda role: (role == "shared", role))
        averaged = [(role, sites) for role in roles for sites in [average_sites(runs, role)] if sites]
        if not averaged:
            continue
        panels = [_heat_panel(arm, role, sites, single=len(averaged) == 1) for role, sites in averaged]
        tokens = runs[0].get("tokens")
        caption = (
            "A row is a place where the depth memory is read, a column a source; "
            + ("a row sums to one" if sums_to_one(averaged) else "weights are sigmoids, which need not sum to one")
            + ". An empty place means that the source "
            "does not exist there"
            + ("; a dotted outline marks the partial sum of a block that is still open" if any_open(averaged) else "")
            + f". Mean over {numbers.plural(len(runs), 'seed')}"
            + (f" and {numbers.count(tokens)} tokens each" if tokens else "")
            + (". Colour goes with the square root of the weight" if any(len(columns(s)) > NUMBERED_SOURCES for _, s in averaged) else "")
            + ". At the right of a row, the mean effective number of sources."
        )
        figures.append(FigureBlock(f"What {arm.label} reads.", caption, panels))
    return figures


def divergence_figure(study: StoredStudy) -> FigureBlock | None:
    """The Jensen-Shannon divergence between the QK and V routing weights by layer, for arms with both roles."""
    lines = []
    for arm in featured_arms(study):
        seeds = [
            [(d["layer"], d["nats"]) for d in cell.routing["divergence"] if d["nats"] is not None]
            for cell in study.complete(arm)
            if cell.routing and cell.routing.get("divergence")
        ]
        if any(seeds):
            lines.append((arm, seeds))
    if not lines:
        return None
    several = any(len(seeds) > 1 for _, seeds in lines)
    caption = (
        "Jensen-Shannon divergence between the two roles' routing weights, in nats: zero where both read the same, "
        f"{math.log(2):.3f} (ln 2) where they share no source. "
        + ("Dots are single seeds, the line their mean, the bar their range." if several else "One seed.")
    )
    return FigureBlock("How far the query-key and value roles part.", caption, [_divergence_panel(lines)])


def average_sites(runs: Sequence[Mapping[str, Any]], role: str) -> list[Site]:
    """One role's sites averaged over seeds; a site enters where every seed has it with the same sources."""
    sites = []
    for site in runs[0]["sites"]:
        others = (s for run in runs for s in run["sites"] if s["site"] == site["site"] and s["sources"] == site["sources"])
        same = [s for s in others if role in s["roles"]]
        if len(same) != len(runs):
            continue
        per_source = zip(*(s["roles"][role]["weights"] for s in same), strict=True)
        names = [_column(source) for source in site["sources"]]
        still_open = next((_column(source) for source in site["sources"] if source.endswith(OPEN)), None)
        weights = dict(zip(names, (math.fsum(column) / len(same) for column in per_source), strict=True))
        effective = [s["roles"][role].get("effective_sources") for s in same]
        kind = KINDS.get(site["kind"], site["kind"])
        label = kind if site["kind"] == "output" or site.get("layer") is None else f"{site['layer']} {kind}"
        sites.append(Site(label, kind, weights, still_open, None if None in effective else math.fsum(effective) / len(same)))
    return sites


def columns(sites: Sequence[Site]) -> list[str]:
    """The columns of a heat map, in the order in which the sources come into being."""
    return list(dict.fromkeys(source for site in sites for source in site.weights))


def any_open(averaged: Sequence[tuple[str, Sequence[Site]]]) -> bool:
    """Whether some row of these heat maps reads an open block."""
    return any(site.open_block for _, sites in averaged for site in sites)


def sums_to_one(averaged: Sequence[tuple[str, Sequence[Site]]]) -> bool:
    """Whether these are softmax weights."""
    return all(abs(math.fsum(site.weights.values()) - 1) < 1e-3 for _, sites in averaged for site in sites)


def _role_words(role: str, sites: Sequence[Site]) -> str:
    """A role in words; the sites that read one mixture for everything are named by their kinds."""
    return ROLES.get(role, role) if role != "shared" else f"{numbers.listed(sorted({site.kind for site in sites}))} sites"


def _column(source: str) -> str:
    """A source's name as the head of its column: a sub-layer like the sites (`3 attn`), an open block like the closed one."""
    kind, _, layer = source.removesuffix(OPEN).partition(" ")
    return f"{layer} {KINDS[kind]}" if kind in KINDS and layer else source.removesuffix(OPEN)


def _heat_panel(arm: Arm, role: str, sites: Sequence[Site], single: bool) -> Panel:
    from matplotlib.patches import Rectangle

    sources = columns(sites)
    numbered = len(sources) <= NUMBERED_SOURCES
    room = (canvas.WIDTH - LABELS - EFFECTIVE) / len(sources)
    cell = max(MIN_NUMBERED, min(80.0, room)) if numbered else max(MIN_CELL, room)
    longest = max(len(s) for s in sources) * canvas.SMALL_SIZE * canvas.CHARACTER_WIDTH
    upright = longest > cell
    head = 22 + min(120.0, longest) if upright else 22.0
    width = max(canvas.WIDTH, LABELS + cell * len(sources) + EFFECTIVE)
    title = arm.label if single else f"{arm.label}: {_role_words(role, sites)}"
    height = canvas.heading_height(title, width) + head + CELL_HEIGHT * len(sites) + 6

    def paint(figure: Figure) -> None:
        top = canvas.heading(figure, title, "mean weight of each source (columns) at each site (rows)") + head
        for column, source in enumerate(sources):
            x = LABELS + cell * (column + 0.5)
            place: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor"} if upright else {"ha": "center"}
            shown = canvas.cut(source, 120, canvas.SMALL_SIZE)
            canvas.text(figure, x + (4 if upright else 0), top - 7, shown, fontsize=canvas.SMALL_SIZE, **place)
        right = LABELS + cell * len(sources) + EFFECTIVE - 4
        canvas.text(figure, right, top - 7, "eff.", fontsize=canvas.SMALL_SIZE, color=color("muted"), ha="right")
        for row, site in enumerate(sites):
            y = top + CELL_HEIGHT * row
            canvas.text(figure, LABELS - 10, y + 15, site.label, fontsize=canvas.SMALL_SIZE, color=color("muted"), ha="right")
            canvas.text(
                figure,
                right,
                y + 15,
                "" if site.effective is None else f"{site.effective:.2f}",
                fontsize=canvas.SMALL_SIZE,
                color=color("muted"),
                ha="right",
            )
            for source, weight in site.weights.items():
                x = LABELS + cell * sources.index(source)
                depth = min(1.0, max(0.0, weight)) ** (1 if numbered else 0.5)
                layers: list[dict[str, Any]] = [
                    {"facecolor": color("surface"), "edgecolor": color("rule"), "linewidth": 0.6},
                    {"facecolor": color("heat"), "alpha": depth, "linewidth": 0},
                ]
                if source == site.open_block:
                    layers.append({"facecolor": "none", "edgecolor": color("ink"), "linewidth": 0.9, "linestyle": (0, (1.2, 1.8))})
                corner = (x + 0.75, height - y - CELL_HEIGHT + 0.75)
                for style in layers:
                    figure.add_artist(Rectangle(corner, cell - 1.5, CELL_HEIGHT - 1.5, transform=None, **style))
                if numbered:
                    canvas.text(
                        figure,
                        x + cell / 2,
                        y + 15,
                        f"{weight:.2f}",
                        fontsize=canvas.SMALL_SIZE,
                        ha="center",
                        color=color("on-heat" if weight >= WHITE_FROM else "ink"),
                    )

    top_sources = "; ".join(f"{site.label}: mostly {max(site.weights, key=lambda s: site.weights[s])}" for site in sites)
    name = f"routing-{arm.index}-{canvas.slug(role)}"
    return canvas.draw(name, f"Mean routing weights of {title} per site and source. {top_sources}.", paint, width=width, height=height)


def _divergence_panel(lines: Sequence[tuple[Arm, Sequence[Sequence[tuple[int, float]]]]]) -> Panel:
    entries = [(arm.index, arm.label) for arm, _ in lines]

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        top = canvas.heading(figure, "QK-V divergence by layer", "Jensen-Shannon divergence, nats")
        ax = canvas.axes(figure, left=50, top=canvas.legend(figure, top, entries, markers=True) + 6)
        for arm, seeds in lines:
            hue = arm_color(arm.index)
            layers = sorted({layer for seed in seeds for layer, _ in seed})
            values = [[nats for seed in seeds for at, nats in seed if at == layer] for layer in layers]
            ax.vlines(layers, [min(v) for v in values], [max(v) for v in values], color=hue, linewidth=6, alpha=0.22)
            for layer, column in zip(layers, values, strict=True):
                ax.plot([layer] * len(column), column, "o", color=hue, markersize=4.5, alpha=0.65, markeredgewidth=0)
            ax.plot(
                layers, [math.fsum(v) / len(v) for v in values], color=hue, linewidth=2.2, marker=canvas.marker(arm.index), markersize=6
            )
        ax.set_ylim(bottom=0)
        canvas.decimal_ticks(ax.yaxis, *ax.get_ylim())
        ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        ax.set_xlabel("layer", color=color("muted"), fontsize=canvas.TEXT_SIZE)

    words = "; ".join(f"{arm.label}, {numbers.plural(len(seeds), 'seed')}" for arm, seeds in lines)
    height = 270 + canvas.legend_height([label for _, label in entries])
    return canvas.draw(
        "divergence", f"Jensen-Shannon divergence between query-key and value routing weights by layer. {words}.", paint, height=height
    )
