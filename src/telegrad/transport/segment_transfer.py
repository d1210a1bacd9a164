"""Pass shared-memory segments to peers, each once, through a connection that carries the memfd.

State: `_announced` and `_retry_at` of `SegmentSender`, changed by single operations. Two threads
may announce one segment at once; the receiver then maps it twice, which is harmless.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable

from telegrad.errors import ProtocolError
from telegrad.transport.segment_mappings import SegmentMappings
from telegrad.transport.segments import SharedSegment
from telegrad.wire.handshake import Introduction

# address, (none), purpose of the connection, deadline -> an authenticated connection
ConnectFunction = Callable[[str, None, str, float], tuple[socket.socket, Introduction]]

_SEGMENT_ID = struct.Struct("<I")
_ACKNOWLEDGED = b"\x01"
_RETRY_SECONDS = 5.0  # after which a peer that could not be reached is tried again
_log = logging.getLogger(__name__)


class SegmentSender:
    """Pass segments of this agent to peers, and remember which peer has which."""

    def __init__(self, connect: ConnectFunction) -> None:
        self._connect = connect
        self._announced: defaultdict[str, set[int]] = defaultdict(set)  # by incarnation
        self._retry_at: dict[str, float] = {}  # by incarnation of peers that could not be reached

    def __repr__(self) -> str:
        return f"<SegmentSender {dict(self._announced)}>"

    def announce(
        self, segment: SharedSegment, incarnation: str, address: str, deadline: float
    ) -> bool:
        """Ensure that a peer has mapped a segment. Return False if that is not possible.

        Then its buffers go through the socket. A peer that did not answer in time is not asked
        again for a while: otherwise each of many buffers would wait for it.
        """
        announced = self._announced[incarnation]
        if segment.segment_id in announced:
            return True
        now = time.monotonic()
        if now < self._retry_at.get(incarnation, 0.0):
            return False
        try:
            sock, _ = self._connect(address, None, "segment", deadline)
            with sock:
                socket.send_fds(sock, [_SEGMENT_ID.pack(segment.segment_id)], [segment.fd])
                if sock.recv(1) != _ACKNOWLEDGED:
                    raise ProtocolError("the peer did not map it")
        except (OSError, ProtocolError) as error:
            _log.info(
                "shared-memory segment %d could not be passed to a peer (%s); using the socket",
                segment.segment_id,
                error,
            )
            self._retry_at[incarnation] = time.monotonic() + _RETRY_SECONDS
            return False
        announced.add(segment.segment_id)
        return True

    def forget_peer(self, incarnation: str) -> None:
        """Forget a peer that was lost."""
        self._announced.pop(incarnation, None)
        self._retry_at.pop(incarnation, None)


def receive_segment(sock: socket.socket, incarnation: str, mappings: SegmentMappings) -> None:
    """Map the segment that an authenticated peer passes through `sock`, and acknowledge it."""
    with sock:
        data, fds, _, _ = socket.recv_fds(sock, _SEGMENT_ID.size, 1)
        try:
            if len(data) != _SEGMENT_ID.size or len(fds) != 1:
                raise ProtocolError("a shared-memory segment was passed without its descriptor")
            mappings.add(incarnation, _SEGMENT_ID.unpack(data)[0], fds[0])
            sock.sendall(_ACKNOWLEDGED)
        finally:
            for fd in fds:
                os.close(fd)
