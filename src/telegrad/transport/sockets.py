"""Open and accept socket connections, and run the handshake over them.

Addresses are strings: ``unix:@name``, ``tcp:host:port``, ``memory:name`` (`in_process`).
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from telegrad.errors import AuthenticationError, ProtocolError, UsageError
from telegrad.timeouts import LONGEST_POLL
from telegrad.transport.records import (
    MacRecords,
    PlainStream,
    Records,
    TlsRecords,
    set_timeout,
)
from telegrad.transport.tls import TlsContexts
from telegrad.wire import admission_token
from telegrad.wire.handshake import (
    MAGIC,
    HandshakeBroken,
    HandshakeResult,
    Introduction,
    Steps,
    refuse_without_tls,
)

_BACKLOG = 1024
_PEEK_INTERVAL = 0.005  # seconds
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
    return socket.create_connection((host, int(port)), min(timeout, LONGEST_POLL))


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


class AuthenticatedSocket(NamedTuple):
    """A connection after its handshake."""

    sock: socket.socket
    peer: Introduction
    records: Records | None  # of a TCP connection
    session_key: bytes  # that only the two ends know; with TLS, it has forward secrecy
    encrypted: bool
    server_side: bool


def authenticate(
    sock: socket.socket,
    tls: TlsContexts,
    make_steps: Callable[[bytes], Steps],
    *,
    server_side: bool,
    timeout: float,
    token: bytes = b"",
) -> AuthenticatedSocket:
    """Run the TLS handshake, if the connection needs one, and then that of Telegrad.

    `make_steps(binding)` returns the steps of this side. By TCP, a client sends `token` first (see
    `wire.admission_token`). `sock` is closed if this raises. There is one deadline for all of it: a
    peer cannot extend it by sending single bytes.
    """
    deadline = time.monotonic() + timeout
    try:
        if sock.family == socket.AF_UNIX:
            result = _run(PlainStream(sock), make_steps(b""), deadline)
            return AuthenticatedSocket(
                sock, result.peer, None, result.session_key, False, server_side
            )
        # Nagle's algorithm would delay the short messages of the handshake by 40 ms each.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server_side:
            if _peek(sock, len(admission_token.MAGIC), deadline) == admission_token.MAGIC:
                PlainStream(sock).read(admission_token.SIZE, deadline)  # `Admission` has checked it
            _check_first_bytes(sock, tls.enabled, deadline)
        elif token:
            PlainStream(sock).send(token, deadline)
        if not tls.enabled:
            peer, key = _run(PlainStream(sock), make_steps(b""), deadline)
            plain = MacRecords(key, server_side)
            return AuthenticatedSocket(sock, peer, plain, key, False, server_side)
        records = TlsRecords(sock, tls.context(server_side), server_side)
        records.shake_hands(deadline)
        binding = tls.binding(records.tls, server_side)
        peer, key = _run(records, make_steps(binding), deadline)
        return AuthenticatedSocket(sock, peer, records, key, True, server_side)
    except TimeoutError:
        sock.close()
        text = f"the peer did not finish its handshake within {timeout:g} s"
        raise HandshakeBroken(text) from None
    except BaseException:
        sock.close()
        raise


def clock_id() -> str:
    """Return what identifies `time.monotonic` of this process: those with the same one share it.

    Processes of one machine do, unless a container has a time namespace of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # a kernel without time namespaces
        return boot


def _run(stream: TlsRecords | PlainStream, steps: Steps, deadline: float) -> HandshakeResult:
    """Run one side of the handshake over a new connection."""
    try:
        send, count = next(steps)
        while True:
            if send:
                stream.send(send, deadline)
            send, count = steps.send(stream.read(count, deadline))
    except StopIteration as done:
        result: HandshakeResult = done.value
        return result


def _check_first_bytes(sock: socket.socket, with_tls: bool, deadline: float) -> None:
    """Raise `ProtocolError` if a peer uses TLS differently than this worker."""
    first = _peek(sock, len(MAGIC), deadline)
    if not with_tls and first != MAGIC:
        raise ProtocolError("the peer uses TLS, which is off here, or is no worker")
    if with_tls and first == MAGIC:
        PlainStream(sock).send(refuse_without_tls(), deadline)
        raise ProtocolError("the peer does not use TLS, which is required here")


def _peek(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Return the first bytes that a peer sends, without removing them."""
    ends = select.poll()  # what was not removed hides the end of the connection from `recv`
    ends.register(sock, select.POLLRDHUP)
    while True:
        has_ended = bool(ends.poll(0))
        set_timeout(sock, deadline)
        data = sock.recv(count, socket.MSG_PEEK)
        if len(data) == count:
            return data
        if has_ended or not data:
            raise HandshakeBroken("the peer closed the connection during the handshake")
        ends.poll(_PEEK_INTERVAL * 1000)
