"""Frames: the format of one message on a connection, and a decoder that does no I/O.

    header (32 bytes)   body length u64, call id u64, function id u32, timeout in ms u32,
                        number of buffers u32, kind u8, flags u8, zero u16
    buffer table        for each buffer: length u64, offset u64, segment u32, slot u32;
                        if the segment is 0, the bytes of the buffer follow the body;
                        if it is BULK_SEGMENT, the receiver pulls them from the sender: the offset
                        is the id of their registration; the slot is their index in it and, in
                        the upper 16 bits, the device that they are for (0: host memory, else its
                        index plus 1)
    body                a pickle, or what the kind defines
    buffers             the bytes of each buffer whose segment is 0

State: only in a `FrameDecoder`, which belongs to one reading thread. Its rules:
- The reader calls `get_buffer()` for memory, writes received bytes to it, calls
  `buffer_updated(n)`, and takes complete frames with `next_frame()`.
- Small frames are received into one scratch buffer, so one receive may contain many of them. Large
  bodies and buffers are received directly into their own memory. This memory is reserved but not
  touched before bytes arrive, so a peer that announces much and sends little costs nothing.
- Sizes are checked against the limits before memory is reserved. Violations raise `ProtocolError`.
- If there is no memory for a frame, or a buffer in shared memory cannot be found, the frame is
  *damaged*: its bytes are skipped, and `Frame.receive_error` holds the exception. The stream stays
  in sync, and only this message fails.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, NamedTuple

from telegrad.errors import ProtocolError

HEADER = struct.Struct("<QQIIIBBH")
BUFFER_ENTRY = struct.Struct("<QQII")
BULK_SEGMENT = 0xFFFFFFFF
SCRATCH_SIZE = 1 << 16
# The header and the buffer table of a frame must fit into the scratch buffer.
MAX_BUFFERS = (SCRATCH_SIZE - HEADER.size) // BUFFER_ENTRY.size
_SLOT_BITS = 16  # of the index of a bulk buffer, which is less than MAX_BUFFERS
_MAX_SLOT = (1 << _SLOT_BITS) - 1
# Bodies and buffers of at least this size are received directly into their own memory.
_DIRECT = 1 << 14

_pack = HEADER.pack
_unpack_from = HEADER.unpack_from
_SIZE = HEADER.size
_NO_TIMEOUT, _MAX_TIMEOUT = 0, 0xFFFFFFFF  # milliseconds


class Kind(enum.IntEnum):
    """The purpose of a frame."""

    CALL = 1
    REPLY = 2
    FAILURE = 3
    CANCEL = 4
    HEARTBEAT = 5
    LEAVE = 6  # the sender leaves the group; the body is the reason
    CLOSE = 7  # the sender closes only this connection; the body is the reason
    EXPEL = 8  # the sender has declared the receiver lost; the body is the reason


_KINDS = frozenset(int(kind) for kind in Kind)
PARTING = frozenset((Kind.LEAVE, Kind.EXPEL))  # they end all connections with the peer

# Flags of a CALL.
DEFINES_FUNCTION = 1  # the body starts with the pickled function that gets the function id
HAS_KEYWORDS = 2  # the pickle is (args, kwargs) instead of args
INLINE_FUNCTION = 4  # the pickle is (function, args, kwargs): the function has no id
HAS_SCOPE = 8  # the body ends with the description of the scope that the call runs under
HAS_TRACE = 16  # the body ends, after the scope, with the context of a tracer


class BufferLocation(NamedTuple):
    """Where a buffer of a message is.

    In the stream if `segment` is 0, with the sender if it is `BULK_SEGMENT`, else in shared memory.
    """

    nbytes: int
    offset: int = 0
    segment: int = 0
    slot: int = 0

    @property
    def bulk_index(self) -> int:
        """The position of a bulk buffer in its registration."""
        return self.slot & _MAX_SLOT

    @property
    def device(self) -> int | None:
        """The index of the receiver's device that a bulk buffer is for; None: host memory."""
        return (self.slot >> _SLOT_BITS) - 1 if self.slot > _MAX_SLOT else None


def bulk_location(
    nbytes: int, registration_id: int, index: int, device: int | None
) -> BufferLocation:
    """Return the location of a buffer that its receiver pulls."""
    slot = index if device is None else index | (device + 1) << _SLOT_BITS
    return BufferLocation(nbytes, registration_id, BULK_SEGMENT, slot)


class Frame:
    """One message.

    It has slots, because its fields are read about thirty times in a call: reading a field of a
    named tuple takes five times as long.
    """

    __slots__ = (
        "body",
        "buffers",
        "bulk",
        "call_id",
        "flags",
        "function_id",
        "kind",
        "receive_error",
        "timeout_ms",
    )

    # Set by `of` and by the fast path of `FrameDecoder`: `__init__` would take longer.
    kind: int
    flags: int
    call_id: int
    function_id: int
    timeout_ms: int
    body: Any  # bytes-like
    buffers: Sequence[Any]
    # Why the buffers could not be received. If the body is empty, it was not received either.
    receive_error: BaseException | None
    # The buffers that must still be pulled: the location and the reserved memory of each.
    bulk: Sequence[tuple[BufferLocation, memoryview]]

    @classmethod
    def of(
        cls,
        kind: int,
        flags: int,
        call_id: int,
        function_id: int,
        timeout_ms: int,
        body: Any,
        buffers: Sequence[Any],
        receive_error: BaseException | None = None,
        bulk: Sequence[tuple[BufferLocation, memoryview]] = (),
    ) -> Frame:
        """Return a frame with these fields."""
        frame = cls()
        frame.kind = kind
        frame.flags = flags
        frame.call_id = call_id
        frame.function_id = function_id
        frame.timeout_ms = timeout_ms
        frame.body = body
        frame.buffers = buffers
        frame.receive_error = receive_error
        frame.bulk = bulk
        return frame

    def replaced(self, **fields: Any) -> Frame:
        """Return a copy with other values of some fields."""
        return Frame.of(**{**{name: getattr(self, name) for name in self.__slots__}, **fields})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Frame {Kind(self.kind).name} of call {self.call_id}, {len(self.body)} bytes>"


def message_bytes(body: Sized, buffers: Iterable[memoryview]) -> int:
    """Return the size of a message without its header."""
    return len(body) + sum(buffer.nbytes for buffer in buffers)


def encode_timeout(timeout: float | None) -> int:
    """Return a timeout as whole milliseconds for a frame header.

    0 stands for no timeout, so a very short one becomes 1. One that the header cannot hold (49
    days) is none for the callee: the caller cancels the call then.
    """
    if timeout is None or timeout * 1000 > _MAX_TIMEOUT:
        return _NO_TIMEOUT
    return max(int(timeout * 1000), 1)


def encode_header(
    kind: int,
    call: int,
    body: bytes | memoryview,
    *,
    function: int = 0,
    timeout_ms: int = 0,
    flags: int = 0,
    places: Sequence[BufferLocation] = (),
) -> bytes:
    """Return the header and the buffer table of a frame.

    The body and the buffers that are in the stream follow them on the wire.
    """
    header = _pack(len(body), call, function, timeout_ms, len(places), kind, flags, 0)
    return (
        header if not places else header + b"".join([BUFFER_ENTRY.pack(*place) for place in places])
    )


class FrameDecoder:
    """Makes frames of received bytes.

    `reserve(n)` must return writable memory for a buffer of n bytes, `locate(place)` the memory of
    a buffer in shared memory. With `reserve_bulk`, frames may have buffers that must be pulled:
    it must return memory for such a buffer.
    """

    def __init__(
        self,
        reserve: Callable[[int], memoryview],
        locate: Callable[[BufferLocation], memoryview],
        max_frame: int,
        reserve_bulk: Callable[[BufferLocation], memoryview] | None = None,
    ) -> None:
        self._reserve = reserve
        self._locate = locate
        self._max_frame = max_frame
        self._reserve_bulk = reserve_bulk
        self._scratch = memoryview(bytearray(SCRATCH_SIZE))
        # The bytes of the scratch buffer that were received but not decoded: from start to end.
        self._start = self._end = 0
        # The frame that is being received; `_header` is None between frames.
        self._header: tuple[int, ...] | None = None
        self._body = memoryview(b"")
        self._buffers: list[Any] = []
        self._bulk: list[tuple[BufferLocation, memoryview]] = []
        self._parts: list[memoryview] = []  # the body and the buffers that are in the stream
        self._part = 0  # the part that is being received
        self._filled = 0  # how many of its bytes have been received
        self._direct = False  # whether the last `get_buffer()` was memory of a part
        self._receive_error: BaseException | None = None
        self._skip = 0  # bytes of a damaged frame that have not been received

    def __repr__(self) -> str:
        state = "inside a frame" if self._header else "between frames"
        return f"<FrameDecoder {self._end - self._start} bytes waiting, {state}>"

    @property
    def between_frames(self) -> bool:
        """Whether all bytes that were received belong to frames that have been taken."""
        return self._start == self._end and self._header is None

    def get_buffer(self) -> memoryview:
        """Return memory to receive into. Write at least one byte to it before `next_frame`."""
        self._direct = False
        if self._start == self._end:
            self._start = self._end = 0
            if self._header is not None and self._part < len(self._parts):
                rest = self._parts[self._part][self._filled :]
                self._direct = len(rest) >= _DIRECT
                if self._direct:
                    return rest
        elif self._end == SCRATCH_SIZE:
            kept = self._end - self._start
            self._scratch[:kept] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, kept
        return self._scratch[self._end :]

    def buffer_updated(self, count: int) -> None:
        """Accept the `count` bytes that were written to the start of `get_buffer()`."""
        if self._direct:
            self._advance(count)
        else:
            self._end += count

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None if more bytes are needed."""
        if self._header is None:
            start = self._start
            if self._end - start < _SIZE:
                return None
            length, call, function, timeout_ms, count, kind, flags, zero = _unpack_from(
                self._scratch, start
            )
            # The fast path: a frame without buffers that is completely in the scratch buffer.
            if (
                count == 0
                and length <= self._end - start - _SIZE
                and kind in _KINDS
                and not zero
                and length <= self._max_frame
            ):
                body_start = start + _SIZE
                self._start = body_end = body_start + length
                body = bytes(self._scratch[body_start:body_end])
                frame = Frame()
                frame.kind = kind
                frame.flags = flags
                frame.call_id = call
                frame.function_id = function
                frame.timeout_ms = timeout_ms
                frame.body = body
                frame.buffers = frame.bulk = ()
                frame.receive_error = None
                return frame
            if not self._begin(length, count, kind, zero):
                return None
        return self._continue()

    @property
    def missing_bytes(self) -> int:
        """The number of bytes of the current frame that have not been received."""
        if self._header is None:
            return 0
        return sum(len(part) for part in self._parts[self._part :]) - self._filled + self._skip

    def has_frame(self) -> bool:
        """Return whether a complete frame without buffers has been received."""
        waiting = self._end - self._start
        if self._header is not None or waiting < _SIZE:
            return False
        header = _unpack_from(self._scratch, self._start)
        length, buffer_count = header[0], header[4]
        return bool(buffer_count == 0 and length <= waiting - _SIZE)

    def _begin(self, length: int, count: int, kind: int, zero: int) -> bool:
        """Check the header, read the buffer table and reserve memory.

        Return False if the table has not been received completely.
        """
        if kind not in _KINDS or zero:
            raise ProtocolError(f"received a frame of unknown kind {kind}")
        if count > MAX_BUFFERS or length > self._max_frame:
            raise ProtocolError(
                f"received a frame of {length} bytes with {count} buffers; the limits are "
                f"{self._max_frame} bytes (Config.max_frame) and {MAX_BUFFERS} buffers"
            )
        table_start = self._start + _SIZE
        table_end = table_start + count * BUFFER_ENTRY.size
        if self._end < table_end:
            return False
        table = self._scratch[table_start:table_end]
        places = [BufferLocation(*entry) for entry in BUFFER_ENTRY.iter_unpack(table)]
        total = length + sum(place.nbytes for place in places)
        if total > self._max_frame:
            raise ProtocolError(
                f"received a frame of {total} bytes; the limit is {self._max_frame} "
                "(Config.max_frame)"
            )
        try:
            body = memoryview(bytearray(length)) if length < _DIRECT else self._reserve(length)
        except BaseException as error:
            self._receive_error = error
            body = memoryview(b"")
        buffers = self._find_buffers(places)
        in_stream: list[memoryview] = []
        self._skip = 0
        if self._receive_error is None:
            for buffer, place in zip(buffers, places, strict=True):
                if not place.segment and place.nbytes:
                    in_stream.append(buffer)
        else:
            buffers = []
            in_stream_bytes = sum(place.nbytes for place in places if not place.segment)
            self._skip = in_stream_bytes + length - len(body)
        memory = buffers or [memoryview(b"")] * len(places)  # none if the frame is damaged
        self._bulk = [
            (place, buffer)
            for place, buffer in zip(places, memory, strict=True)
            if place.segment == BULK_SEGMENT
        ]
        self._buffers = buffers
        self._parts = [body, *in_stream] if body else in_stream
        self._body = body
        self._part = self._filled = 0
        self._header = _unpack_from(self._scratch, self._start)
        self._start = table_end
        return True

    def _find_buffers(self, places: Sequence[BufferLocation]) -> list[memoryview]:
        """Return the memory of each buffer. Store the first exception in `_receive_error`.

        After an exception, blocks of shared memory are still located, so that they are freed when
        the memory that was found is dropped.
        """
        found: list[memoryview] = []
        for place in places:
            try:
                if place.segment not in (0, BULK_SEGMENT):
                    found.append(self._locate(place))
                elif place.segment and self._reserve_bulk is None:
                    raise ProtocolError(
                        "a buffer must be pulled, but this connection has no stripes"
                    )
                elif self._receive_error is None:
                    found.append(
                        self._reserve_bulk(place)
                        if place.segment and self._reserve_bulk is not None
                        else self._reserve(place.nbytes)
                    )
            except ProtocolError:
                raise
            except BaseException as error:
                self._receive_error = self._receive_error or error
        return found

    def _continue(self) -> Frame | None:
        """Move bytes from the scratch buffer to the parts. Return the frame if it is complete."""
        while self._part < len(self._parts):
            waiting = self._end - self._start
            if not waiting:
                return None
            part = self._parts[self._part]
            count = min(waiting, len(part) - self._filled)
            part[self._filled : self._filled + count] = self._scratch[
                self._start : self._start + count
            ]
            self._start += count
            self._advance(count)
        if self._skip:
            count = min(self._end - self._start, self._skip)
            self._start += count
            self._skip -= count
            if self._skip:
                return None
        return self._finish()

    def _advance(self, count: int) -> None:
        self._filled += count
        if self._filled == len(self._parts[self._part]):
            self._part += 1
            self._filled = 0

    def _finish(self) -> Frame:
        assert self._header is not None
        _, call, function, timeout_ms, _, kind, flags, _ = self._header
        frame = Frame.of(
            kind,
            flags,
            call,
            function,
            timeout_ms,
            self._body,
            self._buffers,
            self._receive_error,
            tuple(self._bulk),
        )
        self._header, self._receive_error = None, None
        self._parts, self._buffers, self._bulk, self._body = [], [], [], memoryview(b"")
        return frame
