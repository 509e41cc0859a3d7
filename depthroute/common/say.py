"""Words about work that goes on whether anybody reads them or not."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(text: str, file: TextIO | None = None, *, end: str = "\n") -> None:
    """Print at once, on standard output by default. What cannot be written (the pipe's reader has gone, the disk of a log is full) is lost,
    and so is what follows: work of hours does not end for it, nor does it leave out what it has to do on its way out."""
    file = sys.stdout if file is None else file
    try:
        print(text, end=end, file=file, flush=True)
    except OSError:
        drop(file)


def drop(file: TextIO | None) -> None:
    """Let what a stream holds, and all that is still written to it, go nowhere; or else Python tries to write it at its exit, and fails."""
    if file is None:  # it was closed before the start
        return
    with suppress(OSError):  # it is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, file.fileno())
        finally:
            os.close(nowhere)
