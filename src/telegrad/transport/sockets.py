"""Open and accept socket connections, and run the handshake over them.

Addresses are strings: ``unix:@name``, ``tcp:host:port``, ``memory:name`` (`in_process`).
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from telegrad.errors import AuthenticationError, ProtocolError, UsageError
from telegrad.transport.records import (
    MacRecords,
    PlainStream,
    Records,
    TlsRecords,
    explain_tls_error,
    set_timeout,
)
from telegrad.transport.tls import TlsContexts
from telegrad.wire.handshake import (
    MAGIC,
    HandshakeResult,
    Introduction,
    Steps,
    refuse_without_tls,
)

_BACKLOG = 1024
_PEEK_INTERVAL = 0.005  # seconds
_BULK = b"TLGB"  # precedes TLS on a bulk connection
_WITHOUT_RECORDS = ("bulk", "doctor")  # purposes of connections that carry no frames
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


class AuthenticatedSocket(NamedTuple):
    """A connection after its handshake."""

    sock: socket.socket  # with TLS, that of a bulk connection is an `ssl.SSLSocket`
    peer: Introduction
    records: Records | None  # of a TCP connection that carries frames


def authenticate(
    sock: socket.socket,
    tls: TlsContexts,
    make_steps: Callable[[bytes], Steps],
    *,
    server_side: bool,
    timeout: float,
    bulk: bool = False,
) -> AuthenticatedSocket:
    """Run the TLS handshake, if the connection needs one, and then that of Telegrad.

    `make_steps(binding)` returns the steps of this side. `bulk`: the connection carries no frames;
    the side that accepts finds that out. `sock` is closed if this raises. There is one deadline for
    all of it: a peer cannot extend it by sending single bytes.
    """
    deadline = time.monotonic() + timeout
    try:
        if sock.family == socket.AF_UNIX:
            return AuthenticatedSocket(
                sock, _run(PlainStream(sock), make_steps(b""), deadline)[0], None
            )
        # Nagle's algorithm would delay the short messages of the handshake by 40 ms each.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server_side:
            bulk = _check_first_bytes(sock, tls.enabled, deadline)
        if not tls.enabled:
            peer, session_key = _run(PlainStream(sock), make_steps(b""), deadline)
            records = None if bulk else MacRecords(session_key, server_side)
            return AuthenticatedSocket(sock, peer, records)
        context = tls.context(server_side)
        if not bulk:
            tls_records = TlsRecords(sock, context, server_side)
            tls_records.shake_hands(deadline)
            binding = tls.binding(tls_records.tls, server_side)
            peer = _run(tls_records, make_steps(binding), deadline).peer
            _check_marker(peer, server_side, bulk)
            return AuthenticatedSocket(sock, peer, tls_records)
        if not server_side:
            sock.sendall(_BULK)
        set_timeout(sock, deadline)
        try:
            sock = context.wrap_socket(sock, server_side=server_side)
        except ssl.SSLError as error:
            raise explain_tls_error(error) from None
        assert isinstance(sock, ssl.SSLSocket)
        binding = tls.binding(sock, server_side)
        peer = _run(PlainStream(sock), make_steps(binding), deadline).peer
        _check_marker(peer, server_side, bulk)
        return AuthenticatedSocket(sock, peer, None)
    except TimeoutError:
        sock.close()
        raise ProtocolError(f"the peer did not finish its handshake within {timeout} s") from None
    except BaseException:
        sock.close()
        raise


def clock_id() -> str:
    """Return what identifies the clock of this machine: processes with the same one share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


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


def _check_marker(peer: Introduction, server_side: bool, bulk: bool) -> None:
    """Raise `ProtocolError` if the marker of bulk connections, which nothing authenticates, was
    added or removed on its way.
    """
    if server_side and (peer.get("purpose") in _WITHOUT_RECORDS) != bulk:
        raise ProtocolError("the first bytes of a connection were changed on their way")


def _check_first_bytes(sock: socket.socket, with_tls: bool, deadline: float) -> bool:
    """Return whether a peer opens a bulk connection. Raise `ProtocolError` if it uses TLS
    differently than this worker.
    """
    first = _peek(sock, len(MAGIC), deadline)
    if not with_tls:
        if first != MAGIC:
            raise ProtocolError("the peer uses TLS, which is off here, or is no worker")
        return False
    if first == MAGIC:
        PlainStream(sock).send(refuse_without_tls(), deadline)
        raise ProtocolError("the peer does not use TLS, which is required here")
    if first == _BULK:
        sock.recv(len(_BULK))
        return True
    return False


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
            raise ProtocolError("the peer closed the connection during the handshake")
        ends.poll(_PEEK_INTERVAL * 1000)
