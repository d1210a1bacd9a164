"""`Dashboard`: the HTTP server of the page. It listens on loopback only.

The page itself contains no data, so everybody may load it. Requests for data need a token, in the
header ``Authorization``: the page takes it from the fragment of its address, which browsers send to
nobody, and keeps it for its own origin. There is no cookie, because browsers send the cookies of
one port to all ports. The token is derived from the secret of the group, so a page that is open
goes on when the server is started again.

The name in the header ``Host`` must be one of this host, so a page of another site cannot reach the
server by a name of its own that resolves to 127.0.0.1. Answers forbid other origins to read them,
and scripts other than the one of the page to run.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import logging
import re
import socketserver
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from telegrad.config import Config
from telegrad.dashboard.view import finite
from telegrad.dashboard.watcher import GroupWatcher
from telegrad.errors import TelegradError, UsageError
from telegrad.group.secret import group_key
from telegrad.observer import WorkerReply, attach
from telegrad.observer.tables import is_idle
from telegrad.timeouts import duration

PORT = 8642  # if it is free, and no other is asked for
_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost", "[::1]")
_MAX_PORT = 65535
_MAX_CONNECTIONS = 64
_MAX_SECONDS = 600.0  # of a trace
_TIMEOUT = 10.0  # seconds that a browser may take to send its request, or to take the answer
_SCRIPTS = ("charts.js", "tables.js", "graph.js", "training.js", "main.js")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_log = logging.getLogger(__name__)


def serve(
    rendezvous: str | None = None,
    address: str | None = None,
    pid: int | None = None,
    config: Config | None = None,
    timeout: float = 2.0,
    port: int | None = None,
    wait: bool = False,
) -> Dashboard:
    """Show a running group at `Dashboard.url`, until `Dashboard.close`.

    The group is found as by `telegrad.observer.attach`. With `wait`, it may start later. `port` is
    a port of this host, 0 for any that is free; by default it is 8642 if that is free.
    """
    config = config if config is not None else Config.from_environment()
    timeout = duration(timeout, positive=True)
    discover = partial(attach, rendezvous, address, pid, config, timeout)
    group = None if wait else discover()
    return Dashboard(GroupWatcher(discover, config, timeout, group), config, port)


def serve_job(environment: Mapping[str, str], rendezvous: str) -> Dashboard | None:
    """Show the workers of a job that starts, if ``TELEGRAD_DASHBOARD`` asks for it.

    ``1`` asks for the usual port; another number is a port.
    """
    wanted = environment.get("TELEGRAD_DASHBOARD", "").strip()
    if wanted in ("", "0"):
        return None
    if not wanted.isdecimal() or int(wanted) > _MAX_PORT:
        raise UsageError(f"TELEGRAD_DASHBOARD={wanted!r} is not 0, 1 or a port")
    port = None if wanted == "1" else int(wanted)
    return serve(rendezvous, config=Config.from_environment(environment), port=port, wait=True)


class Dashboard:
    """A server that shows what a watcher knows. It closes the watcher. `url` has the token."""

    def __init__(self, watcher: GroupWatcher, config: Config, port: int | None = None) -> None:
        self._watcher = watcher
        key = group_key(config.secret)
        token = hmac.new(key, b"telegrad dashboard", hashlib.sha256).hexdigest()[:32]
        try:
            self._server = _listen(port, partial(_RequestHandler, watcher, token, _Page()))
        except BaseException:
            watcher.close()
            raise
        self.port: int = self._server.server_address[1]
        self.url: str = f"http://{_HOST}:{self.port}/#token={token}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="telegrad-dashboard", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Dashboard at port {self.port}: {self._watcher!r}>"

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._watcher.close()


class _Page:
    """The page as one document, and the policy that lets only its own script and style work."""

    def __init__(self) -> None:
        folder = Path(__file__).parent / "page"
        style = (folder / "style.css").read_text()
        script = '"use strict";\n' + "\n".join((folder / name).read_text() for name in _SCRIPTS)
        frame = (folder / "index.html").read_text()
        text = frame.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
        self.data = text.encode()
        self.policy = "; ".join(
            [
                "default-src 'none'",
                f"script-src '{_hash(script)}'",
                f"style-src '{_hash(style)}'",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A thread for each request, up to a number of them. Further connections are closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * _MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: Callable[..., Any]) -> None:
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request of the dashboard failed", exc_info=True)


def _listen(port: int | None, handler: Callable[..., Any]) -> _Server:
    try:
        return _Server((_HOST, PORT if port is None else port), handler)
    except OSError as error:
        if port is not None:
            raise UsageError(
                f"the dashboard cannot listen on port {port}: {error.strerror}"
            ) from error
        return _Server((_HOST, 0), handler)


class _RequestHandler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server_version = "telegrad"
    sys_version = ""
    timeout = _TIMEOUT

    def __init__(self, watcher: GroupWatcher, token: str, page: _Page, *args: Any) -> None:
        self._watcher = watcher
        self._token = token
        self._page = page
        super().__init__(*args)

    def do_GET(self) -> None:
        """Send the page, or data if the token is right."""
        parts = urlsplit(self.path)
        if not self._is_for_this_host():
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "use the address 127.0.0.1 or localhost")
        elif parts.path == "/":
            self._send(self._page.data, "text/html; charset=utf-8", HTTPStatus.OK)
        elif not parts.path.startswith("/api/"):
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        elif self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            self._refuse(HTTPStatus.FORBIDDEN, "pages of other origins may not read this")
        elif not self._has_token():
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
        else:
            self._send_data(parts.path, parse_qs(parts.query))

    def _is_for_this_host(self) -> bool:
        host = self.headers.get("Host", "")
        return re.sub(r":\d+$", "", host).lower() in _NAMES

    def _has_token(self) -> bool:
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        expected = self._token.encode()
        return hmac.compare_digest(given.encode("utf-8", "replace"), expected) and kind == "Bearer"

    def _send_data(self, path: str, query: dict[str, list[str]]) -> None:
        try:
            if path == "/api/group":
                value: Any = self._watcher.group_view(history="history" in query)
            elif path == "/api/training":
                value = self._watcher.training_view()
            elif path == "/api/stacks":
                value = [_stacks(reply) for reply in self._watcher.stacks()]
            elif path == "/api/trace":
                value = self._watcher.trace(_seconds(query))
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is no such data")
                return
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except TelegradError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            self._send_json(value, HTTPStatus.OK)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send_json({"error": reason}, status)

    def _send_json(self, value: Any, status: HTTPStatus) -> None:
        self._send(json.dumps(finite(value)).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: HTTPStatus) -> None:
        self.send_response(status)
        for name, text in _HEADERS.items():
            self.send_header(name, text)
        self.send_header("Content-Security-Policy", self._page.policy)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except (TimeoutError, ConnectionError) as error:
            _log.debug("a browser did not take its answer: %s", error)

    def log_message(self, format: str, *args: Any) -> None:
        """Log to the logger of this module, not to stderr."""
        _log.debug(format, *args)


def _seconds(query: dict[str, list[str]]) -> float:
    seconds = float(query.get("seconds", ["10"])[0])
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(f"seconds must be from 0 to {_MAX_SECONDS:g}")
    return seconds


def _stacks(reply: WorkerReply) -> dict[str, Any]:
    threads = [] if reply.value is None else reply.value["threads"]
    return {
        "name": reply.worker.name,
        "problem": reply.problem,
        "threads": [{**thread, "idle": is_idle(thread)} for thread in threads],
    }
