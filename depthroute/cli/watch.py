"""`depthroute watch`: the live page of a study, on this machine alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """Serve a page that shows a study while it runs: curves, paired differences, every cell. It only reads; Ctrl-C ends it."""

    study: tyro.conf.Positional[Path]
    """The study folder; it may be finished, or planned and not begun."""
    port: int = 0
    """The port of 127.0.0.1. Default: a free one."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "watch", arguments)
    from depthroute.report.watch import WatchServer

    with suppress(KeyboardInterrupt), WatchServer(options.study, options.port) as server:
        print(f"{options.study}: {server.address} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
