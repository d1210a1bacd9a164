"""Stripes: connections that carry chunks of bulk buffers, and the format of what they carry.

    request    operation u32, buffer index u32, registration id u64, offset u64, length u64
    response   status u64, then the bytes of the chunk if the status is OK and a chunk was requested

Two requests are for other engines: DESCRIBE, whose response has a length and a description of the
registration, and CHECK, which is accepted as long as the registration is valid.

The receiver of the buffers opens a stripe and sends requests, several before the first response.
The sender answers them in order. So both sides know the size of every message before it arrives.

`SealedStripe` encrypts and authenticates messages, in records of up to `RECORD` bytes. A record is
the encrypted bytes and a tag. The tag covers the number of the record, the request that it answers
and its place in the response: one that was changed, repeated, moved or left out is an error.
The keys are derived from the session key of the connection, which nobody else can compute, even if
he learns the secret of the group later: the nonces of the handshake were encrypted by TLS. No key
has two records with the same number, because every connection and direction has keys of its own.

`RecordStripe` is used if AES-GCM is not available at both ends, and `PlainStripe` where TLS is
switched off. The latter authenticates messages, each with a MAC, but not the contents of buffers,
which nobody interprets here: a MAC by AES-GCM takes three quarters of the time of the encryption,
and sockets with it reach half of the bandwidth of those without, on the same cores. Who needs it
can use TLS.
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from hashlib import blake2b

from telegrad.errors import ProtocolError
from telegrad.transport import aead
from telegrad.transport.bulk import Reader
from telegrad.transport.records import RecordStream
from telegrad.transport.sockets import AuthenticatedSocket

REQUEST = struct.Struct("<IIQQQ")
STATUS = struct.Struct("<Q")
PULL, DONE, DESCRIBE, CHECK = 1, 2, 3, 4  # operations
OK, REFUSED = 1, 2  # statuses; REFUSED: there is no such registration or chunk

# It stays in the cache of a core between two steps, such as receiving it and decrypting it.
RECORD = 1 << 19  # at most; see `aead.RECORDS_PER_KEY`
_PLACE = struct.Struct("<Q")
_MAC_OF = struct.Struct("<QQ")  # the number of a message, and the size of the request it answers
_MAC_BYTES = 16
_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_WAITALL = int(socket.MSG_WAITALL)
_MORE = int(getattr(socket, "MSG_MORE", 0))
_log = logging.getLogger(__name__)

CIPHER = "aes-256-gcm"


def cipher() -> str:
    """Return the cipher that this process can use for stripes; "" if there is none.

    Peers tell it in their introductions, which their proofs cover.
    """
    return CIPHER if aead.is_available() else ""


class Stripe(ABC):
    """A connection that carries requests and chunks, used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._sock!r}>"

    @abstractmethod
    def send(self, data: bytes | memoryview, about: bytes = b"", more: bool = False) -> None:
        """Send a message that answers the request `about`. `more`: something follows at once."""

    @abstractmethod
    def receive(self, memory: memoryview, about: bytes = b"") -> None:
        """Fill `memory` with the answer to the request `about`.

        Raise `ConnectionError` if the connection ends before, `ProtocolError` if what arrives is
        not what the peer sent.
        """

    @abstractmethod
    def send_contents(self, data: memoryview, about: bytes, offset: int) -> None:
        """Send a part of the bytes that the request `about` asks for, from `offset` on.

        All parts but the last have a size that is a multiple of `RECORD`.
        """

    @abstractmethod
    def receive_contents(self, memory: memoryview, about: bytes, offset: int) -> None:
        """Fill `memory` with a part of the requested bytes; see `receive`.

        A `PlainStripe` does not find out whether they are what the peer sent.
        """

    def prepare(self) -> None:
        """Let operations block, send without delay, and end a connection whose peer has gone."""
        sock = self._sock
        sock.settimeout(None)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE_OPTIONS.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def shut(self) -> None:
        """Wake the thread that sends or receives."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("a bulk connection was closed already: %s", error)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class PlainStripe(Stripe):
    """A stripe that is not encrypted. Its messages are authenticated, the contents are not."""

    def __init__(self, sock: socket.socket, session_key: bytes, server_side: bool) -> None:
        super().__init__(sock)
        keys = [
            hmac.digest(session_key, b"telegrad plain bulk " + direction, "sha256")
            for direction in (b"client to server", b"server to client")
        ]
        self._send_key, self._receive_key = reversed(keys) if server_side else keys
        self._sent = self._received = 0  # messages

    def send(self, data: bytes | memoryview, about: bytes = b"", more: bool = False) -> None:
        message = bytes(data)
        tag = _mac(self._send_key, self._sent, about, message)
        self._sent += 1
        self._sock.sendall(message + tag, _MORE if more else 0)

    def receive(self, memory: memoryview, about: bytes = b"") -> None:
        size = memory.nbytes
        received = bytearray(size + _MAC_BYTES)
        _fill(self._sock, memoryview(received))
        message = bytes(received[:size])
        tag = _mac(self._receive_key, self._received, about, message)
        self._received += 1
        if not hmac.compare_digest(tag, received[size:]):
            raise ProtocolError("a bulk connection failed: a message was changed on its way")
        memory[:] = message

    def send_contents(self, data: memoryview, about: bytes, offset: int) -> None:
        self._sock.sendall(data)

    def receive_contents(self, memory: memoryview, about: bytes, offset: int) -> None:
        _fill(self._sock, memory)


def _mac(key: bytes, number: int, about: bytes, message: bytes) -> bytes:
    content = _MAC_OF.pack(number, len(about)) + about + message
    return blake2b(content, key=key, digest_size=_MAC_BYTES).digest()


class RecordStripe(Stripe):
    """A stripe whose messages travel in the records of TLS."""

    def __init__(self, stream: RecordStream) -> None:
        super().__init__(stream.sock)
        self._stream = stream

    def send(self, data: bytes | memoryview, about: bytes = b"", more: bool = False) -> None:
        self._stream.sendall(data)

    def receive(self, memory: memoryview, about: bytes = b"") -> None:
        self._stream.receive(memory)

    def send_contents(self, data: memoryview, about: bytes, offset: int) -> None:
        self._stream.sendall(data)

    def receive_contents(self, memory: memoryview, about: bytes, offset: int) -> None:
        self._stream.receive(memory)


class SealedStripe(Stripe):
    """A stripe that is encrypted and authenticated by AES-256-GCM."""

    def __init__(self, sock: socket.socket, session_key: bytes, server_side: bool) -> None:
        super().__init__(sock)
        self._sending = aead.RecordCipher(session_key, b"bulk", server_side, seals=True)
        self._receiving = aead.RecordCipher(session_key, b"bulk", server_side, seals=False)
        # a record that is being sent or received; as large as the largest record so far
        self._buffer = memoryview(b"")

    def send(self, data: bytes | memoryview, about: bytes = b"", more: bool = False) -> None:
        self._send(memoryview(data), about, 0, _MORE if more else 0)

    def receive(self, memory: memoryview, about: bytes = b"") -> None:
        self.receive_contents(memory, about, 0)

    def send_contents(self, data: memoryview, about: bytes, offset: int) -> None:
        self._send(data, about, offset, 0)

    def _send(self, view: memoryview, about: bytes, offset: int, flags: int) -> None:
        for start in range(0, view.nbytes, RECORD):
            part = view[start : start + RECORD]
            record = self._space(part.nbytes + aead.TAG_BYTES)
            self._sending.seal(about + _PLACE.pack(offset + start), part, record)
            self._sock.sendall(record, flags)

    def receive_contents(self, memory: memoryview, about: bytes, offset: int) -> None:
        for start in range(0, memory.nbytes, RECORD):
            part = memory[start : start + RECORD]
            record = self._space(part.nbytes + aead.TAG_BYTES)
            _fill(self._sock, record)
            try:
                self._receiving.open(about + _PLACE.pack(offset + start), record, part)
            except aead.TagError as error:
                raise ProtocolError(f"a bulk connection failed: {error}") from None

    def _space(self, size: int) -> memoryview:
        if self._buffer.nbytes < size:
            self._buffer = memoryview(bytearray(size))
        return self._buffer[:size]


def _fill(sock: socket.socket, memory: memoryview) -> None:
    """Receive into `memory`. With MSG_WAITALL one call receives a whole chunk."""
    while memory.nbytes:
        count = sock.recv_into(memory, 0, _WAITALL)
        if not count:
            raise ConnectionError("the peer closed a bulk connection")
        memory = memory[count:]


def open_stripe(connection: AuthenticatedSocket, own_cipher: str | None = None) -> Stripe:
    """Return the stripe over a connection whose handshake has ended.

    `own_cipher` is the cipher that this side has told; None: that of `cipher`.
    """
    sock, records = connection.sock, connection.records
    assert records is not None
    if not connection.encrypted:
        return PlainStripe(sock, connection.session_key, connection.server_side)
    own_cipher = cipher() if own_cipher is None else own_cipher
    if own_cipher and own_cipher == connection.peer.get("cipher"):
        if records.take_unread():
            raise ProtocolError("the peer sent data before it was asked for")
        return SealedStripe(sock, connection.session_key, connection.server_side)
    return RecordStripe(RecordStream(sock, records))


def send_chunk(stripe: Stripe, chunk: Iterable[memoryview], about: bytes) -> None:
    """Send a response with a chunk, given in parts."""
    stripe.send(STATUS.pack(OK), about, more=True)
    offset = 0
    for part in chunk:
        stripe.send_contents(part, about, offset)
        offset += part.nbytes


def shut(stripes: Iterable[Reader]) -> None:
    """Wake the threads that send to or receive from these stripes."""
    for stripe in stripes:
        stripe.shut()
