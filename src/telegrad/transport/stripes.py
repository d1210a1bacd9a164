"""Stripes: connections that carry chunks of bulk buffers, and the format of what they carry.

    request    operation u32, buffer index u32, registration id u64, offset u64, length u64
    response   status u64, then the bytes of the chunk if the status is OK and a chunk was requested

The receiver of the buffers opens a stripe and sends requests, several before the first response.
The sender answers them in order.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterable
from typing import Any

Stripe = Any  # a connected socket, or an object with its methods, such as one over TLS

REQUEST = struct.Struct("<IIQQQ")
STATUS = struct.Struct("<Q")
PULL, DONE = 1, 2  # operations
OK, REFUSED = 1, 2  # statuses; REFUSED: there is no such registration or chunk

_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_WAITALL = int(socket.MSG_WAITALL)
_MORE = int(getattr(socket, "MSG_MORE", 0))
_log = logging.getLogger(__name__)


def prepare(stripe: Stripe) -> None:
    """Let operations block, send without delay, and end a connection whose peer has gone."""
    stripe.settimeout(None)
    if stripe.family in (socket.AF_INET, socket.AF_INET6):
        stripe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stripe.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_OPTIONS.items():
            if hasattr(socket, name):
                stripe.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive(stripe: Stripe, memory: memoryview) -> None:
    """Fill `memory`. Raise `ConnectionError` if the connection ends before."""
    # Only a plain socket has flags. With MSG_WAITALL one call receives a whole chunk.
    flags = (0, _WAITALL) if type(stripe) is socket.socket else ()
    while memory.nbytes:
        count = stripe.recv_into(memory, *flags)
        if not count:
            raise ConnectionError("the peer closed a bulk connection")
        memory = memory[count:]


def send_chunk(stripe: Stripe, chunk: memoryview) -> None:
    """Send a response with a chunk."""
    if type(stripe) is socket.socket:
        stripe.send(STATUS.pack(OK), _MORE)
    else:
        stripe.sendall(STATUS.pack(OK))
    stripe.sendall(chunk)


def shut(stripes: Iterable[Stripe]) -> None:
    """Wake the threads that send to or receive from these stripes."""
    for stripe in stripes:
        try:
            # not the method of an `SSLSocket`: it would send what follows without encryption
            socket.socket.shutdown(stripe, socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("a bulk connection was closed already: %s", error)
