"""The table of residual methods: as a terminal shows it, and as Markdown for the documentation."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.cost.summary import routing_percent
from depthroute.cost.traffic import least_traffic
from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig, Method

COLUMNS: dict[str, str] = {
    "method": "--residual",
    "equation": "what it computes",
    "parameters": "adds",
    "weights": "weights",
    "reads": "what a site reads",
    "degenerate": "degenerate case",
    "paper": "paper",
}
COSTS: dict[str, str] = {
    "method": "--residual",
    "state": "carries per token",
    "cost": "multiply-adds per token and site",
    "share": "of the body's, shape S",
    "moves": "moves per token and site, shape S",
    "notes": "mind",
}
# Shape S of the Role-Decoupled paper with its blocks of four layers, and keys of a quarter of the width where they have a rank.
SHAPE = ModelConfig(vocabulary=32_768, width=576, layers=16, heads=36, mlp_width=2_880, context=1_024)
BASE = AttnResConfig(layers_per_block=4, rank=144)


def row(method: Method) -> dict[str, str]:
    """Everything a method says of itself, as text."""
    facts = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    texts = {name: value for name, value in facts.items() if isinstance(value, str)}
    size = f"{method.name}:{method.size.upper()}" if method.size else method.name
    return texts | {
        "method": method.name,
        "sized": size,
        "weights": "dynamic" if method.dynamic else "static",
        **_counted(method),
        "degenerate": "; ".join(case.says for case in method.degenerate) or "the one that others become",
    }


def _counted(method: Method) -> dict[str, str]:
    """What it moves and computes in shape S; nothing for a method from outside, which has no formulas."""
    model = dataclasses.replace(SHAPE, residual=method.configure(BASE))
    share = routing_percent(model)
    try:
        moved = least_traffic(model).total
    except RequestError:
        return {"share": "", "moves": ""}
    return {
        "share": "" if share is None else f"{share:.2g} %" if share else "0",
        "moves": f"{moved / (2 * model.layers * model.width):.1f}d",
    }


def markdown(methods: Iterable[Method], columns: Mapping[str, str], further: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """A Markdown table. `further`: more columns by title, each with its text by method name."""
    further = further or {}
    lines = [[*columns.values(), *further], ["---"] * (len(columns) + len(further))]
    for method in methods:
        facts = row(method)
        cells = [f"`{facts[name]}`" if name == "method" else facts[name] for name in columns]
        lines.append([*cells, *(texts.get(method.name, "") for texts in further.values())])
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def show(methods: Iterable[Method], width: int | None = None) -> str:
    """The table as text, as wide as the terminal or `width`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS.values(), show_lines=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for method in methods:
        facts = row(method)
        table.add_row(*(Text(facts[name]) for name in COLUMNS))
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def details(method: Method) -> str:
    """All that is known of one method: its row, and the fields of its configuration with their defaults."""
    facts = row(method)
    config = method.configure(AttnResConfig())
    titles = {"label": "name", **COLUMNS, **COSTS}
    width = max(map(len, titles.values()))
    lines = [f"{titles[name]:<{width}}  {facts[name]}" for name in titles if facts.get(name) and name != "method"]
    lines += ["", f"{facts['sized']},FIELD=VALUE,...", "", inspect.cleandoc(type(config).__doc__ or "")]
    for base in type(config).__mro__[1:]:
        if dataclasses.is_dataclass(base) and dataclasses.fields(base):
            lines += ["", inspect.cleandoc(base.__doc__ or "")]
    lines += ["", *(f"  {field.name} = {_text(getattr(config, field.name))}" for field in dataclasses.fields(config))]
    return "\n".join([method.name, "", *lines]) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
