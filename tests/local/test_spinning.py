"""Polling for messages before sleeping: only while it does not cost other threads their core."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Iterator

import pytest

from telegrad.spinning import Spinning, spinning
from telegrad.testing import LocalCluster
from telegrad.transport.buffer_pool import BufferPool
from telegrad.transport.stream import StreamChannel
from telegrad.wire.frames import Kind

MEGABYTE = 1 << 20


def test_short_polls_have_not_lost_the_core() -> None:
    own = Spinning()
    assert not own.lost_core(10.0, 10.00005)
    assert own.rest_until == 0.0


def test_a_worker_that_serves_a_call_on_the_same_core_causes_no_rest() -> None:
    own = Spinning()
    assert own.lost_core(10.0, 10.0005)
    assert own.rest_until == 0.0


def test_a_turn_of_another_thread_is_followed_by_a_rest_thirty_times_as_long() -> None:
    own = Spinning()
    assert own.lost_core(10.0, 10.003)
    assert own.rest_until == pytest.approx(10.093)
    assert "10.093" in repr(own)


def test_a_process_that_was_stopped_for_an_hour_rests_as_after_a_long_turn() -> None:
    own = Spinning()
    assert own.lost_core(0.0, 3600.0)
    assert own.rest_until == pytest.approx(3600.3)


@pytest.fixture
def pair() -> Iterator[tuple[StreamChannel, StreamChannel]]:
    first, second = socket.socketpair()
    channels = (
        StreamChannel(first, BufferPool(), MEGABYTE),
        StreamChannel(second, BufferPool(), MEGABYTE),
    )
    yield channels
    for channel in channels:
        channel.close()


def test_a_channel_does_not_poll_while_its_process_rests(
    pair: tuple[StreamChannel, StreamChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    sender.send(Kind.HEARTBEAT, 0, b"")
    monkeypatch.setattr(spinning, "rest_until", 10.0)
    assert not receiver._spin(9.0, select.poll())
    assert not receiver.has_frame()
    assert receiver._spin(11.0)
    assert receiver.has_frame()


@pytest.mark.parametrize("rest_until", [0.0, math.inf])
def test_calls_work_with_and_without_polling(
    rest_until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spinning, "rest_until", rest_until)
    with LocalCluster(2) as cluster:
        assert [cluster["w0"].call("w1", abs, -number) for number in range(50)] == [*range(50)]
        # busy tests may let the process rest for longer, but never for a shorter time
        assert spinning.rest_until >= rest_until
