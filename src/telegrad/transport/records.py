"""Records: the bytes of a TCP connection, encrypted by TLS or authenticated by a MAC.

`TlsRecords` is the record layer of the standard library's `ssl`, without a socket: it turns the
bytes of frames into encrypted bytes and back, so that the channel decides when to send and receive.
`MacRecords` is used where TLS is switched off. Everything that is unpickled travels in records, so
nobody without the key can make a worker run code: a record that was changed, repeated, left out or
moved to another place fails.

State: a `TlsRecords` is used by the sending and the receiving thread at the same time, which
OpenSSL does not permit, so `_lock` guards it. The sending and the receiving state of `MacRecords`
are separate.
"""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from hashlib import blake2b

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.locks import new_lock
from telegrad.timeouts import LONGEST_POLL
from telegrad.wire.handshake import HandshakeBroken

MAX_RECORD = 1 << 16  # bytes of plaintext of one `MacRecords` record
_LENGTH = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")
_TAG = 16  # bytes of a MAC
_CHUNK = 1 << 17
_TLS_RECORD = 1 << 14  # bytes
# RFC 8446 permits 2 ** 24.5 records with one key of AES-GCM. OpenSSL does not change keys itself.
_RECORDS_PER_KEY = 1 << 23
_ALERT_TIMEOUT = 1.0  # seconds for the peer to take the reason why it was refused

_CLOSED = "the peer closed the connection during the handshake"
_NO_TLS = (
    "the peer closed the connection during the TLS handshake: if this happens again, give every "
    "worker the same TELEGRAD_TLS"
)

_log = logging.getLogger(__name__)


class RecordError(Exception):
    """A received record is not what the peer sent, or the peer ended the connection."""


class Records(ABC):
    """One connection's encryption and authentication, in both directions."""

    def __init__(self) -> None:
        # how many bytes the last read has received, until `buffer_updated` accepts them
        self.received: list[int] = []

    @property
    def needs_new_keys(self) -> bool:
        """Whether the keys have encrypted as much as they should: use another connection."""
        return False

    @abstractmethod
    def encode(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return the records that carry `data`, in the order of these calls.

        They are valid until the next call.
        """

    @abstractmethod
    def get_buffer(self) -> memoryview:
        """Return memory to receive into. Call it when `read_into` has returned 0."""

    @abstractmethod
    def buffer_updated(self, count: int) -> None:
        """Accept the bytes at the start of `get_buffer()`; `read_into` returns what they carry."""

    def feed(self, data: memoryview) -> None:
        """Accept received bytes that are elsewhere, at most as many as there is space for."""
        space = self.get_buffer()
        while data.nbytes:
            count = min(len(space), len(data))
            space[:count] = data[:count]
            self.buffer_updated(count)
            space, data = self.get_buffer(), data[count:]

    @abstractmethod
    def read_into(self, space: memoryview) -> int:
        """Write received data to the start of `space`. Return its size, 0 if there is none now.

        Raise `RecordError` if the records were changed on their way.
        """

    @abstractmethod
    def take_unread(self) -> bytes:
        """Return received bytes that `read_into` has not opened. They are of other records.

        Call this when the connection changes to other records. Raise `ProtocolError` if there is
        data that `read_into` has not returned.
        """

    @staticmethod
    def _check_read(has_data: bool) -> None:
        if has_data:
            raise ProtocolError("the peer sent data before it was asked for")


class MacRecords(Records):
    """Records of plain data, each with a MAC over its number, its length and its data.

    The MAC is BLAKE2b with a key of this connection and direction. It takes a third of the time of
    HMAC-SHA256 for the short messages that are sent here.
    """

    def __init__(self, session_key: bytes, server_side: bool) -> None:
        super().__init__()
        keys = [
            hmac.digest(session_key, label, "sha256")
            for label in (b"client to server", b"server to client")
        ]
        self._send_key, self._receive_key = reversed(keys) if server_side else keys
        self._sent = self._received = 0  # records
        self._chunk = memoryview(bytearray(_CHUNK))
        self._input = bytearray()
        self._data = memoryview(b"")  # verified data that was not read yet

    def encode(self, data: bytes | memoryview) -> bytes:
        parts = []
        for start in range(0, len(data), MAX_RECORD):
            part = data[start : start + MAX_RECORD]
            content = _LENGTH.pack(len(part)) + part
            parts += [content, self._tag(self._send_key, self._sent, content)]
            self._sent += 1
        return b"".join(parts)

    def get_buffer(self) -> memoryview:
        return self._chunk

    def buffer_updated(self, count: int) -> None:
        self._input += self._chunk[:count]

    def read_into(self, space: memoryview) -> int:
        if not self._data and not self._next_record():
            return 0
        count = min(len(space), len(self._data))
        space[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def take_unread(self) -> bytes:
        self._check_read(bool(self._data))
        unread, self._input = bytes(self._input), bytearray()
        return unread

    def _next_record(self) -> bool:
        """Verify the next record, if it is complete, and let `_data` be its content."""
        received = self._input
        if len(received) < _LENGTH.size:
            return False
        length = _LENGTH.unpack_from(received)[0]
        if not 0 < length <= MAX_RECORD:
            raise RecordError(f"a record of {length} bytes")
        end = _LENGTH.size + length
        if len(received) < end + _TAG:
            return False
        content, tag = bytes(received[:end]), received[end : end + _TAG]
        if not hmac.compare_digest(self._tag(self._receive_key, self._received, content), tag):
            raise RecordError("a record was changed on its way")
        del received[: end + _TAG]
        self._received += 1
        self._data = memoryview(content)[_LENGTH.size :]
        return True

    @staticmethod
    def _tag(key: bytes, number: int, content: bytes) -> bytes:
        return blake2b(_SEQUENCE.pack(number) + content, key=key, digest_size=_TAG).digest()


class TlsRecords(Records):
    """The records of a TLS connection, and its handshake over a blocking socket."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        super().__init__()
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._chunk = memoryview(bytearray(_CHUNK))
        self._lock = new_lock()
        self._encoded = 0  # records

    @property
    def needs_new_keys(self) -> bool:
        return self._encoded >= _RECORDS_PER_KEY

    def encode(self, data: bytes | memoryview) -> bytes:
        with self._lock:
            self._encoded += 1 + len(data) // _TLS_RECORD
            written = 0
            while written < len(data):
                written += self.tls.write(memoryview(data)[written:])
            return self._outgoing.read()

    def get_buffer(self) -> memoryview:
        return self._chunk

    def buffer_updated(self, count: int) -> None:
        with self._lock:
            self._incoming.write(self._chunk[:count])

    def read_into(self, space: memoryview) -> int:
        with self._lock:
            # without this check, every read would end with a costly exception
            if not self._incoming.pending and not self.tls.pending():
                return 0
            try:
                return self.tls.read(len(space), space)  # type: ignore[arg-type, return-value]
            except ssl.SSLWantReadError:
                return 0
            except ssl.SSLError as error:
                raise RecordError(str(error)) from error

    def take_unread(self) -> bytes:
        self._check_read(bool(self.tls.pending()))
        return self._incoming.read()

    # The handshakes, before there are frames

    def shake_hands(self, deadline: float) -> None:
        """Run the TLS handshake. Raise `AuthenticationError` if the keys do not fit."""
        try:
            while True:
                try:
                    self.tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush(deadline)
                    self._fill(deadline)
            self._flush(deadline)
        except ConnectionResetError:
            raise HandshakeBroken(_NO_TLS) from None
        except ssl.SSLError as error:
            self._send_alert(min(deadline, time.monotonic() + _ALERT_TIMEOUT))
            raise explain_tls_error(error) from None

    def _send_alert(self, deadline: float) -> None:
        """Tell the peer why its handshake failed, and wait until it closes the connection.

        If this side closed it first, while it has data that was not read, the kernel would reset
        the connection, and the peer could lose the alert.
        """
        try:
            self._flush(deadline)
            self._sock.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline:
                set_timeout(self._sock, deadline)
                if not self._sock.recv(_CHUNK):
                    return
        except OSError as closed:
            _log.debug("the TLS alert may not have arrived: %s", closed)

    def send(self, data: bytes, deadline: float) -> None:
        """Send data during the handshake above TLS."""
        self._outgoing_write(self.encode(data), deadline)

    def read(self, count: int, deadline: float) -> bytes:
        """Receive exactly `count` bytes during the handshake above TLS."""
        data = bytearray(count)
        view, filled = memoryview(data), 0
        while filled < count:
            try:
                size = self.read_into(view[filled:])
            except RecordError as error:
                # With TLS 1.3, the client's handshake ends before the server checks its
                # certificate, so the refusal arrives here.
                if isinstance(error.__cause__, ssl.SSLError):
                    raise explain_tls_error(error.__cause__) from None
                raise ProtocolError(f"the TLS connection failed: {error}") from None
            if not size:
                self._fill(deadline)
            filled += size
        return bytes(data)

    def _fill(self, deadline: float) -> None:
        set_timeout(self._sock, deadline)
        data = self._sock.recv(_CHUNK)
        if not data:
            raise HandshakeBroken(_CLOSED if self.tls.version() else _NO_TLS)
        self._incoming.write(data)

    def _flush(self, deadline: float) -> None:
        self._outgoing_write(self._outgoing.read(), deadline)

    def _outgoing_write(self, data: bytes, deadline: float) -> None:
        if data:
            set_timeout(self._sock, deadline)
            self._sock.sendall(data)


class PlainStream:
    """A socket during the handshake above it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes, deadline: float) -> None:
        """Send data."""
        set_timeout(self._sock, deadline)
        self._sock.sendall(data)

    def read(self, count: int, deadline: float) -> bytes:
        """Receive exactly `count` bytes."""
        data = b""
        while len(data) < count:
            set_timeout(self._sock, deadline)
            part = self._sock.recv(count - len(data))
            if not part:
                raise HandshakeBroken(_CLOSED)
            data += part
        return data


class RecordStream:
    """A connection that carries bytes in records, for blocking operations of one thread."""

    def __init__(self, sock: socket.socket, records: Records) -> None:
        self.sock = sock
        self._records = records

    def sendall(self, data: bytes | memoryview) -> None:
        """Send data."""
        view = memoryview(data)
        for start in range(0, view.nbytes, _CHUNK):
            self.sock.sendall(self._records.encode(view[start : start + _CHUNK]))

    def receive(self, memory: memoryview) -> None:
        """Fill `memory`. Raise `ConnectionError` if the connection ends before."""
        while memory.nbytes:
            try:
                size = self._records.read_into(memory)
            except RecordError as error:
                raise ProtocolError(f"a connection failed: {error}") from None
            if not size:
                received = self.sock.recv_into(self._records.get_buffer())
                if not received:
                    raise ConnectionError("the peer closed the connection")
                self._records.buffer_updated(received)
            memory = memory[size:]


def set_timeout(sock: socket.socket, deadline: float) -> None:
    """Let the next operation end at `deadline`. Raise `TimeoutError` if that has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(min(left, LONGEST_POLL))


# What OpenSSL reports, at either side, if the two sides have different keys.
_WRONG_KEY = ("BINDER", "ILLEGAL_PARAMETER", "DECRYPT_ERROR", "UNKNOWN_PSK")
_CERTIFICATE = ("CERT", "UNKNOWN_CA")


def explain_tls_error(error: ssl.SSLError) -> ProtocolError:
    """Return the error of Telegrad for a TLS handshake that failed."""
    reason = error.reason or str(error)
    if any(word in reason for word in _CERTIFICATE):
        # An alert is the other side's report of what it found.
        refused = "the peer refused this worker's certificate"
        if "ALERT" not in reason:
            refused = "this worker refused the peer's certificate"
        detail = getattr(error, "verify_message", "") or reason
        return AuthenticationError(
            f"the TLS handshake failed: {refused} ({detail}). With your own certificates, check "
            "TELEGRAD_TLS_CERT and TELEGRAD_TLS_CA on both workers; without them, run Python 3.13 "
            "or newer on every worker, or an older one on every worker"
        )
    if any(word in reason for word in _WRONG_KEY):
        return AuthenticationError(
            f"the TLS handshake failed ({reason}): set the same TELEGRAD_SECRET (or Config.secret) "
            "and the same TELEGRAD_TLS_* settings on every worker"
        )
    return ProtocolError(
        f"the TLS handshake failed ({reason}): give every worker the same TELEGRAD_TLS settings"
    )
