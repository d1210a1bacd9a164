"""Answer the requests of one observer, on the thread that accepted its connection.

The answers do not depend on the executor or on an event loop, so they come also if all calls of the
worker are blocked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from telegrad.diagnosis.debugger import DebugSession
from telegrad.errors import ProtocolError, UsageError, error_text
from telegrad.transport.json_messages import JsonStream
from telegrad.transport.sockets import AuthenticatedSocket

_MAX_REQUEST = 1 << 16  # bytes
_IDLE_SECONDS = 300.0  # after which the connection of an observer is closed
_SEND_SECONDS = 10.0

_log = logging.getLogger(__name__)


def serve_observer(
    connection: AuthenticatedSocket, answer: Callable[[dict[str, Any]], Any], worker: str
) -> None:
    """Answer requests until the observer closes its connection. Never raise.

    A request for a debugger is the last one: the connection belongs to the debugger from then on.
    """
    stream = JsonStream(connection)
    try:
        while True:
            request = stream.receive(_MAX_REQUEST, time.monotonic() + _IDLE_SECONDS)
            if request is None:
                return
            if isinstance(request, dict) and request.get("operation") == "debug":
                _debug(stream, request, worker)
                return
            stream.send(_answer(request, answer), time.monotonic() + _SEND_SECONDS)
    except (OSError, ProtocolError) as error:
        _log.debug("the connection of an observer ended: %s", error)


def _debug(stream: JsonStream, request: dict[str, Any], worker: str) -> None:
    _log.warning("an observer debugs worker %r", worker)
    try:
        DebugSession(worker).serve(stream, str(request.get("thread", "")))
        end: dict[str, Any] = {"value": {"end": True}}
    except UsageError as error:
        end = {"error": error_text(error)}
    finally:
        _log.warning("the debugger of worker %r has detached", worker)
    stream.send(end, time.monotonic() + _SEND_SECONDS)


def _answer(request: Any, answer: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    try:
        if not isinstance(request, dict):
            raise ProtocolError("a request is a JSON object")
        return {"value": answer(request)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error_text(error)}"}
