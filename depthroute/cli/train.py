"""`depthroute train`: one model in a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from depthroute.cli.options import changes, read, run_from


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train one model. The same command continues an interrupted run; a complete one is left as it is.

    A folder that holds a run already (an interrupted, converted or adopted one) goes on by itself: `depthroute train OUT`.
    """

    out: tyro.conf.Positional[Path]
    """The run folder."""
    data: Path | None = None
    """Token shards, made by `depthroute data`. Default: those that the run in OUT names."""
    recipe: str | None = None
    """A model shape and training recipe; `depthroute recipes` lists them. Default: that of the run in OUT, or `small`."""
    residual: str | None = None
    """NAME[:BLOCK][,FIELD=VALUE...]: prenorm, full, block:8, rd:8, low-rank:8,rank=64, ... Default: that of the run or recipe."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE"), tyro.conf.UseAppendAction] = ()
    """Change a field, such as train.steps=100, model.width=64 or train.seed=7."""
    parallel: str | None = None
    """How the processes that torchrun started share the run: `ddp`, `fsdp`, `pp:2`, `tp:2`, and products such as
    `pp:2,virtual=2,fsdp:4`; docs/parallel.md. It may change when the run goes on."""
    log: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SINK"), tyro.conf.UseAppendAction] = ()
    """Also send the numbers to `tensorboard`, `trackio` or `wandb`, each an optional package; docs/watching.md."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "train", arguments)
    from depthroute.common.config import override
    from depthroute.common.errors import RequestError
    from depthroute.parallel.layout import parse_layout
    from depthroute.parallel.world import first
    from depthroute.recipes import recipe
    from depthroute.train import recorded_config, train

    recorded = None if options.recipe or options.residual else recorded_config(options.out)
    if recorded is not None:
        config = override(recorded, changes(options.set) | ({"data": str(options.data)} if options.data else {}))
    elif options.data is not None:
        config = run_from(recipe(options.recipe or "small"), options.residual, options.data, options.set)
    else:
        raise RequestError("a new run needs --data, token shards made by `depthroute data`; without it OUT must hold a run.")
    layout = None if options.parallel is None else parse_layout(options.parallel)
    result = train(config, options.out, sinks=options.log, layout=layout)
    if first():
        print(f"{options.out}: {result['nll']:.4f} nats per token after {result['tokens']:,} tokens")
