"""Answer the requests of one observer, on the thread that accepted its connection.

The answers do not depend on the executor or on an event loop, so they come also if all calls of the
worker are blocked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from telegrad.errors import ProtocolError, error_text
from telegrad.transport.json_messages import JsonStream
from telegrad.transport.sockets import AuthenticatedSocket

_MAX_REQUEST = 1 << 16  # bytes
_IDLE_SECONDS = 300.0  # after which the connection of an observer is closed
_SEND_SECONDS = 10.0

_log = logging.getLogger(__name__)


def serve_observer(
    connection: AuthenticatedSocket, answer: Callable[[dict[str, Any]], Any]
) -> None:
    """Answer requests until the observer closes its connection. Never raise."""
    stream = JsonStream(connection)
    try:
        while True:
            request = stream.receive(_MAX_REQUEST, time.monotonic() + _IDLE_SECONDS)
            if request is None:
                return
            stream.send(_answer(request, answer), time.monotonic() + _SEND_SECONDS)
    except (OSError, ProtocolError) as error:
        _log.debug("the connection of an observer ended: %s", error)


def _answer(request: Any, answer: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    try:
        if not isinstance(request, dict):
            raise ProtocolError("a request is a JSON object")
        return {"value": answer(request)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error_text(error)}"}
