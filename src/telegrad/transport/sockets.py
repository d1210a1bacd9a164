"""Open and accept socket connections, and run the handshake over them.

Addresses are strings: ``unix:@name``, ``tcp:host:port``, ``memory:name`` (`in_process`).
"""

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
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


def listen(transport: str, host: str) -> tuple[socket.socket, str]:
    """Return a listening socket and its address. `host` is used by TCP only.

    Unix sockets have abstract names, which the kernel removes with their process.
    """
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
    """Return a connection to `address`. Raise `OSError` if no process listens there."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        try:
            # With a Python timeout, a unix connect fails at once if the backlog is full. With the
            # kernel's timeout, it waits.
            timeval = struct.pack("ll", max(int(timeout), 1), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            sock.connect("\0" + rest.removeprefix("@"))
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def check_same_user(sock: socket.socket) -> None:
    """Raise `AuthenticationError` if a unix socket's peer belongs to another user, except root."""
    if sock.family != socket.AF_UNIX or sys.platform != "linux":
        return
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(credentials)[1]
    if uid not in (os.getuid(), 0):
        raise AuthenticationError(
            f"a process of user {uid} tried to connect; this worker belongs to {os.getuid()}"
        )


def run_handshake(sock: socket.socket, steps: Steps, timeout: float) -> Introduction:
    """Run one side of the handshake over a new connection. Return the peer's introduction."""
    # one deadline for the whole handshake: a peer cannot extend it by sending single bytes
    deadline = time.monotonic() + timeout
    try:
        send, count = next(steps)
        while True:
            if send:
                _set_timeout(sock, deadline)
                sock.sendall(send)
            send, count = steps.send(_read(sock, count, deadline))
    except StopIteration as done:
        introduction: Introduction = done.value
        return introduction
    except TimeoutError:
        raise ProtocolError(f"the peer did not finish its handshake within {timeout} s") from None


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Receive exactly `count` bytes."""
    data = b""
    while len(data) < count:
        _set_timeout(sock, deadline)
        part = sock.recv(count - len(data))
        if not part:
            raise ProtocolError("the peer closed the connection during the handshake")
        data += part
    return data


def _set_timeout(sock: socket.socket, deadline: float) -> None:
    """Let the next operation end at `deadline`. Raise `TimeoutError` if that has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)
