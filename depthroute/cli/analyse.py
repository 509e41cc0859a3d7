"""`depthroute analyse`: what a trained run routes, how sharply, and what of it matters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from depthroute.cli.options import read
from depthroute.common.say import say


@dataclass(frozen=True, kw_only=True)
class Options:
    """Analyse a trained run on held-out text: JSON, arrays, and a page."""

    run: tyro.conf.Positional[Path]
    """A run folder with a checkpoint, or one of its checkpoint folders."""
    out: Path | None = None
    """Where to write. Default: RUN/analysis."""
    tokens: int = 65_536
    """Validation tokens for reads and mixing."""
    dear_tokens: int = 4_096
    """Tokens for magnitudes, gradients, routing feedback and the logit lens."""
    probe_tokens: int = 8_192
    """Tokens for causal probes, each of which runs the model again; 0 leaves them out."""
    text: str | None = None
    """What the token view shows. Default: the beginning of the validation split."""
    data: Path | None = None
    """The token shards to read. Default: those the run names."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "analyse", arguments)
    from depthroute.analysis.analyse import analyse
    from depthroute.common.errors import RequestError
    from depthroute.report.analysis_page import write_analysis
    from depthroute.train.run_folder import root_of

    for name in ("tokens", "dear_tokens", "probe_tokens"):
        value = getattr(options, name)
        least = 0 if name == "probe_tokens" else 1
        if value < least:
            raise RequestError(f"--{name.replace('_', '-')} {value} is not allowed; it takes {least} or more.")
    run = options.run
    out = options.out or root_of(run) / "analysis"
    analyse(
        run, out, data=options.data, tokens=options.tokens, dear_tokens=options.dear_tokens, probe_tokens=options.probe_tokens,
        text=options.text, report=lambda line: say(line, sys.stderr),
    )  # fmt: skip
    print(f"analysis: {write_analysis(out)}")
