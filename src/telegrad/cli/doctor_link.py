"""`telegrad doctor` on two hosts at once: measure the connection between them.

The connection is authenticated and encrypted like one of workers, so a wrong secret, another
version of the protocol and other settings of TLS show here. In the handshake each side tells its
versions. Then the side that connects sends requests: a kind and a number of bytes.
"""

from __future__ import annotations

import platform
import socket
import statistics
import struct
import time
from importlib import metadata
from typing import Any, NamedTuple

import telegrad
from telegrad.config import Config
from telegrad.errors import ProtocolError
from telegrad.timeouts import LONGEST_POLL
from telegrad.transport import sockets
from telegrad.transport.stripes import Stripe, cipher, open_stripe
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake

_REQUEST = struct.Struct("<BQ")
_END, _ECHO, _UPLOAD, _DOWNLOAD = range(4)
_MAX_BYTES = 1 << 30
_CHUNK = 1 << 20
_ECHOES = 100
_SECONDS = 1.0  # that a measurement of the bandwidth takes, about
_PURPOSE = "doctor"


class Link(NamedTuple):
    """What was measured between two hosts. Rates are in bytes per second."""

    peer: dict[str, Any]
    round_trip: float
    upload: float
    download: float


def versions(config: Config, key: bytes) -> dict[str, str]:
    """Return the versions of this host, as they are compared with those of others."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return {
        "telegrad": telegrad.__version__,
        "protocol": str(handshake.VERSION),
        "python": platform.python_version(),
        "torch": torch,
        "tls": TlsContexts(config, key).describe(),
        "cipher": cipher(),
    }


def listen(address: str) -> socket.socket:
    """Return a socket that listens at ``host:port``; port 0: any."""
    host, port = parse(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def parse(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``. Raise `ValueError` if it has no port."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def serve_one(listening: socket.socket, config: Config, key: bytes) -> dict[str, Any]:
    """Serve one doctor that connects. Return what it says of itself."""
    sock, address = listening.accept()
    connection = sockets.authenticate(
        sock,
        TlsContexts(config, key),
        lambda binding: handshake.server(
            key, lambda peer: _introduction(config, key), _reason_to_refuse, binding
        ),
        server_side=True,
        timeout=config.connect_timeout,
    )
    with connection.sock:
        connection.sock.settimeout(min(config.connect_timeout, LONGEST_POLL) + 10 * _SECONDS)
        stripe = open_stripe(connection)
        while True:
            kind, size = _REQUEST.unpack(_read(stripe, _REQUEST.size))
            if kind == _END:
                return {**connection.peer, "address": address[0]}
            if size > _MAX_BYTES:
                raise ProtocolError(f"a request for {size} bytes")
            if kind == _ECHO:
                stripe.send(_read(stripe, size))
            elif kind == _UPLOAD:
                _skip(stripe, size)
                stripe.send(b"k")
            elif kind == _DOWNLOAD:
                _send(stripe, size)
            else:
                raise ProtocolError(f"a request of kind {kind}")


def measure(address: str, config: Config, key: bytes) -> Link:
    """Connect to another doctor and measure. Raise `OSError` or `ProtocolError` if that fails."""
    host, port = parse(address)
    sock = sockets.connect(f"tcp:{host}:{port}", config.connect_timeout)
    connection = sockets.authenticate(
        sock,
        TlsContexts(config, key),
        lambda binding: handshake.client(key, _introduction(config, key), binding),
        server_side=False,
        timeout=config.connect_timeout,
    )
    with connection.sock:
        connection.sock.settimeout(min(config.connect_timeout, LONGEST_POLL) + 10 * _SECONDS)
        stripe = open_stripe(connection)
        round_trip = statistics.median(_echo(stripe) for _ in range(_ECHOES))
        upload, download = _rate(stripe, _UPLOAD), _rate(stripe, _DOWNLOAD)
        stripe.send(_REQUEST.pack(_END, 0))
    return Link(connection.peer, round_trip, upload, download)


def _introduction(config: Config, key: bytes) -> dict[str, Any]:
    return {"name": socket.gethostname(), "purpose": _PURPOSE, **versions(config, key)}


def _reason_to_refuse(peer: dict[str, Any]) -> str | None:
    return None if peer.get("purpose") == _PURPOSE else "this is `telegrad doctor`, not a worker"


def _echo(stripe: Stripe) -> float:
    start = time.perf_counter()
    stripe.send(_REQUEST.pack(_ECHO, 8))
    stripe.send(b"12345678")
    _read(stripe, 8)
    return time.perf_counter() - start


def _rate(stripe: Stripe, kind: int) -> float:
    """Return the bytes per second of one stream. Transfer more until it takes long enough."""
    size = _CHUNK
    while True:
        start = time.perf_counter()
        stripe.send(_REQUEST.pack(kind, size))
        if kind == _UPLOAD:
            _send(stripe, size)
            _read(stripe, 1)
        else:
            _skip(stripe, size)
        seconds = time.perf_counter() - start
        if seconds > _SECONDS / 4 or 4 * size > _MAX_BYTES:
            return size / seconds
        size *= 4


def _send(stripe: Stripe, size: int) -> None:
    chunk = memoryview(bytes(_CHUNK))
    for start in range(0, size, _CHUNK):
        stripe.send_contents(chunk[: size - start], b"", 0)


def _skip(stripe: Stripe, size: int) -> None:
    space = memoryview(bytearray(_CHUNK))
    for start in range(0, size, _CHUNK):
        stripe.receive_contents(space[: size - start], b"", 0)


def _read(stripe: Stripe, size: int) -> bytes:
    data = bytearray(size)
    try:
        stripe.receive(memoryview(data))
    except ConnectionError:
        raise ProtocolError("the other `telegrad doctor` closed the connection") from None
    return bytes(data)
