"""What every transport must do, in one suite: the same bodies for memory, unix sockets, shared
memory and TCP.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from telegrad.errors import ProtocolError
from telegrad.transport.channel import Channel, ChannelClosed, PeerClosed, SendTimeout, send_leave
from telegrad.wire.frames import BufferLocation, Frame, Kind, encode_header
from tests.local.gates import until
from tests.transport.pairs import (
    KERNEL_BUFFER,
    MAX_FRAME,
    Background,
    Pair,
    connected,
    fill_with_frames,
)

SOON = 0.03  # seconds to wait for something that must not come
LATE = 20.0  # seconds after which something that must come is given up
BIG = 8 << 20  # more than any socket holds here


def filled(size: int, value: int) -> memoryview:
    """A buffer of one value."""
    return memoryview(np.full(size, value, np.uint8))


def is_filled(buffer: Any, size: int, value: int) -> bool:
    array = np.frombuffer(buffer, np.uint8)
    return array.size == size and bool((array == value).all())


def take(channel: Channel, count: int) -> list[int]:
    """The call ids of the next frames."""
    return [channel.recv(LATE).call_id for _ in range(count)]


def until_end(channel: Channel) -> list[int]:
    calls = []
    try:
        while True:
            calls.append(channel.recv(LATE).call_id)
    except ChannelClosed:
        return calls


# Frames arrive


def test_a_frame_arrives_with_all_its_fields(pair: Pair) -> None:
    pair.near.send(Kind.CALL, 2**64 - 1, b"body", (), 2**32 - 1, 2**31, 0xFF, timeout=1.0)
    frame = pair.far.recv(LATE)
    assert (frame.kind, frame.flags, frame.call_id, frame.function_id, frame.timeout_ms) == (
        1,
        255,
        2**64 - 1,
        2**32 - 1,
        2**31,
    )
    assert bytes(frame.body) == b"body"
    assert list(frame.buffers) == []


def test_both_ways(pair: Pair) -> None:
    pair.near.send(Kind.CALL, 1, b"question")
    assert bytes(pair.far.recv(LATE).body) == b"question"
    pair.far.send(Kind.REPLY, 1, b"answer")
    assert bytes(pair.near.recv(LATE).body) == b"answer"


def test_frames_arrive_in_order(pair: Pair, background: Background) -> None:
    received = background(take, pair.far, 500)
    for call in range(500):
        pair.near.send(Kind.CALL, call, b"x" * (call % 50), timeout=LATE)
    assert received.result(LATE) == list(range(500))


@pytest.mark.parametrize("size", [0, 1, 40_000, 3 << 20])
def test_bodies_of_any_size(pair: Pair, background: Background, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    received = background(pair.far.recv, LATE)
    pair.near.send(Kind.REPLY, 1, body[:size])
    assert bytes(received.result(LATE).body) == body[:size]


def test_big_buffers_next_to_small_and_empty_ones(pair: Pair, background: Background) -> None:
    sizes = [BIG + 3, 0, 1, 5000, 300_001]
    received = background(pair.far.recv, LATE)
    pair.near.send(Kind.CALL, 1, b"body", [filled(size, value) for value, size in enumerate(sizes)])
    frame: Frame = received.result(LATE)
    assert bytes(frame.body) == b"body"
    assert len(frame.buffers) == len(sizes)
    assert all(is_filled(frame.buffers[value], size, value) for value, size in enumerate(sizes))


def test_more_buffers_than_one_system_call_takes(pair: Pair, background: Background) -> None:
    received = background(pair.far.recv, LATE)
    pair.near.send(Kind.CALL, 1, b"", [filled(100, value % 256) for value in range(2500)])
    frame = received.result(LATE)
    assert all(is_filled(buffer, 100, value % 256) for value, buffer in enumerate(frame.buffers))


def test_big_frames_both_ways_at_once(pair: Pair, background: Background) -> None:
    ends = (pair.near, pair.far)
    received = [background(channel.recv, LATE) for channel in ends]
    sent = [background(channel.send, Kind.CALL, 1, b"", [filled(BIG, 7)]) for channel in ends]
    assert all(future.result(LATE) is None for future in sent)
    assert all(is_filled(future.result(LATE).buffers[0], BIG, 7) for future in received)


def test_concurrent_senders_never_mix_their_frames(pair: Pair, background: Background) -> None:
    senders, frames = 4, 40
    start = threading.Barrier(senders)
    sizes = [0, 10, 3000, 40_000, 200_000]

    def send(sender: int) -> None:
        start.wait(LATE)
        for number in range(frames):
            size = sizes[(number + sender) % len(sizes)]
            buffers = [filled(size, sender)] if number % 2 else []
            pair.near.send(Kind.CALL, number, bytes([sender]) * size, buffers, function=sender)

    sent = [background(send, sender) for sender in range(senders)]
    seen: list[list[int]] = [[] for _ in range(senders)]
    for _ in range(senders * frames):
        frame = pair.far.recv(LATE)
        sender, number = frame.function_id, frame.call_id
        size = sizes[(number + sender) % len(sizes)]
        assert is_filled(frame.body, size, sender)
        assert [is_filled(buffer, size, sender) for buffer in frame.buffers] == [True] * (
            number % 2
        )
        seen[sender].append(number)
    assert seen == [list(range(frames))] * senders
    assert all(future.result(LATE) is None for future in sent)


# Whose memory it is


def test_the_sender_may_overwrite_its_memory_after_send(pair: Pair, background: Background) -> None:
    received = background(pair.far.recv, LATE)
    memory = np.full(BIG, 1, np.uint8)
    pair.near.send(Kind.CALL, 1, b"", [memoryview(memory)])
    memory[:] = 2
    assert is_filled(received.result(LATE).buffers[0], BIG, 1)


def test_the_receiver_may_write_to_what_it_received(pair: Pair, background: Background) -> None:
    memory = np.full(BIG, 1, np.uint8)
    for _ in range(2):
        received = background(pair.far.recv, LATE)
        pair.near.send(Kind.CALL, 1, b"", [memoryview(memory)])
        buffer = received.result(LATE).buffers[0]
        assert is_filled(buffer, BIG, 1)
        np.frombuffer(buffer, np.uint8)[:] = 3
    assert is_filled(memory, BIG, 1)


def test_what_was_received_stays_while_more_arrives(pair: Pair, background: Background) -> None:
    def receive() -> list[Frame]:
        return [pair.far.recv(LATE) for _ in range(6)]

    received = background(receive)
    for value in range(6):
        pair.near.send(Kind.CALL, value, b"", [filled(400_000, value)])
    assert all(
        is_filled(frame.buffers[0], 400_000, value)
        for value, frame in enumerate(received.result(LATE))
    )


def test_read_only_memory_can_be_sent(pair: Pair, background: Background) -> None:
    received = background(pair.far.recv, LATE)
    pair.near.send(Kind.CALL, 1, b"", [memoryview(bytes(6 << 20))])
    assert is_filled(received.result(LATE).buffers[0], 6 << 20, 0)


# Time limits of the receiver


def test_recv_gives_up_in_time_and_goes_on_later(pair: Pair) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        pair.far.recv(timeout=SOON)
    assert SOON * 0.9 <= time.monotonic() - started < LATE
    pair.near.send(Kind.CALL, 1, b"after")
    assert bytes(pair.far.recv(timeout=LATE).body) == b"after"
    with pytest.raises(TimeoutError):
        pair.far.recv(timeout=SOON)
    pair.near.send(Kind.CALL, 2, b"again")
    assert bytes(pair.far.recv().body) == b"again"


@pytest.mark.parametrize("timeout", [0.0, -1.0, -0.25])
def test_a_deadline_that_has_passed_is_a_timeout(pair: Pair, timeout: float) -> None:
    with pytest.raises(TimeoutError):
        pair.far.recv(timeout=timeout)
    pair.near.send(Kind.CALL, 1, b"")
    assert pair.far.recv(LATE).call_id == 1


def test_a_frame_that_is_here_beats_the_time_limit(pair: Pair) -> None:
    for call in (1, 2):
        pair.near.cork(Kind.CALL, call, b"")
    pair.near.flush_nowait()
    assert pair.far.recv(LATE).call_id == 1
    assert pair.far.recv(timeout=0.0).call_id == 2


def test_half_a_frame_then_a_timeout_then_the_rest(streams: Pair) -> None:
    body = b"b" * 20_000
    data = encode_header(Kind.CALL, 9, body, places=[BufferLocation(30_000)]) + body + b"c" * 30_000
    for end in (10, 40, 100, 25_000, 50_000):
        streams.near_socket.sendall(data[:end])
        with pytest.raises(TimeoutError):
            streams.far.recv(timeout=SOON)
        streams.near_socket.sendall(data[end:])
        frame = streams.far.recv(LATE)
        assert (frame.call_id, bytes(frame.body), bytes(frame.buffers[0])) == (
            9,
            body,
            b"c" * 30_000,
        )


def test_a_peer_that_sends_drop_by_drop_does_not_extend_the_time_limit(
    streams: Pair, background: Background
) -> None:
    stop = threading.Event()

    def drip() -> None:
        for byte in encode_header(Kind.CALL, 1, b"x" * 500) + b"x" * 500:
            if stop.wait(0.01):
                return
            streams.near_socket.send(bytes([byte]))

    dripping = background(drip)
    with pytest.raises(TimeoutError):
        streams.far.recv(timeout=0.1)
    assert not dripping.done()
    stop.set()
    dripping.result(LATE)


# The end


@pytest.mark.parametrize("side", ["near", "far"])
def test_shut_on_either_side_wakes_whoever_receives(
    pair: Pair, background: Background, side: str
) -> None:
    inside = threading.Event()

    def receive() -> None:
        inside.set()
        pair.far.recv()

    receiving = background(receive)
    assert inside.wait(LATE)
    getattr(pair, side).shutdown()
    with pytest.raises(ChannelClosed):
        receiving.result(LATE)


def blocked_sender(streams: Pair, background: Background) -> Future[None]:
    sending = background(streams.near.send, Kind.CALL, 1, bytes(BIG))
    # part of it is here; the rest does not fit
    assert select.select([streams.far_socket], [], [], LATE)[0]
    return sending


def test_shut_wakes_whoever_sends(streams: Pair, background: Background) -> None:
    sending = blocked_sender(streams, background)
    streams.near.shutdown()
    with pytest.raises(ChannelClosed):
        sending.result(LATE)


def test_a_peer_that_closes_wakes_whoever_sends(streams: Pair, background: Background) -> None:
    sending = blocked_sender(streams, background)
    streams.far.close()
    with pytest.raises(ChannelClosed):
        sending.result(LATE)


def test_what_was_sent_before_the_end_arrives_before_it(pair: Pair) -> None:
    for call in range(5):
        pair.near.send(Kind.REPLY, call, b"last words")
    pair.near.close()
    assert take(pair.far, 5) == [0, 1, 2, 3, 4]
    for _ in range(3):
        with pytest.raises(ChannelClosed):
            pair.far.recv(LATE)


def test_a_flush_of_nothing_after_the_end_does_not_hide_what_arrived(pair: Pair) -> None:
    pair.near.send(Kind.CALL, 1, b"")
    pair.near.send(Kind.CALL, 2, b"")
    pair.near.shutdown()
    for call in (1, 2):
        pair.far.flush_nowait()
        assert pair.far.recv(LATE).call_id == call
    pair.far.flush_nowait()


def test_the_end_is_final_for_the_one_who_shut(pair: Pair) -> None:
    pair.near.shutdown()
    for _ in range(3):
        with pytest.raises(ChannelClosed):
            pair.near.recv(LATE)
        with pytest.raises(ChannelClosed):
            pair.near.send(Kind.CALL, 1, b"too late")
        with pytest.raises(ChannelClosed):
            pair.near.send(Kind.CALL, 1, b"", [filled(100_000, 1)])
        with pytest.raises(ChannelClosed):
            pair.near.try_send(Kind.HEARTBEAT)


def test_nothing_comes_after_the_end_even_if_somebody_still_sends(pair: Pair) -> None:
    pair.near.shutdown()
    for call in range(3):
        try:
            pair.far.send(Kind.CALL, call, b"too late")
        except ChannelClosed:
            break
    for _ in range(3):
        with pytest.raises(ChannelClosed):
            pair.near.recv(LATE)


def test_sending_to_a_peer_that_is_gone_fails(pair: Pair) -> None:
    pair.far.close()
    with pytest.raises(ChannelClosed):
        pair.near.recv(LATE)

    def knock() -> None:
        for _ in range(10):  # TCP learns of it by the answer to the first
            pair.near.send(Kind.CALL, 1, b"anybody there?")

    with pytest.raises(ChannelClosed):
        knock()


def test_what_is_corked_when_the_channel_ends_is_lost(pair: Pair) -> None:
    pair.near.cork(Kind.REPLY, 1, b"")
    pair.near.shutdown()
    pair.near.cork(Kind.REPLY, 2, b"")
    with pytest.raises(ChannelClosed):
        pair.near.flush_nowait()
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            pair.far.recv(LATE)


def test_closing_twice_is_closing_once(pair: Pair) -> None:
    pair.near.shutdown()
    pair.near.close()
    pair.near.close()
    pair.near.shutdown()
    for use in (
        pair.near.recv,
        lambda: pair.near.send(Kind.CALL, 1, b""),
        lambda: pair.near.try_send(Kind.HEARTBEAT),
    ):
        with pytest.raises(ChannelClosed):
            use()
    assert "shut" in repr(pair.near)


def test_the_end_in_the_middle_of_a_frame(streams: Pair) -> None:
    streams.near_socket.sendall(encode_header(Kind.CALL, 1, b"body") + b"bo")
    streams.near.close()
    with pytest.raises(ChannelClosed):
        streams.far.recv(LATE)


def test_a_copy_that_is_dropped_does_not_end_the_conversation(streams: Pair) -> None:
    # as a parent keeps its copy when its forked child drops the other
    with streams.near_socket.dup() as kept:
        streams.near.close_after_fork()
        with pytest.raises(TimeoutError):
            streams.far.recv(timeout=SOON)
        kept.sendall(encode_header(Kind.CALL, 3, b""))
        assert streams.far.recv(LATE).call_id == 3


def test_last_words_arrive(pair: Pair) -> None:
    send_leave(pair.near, "out of memory — désolé")
    frame = pair.far.recv(LATE)
    assert frame.kind == Kind.LEAVE
    assert PeerClosed(frame).reason == "out of memory — désolé"


def test_leaving_without_a_word_and_talking_to_nobody(pair: Pair) -> None:
    send_leave(pair.near, None)
    with pytest.raises(TimeoutError):
        pair.far.recv(timeout=SOON)
    pair.near.shutdown()
    send_leave(pair.near, "nobody hears this")


# Cork and flush


def test_corked_frames_go_first_and_in_order(pair: Pair) -> None:
    pair.near.cork(Kind.REPLY, 1, b"one")
    pair.near.cork(Kind.REPLY, 2, b"")
    pair.near.send(Kind.REPLY, 3, b"three")
    pair.near.cork(Kind.REPLY, 4, b"four")
    pair.near.send(Kind.REPLY, 5, b"", [filled(20_000, 5)])
    pair.near.cork(Kind.REPLY, 6, b"six")
    pair.near.flush_nowait()
    pair.near.cork(Kind.REPLY, 7, b"seven")
    pair.near.try_send(Kind.HEARTBEAT)
    frames = [pair.far.recv(LATE) for _ in range(7)]
    assert [frame.call_id for frame in frames] == [1, 2, 3, 4, 5, 6, 7]
    assert [bytes(frame.body) for frame in frames] == [
        b"one",
        b"",
        b"three",
        b"four",
        b"",
        b"six",
        b"seven",
    ]
    assert is_filled(frames[4].buffers[0], 20_000, 5)


def test_corked_frames_wait_for_a_flush(pair: Pair) -> None:
    pair.near.cork(Kind.REPLY, 1, b"")
    with pytest.raises(TimeoutError):
        pair.far.recv(timeout=SOON)
    pair.near.flush_nowait()
    assert pair.far.recv(LATE).call_id == 1


def test_a_flush_of_nothing_sends_nothing(pair: Pair) -> None:
    pair.near.flush_nowait()
    with pytest.raises(TimeoutError):
        pair.far.recv(timeout=SOON)


def test_has_frame_says_whether_another_one_is_here(pair: Pair) -> None:
    assert not pair.far.has_frame()
    for call in range(3):
        pair.near.cork(Kind.REPLY, call, b"body")
    pair.near.flush_nowait()
    assert pair.far.recv(LATE).call_id == 0
    assert pair.far.has_frame()
    assert take(pair.far, 2) == [1, 2]
    assert not pair.far.has_frame()


def test_a_heartbeat_is_an_empty_frame(streams: Pair) -> None:
    streams.near.try_send(Kind.HEARTBEAT)
    frame = streams.far.recv(LATE)
    assert (frame.kind, frame.call_id, bytes(frame.body), list(frame.buffers)) == (
        Kind.HEARTBEAT,
        0,
        b"",
        [],
    )


# A peer that takes nothing


def stuff(streams: Pair) -> None:
    """Fill the connection: the frame that does not fit is cut short, and the channel owes the
    rest.
    """
    with pytest.raises(TimeoutError):
        streams.near.send(Kind.CALL, 1, bytes(BIG), timeout=0.05)


def test_a_send_that_gives_up_is_finished_by_the_next_one(
    streams: Pair, background: Background
) -> None:
    stuff(streams)
    received = background(lambda: [streams.far.recv(LATE) for _ in range(2)])
    streams.near.send(Kind.CALL, 2, b"second")
    first, second = received.result(LATE)
    assert (first.call_id, is_filled(first.body, BIG, 0)) == (1, True)
    assert (second.call_id, bytes(second.body)) == (2, b"second")


def test_a_frame_that_has_not_begun_is_dropped_and_the_one_before_it_is_finished(
    streams: Pair, background: Background
) -> None:
    stuff(streams)
    for call in (2, 3):
        with pytest.raises(SendTimeout) as late:
            streams.near.send(Kind.CALL, call, b"small", timeout=0.03)
        assert not late.value.begun
    received = background(take, streams.far, 2)
    streams.near.send(Kind.CALL, 4, b"last")
    assert received.result(LATE) == [1, 4]


def test_corked_frames_that_do_not_fit_are_not_lost(streams: Pair, background: Background) -> None:
    stuff(streams)
    streams.near.cork(Kind.REPLY, 2, b"corked")
    with pytest.raises(SendTimeout):
        streams.near.send(Kind.REPLY, 3, b"small", timeout=0.03)
    received = background(take, streams.far, 3)
    streams.near.send(Kind.REPLY, 4, b"")
    assert received.result(LATE) == [1, 2, 4]


def test_a_frame_of_which_nothing_fits_is_not_sent_at_all(
    shared: Pair, background: Background
) -> None:
    fill_with_frames(shared.near_socket)
    with pytest.raises(TimeoutError):
        shared.near.send(Kind.CALL, 1, b"x" * 100_000, timeout=0.05)

    def first_call() -> int:
        while (frame := shared.far.recv(LATE)).kind == Kind.HEARTBEAT:
            pass
        return frame.call_id

    received = background(first_call)
    shared.near.send(Kind.CALL, 2, b"next")
    assert received.result(LATE) == 2


def test_try_send_never_blocks_on_a_full_connection(streams: Pair, background: Background) -> None:
    stuff(streams)
    minute = socket.SO_SNDTIMEO, (60).to_bytes(8, "little") + bytes(8)
    streams.near_socket.setsockopt(socket.SOL_SOCKET, *minute)
    started = time.monotonic()
    for _ in range(3):
        streams.near.try_send(Kind.HEARTBEAT)
    assert time.monotonic() - started < LATE
    received = background(lambda: [streams.far.recv(LATE) for _ in range(2)])
    streams.near.send(Kind.CALL, 2, b"")
    # what is owed is sign enough
    assert [frame.kind for frame in received.result(LATE)] == [Kind.CALL, Kind.CALL]


def test_try_send_leaves_out_what_would_wait_for_another_sender(
    streams: Pair, background: Background
) -> None:
    sending = blocked_sender(streams, background)
    background(streams.near.try_send, Kind.HEARTBEAT).result(LATE)
    assert not sending.done()
    assert streams.far.recv(LATE).call_id == 1
    sending.result(LATE)
    streams.near.send(Kind.CALL, 2, b"")
    assert streams.far.recv(LATE).call_id == 2


def test_senders_wait_for_a_slow_reader(streams: Pair, background: Background) -> None:
    def send(call: int) -> None:
        streams.near.send(Kind.CALL, call, bytes(KERNEL_BUFFER), timeout=LATE)

    sending = [background(send, call) for call in range(8)]
    assert sorted(take(streams.far, 8)) == list(range(8))
    assert all(future.result(LATE) is None for future in sending)


# Peers that break the rules


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        bytes(32),
        b"\xff" * 64,
        encode_header(Kind.CALL, 1, b"")[:-4] + b"\0" * 4,
    ],
    ids=["http", "zeros", "ones", "no kind"],
)
def test_garbage_breaks_the_protocol(streams: Pair, data: bytes) -> None:
    streams.near_socket.sendall(data)
    with pytest.raises(ProtocolError):
        streams.far.recv(LATE)


def test_a_frame_over_the_limit_breaks_the_protocol(streams: Pair) -> None:
    streams.near_socket.sendall(
        encode_header(Kind.CALL, 1, b"", places=[BufferLocation(MAX_FRAME + 1)])
    )
    with pytest.raises(ProtocolError, match="limit"):
        streams.far.recv(LATE)


def test_a_buffer_in_shared_memory_that_nobody_announced_damages_its_frame_alone(
    shared: Pair,
) -> None:
    shared.near_socket.sendall(
        encode_header(Kind.CALL, 1, b"body", places=[BufferLocation(100_000, 4096, 1, 0)]) + b"body"
    )
    shared.near.send(Kind.CALL, 2, b"next")
    damaged, whole = shared.far.recv(LATE), shared.far.recv(LATE)
    assert (damaged.call_id, bytes(damaged.body), "unknown" in str(damaged.receive_error)) == (
        1,
        b"body",
        True,
    )
    assert (whole.call_id, bytes(whole.body), whole.receive_error) == (2, b"next", None)


def test_shared_memory_on_a_connection_that_has_none_breaks_the_protocol() -> None:
    for pair in connected("unix"):
        pair.near_socket.sendall(
            encode_header(Kind.CALL, 1, b"", places=[BufferLocation(100_000, 4096, 1, 0)])
        )
        with pytest.raises(ProtocolError, match="shared"):
            pair.far.recv(LATE)


def test_a_channel_says_what_it_is(pair: Pair) -> None:
    assert pair.near.kind in ("memory", "unix", "tcp")
    assert "shut" not in repr(pair.near)
    pair.near.shutdown()
    assert repr(pair.near).startswith("<")
    assert "shut" in repr(pair.near)


def test_until_end_of_a_busy_channel(pair: Pair, background: Background) -> None:
    received = background(until_end, pair.far)
    for call in range(100):
        pair.near.send(Kind.CALL, call, b"x" * 100, [filled(10_000, 1)])
    pair.near.shutdown()
    assert received.result(LATE) == list(range(100))


# Without waiting


def test_what_is_offered_arrives(pair: Pair) -> None:
    assert pair.near.send_nowait(Kind.REPLY, 7, b"body")
    frame = pair.far.recv(LATE)
    assert (frame.kind, frame.call_id, bytes(frame.body)) == (Kind.REPLY, 7, b"body")


def test_what_is_not_taken_at_once_is_left_for_later(streams: Pair, background: Background) -> None:
    full: list[bool] = []
    streams.near.on_send_blocked = lambda: full.append(True)
    sent = 0
    while streams.near.send_nowait(Kind.REPLY, sent, bytes(4096)):
        sent += 1
    assert not streams.near.send_nowait(Kind.REPLY, sent + 1, b"one more")
    assert full == [True, True]
    arriving = background(take, streams.far, sent + 2)
    number = streams.near.fileno()
    assert number is not None
    while not streams.near.flush_nowait():
        assert select.select([], [number], [], LATE)[1]
    assert arriving.result(LATE) == list(range(sent + 2))


def test_what_is_corked_while_another_thread_sends_goes_out_after_it(
    streams: Pair, background: Background
) -> None:
    sending = background(streams.near.send, Kind.CALL, 1, bytes(BIG))
    until(streams.near._send_lock.locked)  # type: ignore[attr-defined]
    assert streams.near.send_nowait(Kind.REPLY, 2, b"small")
    assert [frame.call_id for frame in (streams.far.recv(LATE), streams.far.recv(LATE))] == [1, 2]
    sending.result(LATE)


def next_frame(channel: Channel) -> Frame | None:
    """Return the next frame if it can be had without waiting."""
    channel.receive()
    return channel.next_frame()


def test_what_is_corked_during_a_sign_of_life_goes_out_after_it(
    streams: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    near: Any = streams.near
    send_all = near._send_all

    def cork_meanwhile(*args: Any, **kwargs: Any) -> bool:
        complete: bool = send_all(*args, **kwargs)
        near.cork(Kind.REPLY, 7, b"x")
        near.flush_nowait()  # as another thread would, which finds the lock taken
        return complete

    monkeypatch.setattr(near, "_send_all", cork_meanwhile)
    near.try_send(Kind.HEARTBEAT)
    assert [streams.far.recv(LATE).kind for _ in range(2)] == [Kind.HEARTBEAT, Kind.REPLY]


def test_many_threads_cork_while_others_flush(pair: Pair, background: Background) -> None:
    threads, count = 3, 300
    begin = threading.Barrier(threads)

    def reply(first: int) -> None:
        begin.wait(LATE)
        for call in range(first, first + count):
            pair.near.cork(Kind.REPLY, call, b"x")
            pair.near.flush_nowait()

    full = threading.Semaphore(0)
    pair.near.on_send_blocked = full.release
    receiving = background(lambda: [pair.far.recv(LATE).call_id for _ in range(threads * count)])
    sending = [background(reply, number * count) for number in range(threads)]
    for each in sending:
        each.result(LATE)
    while full.acquire(blocking=False):  # an event loop would go on when the peer takes more
        until(pair.near.flush_nowait)
    received = receiving.result(LATE)
    assert sorted(received) == list(range(threads * count))
    for number in range(threads):  # what one thread corked arrives in order
        own = [call for call in received if call // count == number]
        assert own == sorted(own)


def test_receiving_does_not_wait(streams: Pair, background: Background) -> None:
    assert next_frame(streams.far) is None
    sending = background(streams.near.send, Kind.CALL, 3, b"body", [filled(BIG, 5)])
    number = streams.far.fileno()
    assert number is not None
    frame = None
    while frame is None:
        assert select.select([number], [], [], LATE)[0]
        frame = next_frame(streams.far)
    assert frame.call_id == 3
    assert is_filled(frame.buffers[0], BIG, 5)
    sending.result(LATE)
    streams.near.shutdown()
    assert select.select([number], [], [], LATE)[0]
    with pytest.raises(ChannelClosed):
        next_frame(streams.far)
