"""Passing shared-memory segments to peers: each once, over a connection of its own that carries the descriptor.

State: `_announced`, the segments that each peer has been given. Two threads may announce one segment at once; the
receiver then maps it twice, which does no harm.
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

ConnectFunction = Callable[[str, None, str, float], tuple[socket.socket, Introduction]]

_SEGMENT_ID = struct.Struct("<I")
_ACKNOWLEDGED = b"\x01"
_RETRY_SECONDS = 5.0  # seconds
_log = logging.getLogger(__name__)


class SegmentSender:
    """The segments of this agent that peers know."""

    def __init__(self, connect: ConnectFunction) -> None:
        self._connect = connect
        self._announced: defaultdict[str, set[int]] = defaultdict(set)
        self._retry_at: dict[str, float] = {}  # peers that could not be reached: when to try again

    def __repr__(self) -> str:
        return f"<SegmentSender {dict(self._announced)}>"

    def announce(
        self, segment: SharedSegment, incarnation: str, address: str, deadline: float
    ) -> bool:
        """Make sure that a peer has mapped a segment. False if that is not possible: its buffers go by the socket.

        A peer that did not answer in time is not asked again for a while: each of many buffers would wait for it.
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
                "a shared-memory segment could not be passed on (%s); using the socket", error
            )
            self._retry_at[incarnation] = time.monotonic() + _RETRY_SECONDS
            return False
        announced.add(segment.segment_id)
        return True

    def forget(self, incarnation: str) -> None:
        self._announced.pop(incarnation, None)
        self._retry_at.pop(incarnation, None)


def receive_segment(sock: socket.socket, incarnation: str, mappings: SegmentMappings) -> None:
    """The receiving side: map the segment that a proven peer passes, and say so."""
    with sock:
        data, fds, _, _ = socket.recv_fds(sock, _SEGMENT_ID.size, 1)
        try:
            if len(data) != _SEGMENT_ID.size or len(fds) != 1:
                raise ProtocolError("a shared-memory segment without its descriptor")
            mappings.add(incarnation, _SEGMENT_ID.unpack(data)[0], fds[0])
            sock.sendall(_ACKNOWLEDGED)
        finally:
            for fd in fds:
                os.close(fd)
