"""`depthroute boundaries`: block boundaries from a pilot run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where a run's consecutive sub-layers put out the least alike, and the --residual that cuts its blocks there."""

    run: tyro.conf.Positional[Path]
    """The pilot: a run folder with a checkpoint, of any residual method."""
    blocks: int = 8
    """How many blocks."""
    tokens: int = 32_768
    """How many validation tokens to average over."""
    data: Path | None = None
    """The token shards to read. Default: those the run names."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "boundaries", arguments)
    import torch

    from depthroute.analysis.boundaries import ends_of, output_similarity
    from depthroute.data import evaluation_windows
    from depthroute.train import load_trained
    from depthroute.train.run_data import run_data

    config, model = load_trained(options.run)
    held_out = run_data(options.run, config, options.data).held_out(limit=options.tokens)
    ends_of([0.0] * (config.model.body.sublayers - 1), options.blocks)  # a wrong number is refused before the model runs
    windows = evaluation_windows(held_out.tokens, config.model.context)
    similarity = output_similarity(model, (torch.from_numpy(batch[:, :-1]) for batch in windows))
    ends = ends_of(similarity, options.blocks)
    residual = f"block,ends=[{','.join(map(str, ends))}]"
    if options.json:
        print(json.dumps({"similarity": similarity, "ends": ends, "residual": residual}, indent=2))
        return
    kinds = ("attention", "mlp")
    for site, cosine in enumerate(similarity, start=1):
        cut = "  | block ends" if site in ends else ""
        print(f"{kinds[(site - 1) % 2]:>9} {(site - 1) // 2:<3} {kinds[site % 2]:>9} {site // 2:<3} {cosine:+.3f}{cut}")
    print(f"\n--residual '{residual}'")
