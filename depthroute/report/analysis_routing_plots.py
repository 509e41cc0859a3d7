"""What one model reads: effective sources by site, its heat maps, and how far its roles part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from depthroute.report import numbers
from depthroute.report.analysis_depth_plots import Line, depth_panel, finite, line, role_words
from depthroute.report.document import Block, Details, FigureBlock
from depthroute.report.routing_plots import divergence_figure, heat_figures
from depthroute.report.stored import Arm, Cell, StoredStudy

FEW = 4  # panels that are shown; more are folded away, so that they do not hide the rest


def routing_blocks(routing: Mapping[str, Any], label: str) -> list[Block]:
    """Every figure that can be made from the content of a routing.json."""
    sites = [site for site in routing.get("sites") or [] if site.get("roles")]
    alone = _study_of_one({**routing, "sites": sites}, label)
    maps = [replace(figure, caption=_without_seeds(figure.caption)) for figure in heat_figures(alone)]
    parted = divergence_figure(alone)
    found: list[Block | None] = [effective_figure(sites)]
    found += [figure if len(figure.panels) <= FEW else Details("Every role, site by site", [figure]) for figure in maps]
    found += [replace(parted, caption=_without_seeds(parted.caption))] if parted is not None else []
    return [block for block in found if block is not None]


def effective_figure(sites: Sequence[Mapping[str, Any]]) -> FigureBlock | None:
    """The effective number of sources by site, a line a role, with one standard deviation over tokens to each side."""
    roles = list(dict.fromkeys(role for site in sites for role in site["roles"]))
    lines = [line(role_words(role), _rows(sites, role), "mean", low="low", high="high") for role in roles]
    available = Line("sources", [(site["site"], len(site["sources"])) for site in sites])
    panel = depth_panel(
        "effective-sources", "Effective sources by site", "exp of the entropy of a token's weights", lines, floor=0.0, limit=available
    )
    caption = (
        "The effective number of sources of a token is exp of the entropy of its weights (Low-Rank Attention Residuals, Eq. 14): one "
        "where a single source has all the weight, all of them where they share it evenly. Points are means over tokens, bars one "
        "standard deviation over tokens to each side, the dotted line the number of sources there are."
    )
    return FigureBlock("How many sources a token reads.", caption, [panel]) if panel else None


def mean_effective(routing: Mapping[str, Any]) -> tuple[float, float] | None:
    """Effective sources and sources, both averaged over the sites and roles that have a choice."""
    found = [
        (effective, float(len(site["sources"])))
        for site in routing.get("sites") or []
        for of_role in site["roles"].values()
        for effective in [finite(of_role.get("effective_sources"))]
        if effective is not None and len(site["sources"]) > 1
    ]
    return (sum(e for e, _ in found) / len(found), sum(n for _, n in found) / len(found)) if found else None


def _rows(sites: Sequence[Mapping[str, Any]], role: str) -> list[dict[str, Any]]:
    rows = []
    for site in sites:
        of_role = site["roles"].get(role, {})
        mean, sd = finite(of_role.get("effective_sources")), finite(of_role.get("effective_sources_sd"))
        # A standard deviation can reach past what a count of sources can be.
        low = None if mean is None or sd is None else max(1.0, mean - sd)
        high = None if mean is None or sd is None else min(float(len(site["sources"])), mean + sd)
        rows.append({"site": site["site"], "mean": mean, "low": low, "high": high})
    return rows


def _study_of_one(routing: Mapping[str, Any], label: str) -> StoredStudy:
    """One model as the only run of a study, for the figures that studies have."""
    arm = Arm(index=2, name="model", label=label, config={}, seeds=[0])
    cell = Cell(
        arm="model", seed=0, result={}, environment={}, fingerprint=None, metrics=[], evaluations=[], routing=routing, reason=None,
        nll=None, folder=None,
    )  # fmt: skip
    return StoredStudy(plan={}, arms=[arm], seeds=[0], comparisons=[], claims=[], plan_intact=None, cells={("model", 0): cell})


def _without_seeds(caption: str) -> str:
    seed = numbers.plural(1, "seed")
    caption = caption.replace(f"Mean over {seed} and", "Mean over").replace(f" Mean over {seed}.", "")
    return caption.replace(" tokens each", " tokens").replace(" One seed.", "")
