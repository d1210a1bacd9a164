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

_NUMBER = struct.Struct("<I")
_DONE = b"\x01"
_TRY_AGAIN = 5.0  # seconds
_log = logging.getLogger(__name__)


class SegmentSender:
    """The segments of this agent that peers know."""

    def __init__(self, connect: ConnectFunction) -> None:
        self._connect = connect
        self._announced: defaultdict[str, set[int]] = defaultdict(set)
        self._failed: dict[str, float] = {}  # peers that could not be reached: when to try again

    def __repr__(self) -> str:
        return f"<SegmentSender {dict(self._announced)}>"

    def announce(
        self, segment: SharedSegment, incarnation: str, address: str, until: float
    ) -> bool:
        """Make sure that a peer has mapped a segment. False if that is not possible: its buffers go by the socket.

        A peer that did not answer in time is not asked again for a while: each of many buffers would wait for it.
        """
        announced = self._announced[incarnation]
        if segment.number in announced:
            return True
        now = time.monotonic()
        if now < self._failed.get(incarnation, 0.0):
            return False
        try:
            sock, _ = self._connect(address, None, "segment", until)
            with sock:
                socket.send_fds(sock, [_NUMBER.pack(segment.number)], [segment.fd])
                if sock.recv(1) != _DONE:
                    raise ProtocolError("the peer did not map it")
        except (OSError, ProtocolError) as error:
            _log.info(
                "a shared-memory segment could not be passed on (%s); using the socket", error
            )
            self._failed[incarnation] = time.monotonic() + _TRY_AGAIN
            return False
        announced.add(segment.number)
        return True

    def forget(self, incarnation: str) -> None:
        self._announced.pop(incarnation, None)
        self._failed.pop(incarnation, None)


def receive_segment(sock: socket.socket, incarnation: str, mappings: SegmentMappings) -> None:
    """The receiving side: map the segment that a proven peer passes, and say so."""
    with sock:
        data, fds, _, _ = socket.recv_fds(sock, _NUMBER.size, 1)
        try:
            if len(data) != _NUMBER.size or len(fds) != 1:
                raise ProtocolError("a shared-memory segment without its descriptor")
            mappings.add(incarnation, _NUMBER.unpack(data)[0], fds[0])
            sock.sendall(_DONE)
        finally:
            for fd in fds:
                os.close(fd)
