"""`depthroute info`: what a recipe, a run or prepared data holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from depthroute.cli.options import changes, read, show


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parameters, shape and routing cost of a recipe or run; counts and hashes of prepared data."""

    target: tyro.conf.Positional[str]
    """A recipe (`depthroute recipes` lists them), a run folder, or a folder of token shards."""
    residual: str | None = None
    """For a recipe: NAME[:BLOCK][,FIELD=VALUE...], such as block:8 or rd:8,rank=64."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """For a recipe: change a field of the model, such as model.width=640."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "info", arguments)
    from depthroute.cli.facts import facts_of

    show(facts_of(options.target, options.residual, changes(options.set)), options.json)
