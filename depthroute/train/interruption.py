"""Ctrl-C and SIGTERM as a wish to stop after the current step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SAME_SECONDS = 5.0


class Interruption:
    """While it is entered, it counts SIGINT and SIGTERM, up to `limit`, and then gives the signals back: one more acts at once.

    A SIGTERM that follows within seconds may be the same one, see `passed_on`. Signals belong to the main thread; in another one nothing is
    caught.
    """

    def __init__(self, *, limit: int = 1, passed_on: bool = False) -> None:
        """`passed_on`: torchrun passes SIGTERM on, also to processes that have had it already, so that a second one says nothing new."""
        self.count = 0
        self._limit = limit
        self._passed_on = passed_on
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether there was one."""
        return self.count > 0

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.count < self._limit:
            self.count, self._since = self.count + 1, time.monotonic()
            if self.count == self._limit:
                self._restore(keep=signal.SIGTERM if self._passed_on else None)
        elif time.monotonic() - self._since > SAME_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self, keep: int | None = None) -> None:
        for number in self._previous.keys() - {keep}:
            handler = self._previous.pop(number)
            # None: set by something that is not Python, and only that could put it back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
