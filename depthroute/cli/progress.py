"""How far a long command has come, on standard error: one line that is rewritten on a terminal, now and then a line in a log file."""

from __future__ import annotations

import shutil
import sys
import time

from depthroute.common.say import say

SECONDS_ON_A_TERMINAL = 0.1
SECONDS_IN_A_LOG = 30.0
ERASE = "\r\033[K"


class Lines:
    """A context: what it left on the terminal is erased at its end."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic() if not self._terminal else float("-inf")
        self._drawn = False

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self._erase()

    def report(self, line: str) -> None:
        """Print a line that stays."""
        self._erase()
        say(line, sys.stderr)

    def progress(self, state: object) -> None:
        """Show how far it has come, `str(state)`; called as often as there is something new."""
        now = time.monotonic()
        if now - self._last < (SECONDS_ON_A_TERMINAL if self._terminal else SECONDS_IN_A_LOG):
            return
        self._last = now
        if not self._terminal:
            say(str(state), sys.stderr)
            return
        # A longer line would go on in the next one, and could not be rewritten.
        width = shutil.get_terminal_size().columns - 1
        say(f"{ERASE}{str(state)[:width]}", sys.stderr, end="")
        self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            say(ERASE, sys.stderr, end="")
            self._drawn = False
