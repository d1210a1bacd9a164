"""Raw sockets that speak to an agent without being one."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

from telegrad.agent import Agent
from telegrad.group.secret import group_secret
from telegrad.transport import sockets
from telegrad.wire import handshake
from tests.local.gates import PATIENCE


@contextlib.contextmanager
def unauthenticated_socket(agent: Agent, transport: str) -> Iterator[socket.socket]:
    """A connection to an agent that has not said anything yet."""
    address = next(
        address
        for address in agent._runtime.local_member.addresses
        if address.startswith(transport + ":")
    )
    with sockets.connect(address, PATIENCE) as sock:
        sock.settimeout(PATIENCE)
        yield sock


def is_closed(sock: socket.socket) -> bool:
    """Waits until the other side has closed the connection, reading whatever it still says."""
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


def introduction(agent: Agent, **changes: Any) -> dict[str, Any]:
    """What a proper member of the agent's group would say of itself."""
    proper = {
        "name": "stranger",
        "rank": 99,
        "incarnation": os.urandom(8).hex(),
        "group": agent._runtime.group,
        "purpose": "multiplexed",
        "heartbeat": 5.0,
        "unix": "",
    }
    return {**proper, **changes}


def shake_hands(sock: socket.socket, agent: Agent, **changes: Any) -> None:
    """Prove oneself, as somebody does who knows the secret."""
    steps = handshake.client(group_secret(agent.config.secret), introduction(agent, **changes))
    sockets.run_handshake(sock, steps, PATIENCE)
    sock.settimeout(PATIENCE)


class Recorder:
    """Stands in for a socket during a handshake and keeps what was sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        self._sock.sendall(data)

    def recv(self, count: int) -> bytes:
        return self._sock.recv(count)

    def settimeout(self, timeout: float | None) -> None:
        self._sock.settimeout(timeout)
