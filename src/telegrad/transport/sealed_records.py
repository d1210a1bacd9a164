"""`SealedRecords`: the records of a TCP channel, sealed by AES-256-GCM in one call for each record.

    record     length u32, data, tag

They take the place of the records of TLS after both handshakes, and of `MacRecords` where TLS is
switched off: then the data is not encrypted, and the tag authenticates it (GMAC). TLS has records
of 16 KB, which `ssl` decrypts one by one in Python; these have up to `MAX_RECORD` bytes and are
decrypted straight into the memory of the frame. They are used if both workers have the package
`cryptography`, which needs less than 1 us for a small record.

The tag covers the length and the number of the record. So a record that was changed, repeated,
left out or moved to another place fails. Keys are derived from the session key of the connection,
one for each direction; see `stripes` for what that means for forward secrecy.

State: the sending and the receiving state are separate; each is used by one thread at a time.
"""

from __future__ import annotations

import struct

from telegrad.transport import aead
from telegrad.transport.records import RecordError, Records
from telegrad.transport.sockets import AuthenticatedSocket

CIPHER = "aes-256-gcm"
# It stays in the cache of a core between two steps, such as receiving it and decrypting it.
MAX_RECORD = 1 << 17
_LENGTH = struct.Struct("<I")
_OVERHEAD = _LENGTH.size + aead.TAG_BYTES
_SPACE = 2 * (MAX_RECORD + _OVERHEAD)
_LARGE = 1 << 14  # bytes of a record that are received without the records behind it
_NOTHING = memoryview(bytearray())


def cipher() -> str:
    """Return the cipher that this process uses for the records of channels; "" if there is none.

    Peers tell it in their introductions, which their proofs cover.
    """
    return CIPHER if aead.has_package() else ""


def channel_records(connection: AuthenticatedSocket) -> Records:
    """Return the records for the frames of a connection whose handshake has ended."""
    assert connection.records is not None
    if not cipher() or connection.peer.get("records") != cipher():
        return connection.records
    sealed = SealedRecords(connection.session_key, connection.server_side, connection.encrypted)
    # Frames may have arrived with the end of the handshake.
    sealed.feed(memoryview(connection.records.take_unread()))
    return sealed


class SealedRecords(Records):
    """Records that AES-256-GCM encrypts and authenticates, or only authenticates."""

    def __init__(self, session_key: bytes, server_side: bool, encrypts: bool) -> None:
        super().__init__()
        purpose = b"records" if encrypts else b"plain records"
        self._encrypts = encrypts
        self._sending, self._receiving = (
            aead.RecordCipher(session_key, purpose, server_side, seals, aead.PackageCipher)
            for seals in (True, False)
        )
        self._output = memoryview(b"")  # as large as the largest that was encoded so far
        self._input = memoryview(bytearray(_SPACE))
        # The bytes of `_input` that were received but not opened: from start to end.
        self._start = self._end = 0
        self._opened = memoryview(b"")  # the content of a record for which there was no space
        self._unread = memoryview(b"")  # the part of it that was not read

    def encode(self, data: bytes | memoryview) -> memoryview:
        """Return the records that carry `data`. They are valid until the next call."""
        size = len(data)
        needed = size + _OVERHEAD * (1 + (size - 1) // MAX_RECORD)
        if len(self._output) < needed:
            self._output = memoryview(bytearray(needed))
        view, output, end = memoryview(data), self._output, 0
        for start in range(0, size, MAX_RECORD):
            part = view[start : start + MAX_RECORD]
            end = self._seal(part, output, end)
        return output[:end]

    def _seal(self, part: memoryview, output: memoryview, start: int) -> int:
        """Write a record to `output`. Return its end."""
        length = len(part)
        header = _LENGTH.pack(length)
        data_start = start + _LENGTH.size
        tag_start, end = data_start + length, data_start + length + aead.TAG_BYTES
        output[start:data_start] = header
        if self._encrypts:
            self._sending.seal(header, part, output[data_start:end])
        else:
            output[data_start:tag_start] = part
            self._sending.seal(output[start:tag_start], b"", output[tag_start:end])
        return end

    def get_buffer(self) -> memoryview:
        start, end = self._start, self._end
        waiting = end - start
        if not waiting:
            self._start = self._end = end = 0
        elif _SPACE - start <= MAX_RECORD + _OVERHEAD or waiting <= _LENGTH.size:
            self._input[:waiting] = bytes(self._input[start:end])
            self._start, self._end = 0, waiting
            end = waiting
        if waiting >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._input, self._start)[0]
            missing = length + _OVERHEAD - waiting
            if missing >= _LARGE:
                # Only this record, and the length of the next one: nothing needs to be moved.
                return self._input[end : end + missing + _LENGTH.size]
        return self._input[end:]

    def buffer_updated(self, count: int) -> None:
        self._end += count

    def read_into(self, space: memoryview) -> int:
        unread = self._unread
        if not unread:
            start = self._start
            waiting = self._end - start
            if waiting < _LENGTH.size:
                return 0
            length: int = _LENGTH.unpack_from(self._input, start)[0]
            if not 0 < length <= MAX_RECORD:
                raise RecordError(f"a record of {length} bytes")
            if waiting < length + _OVERHEAD:
                return 0
            self._start = start + length + _OVERHEAD
            opened = self._open(start, length, space)
            if opened is None:
                return length
            unread = opened
        count = min(len(space), len(unread))
        space[:count] = unread[:count]
        self._unread = unread[count:]
        return count

    def _open(self, start: int, length: int, space: memoryview) -> memoryview | None:
        """Verify a record. Return its content; None if that was written to `space`."""
        received = self._input
        data_start = start + _LENGTH.size
        tag_start, end = data_start + length, data_start + length + aead.TAG_BYTES
        try:
            if not self._encrypts:
                self._receiving.open(received[start:tag_start], received[tag_start:end], _NOTHING)
                return received[data_start:tag_start]
            direct = length <= len(space)
            if not direct and len(self._opened) < length:
                self._opened = memoryview(bytearray(MAX_RECORD))
            target = space[:length] if direct else self._opened[:length]
            self._receiving.open(received[start:data_start], received[data_start:end], target)
            return None if direct else target
        except aead.TagError:
            raise RecordError("a record was changed on its way") from None

    def take_unread(self) -> bytes:
        self._check_read(bool(self._unread))
        unread = bytes(self._input[self._start : self._end])
        self._start = self._end = 0
        return unread
