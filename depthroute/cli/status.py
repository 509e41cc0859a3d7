"""`depthroute status`: where the cells of a study are."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from depthroute.cli.options import read

if TYPE_CHECKING:
    from depthroute.study.live import Live

REFRESH_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show every cell of a study, running or not: step, loss, speed, memory, time left, and why one failed. Reads files alone.

    On a terminal the table follows a running study until it ends, or Ctrl-C; elsewhere it is written once.
    """

    study: tyro.conf.Positional[Path]
    """The study folder."""
    once: bool = False
    """Write the table once and end."""
    json: bool = False
    """Once, as JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "status", arguments)
    from depthroute.study.live import read_live
    from depthroute.study.status import status_lines

    if options.json:
        print(json.dumps(asdict(read_live(options.study)), indent=2))
    elif options.once or not sys.stdout.isatty():
        print("\n".join(status_lines(read_live(options.study))))
    else:
        _follow(options.study)


def _follow(directory: Path) -> None:
    from rich.console import Console
    from rich.live import Live as Screen
    from rich.text import Text

    from depthroute.study.live import read_live
    from depthroute.study.status import status_lines

    def table(state: Live) -> Text:
        # As many cells as the terminal has lines for; the others are counted in the first line.
        return Text("\n".join(status_lines(state, width=console.width, height=console.height - 1)), no_wrap=True, overflow="ellipsis")

    console = Console()
    state = read_live(directory)
    with Screen(table(state), console=console, auto_refresh=False) as screen:
        while state.running:
            time.sleep(REFRESH_SECONDS)
            state = read_live(directory)
            screen.update(table(state), refresh=True)
