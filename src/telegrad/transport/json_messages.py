"""JSON messages over an authenticated connection: a length of four bytes, then the text.

Observers use them. Nothing is unpickled, and the receiver limits the length of a message. On a TCP
connection the bytes travel in records, like frames.
"""

from __future__ import annotations

import json
import select
import struct
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.transport.records import RecordError, set_timeout
from telegrad.transport.sockets import AuthenticatedSocket

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18


class JsonStream:
    """Send and receive values of JSON over one connection. Used by one thread at a time.

    Deadlines are times of `time.monotonic`. `TimeoutError` is raised when one has passed.
    """

    def __init__(self, connection: AuthenticatedSocket) -> None:
        self._sock = connection.sock
        self._records = connection.records

    def __repr__(self) -> str:
        return f"<JsonStream {self._sock!r}>"

    def send(self, value: Any, deadline: float) -> None:
        """Send a value."""
        text = json.dumps(value, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(text)) + text
        set_timeout(self._sock, deadline)
        self._sock.sendall(data if self._records is None else self._records.encode(data))

    def receive(self, max_bytes: int, deadline: float) -> Any:
        """Return the next value; None at the end of the connection."""
        head = self._receive(_LENGTH.size, deadline)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > max_bytes:
            raise ProtocolError(f"a message of {length} bytes exceeds the limit of {max_bytes}")
        text = self._receive(length, deadline)
        if text is None:
            raise ProtocolError("the connection ended inside a message")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"received a message that is not JSON: {error}") from None

    def is_readable(self) -> bool:
        """Return whether something was received, or the connection has ended."""
        try:
            return bool(select.select([self._sock], [], [], 0)[0])
        except (OSError, ValueError):  # it was closed here
            return True

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _receive(self, count: int, deadline: float) -> bytes | None:
        """Receive `count` bytes; None if the connection ends before the first."""
        data = bytearray(count)
        view, filled = memoryview(data), 0
        while filled < count:
            size = self._receive_some(view[filled:], deadline)
            if size is None:
                if filled:
                    raise ProtocolError("the connection ended inside a message")
                return None
            filled += size
        return bytes(data)

    def _receive_some(self, space: memoryview, deadline: float) -> int | None:
        """Receive up to `len(space)` bytes; None at the end of the connection."""
        if self._records is None:
            set_timeout(self._sock, deadline)
            return self._sock.recv_into(space) or None
        try:
            size = self._records.read_into(space)
            if size:
                return size
            set_timeout(self._sock, deadline)
            received = self._sock.recv_into(self._records.get_buffer())
            if not received:
                return None
            self._records.buffer_updated(received)
            return self._records.read_into(space)
        except RecordError as error:
            raise ProtocolError(str(error)) from None
