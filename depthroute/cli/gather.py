"""`depthroute gather`: sharded checkpoints as whole files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make whole files of the shards that a parallel run wrote: model.safetensors and optimizer.safetensors, bit for bit, in their place.

    All commands read both forms; other programs read the whole files. The run may go on from either, on any number of processes.
    """

    run: tyro.conf.Positional[Path]
    """A run folder, or one checkpoint folder of a run."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "gather", arguments)
    from depthroute.train.sharded import gather

    found = gather(options.run)
    done = [checkpoint for checkpoint, had_shards in found.items() if had_shards]
    if options.json:
        before = [str(checkpoint) for checkpoint, had_shards in found.items() if not had_shards]
        print(json.dumps({"gathered": [str(checkpoint) for checkpoint in done], "whole_before": before}, indent=2))
        return
    for checkpoint in done:
        print(f"{checkpoint}: model.safetensors and optimizer.safetensors in place of its shards")
    if not done:
        print(f"{options.run}: nothing to do, {'no checkpoint has shards' if found else 'it has no checkpoint yet'}")
