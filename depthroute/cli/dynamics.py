"""`depthroute dynamics`: runs side by side, as Figure 5 of Attention Residuals."""

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
    """Validation loss, and what layers hand on and its gradient by depth, of several trained runs: JSON, and a page."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders with a checkpoint, on the same data; or checkpoint folders of them."""
    out: Path
    """Where to write."""
    tokens: int = 16_384
    """Validation tokens for magnitudes and gradients."""
    data: Path | None = None
    """The token shards to read. Default: those the runs name."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "dynamics", arguments)
    from depthroute.analysis.dynamics import dynamics
    from depthroute.common.errors import RequestError
    from depthroute.report.dynamics_page import check_runs, write_dynamics

    if options.tokens < 1:
        raise RequestError(f"--tokens {options.tokens} is not allowed; it takes 1 or more.")
    check_runs(len(options.runs))
    dynamics(options.runs, options.out, data=options.data, tokens=options.tokens, report=lambda line: say(line, sys.stderr))
    print(f"dynamics: {write_dynamics(options.out)}")
