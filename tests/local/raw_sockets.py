"""Raw sockets that speak to an agent without being one."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

from telegrad.agent import Agent
from telegrad.config import Config
from telegrad.group.secret import group_key
from telegrad.transport import sockets
from telegrad.transport.records import PlainStream, Records
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake
from tests.local.gates import PATIENCE


@contextlib.contextmanager
def unauthenticated_socket(agent: Agent, transport: str) -> Iterator[socket.socket]:
    """A connection to an agent that has not said anything yet."""
    with sockets.connect(address_of(agent, transport), PATIENCE) as sock:
        sock.settimeout(PATIENCE)
        yield sock


def is_closed(sock: socket.socket) -> bool:
    """Waits until the other side has closed the connection, reading whatever it still says."""
    if sock.fileno() < 0:
        return True  # this side has closed it, after the other one
    try:
        while sock.recv(4096):
            continue
    except ConnectionError:
        return True
    return True


def trickle(sock: socket.socket, data: bytes, pause: float) -> int:
    """Send one byte after each pause in which the other side does not close.

    How many bytes it took.
    """
    for count in range(len(data)):
        readable, _, _ = select.select([sock], [], [], pause)
        if readable:
            return count
        try:
            sock.send(data[count : count + 1])
        except ConnectionError:
            return count
    return len(data)


def address_of(agent: Agent, transport: str) -> str:
    """The address of an agent by one transport."""
    addresses = agent._runtime.local_member.addresses
    return next(address for address in addresses if address.startswith(transport + ":"))


def introduction(agent: Agent, transport: str = "unix", **changes: Any) -> dict[str, Any]:
    """What a proper member of the agent's group would say of itself."""
    proper = {
        "name": "stranger",
        "rank": 99,
        "incarnation": os.urandom(8).hex(),
        "group": agent._runtime.group,
        "purpose": "multiplexed",
        "heartbeat": 5.0,
        "unix": "",
        "address": address_of(agent, transport),
        "session": "5e551",
        "received": -1,
    }
    return {**proper, **changes}


class MemberSocket:
    """A connection of a member: sends and receives frames as bytes."""

    def __init__(self, sock: socket.socket, records: Records | None) -> None:
        self._sock = sock
        self._records = records

    def sendall(self, data: bytes) -> None:
        """Send bytes of frames."""
        self._sock.sendall(data if self._records is None else self._records.encode(data))

    def recv(self, count: int) -> bytes:
        """Receive bytes of frames."""
        if self._records is None:
            return self._sock.recv(count)
        space = memoryview(bytearray(count))
        while not (size := self._records.read_into(space)):
            data = self._sock.recv(4096)
            if not data:
                return b""
            self._records.feed(memoryview(data))
        return bytes(space[:size])


def shake_hands(sock: socket.socket, agent: Agent, **changes: Any) -> MemberSocket:
    """Prove oneself, as somebody does who knows the secret. TCP is not encrypted."""
    key = group_key(agent.config.secret)
    transport = "unix" if sock.family == socket.AF_UNIX else "tcp"
    said = introduction(agent, transport, **changes)
    connection = sockets.authenticate(
        sock,
        TlsContexts(Config(tls="off"), key),
        lambda binding: handshake.client(key, said, binding),
        server_side=False,
        timeout=PATIENCE,
    )
    sock.settimeout(PATIENCE)
    return MemberSocket(sock, connection.records)


class Recorder:
    """A connection during a handshake that keeps what was sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = PlainStream(sock)
        self.sent: list[bytes] = []

    def send(self, data: bytes, deadline: float) -> None:
        self.sent.append(data)
        self._stream.send(data, deadline)

    def read(self, count: int, deadline: float) -> bytes:
        return self._stream.read(count, deadline)
