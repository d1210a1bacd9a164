"""Buffers that their receiver pulls over stripes: what interrupts that, and what stays behind."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport import stripe_client, stripes
from telegrad.transport.bulk import BulkPeer, Registration
from telegrad.transport.channel import ChannelClosed, SendTimeout
from telegrad.transport.stripes import OK, PULL, REFUSED, REQUEST, STATUS, Stripe
from telegrad.wire.frames import BULK_SEGMENT, BufferLocation, Frame, FrameDecoder, Kind
from telegrad.wire.handshake import Incarnation
from tests.local.gates import until
from tests.transport.pairs import (
    GIVE_UP,
    Background,
    Pair,
    connected,
    connected_sockets,
    connected_stripes,
    records_pair,
    tcp_channels,
)

LATE = 20.0
BIG = 12 << 20


@pytest.fixture
def bulk(background: Background) -> Iterator[Pair]:
    """Two channels that pull large buffers from each other. Nothing is in use in the end."""
    for pair in connected("tcp+bulk"):
        yield pair
        for end in (pair.near_end, pair.far_end):
            until(lambda end=end: not end.engine.counters()["bulk_pulls"])  # type: ignore[misc]
            until(lambda end=end: not end.engine.counters()["bulk_registrations"])  # type: ignore[misc]


def random_bytes(size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def equal(buffer: memoryview, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    return bool(np.array_equal(np.frombuffer(buffer, np.uint8), array))


def is_received(receiving: Future[Frame]) -> bool:
    """Whether a frame was received, with its buffers."""
    try:
        return receiving.result(LATE).receive_error is None
    except ChannelClosed:
        return False


class Interceptor:
    """Runs `before(count)` before each chunk that is sent, with the number of chunks so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.stripes: list[Stripe] = []
        self._lock = threading.Lock()
        self._send = stripes.send_chunk
        monkeypatch.setattr(stripes, "send_chunk", self._intercept)

    def before(self, count: int, stripe: Stripe) -> None:
        """Do nothing."""

    def _intercept(self, stripe: Stripe, chunk: Iterable[memoryview], about: bytes) -> None:
        with self._lock:
            self.count += 1
            count = self.count
        self.stripes.append(stripe)
        self.before(count, stripe)
        self._send(stripe, chunk, about)


@pytest.mark.parametrize("size", [30_000, (1 << 19) - 1, 1 << 19, (1 << 19) + 1, 5_000_003, BIG])
def test_bytes_are_equal(bulk: Pair, background: Background, size: int) -> None:
    data = random_bytes(size)
    received = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 1, b"body", [memoryview(data)])
    frame = received.result(LATE)
    assert bytes(frame.body) == b"body"
    assert not frame.bulk
    assert equal(frame.buffers[0], data)
    assert bulk.far_end.stripes  # it was pulled


def test_many_buffers_of_one_frame(bulk: Pair, background: Background) -> None:
    sizes = [100_000 + index if index % 3 else index for index in range(200)]
    data = [random_bytes(size, size) for size in sizes]
    received = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 1, b"", [memoryview(array) for array in data])
    buffers = received.result(LATE).buffers
    assert all(equal(buffer, array) for buffer, array in zip(buffers, data, strict=True))


def test_small_frames_overtake_a_frame_that_is_pulled(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = threading.Event()
    interceptor = Interceptor(monkeypatch)
    monkeypatch.setattr(interceptor, "before", lambda count, stripe: blocked.wait(LATE))
    arrived = threading.Semaphore(0)
    bulk.far.on_frame = arrived.release  # as if an event loop read it
    sending = background(bulk.near.send, Kind.CALL, 1, b"", [memoryview(random_bytes(BIG))])
    until(lambda: interceptor.count > 0 or bool(bulk.far.receive()))
    bulk.near.send(Kind.CALL, 2, b"small")
    until(lambda: bulk.far.has_frame() or bulk.far.receive())
    frame = bulk.far.next_frame()
    assert frame is not None
    assert frame.call_id == 2
    assert not sending.done()
    blocked.set()
    assert arrived.acquire(timeout=LATE)
    frame = bulk.far.next_frame()
    assert frame is not None
    assert frame.call_id == 1
    sending.result(LATE)
    bulk.far.on_frame = None


def test_a_stripe_that_breaks_is_opened_again(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    interceptor = Interceptor(monkeypatch)

    def break_some(count: int, stripe: Stripe) -> None:
        if count in (2, 5, 6, 7, 11):
            stripe._sock.sendall(b"half of a record")
            stripes.shut([stripe])

    monkeypatch.setattr(interceptor, "before", break_some)
    data = random_bytes(BIG)
    received = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 1, b"", [memoryview(data)])
    assert equal(received.result(LATE).buffers[0], data)
    assert len(bulk.far_end.stripes) > 3


def test_the_connection_is_interrupted_during_a_pull(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the connection and the stripes break; the transfer goes on over new ones."""
    interceptor = Interceptor(monkeypatch)
    for pair in connected("tcp+bulk"):
        near_end, far_end = pair.near_end, pair.far_end
        sockets = connected_sockets("tcp")
        transfers = near_end.pulling_from(far_end), far_end.pulling_from(near_end)
        near, far = tcp_channels(*sockets, "mac", lambda channel, error: None, transfers)

        def cut(count: int, stripe: Stripe, near=near, far=far) -> None:  # type: ignore[no-untyped-def]
            if count == 4:
                near_received, near_interruption = near.prepare_resume()
                far_received, far_interruption = far.prepare_resume()
                stripes.shut(interceptor.stripes)
                new = connected_sockets("tcp")
                near_records, far_records = records_pair(*new, "mac")
                far.resume(new[1], far_records, near_received, far_interruption)
                near.resume(new[0], near_records, far_received, near_interruption)

        monkeypatch.setattr(interceptor, "before", cut)
        data = random_bytes(BIG)
        frame = background(far.recv, LATE)
        near.send(Kind.CALL, 1, b"", [memoryview(data)], timeout=LATE)
        assert equal(frame.result(LATE).buffers[0], data)
        near.send(Kind.CALL, 2, b"after")
        assert far.recv(LATE).call_id == 2
        near.close()
        far.close()


def test_a_sender_that_gives_up_fails_the_pull_alone(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    interceptor = Interceptor(monkeypatch)
    reached, go_on = threading.Event(), threading.Event()

    def stop(count: int, stripe: Stripe) -> None:
        reached.set()
        assert go_on.wait(LATE)

    monkeypatch.setattr(interceptor, "before", stop)
    memory = random_bytes(BIG)
    received = background(bulk.far.recv, LATE)

    def send() -> None:
        with pytest.raises(SendTimeout) as raised:
            bulk.near.send(Kind.CALL, 1, b"", [memoryview(memory)], timeout=0.5)
        assert raised.value.begun
        memory[:] = 0  # the receiver must not get any of these

    sending = background(send)
    assert reached.wait(LATE)
    # it waits until no thread reads the memory any more
    until(lambda: not bulk.near_end.engine.counters()["bulk_registrations"])
    go_on.set()
    sending.result(LATE)
    frame = received.result(LATE)
    assert isinstance(frame.receive_error, SerializationError)
    assert not frame.buffers
    received = background(bulk.far.recv, LATE)
    data = random_bytes(BIG)
    bulk.near.send(Kind.CALL, 2, b"", [memoryview(data)], timeout=LATE)
    assert equal(received.result(LATE).buffers[0], data)


def test_no_memory_for_the_buffers_fails_the_frame_alone(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: BufferLocation) -> memoryview:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(bulk.far._decoder, "_reserve_bulk", refuse)  # type: ignore[attr-defined]
        received = background(bulk.far.recv, LATE)
        bulk.near.send(Kind.CALL, 1, b"body", [memoryview(random_bytes(BIG))], timeout=LATE)
        frame = received.result(LATE)
    assert isinstance(frame.receive_error, MemoryError)
    received = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 2, b"", [memoryview(random_bytes(BIG))], timeout=LATE)
    assert received.result(LATE).receive_error is None


@pytest.mark.parametrize("side", ["near", "far"])
def test_a_channel_that_is_shut_ends_both_sides(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    interceptor = Interceptor(monkeypatch)
    channel = bulk.near if side == "near" else bulk.far
    monkeypatch.setattr(interceptor, "before", lambda count, stripe: channel.shutdown())
    received = background(bulk.far.recv, LATE)
    # A receiver that gives up tells the sender, which may return before the channel is closed.
    is_closed = pytest.raises if side == "near" else contextlib.suppress
    with is_closed(ChannelClosed):
        bulk.near.send(Kind.CALL, 1, b"", [memoryview(random_bytes(BIG))])
    assert not is_received(received)


@pytest.mark.parametrize("side", ["near", "far"])
def test_a_lost_peer_ends_its_transfers(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    interceptor = Interceptor(monkeypatch)
    end, other = bulk.near_end, bulk.far_end
    if side == "far":
        end, other = other, end

    def forget(count: int, stripe: Stripe) -> None:
        end.engine.forget_peer(Incarnation(other.name))
        (bulk.near if side == "near" else bulk.far).shutdown()

    monkeypatch.setattr(interceptor, "before", forget)
    received = background(bulk.far.recv, LATE)
    with pytest.raises(ChannelClosed):
        bulk.near.send(Kind.CALL, 1, b"", [memoryview(random_bytes(BIG))])
    assert not is_received(received)


def test_a_sender_that_cannot_be_reached_fails_the_call_alone(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(peer: BulkPeer) -> Stripe:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(bulk.far_end.engine, "_connect", refuse)
    for end in (bulk.near_end, bulk.far_end):
        monkeypatch.setattr(end.engine, "_limits", (0.1, GIVE_UP))
    monkeypatch.setattr(bulk.near_end.engine._server, "_connect_limit", 0.1)
    received = background(bulk.far.recv, LATE)
    with pytest.raises(SerializationError, match="TELEGRAD_ADVERTISE"):
        bulk.near.send(Kind.CALL, 1, b"", [memoryview(random_bytes(BIG))])
    assert "nobody listens" in str(received.result(LATE).receive_error)
    bulk.near.send(Kind.CALL, 2, b"small")
    assert bulk.far.recv(LATE).call_id == 2


def test_no_thread_for_a_stripe_fails_the_frame_alone(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bulk.far_end.engine, "_start_thread", refuse)
    monkeypatch.setattr(bulk.near_end.engine._server, "_connect_limit", 0.1)
    received = background(bulk.far.recv, LATE)
    with pytest.raises(SerializationError):
        bulk.near.send(Kind.CALL, 1, b"", [memoryview(random_bytes(BIG))])
    assert "start new thread" in str(received.result(LATE).receive_error)


def test_idle_stripes_are_closed_and_opened_again(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripe_client, "_IDLE_SECONDS", 0.01)
    for _ in range(2):
        received = background(bulk.far.recv, LATE)
        bulk.near.send(Kind.CALL, 1, b"", [memoryview(random_bytes(BIG))], timeout=LATE)
        assert received.result(LATE).receive_error is None
        until(lambda: not bulk.far_end.engine.counters()["bulk_stripes"])
        until(lambda: not bulk.near_end.engine.counters()["bulk_stripes"])


# What a peer may ask for


def request(stripe: Stripe, *fields: int) -> int:
    stripe.send(REQUEST.pack(*fields))
    status: int = STATUS.unpack(read(stripe, STATUS.size, *fields))[0]
    return status


def read(stripe: Stripe, size: int, *fields: int) -> bytes:
    memory = bytearray(size)
    stripe.receive(memoryview(memory), REQUEST.pack(*fields))
    return bytes(memory)


@pytest.fixture
def registration(bulk: Pair) -> Iterator[Registration]:
    peer = BulkPeer("far", Incarnation("far"), "tcp:there")
    registration = bulk.near_end.engine.register(peer, [memoryview(b"0123456789")])
    yield registration
    bulk.near_end.engine.withdraw(registration)


def test_only_chunks_of_own_registrations_are_served(
    bulk: Pair, registration: Registration
) -> None:
    key = registration.registration_id
    stripe = bulk.far_end._connect(registration.peer)
    assert request(stripe, PULL, 0, key, 2, 3) == OK
    assert read(stripe, 3, PULL, 0, key, 2, 3) == b"234"
    for wrong in [
        (PULL, 0, key ^ 1, 0, 1),  # no such registration
        (PULL, 1, key, 0, 1),  # no such buffer
        (PULL, 0, key, 0, 11),
        (PULL, 0, key, 11, 1),
        (PULL, 0, key, 2**64 - 1, 2**64 - 1),
        (77, 0, key, 0, 1),
    ]:
        assert request(stripe, *wrong) == REFUSED
    assert not registration.ended.is_set
    stripe.close()


def test_another_peer_gets_nothing(bulk: Pair, registration: Registration) -> None:
    stripe, served = connected_stripes()
    engine = bulk.near_end.engine
    bulk.near_end._start(lambda: engine.serve(served, Incarnation("somebody else")))
    assert request(stripe, PULL, 0, registration.registration_id, 0, 1) == REFUSED
    assert request(stripe, stripes.DONE, 0, registration.registration_id, 0, 0) == OK
    assert not registration.ended.is_set
    stripe.close()


def test_a_connection_without_stripes_refuses_a_bulk_buffer() -> None:
    decoder = FrameDecoder(
        lambda size: memoryview(bytearray(size)), lambda place: memoryview(b""), 99
    )
    data = struct.pack("<QQIIIBBH", 0, 1, 0, 0, 1, 1, 0, 0) + struct.pack(
        "<QQII", *BufferLocation(9, 5, BULK_SEGMENT)
    )
    decoder.get_buffer()[: len(data)] = data
    decoder.buffer_updated(len(data))
    with pytest.raises(ProtocolError, match="no stripes"):
        decoder.next_frame()


def test_a_frame_with_two_registrations_is_refused(bulk: Pair) -> None:
    memory = memoryview(bytearray(1))
    places = [(BufferLocation(1, key, BULK_SEGMENT), memory) for key in (1, 2)]
    frame = Frame.of(1, 0, 1, 0, 0, b"", [memory, memory], None, places)
    with pytest.raises(ProtocolError, match="several registrations"):
        bulk.far._bulk.start_pull(frame, lambda complete: None)  # type: ignore[attr-defined]


def test_the_time_of_the_pull_belongs_to_the_timeout_of_the_call(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    interceptor = Interceptor(monkeypatch)
    started = time.monotonic()
    monkeypatch.setattr(
        interceptor,
        "before",
        lambda count, stripe: until(lambda: time.monotonic() > started + 0.1),
    )
    received = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 1, b"", [memoryview(random_bytes(BIG))], timeout_ms=5000)
    assert 0 < received.result(LATE).timeout_ms < 5000
