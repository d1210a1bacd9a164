"""JSON messages of observers: what is not one ends the connection with an error that says why."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator

import pytest

from telegrad.errors import ProtocolError
from telegrad.transport.json_messages import JsonStream
from telegrad.transport.records import MacRecords
from telegrad.transport.sockets import AuthenticatedSocket
from tests.local.gates import PATIENCE

KEY = bytes(32)
LIMIT = 1000


@pytest.fixture(params=["plain", "records"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[AuthenticatedSocket, JsonStream]]:
    """The end that sends, and the stream of the end that receives."""
    with_records = request.param == "records"
    ours, theirs = socket.socketpair()
    sender, receiver = (
        AuthenticatedSocket(
            sock, {}, MacRecords(KEY, is_server) if with_records else None, KEY, False, is_server
        )
        for sock, is_server in ((ours, False), (theirs, True))
    )
    with ours, theirs:
        yield sender, JsonStream(receiver)


def send(to: AuthenticatedSocket, data: bytes) -> None:
    to.sock.sendall(data if to.records is None else to.records.encode(data))


def message(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def deadline() -> float:
    return time.monotonic() + PATIENCE


Pair = tuple[AuthenticatedSocket, JsonStream]


def test_values_arrive_in_order_until_the_end(pair: Pair) -> None:
    sender, stream = pair
    JsonStream(sender).send({"a": [1, None]}, deadline())
    send(sender, message(b"2")[:3])
    assert stream.receive(LIMIT, deadline()) == {"a": [1, None]}
    send(sender, message(b"2")[3:])
    assert stream.receive(LIMIT, deadline()) == 2
    assert not stream.is_readable()
    sender.sock.close()
    assert stream.is_readable()
    assert stream.receive(LIMIT, deadline()) is None
    stream.close()
    assert stream.is_readable()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (message(b"x" * (LIMIT + 1)), f"{LIMIT + 1} bytes exceeds the limit of {LIMIT}"),
        (message(b"{"), "not JSON"),
        (message(b"[" * LIMIT), "not JSON"),
        (message(b"\xff"), "not JSON"),
        (message(b"true")[:2], "the connection ended inside a message"),
        (message(b"true")[:4], "the connection ended inside a message"),
        (message(b"true")[:6], "the connection ended inside a message"),
    ],
)
def test_a_message_that_is_not_valid(pair: Pair, data: bytes, problem: str) -> None:
    sender, stream = pair
    send(sender, data)
    sender.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match=problem):
        stream.receive(LIMIT, deadline())


def test_a_record_that_was_changed_on_its_way() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(MacRecords(bytes(range(32)), False).encode(message(b"true")))
        records = MacRecords(KEY, True)
        stream = JsonStream(AuthenticatedSocket(theirs, {}, records, KEY, False, True))
        with pytest.raises(ProtocolError):
            stream.receive(LIMIT, deadline())


def test_a_deadline_that_passes(pair: Pair) -> None:
    _, stream = pair
    with pytest.raises(TimeoutError):
        stream.receive(LIMIT, time.monotonic() + 0.01)
