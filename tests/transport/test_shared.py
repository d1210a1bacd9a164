"""Shared memory: blocks go out, come back, are never given out twice, and nothing of it is left
behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.transport import memfd, segments
from telegrad.transport.channel import SendTimeout
from telegrad.transport.segments import (
    SLOTS,
    SegmentAllocator,
    SegmentMappings,
    SegmentUnknown,
    SharedSegment,
)
from telegrad.transport.shared_memory import SharedCopies, SharedMemoryTransfer
from telegrad.wire import codec
from telegrad.wire.frames import BufferLocation, Kind, encode_header
from tests.transport.pairs import FLOOR, Background, End, Pair, fill_with_frames

LATE = 20.0
PAGE = 4096
MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MIN_SEGMENT", MEGABYTE)


@pytest.fixture
def allocator() -> Iterator[SegmentAllocator]:
    allocator = SegmentAllocator(FLOOR, 4 * MEGABYTE)
    yield allocator
    allocator.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """A sender and a receiver."""
    sender, receiver = (
        End(name, SegmentAllocator(FLOOR, 4 * MEGABYTE)) for name in ("sender", "receiver")
    )
    yield sender, receiver
    sender.close()
    receiver.close()


SENDER = object()  # the connection that blocks are sent through


def placed(
    sharing: SharedMemoryTransfer, buffers: list[memoryview]
) -> tuple[list[BufferLocation], list[memoryview]]:
    places = [BufferLocation(buffer.nbytes) for buffer in buffers]
    return places, sharing.place(buffers, places)


def taken(
    allocator: SegmentAllocator, nbytes: int, peer: str = "receiver"
) -> tuple[SharedSegment, BufferLocation]:
    found = allocator.allocate(nbytes, peer, SENDER)
    assert found is not None
    return found


def memfds() -> int:
    """Descriptors and mappings of segments in this process."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the listing itself
    with open("/proc/self/maps") as maps:
        mapped = sum("/memfd:telegrad" in line for line in maps)
    return mapped + sum(target.startswith("/memfd:telegrad") for target in targets)


def send(sender: End, receiver: End, data: bytes) -> memoryview:
    """Through shared memory, without a channel."""
    [place], rest = placed(sender.sharing_with(receiver), [memoryview(data)])
    assert rest == []
    return receiver.sharing_with(sender).locate(place)


# A block's way


def test_what_the_sender_wrote_is_what_the_receiver_reads(ends: tuple[End, End]) -> None:
    data = os.urandom(100_000)
    assert bytes(send(*ends, data)) == data


def test_the_receiver_sits_on_the_senders_pages(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    segment, place = taken(sender.allocator, 10_000)
    receiver.mappings.add("sender", segment.segment_id, segment.fd)
    memory = receiver.mappings.locate("sender", place)
    memory[5] = 77
    assert segment.bytes[place.offset + 5] == 77


def test_a_block_goes_back_when_its_last_holder_dies(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    memory = send(sender, receiver, bytes(100_000))
    assert receiver.mappings.blocks_in_use == 1
    part = memory[10:20]
    del memory
    assert receiver.mappings.blocks_in_use == 1
    del part
    assert receiver.mappings.blocks_in_use == 0
    sender.allocator.close_unused()
    assert repr(sender.allocator) == "<SegmentAllocator []>"


@pytest.mark.parametrize("kind", ["tensor", "view", "numpy", "parameter"])
def test_a_tensor_or_a_view_of_it_holds_the_block(ends: tuple[End, End], kind: str) -> None:
    sender, receiver = ends
    body, [buffer] = codec.encode(torch.arange(10_000))
    memory = send(sender, receiver, bytes(buffer))
    tensor = codec.decode(body, [memory])
    del memory
    holder: Any = {
        "tensor": tensor,
        "view": tensor.view(100, 100)[3:7, ::2],
        "numpy": tensor.numpy()[5:],
        "parameter": torch.nn.Parameter(tensor, requires_grad=False),
    }[kind]
    del tensor
    assert receiver.mappings.blocks_in_use == 1
    sender.allocator.close_unused()
    assert repr(sender.allocator) != "<SegmentAllocator []>"
    assert holder.reshape(-1)[-1] in (9999, 698)
    del holder
    assert receiver.mappings.blocks_in_use == 0


def test_a_block_that_came_back_is_the_first_to_go_out_again(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    places = []
    for size in (100_000, 99_000, 98_000):
        segment, place = taken(sender.allocator, size)
        receiver.mappings.add("sender", segment.segment_id, segment.fd)
        receiver.mappings.locate("sender", place)
        places.append((place.segment, place.offset))
    assert places == [(1, PAGE)] * 3


def test_a_callback_that_runs_late_does_not_free_the_next_use_of_its_block(
    ends: tuple[End, End],
) -> None:
    """Another thread may find that the tensor is gone, and free its block, before the callback of
    the tensor runs.
    """
    sender, receiver = ends
    memory = send(sender, receiver, bytes(100_000))
    [(_, ended, _)] = receiver.mappings._in_use.values()
    late: Any = ended.__callback__
    del memory
    receiver.mappings.release_dead()
    data = os.urandom(100_000)
    again = send(sender, receiver, data)  # in the same block
    late(ended)
    send(sender, receiver, bytes(100_000))
    assert bytes(again) == data


def test_blocks_in_use_are_never_given_out_again(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    held = {value: send(sender, receiver, bytes([value]) * 60_000) for value in range(20)}
    for value in (3, 4, 11, 19):
        del held[value]
    for value in range(100, 110):
        held[value] = send(sender, receiver, bytes([value]) * 60_000)
    assert all(bytes(memory) == bytes([value]) * 60_000 for value, memory in held.items())
    assert receiver.mappings.blocks_in_use == len(held) == 26


def test_a_block_nobody_was_told_of_can_be_returned(allocator: SegmentAllocator) -> None:
    _, place = taken(allocator, 10_000)
    allocator.release([place])
    assert taken(allocator, 10_000)[1] == place


def test_neighbours_that_are_free_become_one_block(allocator: SegmentAllocator) -> None:
    found = [taken(allocator, 200_000) for _ in range(4)]
    for index in (1, 3, 0, 2):
        allocator.release([found[index][1]])
    assert taken(allocator, 900_000)[1].segment == 1


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 300_000) | st.just(0), max_size=40), st.randoms(use_true_random=False)
)
def test_blocks_never_overlap(sizes: list[int], random: Any) -> None:
    """A size is taken; 0 returns one that was."""
    segment = SharedSegment(1, MEGABYTE)
    try:
        held: list[BufferLocation] = []
        for size in sizes:
            if size:
                place = segment.allocate(size, "receiver", SENDER)
                held += [place] if place else []
            elif held:
                segment.release_slot(held.pop(random.randrange(len(held))).slot)
            spans = sorted((place.offset, place.offset + place.nbytes) for place in held)
            assert all(start >= PAGE and end <= MEGABYTE for start, end in spans)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
            assert len({place.slot for place in held}) == len(held)
        for place in held:
            segment.release_slot(place.slot)
        assert segment.allocate(MEGABYTE - PAGE, "receiver", SENDER) is not None
    finally:
        segment.close()


def test_a_segment_has_so_many_slots_and_no_more() -> None:
    segment = SharedSegment(1, 32 * MEGABYTE)
    try:
        places = [segment.allocate(1, "receiver", SENDER) for _ in range(SLOTS)]
        assert len({place.slot for place in places if place}) == SLOTS
        assert segment.allocate(1, "receiver", SENDER) is None
        segment.release_slot(7)
        assert segment.allocate(1, "receiver", SENDER) is not None
    finally:
        segment.close()


# Limits


def test_beyond_the_limit_there_is_no_room(allocator: SegmentAllocator) -> None:
    assert taken(allocator, 3_000_000)[0].size == 4 * MEGABYTE
    assert allocator.allocate(3_000_000, "receiver", SENDER) is None
    assert taken(allocator, 1_000_000)[1].segment == 1


@pytest.mark.parametrize(
    "nbytes", [1, PAGE, MEGABYTE - PAGE, MEGABYTE - PAGE + 1, MEGABYTE, 2 * MEGABYTE - PAGE]
)
def test_a_new_segment_is_always_large_enough(allocator: SegmentAllocator, nbytes: int) -> None:
    segment, place = taken(allocator, nbytes)
    assert place.offset + nbytes <= segment.size


def test_small_buffers_and_those_without_room_stay_in_the_stream(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    buffers = [memoryview(bytes(size)) for size in (FLOOR - 1, FLOOR, 5 * MEGABYTE, 0)]
    places, inside = placed(sender.sharing_with(receiver), buffers)
    assert [place.segment for place in places] == [0, 1, 0, 0]
    assert [place.nbytes for place in places] == [FLOOR - 1, FLOOR, 5 * MEGABYTE, 0]
    assert inside == [buffers[0], buffers[2], buffers[3]]


def test_a_segment_that_cannot_be_passed_on_is_not_used(allocator: SegmentAllocator) -> None:
    sharing = SharedMemoryTransfer(
        allocator, SegmentMappings(), "receiver", lambda segment, until: False
    )
    places, inside = placed(sharing, [memoryview(bytes(FLOOR))])
    assert ([place.segment for place in places], len(inside)) == ([0], 1)
    allocator.close_unused()
    assert repr(allocator) == "<SegmentAllocator []>"


def test_without_descriptors_everything_stays_in_the_stream(
    allocator: SegmentAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", no_more)
    assert allocator.allocate(FLOOR, "receiver", SENDER) is None


def test_a_closed_allocator_has_no_room(allocator: SegmentAllocator) -> None:
    allocator.close()
    assert allocator.allocate(FLOOR, "receiver", SENDER) is None


# When a connection or a peer is lost


def test_a_block_on_its_way_through_a_broken_connection_is_never_used_again(
    ends: tuple[End, End],
) -> None:
    sender, receiver = ends
    segment, place = taken(sender.allocator, 10_000)
    receiver.mappings.add("sender", segment.segment_id, segment.fd)
    sender.allocator.connection_closed("receiver", SENDER)
    assert taken(sender.allocator, 10_000)[1].segment == 2
    memory = receiver.mappings.locate("sender", place)  # it may still arrive
    memory[:] = b"x" * 10_000


def test_blocks_that_arrived_or_came_back_survive_a_broken_connection(
    ends: tuple[End, End],
) -> None:
    sender, receiver = ends
    held = send(sender, receiver, bytes(10_000))
    send(sender, receiver, bytes(10_000))
    sender.allocator.connection_closed("receiver", SENDER)
    assert taken(sender.allocator, 10_000)[1].segment == 1
    del held


def test_the_blocks_of_a_lost_receiver_are_never_used_again(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    held = send(sender, receiver, b"y" * 10_000)
    sender.allocator.connection_closed("receiver", None)
    assert taken(sender.allocator, 10_000, "another")[1].segment == 2
    assert bytes(held) == b"y" * 10_000


def test_another_peers_loss_changes_nothing(allocator: SegmentAllocator) -> None:
    taken(allocator, 10_000)
    allocator.connection_closed("stranger", None)
    assert taken(allocator, 10_000)[1].segment == 1


def test_a_retired_segment_is_forgotten_but_its_tensors_live_on(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    held = send(sender, receiver, b"z" * 10_000)
    receiver.mappings.unmap()
    assert "1 segments" in repr(receiver.mappings)
    sender.allocator.connection_closed("receiver", None)
    receiver.mappings.unmap()
    assert "0 segments" in repr(receiver.mappings)
    assert bytes(held) == b"z" * 10_000
    held[0] = 1
    del held
    assert receiver.mappings.blocks_in_use == 0


def test_the_segments_of_a_lost_sender_are_forgotten(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    send(sender, receiver, bytes(10_000))
    receiver.mappings.unmap("somebody else")
    assert "1 segments" in repr(receiver.mappings)
    receiver.mappings.unmap("sender")
    assert "0 segments" in repr(receiver.mappings)


def test_a_segment_that_is_retired_while_it_is_being_passed_on_keeps_its_descriptor(
    allocator: SegmentAllocator,
) -> None:
    """Another thread may close a connection between `take` and `announce`; the number must not go
    to another file.
    """
    receiver = SegmentMappings()

    def announce(segment: SharedSegment, until: float) -> bool:
        allocator.connection_closed("receiver", SENDER)
        # a new segment, which would get the number of a closed descriptor
        taken(allocator, 50_000, "another")
        receiver.add("sender", segment.segment_id, segment.fd)
        return True

    [place], _ = placed(
        SharedMemoryTransfer(allocator, SegmentMappings(), "receiver", announce),
        [memoryview(b"m" * 20_000)],
    )
    if place.segment:
        assert bytes(receiver.locate("sender", place)) == b"m" * 20_000
    receiver.close()


# Peers that break the rules


def bogus(place: BufferLocation, **changes: int) -> BufferLocation:
    return place._replace(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": 1},
        {"slot": SLOTS},
        {"slot": 2**32 - 1},
        {"offset": 0},
        {"offset": PAGE - 1},
        {"offset": MEGABYTE},
        {"offset": 2**64 - 1},
        {"nbytes": MEGABYTE},
        {"nbytes": 2**64 - 1},
    ],
    ids=str,
)
def test_a_place_that_does_not_exist_breaks_the_protocol(
    ends: tuple[End, End], changes: dict[str, int]
) -> None:
    sender, receiver = ends
    segment, place = taken(sender.allocator, 10_000)
    receiver.mappings.add("sender", segment.segment_id, segment.fd)
    with pytest.raises(ProtocolError, match="shared"):
        receiver.mappings.locate("sender", bogus(place, **changes))
    assert receiver.mappings.blocks_in_use == 0


def test_a_block_can_be_taken_once(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    segment, place = taken(sender.allocator, 10_000)
    receiver.mappings.add("sender", segment.segment_id, segment.fd)
    memory = receiver.mappings.locate("sender", place)
    with pytest.raises(ProtocolError):
        receiver.mappings.locate("sender", place)
    del memory
    with pytest.raises(ProtocolError):
        receiver.mappings.locate("sender", place)


def test_a_peer_cannot_point_into_the_segments_of_another(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    segment, place = taken(sender.allocator, 10_000)
    receiver.mappings.add("sender", segment.segment_id, segment.fd)
    with pytest.raises(SegmentUnknown):
        receiver.mappings.locate("mallory", place)


def unknown_memfd(size: int, *, sealed: bool) -> int:
    fd = os.memfd_create("telegrad-bogus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    return fd


@pytest.mark.parametrize(
    ("size", "sealed"),
    [(MEGABYTE, False), (0, True), (100, True), (PAGE - 1, True)],
    ids=["not sealed", "empty", "tiny", "less than a page"],
)
def test_a_segment_that_could_hurt_us_is_refused(size: int, sealed: bool) -> None:
    fd = unknown_memfd(size, sealed=sealed)
    mappings = SegmentMappings()
    try:
        with pytest.raises(ProtocolError, match="segment"):
            mappings.add("mallory", 1, fd)
    finally:
        os.close(fd)
    mappings.unmap()


def test_a_descriptor_that_is_no_memory_at_all_is_refused() -> None:
    mappings = SegmentMappings()
    near, far = socket.socketpair()
    with near, far, open("/dev/null") as null:
        for fd in (near.fileno(), null.fileno()):
            with pytest.raises(ProtocolError, match="segment"):
                mappings.add("mallory", 1, fd)


@settings(deadline=None, max_examples=100)
@given(
    st.builds(
        BufferLocation,
        nbytes=st.integers(0, 2 * MEGABYTE) | st.integers(0, 2**64 - 1),
        offset=st.integers(0, 2 * MEGABYTE) | st.integers(0, 2**64 - 1),
        segment=st.integers(0, 2),
        slot=st.integers(0, 3) | st.integers(0, 2**32 - 1),
    )
)
def test_any_place_is_inside_a_sent_block_of_a_known_segment_or_refused(
    place: BufferLocation,
) -> None:
    sender, receiver = End("sender", SegmentAllocator(FLOOR, 4 * MEGABYTE)), End("receiver")
    try:
        segment, _ = taken(sender.allocator, 10_000)
        receiver.mappings.add("sender", segment.segment_id, segment.fd)
        try:
            memory = receiver.mappings.locate("sender", place)
        except (ProtocolError, SegmentUnknown):
            return
        assert memory.nbytes == place.nbytes
        assert (place.segment, place.slot) == (1, 0)
        assert PAGE <= place.offset <= MEGABYTE - place.nbytes
    finally:
        sender.close()
        receiver.close()


# Nothing is left behind


def test_no_descriptor_or_mapping_outlives_its_owners() -> None:
    before = memfds()
    sender, receiver = End("sender", SegmentAllocator(FLOOR, 64 * MEGABYTE)), End("receiver")
    held = [send(sender, receiver, bytes(900_000)) for _ in range(5)]
    assert memfds() > before
    sender.allocator.connection_closed("receiver", None)
    send(sender, receiver, bytes(900_000))
    sender.close()
    receiver.close()
    del held, sender, receiver
    assert memfds() == before


def test_trim_returns_what_nobody_uses_and_nothing_else(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    held = [send(sender, receiver, bytes(900_000)) for _ in range(3)]
    assert repr(sender.allocator).count("1 blocks") == 3
    del held[0]
    before = memfds()
    sender.allocator.close_unused()
    receiver.mappings.unmap()
    assert repr(sender.allocator).count("SharedSegment") == 2
    assert memfds() < before
    del held
    sender.allocator.close_unused()
    assert repr(sender.allocator) == "<SegmentAllocator []>"


def test_a_sender_may_close_while_its_blocks_are_in_use(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    held = send(sender, receiver, b"w" * 10_000)
    sender.close()
    assert bytes(held) == b"w" * 10_000


# Through a channel


def test_large_buffers_take_the_short_way_and_small_ones_the_stream(shared: Pair) -> None:
    sizes = [FLOOR, FLOOR - 1, 10 * FLOOR]
    shared.near.send(Kind.CALL, 1, b"body", [memoryview(os.urandom(size)) for size in sizes])
    frame = shared.far.recv(LATE)
    assert [buffer.nbytes for buffer in frame.buffers] == sizes
    assert shared.far_end.mappings.blocks_in_use == 2
    del frame
    assert shared.far_end.mappings.blocks_in_use == 0


def test_without_room_a_large_buffer_goes_through_the_stream(
    shared: Pair, background: Background
) -> None:
    shared.near_end.allocator.close()
    data = os.urandom(3 * MEGABYTE)
    received = background(shared.far.recv, LATE)
    shared.near.send(Kind.CALL, 1, b"", [memoryview(data)])
    assert bytes(received.result(LATE).buffers[0]) == data
    assert shared.far_end.mappings.blocks_in_use == 0


def test_a_thousand_sends_reuse_the_same_memory(shared: Pair) -> None:
    for value in range(1000):
        shared.near.send(
            Kind.CALL, value, b"", [memoryview(np.full(100_000, value % 256, np.uint8))]
        )
        frame = shared.far.recv(LATE)
        assert frame.buffers[0][0] == frame.buffers[0][-1] == value % 256
        del frame
    assert repr(shared.near_end.allocator).count("SharedSegment") == 1


def test_a_closed_channel_abandons_what_was_on_its_way(shared: Pair) -> None:
    shared.near.send(Kind.CALL, 1, b"", [memoryview(bytes(10_000))])
    shared.near.close()
    assert repr(shared.near_end.allocator) == "<SegmentAllocator []>"


def test_a_frame_that_was_never_sent_gives_its_blocks_back(shared: Pair) -> None:
    fill_with_frames(shared.near_socket)
    with pytest.raises(TimeoutError):
        shared.near.send(Kind.CALL, 1, b"", [memoryview(bytes(10_000))], timeout=0.05)
    shared.near_end.allocator.close_unused()
    assert repr(shared.near_end.allocator) == "<SegmentAllocator []>"


def test_a_frame_that_is_finished_later_keeps_its_blocks(
    shared: Pair, background: Background
) -> None:
    with pytest.raises(SendTimeout) as late:
        shared.near.send(
            Kind.CALL, 1, bytes(8 * MEGABYTE), [memoryview(b"k" * 10_000)], timeout=0.05
        )
    assert late.value.begun
    received = background(lambda: [shared.far.recv(LATE) for _ in range(2)])
    shared.near.send(Kind.CALL, 2, b"")
    first, _ = received.result(LATE)
    assert bytes(first.buffers[0]) == b"k" * 10_000


def test_a_frame_that_was_never_sent_returns_its_blocks(shared: Pair) -> None:
    with pytest.raises(SendTimeout):
        shared.near.send(Kind.CALL, 1, bytes(8 * MEGABYTE), timeout=0.05)
    with pytest.raises(SendTimeout) as late:
        shared.near.send(Kind.CALL, 2, b"", [memoryview(b"k" * 10_000)], timeout=0.05)
    assert not late.value.begun
    assert "0 blocks" in repr(shared.near_end.allocator)


def test_a_segment_is_found_while_another_connection_carries_a_block_of_it(
    ends: tuple[End, End],
) -> None:
    """The end of one connection must not cost a message of another its memory."""
    sender, receiver = ends
    ended, other = (sender.sharing_with(receiver) for _ in range(2))
    placed(ended, [memoryview(b"e" * 10_000)])
    [place], _ = placed(other, [memoryview(b"o" * 10_000)])
    ended.close()
    receiver.mappings.unmap()
    # a block of unknown fate: the segment is not used again
    assert taken(sender.allocator, 10_000)[1].segment == 2
    block = receiver.mappings.locate("sender", place)
    assert bytes(block) == b"o" * 10_000
    sender.allocator.close_drained()
    receiver.mappings.unmap()
    assert "0 segments" in repr(receiver.mappings)  # it has drained
    assert "draining" not in repr(sender.allocator)
    del block


def test_a_bogus_place_on_a_channel_breaks_the_protocol(shared: Pair) -> None:
    shared.near.send(Kind.CALL, 1, b"", [memoryview(bytes(10_000))])
    place = BufferLocation(10_000, PAGE, 1, 0)
    shared.near_socket.sendall(encode_header(Kind.CALL, 2, b"", places=[place]))
    first = shared.far.recv(LATE)
    with pytest.raises(ProtocolError, match="shared"):
        shared.far.recv(LATE)
    del first


def test_nobody_waits_for_the_allocator_while_pages_are_faulted_in(
    allocator: SegmentAllocator, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock gives signs of life; if it waited, a worker that sends gigabytes would look
    dead.
    """
    begun, go_on = threading.Event(), threading.Event()
    populate = memfd.populate_pages

    def populate_slowly(*args: Any) -> bool:
        begun.set()
        assert go_on.wait(LATE)
        return populate(*args)

    monkeypatch.setattr(segments, "populate_pages", populate_slowly)
    taken = background(allocator.allocate, MEGABYTE, "peer", None)
    try:
        assert begun.wait(LATE)
        for use in (
            allocator.close_drained,
            allocator.close_unused,
            lambda: allocator.connection_closed("another", None),
        ):
            background(use).result(LATE)
    finally:
        go_on.set()
    assert taken.result(LATE) is not None


def test_many_pages_are_faulted_in_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step holds the interpreter's lock."""
    monkeypatch.setattr(memfd, "_POPULATE_STEP", 16 * PAGE)
    steps: list[tuple[int, int]] = []

    class Recorder:
        def madvise(self, option: int, start: int, length: int) -> None:
            steps.append((start, length))

    assert memfd.populate_pages(Recorder(), PAGE, 40 * PAGE)  # type: ignore[arg-type]
    assert steps == [(PAGE, 16 * PAGE), (17 * PAGE, 16 * PAGE), (33 * PAGE, 8 * PAGE)]


def test_a_block_without_memory_is_given_back(
    allocator: SegmentAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(segments, "populate_pages", lambda *args: False)
        assert allocator.allocate(FLOOR, "peer", None) is None
    segment, place = allocator.allocate(FLOOR, "peer", None) or pytest.fail("there is no room")
    assert (place.offset, len(segment.blocks)) == (PAGE, 1)


def test_two_threads_that_ask_for_the_same_copy_share_it(
    monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    allocator = SegmentAllocator(FLOOR, 1 << 30)
    take, both_are_here = allocator.allocate_for_many, threading.Barrier(2)

    def take_together(nbytes: int) -> Any:
        # as it must be: only one thread comes here
        with contextlib.suppress(threading.BrokenBarrierError):
            both_are_here.wait(0.3)
        return take(nbytes)

    monkeypatch.setattr(allocator, "allocate_for_many", take_together)
    copies, buffer = SharedCopies(), memoryview(bytes([7]) * 10_000)
    found = [background(copies.get_block, allocator, 0, buffer) for _ in range(2)]
    (segment, place), again = (each.result(LATE) for each in found)
    assert again == (segment, place)
    assert len(segment.blocks) == 1
    assert bytes(segment.bytes[place.offset : place.offset + place.nbytes]) == bytes(buffer)
    copies.close()
    assert not segment.blocks
    allocator.close()


def test_one_receiver_is_admitted_once() -> None:
    copies = SharedCopies()
    assert [copies.is_first_message_to(peer) for peer in ("a", "b", "a")] == [True, True, False]


def test_private_pages_are_kept_unless_they_were_written_to() -> None:
    fd = memfd.create_memfd("test", 5 * PAGE, owner := SegmentAllocator(FLOOR, MEGABYTE))
    sender = mmap.mmap(fd, 5 * PAGE)
    mapped = segments.MappedSegment(fd)
    place = BufferLocation(4 * PAGE - 100, offset=PAGE, segment=1)
    sender[PAGE:] = b"a" * (4 * PAGE)
    first = mapped.private_view(place)
    assert bytes(first) == b"a" * first.nbytes
    if not memfd.has_only_file_pages(first):
        pytest.skip("this kernel does not tell which pages are mapped")
    sender[PAGE:] = b"b" * (4 * PAGE)
    second = mapped.private_view(place)
    assert bytes(second) == b"b" * second.nbytes
    second[2 * PAGE] = 0
    assert not memfd.has_only_file_pages(second)
    sender[PAGE:] = b"c" * (4 * PAGE)
    assert bytes(second[: 2 * PAGE]) == b"c" * (2 * PAGE)
    assert second[2 * PAGE + 1] == ord("b")  # of the private copy
    third = mapped.private_view(place)
    assert bytes(third) == b"c" * third.nbytes
    assert memfd.has_only_file_pages(third)
    del first, second, third, mapped
    sender.close()
    owner.close()


def test_pages_that_are_not_mapped_are_not_file_pages() -> None:
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    assert not memfd.has_only_file_pages(array)
    array[:] = 1
    assert not memfd.has_only_file_pages(array)
