"""`WorkerConnection`: an observer's connection to one worker, and its requests.

The observer proves that it knows the secret, as a worker does, and introduces itself with the
purpose ``observe``. The messages are JSON.

State: `_stream`, None while there is no connection. Used by one thread at a time.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from telegrad.config import Config
from telegrad.errors import AuthenticationError, ProtocolError, TelegradError
from telegrad.group.secret import group_key
from telegrad.transport import sockets
from telegrad.transport.json_messages import JsonStream
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake
from telegrad.wire.admission_token import make_token

MAX_REPLY = 1 << 28  # bytes
_log = logging.getLogger(__name__)
_INCARNATION = f"observer-{secrets.token_hex(8)}"
_CLOSED = "it has closed the connection"


class NoAnswer(TelegradError):
    """A worker did not answer in time, or cannot be reached."""


class Credentials:
    """What an observer proves that it knows, and how it encrypts TCP connections."""

    def __init__(self, config: Config) -> None:
        self.key = group_key(config.secret)
        self.tls = TlsContexts(config, self.key)


class WorkerConnection:
    """Requests to the worker at one of these addresses. It connects when it is needed."""

    def __init__(self, addresses: Sequence[str], credentials: Credentials, group: str = "") -> None:
        # unix addresses first: they work on this host only, and fail at once elsewhere
        self.addresses = sorted(addresses, key=lambda address: not address.startswith("unix:"))
        self._credentials = credentials
        self._group = group
        self._stream: JsonStream | None = None

    def __repr__(self) -> str:
        state = "not connected" if self._stream is None else "connected"
        return f"<WorkerConnection {self.addresses} {state}>"

    def request(self, operation: str, timeout: float, **options: Any) -> Any:
        """Return the answer of the worker. Raise `NoAnswer` if there is none within `timeout`."""
        until = time.monotonic() + timeout
        try:
            reply = self._exchange({"operation": operation, **options}, until)
        except TimeoutError:
            self.close()
            raise NoAnswer(f"no answer for {timeout:g} s") from None
        except (OSError, ProtocolError) as error:
            self.close()
            raise NoAnswer(_reason(error)) from error
        if "error" in reply:
            raise NoAnswer(str(reply["error"]))
        return reply["value"]

    def _exchange(self, request: dict[str, Any], until: float) -> dict[str, Any]:
        """Send a request and return the reply. Connect first, and again if the worker closed."""
        if self._stream is not None:
            try:
                self._stream.send(request, until)
                reply = self._stream.receive(MAX_REPLY, until)
                if reply is not None:
                    return dict(reply)
            except ConnectionError as error:
                _log.debug("connecting again: %s", error)
            self.close()
        self._stream = self._connect(until)
        self._stream.send(request, until)
        reply = self._stream.receive(MAX_REPLY, until)
        if reply is None:
            raise ProtocolError(_CLOSED)
        return dict(reply)

    def converse(
        self, operation: str, timeout: float, **options: Any
    ) -> tuple[JsonStream, dict[str, Any]]:
        """Open a connection for a request with many answers. Return it with the first of them."""
        until = time.monotonic() + timeout
        stream: JsonStream | None = None
        try:
            stream = self._connect(until)
            stream.send({"operation": operation, **options}, until)
            reply = stream.receive(MAX_REPLY, until)
            if reply is None:
                raise ProtocolError(_CLOSED)
            return stream, dict(reply)
        except (OSError, ProtocolError) as error:
            if stream is not None:
                stream.close()
            if isinstance(error, TimeoutError):
                raise NoAnswer(f"no answer for {timeout:g} s") from None
            raise NoAnswer(_reason(error)) from error

    def close(self) -> None:
        """Close the connection. The next request opens another."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _connect(self, until: float) -> JsonStream:
        failure: Exception = ConnectionRefusedError("no address of this worker can be used here")
        for address in self.addresses:
            if address.startswith("memory:"):
                continue
            try:
                return self._connect_to(address, until)
            except AuthenticationError:
                raise
            except (OSError, ProtocolError) as error:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                failure = error
        raise failure

    def _connect_to(self, address: str, until: float) -> JsonStream:
        sock = sockets.connect(address, _left(until))
        introduction = {
            "name": "observer",
            "incarnation": _INCARNATION,
            "group": self._group,
            "purpose": "observe",
            "heartbeat": 0,
            "unix": "",
            "address": address,
            "session": "",
            "received": -1,
        }
        connection = sockets.authenticate(
            sock,
            self._credentials.tls,
            lambda binding: handshake.client(self._credentials.key, introduction, binding),
            token=make_token(self._credentials.key, address),
            server_side=False,
            timeout=_left(until),
        )
        return JsonStream(connection)


def _left(until: float) -> float:
    # never 0: what is opened in time must be closed by the function that finds it late
    return max(until - time.monotonic(), 1e-3)


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "ended (connection refused)"
    if isinstance(error, ConnectionResetError | BrokenPipeError):  # before it read the request
        return _CLOSED
    return str(error)
