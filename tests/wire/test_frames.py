"""Frames as bytes: whole, cut anywhere, many at once, too large, and plain nonsense.

No sockets here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire.frames import (
    BUFFER_ENTRY,
    HEADER,
    MAX_BUFFERS,
    SCRATCH_SIZE,
    BufferLocation,
    Frame,
    FrameDecoder,
    Kind,
    encode_header,
)

LIMIT = 1 << 20
DIRECT = 1 << 14  # from this size on, a body or buffer is received straight into its own memory
SIZES = [
    0,
    1,
    31,
    32,
    33,
    DIRECT - 1,
    DIRECT,
    DIRECT + 1,
    SCRATCH_SIZE - 32,
    SCRATCH_SIZE,
    SCRATCH_SIZE + 1,
    3 * SCRATCH_SIZE + 5,
]


class Reader:
    """A decoder and what it asked for."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.reserved: list[int] = []
        self.located: list[BufferLocation] = []
        self.decoder = FrameDecoder(self._reserve, self._locate, limit)

    def _reserve(self, nbytes: int) -> memoryview:
        self.reserved.append(nbytes)
        return memoryview(bytearray(nbytes))

    def _locate(self, place: BufferLocation) -> memoryview:
        self.located.append(place)
        return memoryview(b"shared %d" % place.segment)

    def feed(self, data: bytes, sizes: Iterable[int] = ()) -> Iterator[Frame]:
        """Receive `data` in pieces of the given sizes, then as much at once as the decoder
        takes.
        """
        pieces = itertools.chain(sizes, itertools.repeat(len(data)))
        while data:
            space = self.decoder.get_buffer()
            count = max(1, min(len(space), next(pieces), len(data)))
            space[:count] = data[:count]
            data = data[count:]
            self.decoder.buffer_updated(count)
            while (frame := self.decoder.next_frame()) is not None:
                yield frame


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes of which no two neighbourhoods look alike."""
    return (bytes((seed + number) % 251 for number in range(251)) * (size // 251 + 1))[:size]


def frame(
    body: bytes = b"", buffers: Sequence[bytes] = (), *, call: int = 7, kind: int = Kind.CALL
) -> Frame:
    return Frame.of(kind, 3, call, 11, 1500, body, list(buffers))


def encode(message: Frame) -> bytes:
    places = [BufferLocation(len(buffer)) for buffer in message.buffers]
    start = encode_header(
        message.kind,
        message.call_id,
        message.body,
        function=message.function_id,
        timeout_ms=message.timeout_ms,
        flags=message.flags,
        places=places,
    )
    return b"".join([start, message.body, *message.buffers])


def plain(message: Frame) -> Frame:
    """The frame with bytes in place of whatever memory it lies in."""
    return message.replaced(
        body=bytes(message.body), buffers=[bytes(buffer) for buffer in message.buffers]
    )


def decode(data: bytes, sizes: Iterable[int] = ()) -> list[Frame]:
    return [plain(message) for message in Reader().feed(data, sizes)]


def header(*, length: int = 0, count: int = 0, kind: int = Kind.CALL, zero: int = 0) -> bytes:
    return HEADER.pack(length, 1, 0, 0, count, kind, 0, zero)


# Whole frames


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_travels_with_all_its_fields(kind: Kind) -> None:
    sent = Frame.of(kind, 0xFF, 2**64 - 1, 2**32 - 1, 2**32 - 1, b"body", [b"buffer"])
    assert decode(encode(sent)) == [sent]


def test_an_empty_frame_is_a_header_and_nothing_else() -> None:
    sent = Frame.of(Kind.HEARTBEAT, 0, 0, 0, 0, b"", [])
    assert len(encode(sent)) == HEADER.size == 32
    assert decode(encode(sent)) == [sent]


@pytest.mark.parametrize("size", SIZES)
def test_a_body_of_any_size(size: int) -> None:
    sent = frame(pattern(size))
    assert decode(encode(sent)) == [sent]


@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_of_any_size_with_and_without_a_body(size: int) -> None:
    for body in (b"", b"body"):
        sent = frame(body, [pattern(size), b"", pattern(5, seed=1)])
        assert decode(encode(sent)) == [sent]


def test_a_frame_may_have_only_empty_buffers() -> None:
    sent = frame(b"", [b"", b"", b""])
    assert decode(encode(sent)) == [sent]


def test_as_many_buffers_as_allowed() -> None:
    sent = frame(b"body", [pattern(number % 7) for number in range(MAX_BUFFERS)])
    assert decode(encode(sent), itertools.repeat(1000)) == [sent]


def test_the_body_of_a_small_frame_outlives_the_next_ones() -> None:
    reader = Reader()
    received = list(reader.feed(encode(frame(b"first")) + encode(frame(b"second"))))
    list(reader.feed(encode(frame(b"x" * 1000)) * 100))
    assert [bytes(message.body) for message in received] == [b"first", b"second"]


# Cut anywhere, many at once


def test_frames_cut_in_two_at_every_byte() -> None:
    sent = [
        frame(b"one", [b"buffer", b""]),
        frame(b"", []),
        frame(b"three", []),
        frame(b"", [b"4"]),
    ]
    data = b"".join(map(encode, sent))
    for cut in range(len(data) + 1):
        assert decode(data, [cut] if cut else []) == sent


def test_frames_that_arrive_byte_by_byte() -> None:
    sent = [frame(b"one", [b"buffer"]), frame(b"two"), frame(b"", [b"a", b"b"])]
    assert decode(b"".join(map(encode, sent)), itertools.repeat(1)) == sent


def test_a_large_frame_cut_near_the_ends_of_its_parts() -> None:
    sent = frame(pattern(DIRECT + 3), [pattern(2 * SCRATCH_SIZE, seed=9), pattern(DIRECT, seed=5)])
    data = encode(sent)
    ends = [32, 32 + 48, 32 + 48 + DIRECT + 3, 32 + 48 + DIRECT + 3 + 2 * SCRATCH_SIZE, len(data)]
    for cut in sorted({end + near for end in ends for near in (-1, 0, 1)} - {len(data) + 1}):
        assert decode(data, [cut]) == [sent]


def test_no_frame_comes_out_before_its_last_byte() -> None:
    data = encode(frame(b"body", [b"buffer"]))
    for end in range(len(data)):
        reader = Reader()
        assert list(reader.feed(data[:end], [end] if end else [])) == []
        assert reader.decoder.between_frames == (end == 0)
    assert list(Reader().feed(data)) != []


def test_one_receive_may_bring_many_frames() -> None:
    sent = [frame(b"%d" % call, call=call) for call in range(1000)]
    reader = Reader()
    data = b"".join(map(encode, sent))
    assert len(data) < SCRATCH_SIZE
    space = reader.decoder.get_buffer()
    space[: len(data)] = data
    reader.decoder.buffer_updated(len(data))
    assert [plain(message) for message in iter(reader.decoder.next_frame, None)] == sent
    assert reader.decoder.between_frames


def test_has_frame_knows_a_small_frame_that_is_all_here() -> None:
    data = encode(frame(b"body"))
    decoder = Reader().decoder
    assert not decoder.has_frame()
    decoder.get_buffer()[: len(data) - 1] = data[:-1]
    decoder.buffer_updated(len(data) - 1)
    assert not decoder.has_frame()
    decoder.get_buffer()[: 1 + len(data)] = data[-1:] + data
    decoder.buffer_updated(1 + len(data))
    assert decoder.has_frame()
    assert decoder.next_frame() is not None
    assert decoder.has_frame()
    assert decoder.next_frame() is not None
    assert not decoder.has_frame()


def test_has_frame_is_false_inside_a_large_frame() -> None:
    data = encode(frame(pattern(2 * SCRATCH_SIZE)))
    reader = Reader()
    assert list(reader.feed(data[:-1])) == []
    assert not reader.decoder.has_frame()


def test_the_repr_says_where_the_decoder_stands() -> None:
    reader = Reader()
    assert "between frames" in repr(reader.decoder)
    assert list(reader.feed(encode(frame(pattern(2 * SCRATCH_SIZE)))[:5000])) == []
    assert "inside a frame" in repr(reader.decoder)


frames = st.builds(
    Frame.of,
    kind=st.sampled_from([int(kind) for kind in Kind]),
    flags=st.integers(0, 255),
    call_id=st.integers(0, 2**64 - 1),
    function_id=st.integers(0, 2**32 - 1),
    timeout_ms=st.integers(0, 2**32 - 1),
    body=st.builds(pattern, st.integers(0, 100) | st.sampled_from(SIZES), st.integers(0, 250)),
    buffers=st.lists(
        st.builds(pattern, st.integers(0, 100) | st.sampled_from(SIZES), st.integers(0, 250)),
        max_size=4,
    ),
    receive_error=st.none(),
    bulk=st.just(()),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 2 * SCRATCH_SIZE), max_size=20))
def test_any_frames_in_any_pieces_come_out_equal(sent: list[Frame], sizes: list[int]) -> None:
    assert decode(b"".join(map(encode, sent)), sizes) == sent


# Shared memory


def test_buffers_in_shared_memory_are_located_and_keep_their_order() -> None:
    places = [BufferLocation(9, 4096, 5, 2), BufferLocation(3), BufferLocation(9, 8192, 6, 1)]
    data = encode_header(Kind.CALL, 1, b"body", places=places) + b"body" + b"own"
    reader = Reader()
    [message] = reader.feed(data)
    assert [bytes(buffer) for buffer in message.buffers] == [b"shared 5", b"own", b"shared 6"]
    assert reader.located == [places[0], places[2]]
    assert reader.reserved == [3]


def test_a_frame_whose_buffers_are_all_shared_needs_no_more_bytes() -> None:
    reader = Reader()
    [message] = reader.feed(
        encode_header(Kind.REPLY, 1, b"", places=[BufferLocation(9, 4096, 5, 2)])
    )
    assert (message.body, [bytes(buffer) for buffer in message.buffers]) == (b"", [b"shared 5"])


# Limits


def test_an_unknown_kind_breaks_the_protocol() -> None:
    for kind in set(range(256)) - {int(kind) for kind in Kind}:
        with pytest.raises(ProtocolError, match=f"unknown kind {kind}"):
            decode(header(kind=kind))


def test_the_reserved_bytes_must_be_zero() -> None:
    with pytest.raises(ProtocolError):
        decode(header(zero=1))


def test_a_frame_of_exactly_the_limit_is_accepted() -> None:
    data = encode(frame(pattern(600), [pattern(400)]))
    assert len(list(Reader(limit=1000).feed(data))) == 1


@pytest.mark.parametrize(
    "sent",
    [
        frame(pattern(1001)),
        frame(b"", [pattern(1001)]),
        frame(pattern(600), [pattern(401)]),
        frame(b"", [pattern(10)] * 101),
    ],
    ids=["body", "buffer", "both", "many buffers"],
)
@pytest.mark.parametrize("piece", [1, 31, 32, 33, 100, 10_000])
def test_a_frame_over_the_limit_is_refused_however_it_arrives(sent: Frame, piece: int) -> None:
    reader = Reader(limit=1000)
    with pytest.raises(ProtocolError, match="limit"):
        list(reader.feed(encode(sent), itertools.repeat(piece)))
    assert reader.reserved == []


def test_shared_memory_counts_towards_the_limit() -> None:
    reader = Reader(limit=1000)
    with pytest.raises(ProtocolError, match="limit"):
        list(
            reader.feed(encode_header(Kind.CALL, 1, b"", places=[BufferLocation(1001, 4096, 5, 2)]))
        )
    assert reader.located == []


def test_sizes_whose_sum_overflows_64_bits_are_refused() -> None:
    table = BUFFER_ENTRY.pack(2**64 - 1, 0, 0, 0) * 2
    with pytest.raises(ProtocolError, match="limit"):
        decode(header(length=2, count=2) + table)


def test_more_buffers_than_allowed_are_refused_before_their_table_arrives() -> None:
    for count in (MAX_BUFFERS + 1, 2**32 - 1):
        with pytest.raises(ProtocolError, match=f"{count} buffers"):
            decode(header(count=count))


@pytest.mark.parametrize(
    "failure", [MemoryError("no memory"), OSError("no mapping"), SystemExit(3)]
)
@pytest.mark.parametrize("fails_at", [0, 1, 2])
@pytest.mark.parametrize("piece", [1, 1000, 1 << 20])
def test_a_frame_that_cannot_be_received_is_damaged_and_the_next_one_is_whole(
    failure: BaseException, fails_at: int, piece: int
) -> None:
    asked = itertools.count()

    def reserve(nbytes: int) -> memoryview:
        if next(asked) == fails_at:
            raise failure
        return memoryview(bytearray(nbytes))

    decoder = FrameDecoder(reserve, lambda place: memoryview(b""), 1 << 40)
    data = encode(frame(b"b" * 40_000, [b"x" * 30_000, b"y" * 10])) + encode(frame(b"next", call=8))
    received = []
    while data:
        space = decoder.get_buffer()
        count = min(piece, len(space), len(data))
        space[:count] = data[:count]
        decoder.buffer_updated(count)
        data = data[count:]
        while (one := decoder.next_frame()) is not None:
            received.append(one)
    damaged, whole = received
    assert (damaged.call_id, damaged.receive_error, list(damaged.buffers)) == (7, failure, [])
    assert bytes(damaged.body) == (b"" if fails_at == 0 else b"b" * 40_000)
    assert (whole.call_id, bytes(whole.body), whole.receive_error) == (8, b"next", None)


plausible_headers = st.builds(
    lambda length, count, kind, zero, places: (
        HEADER.pack(length, 1, 0, 0, count, kind, 0, zero)
        + b"".join(BUFFER_ENTRY.pack(*place) for place in places)
    ),
    length=st.integers(0, 5000) | st.integers(0, 2**64 - 1),
    count=st.integers(0, 5) | st.integers(0, 2**32 - 1),
    kind=st.integers(0, 8),
    zero=st.sampled_from([0, 0, 0, 1]),
    places=st.lists(
        st.tuples(
            st.integers(0, 3000) | st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
            st.sampled_from([0, 0, 0, 1, 2**32 - 1]),
            st.integers(0, 2**32 - 1),
        ),
        max_size=5,
    ),
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.binary(max_size=200) | plausible_headers | frames.map(encode), max_size=8),
    st.integers(1, 5000),
)
@example([b"\xff" * 200], 7)
def test_garbage_is_refused_and_reserves_no_more_than_the_limit(
    parts: list[bytes], piece: int
) -> None:
    limit = 4000
    reader = Reader(limit)
    try:
        for _ in reader.feed(b"".join(parts), itertools.repeat(piece)):
            assert sum(reader.reserved) <= limit
            reader.reserved.clear()
    except ProtocolError:
        pass
    assert sum(reader.reserved) <= limit


@settings(deadline=None, max_examples=100)
@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_a_damaged_stream_never_does_more_harm_than_a_protocol_error(
    sent: list[Frame], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(map(encode, sent)))
    for position in data.draw(
        st.lists(st.integers(0, min(len(stream), 300) - 1), min_size=1, max_size=5)
    ):
        stream[position] ^= data.draw(st.integers(1, 255))
    reader = Reader(limit=LIMIT)
    try:
        for _ in reader.feed(bytes(stream)):
            assert sum(reader.reserved) <= LIMIT
            reader.reserved.clear()
    except ProtocolError:
        pass
    assert sum(reader.reserved) <= LIMIT
