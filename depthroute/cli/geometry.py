"""`depthroute geometry`: what the route queries of a checkpoint span."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from depthroute.cli.options import read

if TYPE_CHECKING:
    from depthroute.analysis.geometry import GroupUse, QueryGeometry


@dataclass(frozen=True, kw_only=True)
class Options:
    """Joint rank, effective dimensions and exact zeros of a checkpoint's route queries. Only routing tensors are read."""

    checkpoint: tyro.conf.Positional[Path]
    """A run folder, a safetensors file, an index of shards, or a folder with either: depthroute, Kimi K3, flash-linear-attention."""
    query_pattern: str | None = None
    """For another layout: a regular expression of the queries' whole names, with the named group site, or layer and kind; role if any."""
    gain_pattern: str | None = None
    """The same for the gains of the key norms. A query has the gain whose groups say the same."""
    unused: bool = False
    """Count queries that are stored and never executed as well: the read before the first attention has one source."""
    json: bool = False
    """Print JSON: with every singular value and every query."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "geometry", arguments)
    from depthroute.analysis.geometry import query_geometry
    from depthroute.analysis.routing_tensors import Layout, read_routing
    from depthroute.common.errors import RequestError

    if options.gain_pattern is not None and options.query_pattern is None:
        raise RequestError("--gain-pattern needs --query-pattern: a gain belongs to a query.")
    layout = None if options.query_pattern is None else Layout(name="pattern", query=options.query_pattern, gain=options.gain_pattern)
    geometry = query_geometry(read_routing(options.checkpoint, layout), unused=options.unused)
    print(json.dumps(geometry.facts, indent=2) if options.json else _text(geometry))


def _text(found: QueryGeometry) -> str:
    kinds: dict[str, GroupUse] = {kind: found.kinds[kind] for kind in ("attention", "mlp", "layer", "output") if kind in found.kinds}
    roles = {f"role {name}": group for name, group in found.roles.items()} if len(found.roles) > 1 else {}
    groups = {**kinds, **roles, "all": found.total}
    width = max(map(len, groups))
    lines = [f"{'':<{width}}  queries  rank  effective dimension        zeros: float32  float64"]
    for name, group in groups.items():
        zeros = f"{group.zeros_float32 / group.coordinates:>14.1%}  {group.zeros_float64 / group.coordinates:>7.1%}"
        dimension = f"{group.effective_dimension_float32:>10,.1f} ({group.width_fraction:.1%})"
        lines.append(f"{name:<{width}}  {group.queries:>7}  {group.rank:>4}  {dimension:<25}{zeros}")
    total = found.total
    unused = f"; without a choice, left out: {', '.join(found.unused)}" if found.unused else ""
    counted = found.singular_values[found.rank - 1] if found.rank else 0.0
    lines += [
        "",
        f"layout           {found.layout}, width {found.width:,}, {found.parameters:,} routing parameters",
        f"sites            {found.stored_sites} stored, {found.active_sites} active{unused}",
        f"joint rank       {found.rank} of {total.queries} queries; singular values {found.singular_values[0]:.3g} to {counted:.3g}, "
        f"zero up to {found.tolerance:.1g}",
        f"energy           90 % in {found.directions(0.9)}, 99 % in {found.directions(0.99)} singular directions",
        f"mean dimension   {total.effective_dimension_float32:,.1f} with products in float32, "
        f"{total.effective_dimension_float64:,.1f} in float64",
        f"zeros            {total.zeros_float32:,} of {total.coordinates:,} in float32, {total.zeros_float64:,} in float64: "
        f"{total.underflows:,} by underflow",
    ]
    return "\n".join(lines)
