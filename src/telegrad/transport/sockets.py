"""Making and accepting connections. Addresses are text: ``unix:@name``, ``tcp:host:port``, ``memory:name``."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import time

from telegrad.errors import AuthenticationError, ProtocolError, UsageError
from telegrad.wire.handshake import Introduction, Steps

_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


def listen(transport: str, host: str) -> tuple[socket.socket, str]:
    """A listening socket and its address. Unix sockets have abstract names, which vanish with their process."""
    if transport == "unix":
        name = f"telegrad-{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind("\0" + name)
        except BaseException:
            listener.close()
            raise
        address = f"unix:@{name}"
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.bind((host, 0))
        except OSError as error:
            listener.close()
            raise UsageError(
                f"cannot listen on {host!r}: {error}; set Config.listen or TELEGRAD_LISTEN"
            ) from None
        address = f"tcp:{host}:{listener.getsockname()[1]}"
    listener.listen(_BACKLOG)
    return listener, address


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to `address`; raises OSError if nobody is there."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        try:
            # A full backlog makes a unix connect with a Python timeout fail at once; the kernel's time limit waits.
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(int(timeout), 1), 0)
            )
            sock.connect("\0" + rest.removeprefix("@"))
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def check_user(sock: socket.socket) -> None:
    """On a unix socket, only processes of the same user may come in."""
    if sock.family != socket.AF_UNIX or sys.platform != "linux":
        return
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(credentials)[1]
    if uid not in (os.getuid(), 0):
        raise AuthenticationError(
            f"a process of user {uid} tried to connect; this worker belongs to {os.getuid()}"
        )


def shake_hands(sock: socket.socket, steps: Steps, timeout: float) -> Introduction:
    """Run one side of the handshake over a fresh connection. What the peer says about itself."""
    # for all of it: a peer that sends drop by drop gains nothing
    deadline = time.monotonic() + timeout
    try:
        send, count = next(steps)
        while True:
            if send:
                _limit_to(sock, deadline)
                sock.sendall(send)
            send, count = steps.send(_read(sock, count, deadline))
    except StopIteration as done:
        introduction: Introduction = done.value
        return introduction
    except TimeoutError:
        raise ProtocolError(f"the peer did not finish its handshake within {timeout} s") from None


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        _limit_to(sock, deadline)
        part = sock.recv(count - len(data))
        if not part:
            raise ProtocolError("the peer closed the connection during the handshake")
        data += part
    return data


def _limit_to(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)
