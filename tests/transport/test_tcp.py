"""`TcpChannel`: interruption, resumption, and records that somebody changed on their way."""

from __future__ import annotations

import collections
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType

import pytest

from telegrad.config import Config
from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport import records, tcp
from telegrad.transport.channel import ChannelClosed
from telegrad.transport.records import TlsRecords
from telegrad.transport.tcp import TcpChannel
from telegrad.transport.tls import TlsContexts
from telegrad.wire.frames import Kind
from tests.transport.pairs import (
    RECORDS,
    Background,
    connected_sockets,
    records_pair,
    tcp_channels,
)

LATE = 20.0


class Link:
    """Two TCP channels that are connected again whenever they are interrupted."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.resumptions = 0
        self.closed = False
        self.near, self.far = tcp_channels(
            *connected_sockets("tcp"), kind, on_interrupted=self._interrupted
        )

    def _interrupted(self, channel: TcpChannel, error: BaseException) -> None:
        thread = threading.Thread(target=self._resume)
        self._threads.append(thread)
        thread.start()

    def _resume(self) -> None:
        """Do what the dialer and the listener do."""
        with self._lock:
            if self.closed or not (self.near.is_interrupted or self.far.is_interrupted):
                return
            near_received, near_interruption = self.near.prepare_resume()
            far_received, far_interruption = self.far.prepare_resume()
            near, far = connected_sockets("tcp")
            near_records, far_records = records_pair(near, far, self._kind)
            self.far.resume(far, far_records, near_received, far_interruption)
            self.near.resume(near, near_records, far_received, near_interruption)
            self.resumptions += 1

    def cut(self) -> None:
        """End the present connection."""
        self.near.interrupt(ConnectionResetError("cut"))

    def close(self) -> None:
        with self._lock:
            self.closed = True
        self.near.close()
        self.far.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture(params=RECORDS)
def link(request: pytest.FixtureRequest, background: Background) -> Iterator[Link]:
    link = Link(request.param)
    yield link
    link.close()


def test_frames_that_were_queued_during_an_interruption_arrive(link: Link) -> None:
    for number in range(5):
        link.near.send(Kind.CALL, number, b"before")
    link.cut()
    for number in range(5, 10):
        link.near.send(Kind.CALL, number, b"after")
    assert [link.far.recv(LATE).call_id for _ in range(10)] == list(range(10))
    link.far.send(Kind.REPLY, 1, b"answer")
    assert bytes(link.near.recv(LATE).body) == b"answer"


def in_background(function: Callable[..., object], *args: object) -> Future[object]:
    """Run a function on a thread; return a future for its result."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_every_frame_arrives_once_and_in_order_whatever_is_cut(link: Link) -> None:
    """A sender in each direction, many cuts, frames of all sizes."""
    generator = random.Random(7)
    sizes = [generator.choice([0, 10, 3_000, 100_000, 400_000]) for _ in range(300)]
    all_arrived = threading.Event()

    def send(channel: TcpChannel) -> None:
        for number, size in enumerate(sizes):
            buffers = [memoryview(bytes([number % 251]) * size)] if size > 50 else []
            channel.send(Kind.CALL, number, b"x" * min(size, 50), buffers)
        while not all_arrived.wait(0.001):
            channel.flush_nowait()  # as an event loop would do

    def receive(channel: TcpChannel, cuts: bool) -> list[int]:
        numbers = []
        for _ in sizes:
            frame = channel.recv(LATE)
            for buffer in frame.buffers:
                assert bytes(buffer) == bytes([frame.call_id % 251]) * len(buffer)
            numbers.append(frame.call_id)
            if cuts and frame.call_id % 10 == 5:
                generator.choice([link.near, link.far]).interrupt(ConnectionResetError("cut"))
        return numbers

    sent = [in_background(send, channel) for channel in (link.near, link.far)]
    received = [in_background(receive, link.near, True), in_background(receive, link.far, False)]
    try:
        for each in received:
            assert each.result(LATE * 3) == list(range(len(sizes)))
    finally:
        all_arrived.set()
    for each in sent:
        each.result(LATE)
    assert link.resumptions > 3


def test_frames_are_sent_while_others_are_acknowledged(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that receives removes frames from the queue to which the other one appends."""
    monkeypatch.setattr(tcp, "_FRAMES_PER_ACKNOWLEDGEMENT", 1)
    count = 10_000

    def send() -> None:
        for number in range(count):
            link.near.send(Kind.CALL, number, b"")
        link.near.send(Kind.LEAVE, 0, b"")

    def receive() -> list[int]:
        numbers = []
        while (frame := link.far.recv(LATE)).kind != Kind.LEAVE:
            numbers.append(frame.call_id)
        link.far.send(Kind.REPLY, 0, b"")
        return numbers

    sent, received = in_background(send), in_background(receive)
    assert link.near.recv(LATE * 3).kind == Kind.REPLY
    sent.result(LATE)
    assert received.result(LATE) == list(range(count))


def test_a_frame_that_is_sent_during_an_acknowledgement_is_counted(link: Link) -> None:
    class Unacknowledged(collections.deque[bytes]):
        pop_count = 0

        def popleft(self) -> bytes:
            frame = super().popleft()
            self.pop_count += 1
            if self.pop_count == 1:
                link.near.send(Kind.CALL, 3, b"")  # what another thread may do at this moment
            return frame

    link.near._unacknowledged = Unacknowledged()
    for number in range(3):
        link.near.send(Kind.CALL, number, b"")
    assert [link.far.recv(LATE).call_id for _ in range(3)] == [0, 1, 2]
    link.far.try_send(Kind.HEARTBEAT)
    link.far.send(Kind.REPLY, 0, b"")
    assert link.near.recv(LATE).kind == Kind.REPLY
    assert link.near._unacknowledged.pop_count == 3
    assert link.far.recv(LATE).call_id == 3
    link.cut()  # the peer has received four frames, so as many were sent
    link.near.send(Kind.CALL, 4, b"")
    assert link.far.recv(LATE).call_id == 4


def test_keys_are_changed_by_another_connection(
    monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    monkeypatch.setattr(records, "_RECORDS_PER_KEY", 50)
    link = Link("tls")
    for number in range(200):
        link.near.send(Kind.CALL, number, b"")
    assert [link.far.recv(LATE).call_id for _ in range(200)] == list(range(200))
    link.cut()
    link.near.send(Kind.CALL, 200, b"")
    assert link.far.recv(LATE).call_id == 200
    link.close()
    assert link.resumptions >= 2


def test_frames_that_the_peer_has_are_forgotten(link: Link) -> None:
    for number in range(200):
        link.near.send(Kind.CALL, number, b"")
        link.far.recv(LATE)
    link.far.try_send(Kind.HEARTBEAT)
    link.far.send(Kind.REPLY, 1, b"")
    link.near.recv(LATE)
    assert not link.near._unacknowledged


def test_a_peer_that_acknowledges_what_was_never_sent_breaks_the_protocol(link: Link) -> None:
    link.far._received = 5
    link.far.try_send(Kind.HEARTBEAT)
    with pytest.raises(ProtocolError, match="has received 5 frames, 0 were sent"):
        link.near.recv(LATE)


def test_a_reader_waits_while_the_channel_is_interrupted(background: Background) -> None:
    near, far = tcp_channels(
        *connected_sockets("tcp"), "mac", on_interrupted=lambda channel, error: None
    )
    receiving = background(near.recv)
    far.interrupt(ConnectionResetError("cut"))
    near.interrupt(ConnectionResetError("cut"))
    with pytest.raises(TimeoutError):
        far.recv(timeout=0.05)
    assert not receiving.done()
    near.fail("it could not be resumed")
    with pytest.raises(ChannelClosed, match="could not be resumed"):
        receiving.result(LATE)
    with pytest.raises(ChannelClosed, match="could not be resumed"):
        near.next_frame()
    near.close()
    far.close()


def test_an_orderly_end_is_no_interruption(link: Link) -> None:
    link.near.send(Kind.CALL, 1, b"last")
    link.near.close()
    assert link.far.recv(LATE).call_id == 1
    with pytest.raises(ChannelClosed, match="the peer closed the connection"):
        link.far.recv(LATE)
    assert link.resumptions == 0


# TLS


def test_another_key_cannot_finish_the_tls_connection(background: Background) -> None:
    """With a pre-shared key TLS fails; with ephemeral certificates the proofs differ."""
    near, far = connected_sockets("tcp")
    ours, theirs = TlsContexts(Config(), b"ours"), TlsContexts(Config(), b"theirs")
    client = TlsRecords(near, ours.context(False), server_side=False)
    server = TlsRecords(far, theirs.context(True), server_side=True)
    deadline = time.monotonic() + LATE
    accepting = background(server.shake_hands, deadline)
    if ours.uses_psk:
        with pytest.raises(AuthenticationError):
            client.shake_hands(deadline)
        with pytest.raises(AuthenticationError):
            accepting.result(LATE)
    else:
        client.shake_hands(deadline)
        accepting.result(LATE)
        assert client.tls.version() == "TLSv1.3"
        assert ours.binding(client.tls, False) == theirs.binding(server.tls, True)
        assert ours.context(True) is not theirs.context(True)
        assert ours.binding(server.tls, True) != theirs.binding(server.tls, True)
    near.close()
    far.close()


def test_no_python_code_runs_inside_the_tls_handshake(background: Background) -> None:
    """A signal handler that raised inside a callback would make the handshake fail."""
    near, far = connected_sockets("tcp")
    contexts = TlsContexts(Config(), b"key")
    client = TlsRecords(near, contexts.context(False), server_side=False)
    server = TlsRecords(far, contexts.context(True), server_side=True)
    accepting = background(server.shake_hands, time.monotonic() + LATE)
    inside, called = False, []

    def observe(frame: FrameType, event: str, argument: object) -> None:
        nonlocal inside
        if event.startswith("c_") and getattr(argument, "__name__", "") == "do_handshake":
            inside = event == "c_call"
        elif event == "call" and inside:
            called.append(frame.f_code.co_name)

    sys.setprofile(observe)
    try:
        client.shake_hands(time.monotonic() + LATE)
    finally:
        sys.setprofile(None)
    accepting.result(LATE)
    assert called == []
    near.close()
    far.close()


def test_a_peer_that_does_not_speak_tls_fails_the_handshake(background: Background) -> None:
    near, far = connected_sockets("tcp")
    server = TlsRecords(far, TlsContexts(Config(), b"key").context(True), server_side=True)
    near.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="the TLS handshake failed"):
        server.shake_hands(time.monotonic() + LATE)
    near.shutdown(socket.SHUT_RDWR)
    near.close()
    far.close()
