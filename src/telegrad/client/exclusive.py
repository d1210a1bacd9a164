"""`ExclusiveConnection`: a connection for one call at a time; the calling thread reads the reply.

State: a connection is used by one thread at a time, which takes it from the idle connections of its
`Peer` or opens it.
"""

from __future__ import annotations

import time

from telegrad.client.request_codec import Request
from telegrad.deadline import to_wire
from telegrad.transport.channel import Channel, ChannelClosed, text_of_frame
from telegrad.wire.frames import DEFINES_FUNCTION, Frame, Kind

_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)
_SMALL_DIFFERENCE = 0.02  # seconds


class ExclusiveConnection:
    """A connection for one call at a time."""

    __slots__ = ("channel", "known_functions", "last_used")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.known_functions: set[int] = set()  # ids that the peer knows on this connection
        self.last_used = 0.0

    def exchange(
        self, call_id: int, request: Request, timeout: float | None, until: float
    ) -> Frame:
        """Send a request and return the frame that answers it."""
        function_id, flags, body, buffers = request
        channel = self.channel
        left = time_left(timeout, until)
        channel.send(_CALL, call_id, body, buffers, function_id, to_wire(left), flags, left)
        if flags & DEFINES_FUNCTION:
            self.known_functions.add(function_id)
        del request, body, buffers
        while True:
            frame = channel.recv(time_left(timeout, until))
            if frame.kind == Kind.CLOSE:
                raise ChannelClosed(text_of_frame(frame))
            if frame.call_id == call_id or frame.kind not in (_REPLY, _FAILURE):
                return frame


def time_left(timeout: float | None, until: float) -> float | None:
    """Return the seconds left of a timeout.

    A small difference is ignored, because setting a new timeout of a socket is a system call.
    """
    if timeout is None:
        return None
    left = until - time.monotonic()
    return timeout if timeout - left < _SMALL_DIFFERENCE else max(left, 0.0)
