"""Ctrl-C and SIGTERM as a wish to stop after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interruption:
    """While it is entered, the first SIGINT or SIGTERM sets `requested` and gives the signals back: a second one acts at once.

    Signals belong to the main thread; in another one nothing is caught.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None: set by something that is not Python, and only that could put it back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
