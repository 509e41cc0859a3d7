"""`depthroute train`: one model in a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from depthroute.cli.options import read, run_from


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train one model. The same command continues an interrupted run; a complete one is left as it is."""

    out: tyro.conf.Positional[Path]
    """The run folder."""
    data: Path
    """Token shards, made by `depthroute data`."""
    recipe: str = "small"
    """A model shape and training recipe; `depthroute recipes` lists them."""
    residual: str | None = None
    """NAME[:BLOCK][,FIELD=VALUE...]: prenorm, full, block:8, rd:8, low-rank:8,rank=64, ... Default: the recipe's own."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """Change a field, such as train.steps=100, model.width=64 or train.seed=7."""
    log: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SINK"), tyro.conf.UseAppendAction] = ()
    """Also send the numbers to `tensorboard`, `trackio` or `wandb`, each an optional package; docs/watching.md."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "train", arguments)
    from depthroute.recipes import recipe
    from depthroute.train import train

    config = run_from(recipe(options.recipe), options.residual, options.data, options.set)
    result = train(config, options.out, sinks=options.log)
    print(f"{options.out}: {result['nll']:.4f} nats per token after {result['tokens']:,} tokens")
