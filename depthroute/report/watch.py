"""The live page of a study: a small server on this machine's loopback address that only reads.

No account, nothing from outside: the page, its script and its numbers come from here alone. The server answers GET and HEAD, writes no
file, and refuses a request whose Host is not a name of the loopback address, so that a page of the web whose name was made to lead here
cannot read a study. Texts of a study reach the page as JSON and are put in as text.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from depthroute import __version__
from depthroute.common.errors import DepthrouteError, RequestError
from depthroute.report.theme import css_variables
from depthroute.report.watch_feed import Feed

ADDRESS = "127.0.0.1"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")  # the last two: the other ends of a tunnel
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
PATIENCE_SECONDS = 30  # with a connection that says nothing
HERE = Path(__file__).parent


class WatchServer(ThreadingHTTPServer):
    """Serves the live page of the study in `directory` at `address` once `serve_forever` is called.

    Args:
        port: Of the loopback address; 0 takes a free one.

    Raises:
        RequestError: the folder holds no study, or the port is not allowed or taken.
        FailureError: the plan was changed after it was written.
    """

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise RequestError(f"port = {port} is not allowed; it is 0 (any free one) to 65535.")
        self.feed = Feed(Path(directory))
        style = [css_variables(), *((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "watch.css"))]
        page = (HERE / "watch.html").read_text(encoding="utf-8").replace("{version}", __version__)
        self.files = {
            "/": ("text/html; charset=utf-8", page.encode()),
            "/watch.css": ("text/css; charset=utf-8", "".join(style).encode()),
            "/watch.js": ("text/javascript; charset=utf-8", (HERE / "watch.js").read_bytes()),
        }
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                why = "is in use" if error.errno == errno.EADDRINUSE else "may not be used by you"
                raise RequestError(f"port {port} {why}; give another one, or leave --port out for a free one.") from error
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """A page that was closed while it was being answered is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    # HTTP/1.0, the default: a connection for each answer, so that no thread waits for a page and a server that was closed is silent.
    timeout = PATIENCE_SECONDS

    def do_GET(self) -> None:
        if not _names_loopback(self.headers.get("Host", "")):
            self._text(HTTPStatus.MISDIRECTED_REQUEST, "This page is served to this machine alone: open it at 127.0.0.1 or localhost.\n")
            return
        asked = urlsplit(self.path)
        if asked.path in self.server.files:
            self._answer(HTTPStatus.OK, *self.server.files[asked.path])
        elif asked.path == "/data":
            self._data(parse_qs(asked.query, max_num_fields=4))
        else:
            self._text(HTTPStatus.NOT_FOUND, "There is nothing here.\n")

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Callable[[], None]:
        # http.server looks for do_METHOD, and answers 501 where there is none
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        self._text(HTTPStatus.METHOD_NOT_ALLOWED, "This server only reads: GET and HEAD.\n", Allow="GET, HEAD")

    def _data(self, query: dict[str, list[str]]) -> None:
        try:
            have = _parse_have(query.get("have", [""])[0])
        except ValueError:
            self._text(HTTPStatus.BAD_REQUEST, "have is not a list of reading.points.validations.\n")
            return
        try:
            status, answer = HTTPStatus.OK, self.server.feed.answer(query.get("plan", [""])[0], have)
        except (DepthrouteError, OSError) as error:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        self._answer(status, "application/json", json.dumps(answer, separators=(",", ":")).encode())

    def _text(self, status: HTTPStatus, words: str, **headers: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", words.encode(), **headers)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers | {"Content-Type": kind, "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "depthroute"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to the user."""


def _names_loopback(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, "0"
    return name.lower() in LOOPBACK_NAMES and port.isascii() and port.isdigit()


def _parse_have(text: str) -> list[tuple[int, int, int]]:
    have = []
    for part in text.split(",") if text else ():
        reading, points, validations = map(int, part.split("."))
        if min(reading, points, validations) < 0:
            raise ValueError(part)
        have.append((reading, points, validations))
    return have
