"""`depthroute convert`: a trained run in another form, exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Rewrite an AttnRes run so that its keys have few coordinates, without changing what it computes.

    The basis of the residual stream is turned until all route queries use its last coordinates only (Low-Rank AttnRes, Appendix B). Logits
    are compared in float64 before anything is written, and losses in the run's own precision; conversion.json has the numbers.
    """

    form: tyro.conf.Positional[Literal["low-rank"]]
    """What to convert to."""
    run: tyro.conf.Positional[Path]
    """A run folder with a checkpoint."""
    out: tyro.conf.Positional[Path]
    """The new run folder. It can be trained on; the optimiser then starts afresh."""
    rank: int | None = None
    """Coordinates of a key. Default: the joint rank of the route queries, the smallest that is exact."""
    data: Path | None = None
    """The token shards of the checks. Default: those the run names."""
    tokens: int = 4_096
    """How many validation tokens to compare losses on."""
    evaluate: bool = False
    """Then evaluate the new run as its training does at its end, so that it is complete. For a run at its last step."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "convert", arguments)
    from depthroute.convert import convert_low_rank

    found = convert_low_rank(
        options.run, options.out, rank=options.rank, data=options.data, tokens=options.tokens, evaluate=options.evaluate
    )
    if options.json:
        print(json.dumps(found, indent=2))
        return
    exact, losses = found["float64"], found["cross_entropy"]
    print(f"{options.out}: rank {found['rank']}; {found['queries']} route queries have the joint rank {found['joint_rank']}")
    print(f"float64 logits differ by {exact['logits_max_difference']:.1e} of {exact['logits_max']:.1e} ({exact['tokens']:,} tokens)")
    print(
        f"{losses['precision']} loss {losses['original']:.6f} before, {losses['converted']:.6f} after: {losses['difference']:+.1e} nats "
        f"({losses['tokens']:,} tokens)"
    )
    if found["head_untied"]:
        print("the head is no longer tied to the embedding: it has absorbed the gain of the final norm")
