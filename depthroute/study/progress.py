"""What a running study shows: a bar on a terminal, and a line when a cell ends anywhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from depthroute.common.files import read_json
from depthroute.study.plan import cells, run_folder

REFRESH_SECONDS = 1.0
# Without a terminal a line is kept for good, so there are few.
REFRESH_SECONDS_IN_A_FILE = 30.0


class Progress:
    """Progress across the cells of a study, read from their run folders."""

    def __init__(self, plan: Mapping[str, Any], directory: Path, *, enabled: bool) -> None:
        self._plan, self._directory, self._enabled = plan, directory, enabled
        self._steps = {arm["name"]: arm["config"]["train"]["steps"] for arm in plan["arms"]}
        self._live = enabled and sys.stdout.isatty()
        self._width = 0
        self._begun: tuple[float, int] | None = None
        self._next = 0.0

    def __enter__(self) -> Progress:
        if self._enabled:
            self._next = time.monotonic() + (0 if self._live else REFRESH_SECONDS_IN_A_FILE)
            arms = ", ".join(self._steps)
            self.say(f"Study {self._plan['name']}: {arms}; {len(self._plan['seeds'])} seeds each.")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clear()
