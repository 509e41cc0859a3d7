"""Headless Chromium driven over its debugging pipe with the standard library: load a page, measure it, photograph it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on 4; subprocess cannot place descriptors, so a small process does and becomes it.
LAUNCH = (
    "import fcntl, os, sys\n"
    "ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]\n"
    "for place, end in zip((3, 4), ends):\n    os.dup2(end, place, inheritable=True)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class Browser:
    """One Chromium process with a profile of its own, ended with the context."""

    def __init__(self, executable: str) -> None:
        self._executable = executable
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._buffer = b""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._send = os.pipe()
        self._receive, answers = os.pipe()
        arguments = [self._executable, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(commands), str(answers), *arguments],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._command("Browser.close")
            self._process.wait(10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._send)
        os.close(self._receive)
        self._profile.cleanup()

    def open(self, address: str, *, width: int, height: int = 900, scheme: str = "light") -> Page:
        """Load an address at a width in CSS pixels, in a colour scheme, and wait until it has loaded."""
        target = self._command("Target.createTarget", url="about:blank")["targetId"]
        session = self._command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.command(f"{domain}.enable")
        page.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.command("Page.navigate", url=address)
        page.wait("Page.loadEventFired")
        return page

    def _command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._receive, 1 << 16)
            if not received:
                raise RuntimeError("Chromium ended before it answered")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """One open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser._command(method, self._session, **parameters)

    def wait(self, event: str) -> None:
        deadline = time.monotonic() + 30
        while not self.events(event):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {event} within 30 s")
            self._browser._events.append(self._browser._next())

    def events(self, *names: str) -> list[dict[str, Any]]:
        """What the page reported so far under these names."""
        return [e for e in self._browser._events if e.get("sessionId") == self._session and e["method"] in names]

    def evaluate(self, expression: str) -> Any:
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, from top to bottom."""
        picture = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))
