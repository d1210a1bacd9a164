"""The frame: how one message looks on a connection, and a decoder that never does I/O.

    header (32 bytes)   body length u64, call id u64, function u32, milliseconds left u32, buffers u32, kind u8,
                        flags u8, zero u16
    buffer table        per buffer: length u64, offset u64, segment u32, slot u32 (segment 0: its bytes follow the body)
    body                pickle, or whatever the kind says
    buffers             the bytes of every buffer that is not in shared memory

Rules of the decoder (`FrameDecoder`), which holds the only state here and belongs to one reading thread:
- The reader asks `space()` for memory, puts bytes there, says `fill(n)`, and takes frames with `next()`.
- Small frames gather in one scratch buffer, so a single receive may bring many. Large bodies and buffers are received
  straight into their own memory, which is only reserved, not touched, until bytes arrive: a peer that claims much and
  sends little costs nothing.
- Sizes are checked against the limits before anything is reserved; what breaks a rule raises `ProtocolError`.
- If there is no memory for a frame, or a buffer in shared memory cannot be found, the frame is *damaged*: its bytes are
  skipped, and `Frame.damage` says why. The stream stays in order, and only this message fails.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from telegrad.errors import ProtocolError

HEADER = struct.Struct("<QQIIIBBH")
PLACE = struct.Struct("<QQII")
SCRATCH = 1 << 16
# header and table of a frame must fit the scratch buffer
MAX_BUFFERS = (SCRATCH - HEADER.size) // PLACE.size
# bodies and buffers of at least this size are received straight into their own memory
_DIRECT = 1 << 14

_pack = HEADER.pack
_unpack_from = HEADER.unpack_from
_SIZE = HEADER.size
_new = tuple.__new__


class Kind(enum.IntEnum):
    """What a frame is for."""

    CALL = 1
    REPLY = 2
    FAILURE = 3
    CANCEL = 4
    ALIVE = 5
    BYE = 6  # the sender leaves, or gives the receiver up: the body says why
    END = 7  # the sender ends this connection alone: the body says why


_KINDS = frozenset(int(kind) for kind in Kind)

# Flags of a CALL.
DEFINES = 1  # the body starts with the definition of the function that the header numbers
KEYWORDS = 2  # the pickle holds (args, kwargs), not args alone
INLINE_FUNCTION = 4  # the pickle holds (function, args, kwargs): a function that is not interned
SCOPED = 8  # the body ends with what the scope that the call runs under says of itself


class BufferPlace(NamedTuple):
    """Where a buffer of a message lies: inside the stream when `segment` is 0, else in a shared-memory segment."""

    nbytes: int
    offset: int = 0
    segment: int = 0
    slot: int = 0


class Frame(NamedTuple):
    kind: int
    flags: int
    call: int
    function: int
    left_ms: int
    body: Any  # bytes-like
    buffers: Sequence[Any]
    # why the buffers, and the body if that is empty, could not be received
    damage: BaseException | None = None


def head(
    kind: int,
    call: int,
    body: bytes | memoryview,
    *,
    function: int = 0,
    left_ms: int = 0,
    flags: int = 0,
    places: Sequence[BufferPlace] = (),
) -> bytes:
    """Header and buffer table of a frame; the body and the in-stream buffers follow it on the wire."""
    start = _pack(len(body), call, function, left_ms, len(places), kind, flags, 0)
    return start if not places else start + b"".join([PLACE.pack(*place) for place in places])


class FrameDecoder:
    """Turns received bytes into frames.

    `reserve(n)` gives writable memory for a buffer of n bytes, `locate(place)` the memory of a buffer in shared memory.
    """

    def __init__(
        self,
        reserve: Callable[[int], memoryview],
        locate: Callable[[BufferPlace], memoryview],
        max_frame: int,
    ) -> None:
        self._reserve = reserve
        self._locate = locate
        self._max_frame = max_frame
        self._scratch = memoryview(bytearray(SCRATCH))
        self._lo = self._hi = 0
        self._header: tuple[int, ...] | None = None
        # of the frame under way: its body, then its in-stream buffers
        self._parts: list[memoryview] = []
        self._found: list[Any] = []
        self._body = memoryview(b"")
        self._part = 0
        self._filled = 0
        self._direct = False  # the last `space()` was memory of a part, not of the scratch buffer
        self._damage: BaseException | None = None
        self._skip = 0  # bytes of a damaged frame that are still to come

    def __repr__(self) -> str:
        state = "inside a frame" if self._header else "between frames"
        return f"<FrameDecoder {self._hi - self._lo} bytes waiting, {state}>"

    @property
    def between_frames(self) -> bool:
        """True when no part of a frame has been received."""
        return self._lo == self._hi and self._header is None

    def space(self) -> memoryview:
        """Memory to receive into. At least one byte of it must be filled before the next call of `next`."""
        self._direct = False
        if self._lo == self._hi:
            self._lo = self._hi = 0
            if self._header is not None and self._part < len(self._parts):
                rest = self._parts[self._part][self._filled :]
                self._direct = len(rest) >= _DIRECT
                if self._direct:
                    return rest
        elif self._hi == SCRATCH:
            kept = self._hi - self._lo
            self._scratch[:kept] = bytes(self._scratch[self._lo : self._hi])
            self._lo, self._hi = 0, kept
        return self._scratch[self._hi :]

    def fill(self, count: int) -> None:
        """`count` bytes were put at the start of `space()`."""
        if self._direct:
            self._advance(count)
        else:
            self._hi += count

    def next(self) -> Frame | None:
        """The next whole frame, or None if more bytes are needed."""
        if self._header is None:
            lo = self._lo
            if self._hi - lo < _SIZE:
                return None
            length, call, function, left_ms, count, kind, flags, zero = _unpack_from(
                self._scratch, lo
            )
            if (
                count == 0
                and length <= self._hi - lo - _SIZE
                and kind in _KINDS
                and not zero
                and length <= self._max_frame
            ):
                start = lo + _SIZE
                self._lo = end = start + length
                body = bytes(self._scratch[start:end])
                # half of the usual time
                return _new(Frame, (kind, flags, call, function, left_ms, body, (), None))
            if not self._begin(length, count, kind, zero):
                return None
        return self._continue()

    @property
    def expected(self) -> int:
        """Bytes of the frame under way that have not been received."""
        if self._header is None:
            return 0
        return sum(len(part) for part in self._parts[self._part :]) - self._filled + self._skip

    def has_frame(self) -> bool:
        """Is a whole frame without buffers already here?"""
        waiting = self._hi - self._lo
        if self._header is not None or waiting < _SIZE:
            return False
        start = _unpack_from(self._scratch, self._lo)
        return bool(start[4] == 0 and start[0] <= waiting - _SIZE)

    def _begin(self, length: int, count: int, kind: int, zero: int) -> bool:
        """Check the header, read the buffer table and reserve memory. False if the table is not all here."""
        if kind not in _KINDS or zero:
            raise ProtocolError(f"a frame of unknown kind {kind}")
        if count > MAX_BUFFERS or length > self._max_frame:
            raise ProtocolError(
                f"a frame of {length} bytes with {count} buffers exceeds the limit {self._max_frame}"
            )
        table = count * PLACE.size
        if self._hi - self._lo < _SIZE + table:
            return False
        start = self._lo + _SIZE
        places = [
            BufferPlace(*entry) for entry in PLACE.iter_unpack(self._scratch[start : start + table])
        ]
        total = length + sum(place.nbytes for place in places)
        if total > self._max_frame:
            raise ProtocolError(f"a frame of {total} bytes exceeds the limit of {self._max_frame}")
        try:
            body = memoryview(bytearray(length)) if length < _DIRECT else self._reserve(length)
        except BaseException as error:
            self._damage = error
            body = memoryview(b"")
        found = self._find(places)
        inside = [
            each
            for each, place in zip(found, places, strict=False)
            if not place.segment and place.nbytes
        ]
        self._found = found
        self._skip = 0
        if self._damage is not None:
            self._found, inside = [], []
            self._skip = (
                sum(place.nbytes for place in places if not place.segment) + length - len(body)
            )
        self._parts = [body, *inside] if body else inside
        self._body = body
        self._part = self._filled = 0
        self._header = _unpack_from(self._scratch, self._lo)
        self._lo = start + table
        return True

    def _find(self, places: Sequence[BufferPlace]) -> list[memoryview]:
        """Return the memory of each buffer. After a failure, which is noted, blocks of shared memory are let go."""
        found: list[memoryview] = []
        for place in places:
            try:
                if place.segment:
                    found.append(self._locate(place))
                elif self._damage is None:
                    found.append(self._reserve(place.nbytes))
            except ProtocolError:
                raise
            except BaseException as error:
                self._damage = self._damage or error
        return found

    def _continue(self) -> Frame | None:
        """Move bytes from the scratch buffer into the parts; the frame if it is complete."""
        while self._part < len(self._parts):
            waiting = self._hi - self._lo
            if not waiting:
                return None
            part = self._parts[self._part]
            count = min(waiting, len(part) - self._filled)
            part[self._filled : self._filled + count] = self._scratch[self._lo : self._lo + count]
            self._lo += count
            self._advance(count)
        if self._skip:
            count = min(self._hi - self._lo, self._skip)
            self._lo += count
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
        _, call, function, left_ms, _, kind, flags, _ = self._header
        frame = Frame(kind, flags, call, function, left_ms, self._body, self._found, self._damage)
        self._header, self._damage = None, None
        self._parts, self._found, self._body = [], [], memoryview(b"")
        return frame
