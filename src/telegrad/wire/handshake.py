"""The handshake: both peers prove that they know the secret before any byte is unpickled.

    client -> server   MAGIC, version, client nonce
    server -> client   MAGIC, version, server nonce, proof over both nonces
    client -> server   length, introduction (JSON), proof over both nonces and the introduction
    server -> client   1, length, introduction (JSON), proof over both nonces and the introduction
                   or  0, length, reason for the refusal

A proof is the HMAC-SHA256 of a label, both nonces, the channel binding and the introductions so
far, with the key of the group as its key, so a recorded handshake cannot be replayed. The channel
binding identifies the encrypted connection below (see `transport.tls`): a handshake that is relayed
from one TLS connection to another fails. All data before a valid proof has a fixed or bounded size.
An introduction is what a peer tells about itself (its name, its incarnation, its purpose) and which
worker it wants to talk to at which address.

There is no I/O here. `client` and `server` are generators. They yield `(bytes to send, number of
bytes to read next)`, are resumed with the bytes that were read, and return a `HandshakeResult`: the
introduction of the peer, and a key that only the two ends of this connection know.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, NewType

from telegrad.errors import AuthenticationError, ProtocolError

Introduction = dict[str, Any]
# The id of one life of a worker. A worker that comes back under its name has another one.
Incarnation = NewType("Incarnation", str)


class HandshakeResult(NamedTuple):
    """What one side has after a handshake."""

    peer: Introduction
    session_key: bytes  # of this connection alone; authenticates its records without TLS


Steps = Generator[tuple[bytes, int], bytes, HandshakeResult]

VERSION = 7
# Sent in place of a version by a worker that requires TLS to a client that does not use it.
TLS_REQUIRED = 0xFFFF
MAGIC = b"TLGD"
MAX_INTRODUCTION = 8192

_HELLO = struct.Struct("<4sH32s")
_LENGTH = struct.Struct("<H")
_REPLY = struct.Struct("<BH")
_PROOF_SIZE = hashlib.sha256().digest_size
_SERVER = "the worker that was called"


class ConnectionRefused(ProtocolError):
    """The peer knows the secret and refuses the connection."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the connection was refused: {reason}")
        self.reason = reason


class HandshakeBroken(ProtocolError):
    """The connection ended, or nothing arrived any more, before the handshake was finished.

    Another attempt may succeed: the network, or a busy peer, may have ended the connection.
    """


def client(key: bytes, introduction: Introduction, binding: bytes = b"") -> Steps:
    """Return the steps of the side that connects. `binding` is the channel binding."""
    client_nonce = os.urandom(32)
    hello = yield _HELLO.pack(MAGIC, VERSION, client_nonce), _HELLO.size + _PROOF_SIZE
    bound = client_nonce + _parse_hello(hello[: _HELLO.size]) + _digest(binding)
    _verify(key, b"server", bound, hello[_HELLO.size :], _SERVER)
    text = _pack_json(introduction)
    bound += _digest(text)
    proof = _proof(key, b"client", bound)
    reply = yield _LENGTH.pack(len(text)) + text + proof, _REPLY.size
    accepted, length = _REPLY.unpack(reply)
    if accepted > 1:
        raise ProtocolError(f"received {accepted} in a handshake where 0 or 1 was expected")
    rest = yield b"", _checked_length(length) + _PROOF_SIZE
    text, proof = rest[:-_PROOF_SIZE], rest[-_PROOF_SIZE:]
    if not accepted:
        _verify(key, b"refusal", bound + text, proof, _SERVER)
        raise ConnectionRefused(text.decode("utf-8", "replace"))
    bound += _digest(text)
    _verify(key, b"welcome", bound, proof, _SERVER)
    return HandshakeResult(_parse_json(text), _proof(key, b"session", bound))


def server(
    key: bytes,
    introduce: Callable[[Introduction], Introduction],
    refuse: Callable[[Introduction], str | None],
    binding: bytes = b"",
) -> Steps:
    """Return the steps of the side that accepts.

    `refuse(peer)` returns the reason why a peer that knows the secret is refused, or None.
    `introduce(peer)` returns what this side tells about itself to a peer that is accepted.
    """
    hello = yield b"", _HELLO.size
    if hello[:4] != MAGIC:
        raise ProtocolError("not a Telegrad connection")
    server_nonce = os.urandom(32)
    bound = hello[6:] + server_nonce + _digest(binding)
    proof = _proof(key, b"server", bound)
    header = yield _HELLO.pack(MAGIC, VERSION, server_nonce) + proof, _LENGTH.size
    # Checked after the reply, so that a client of another version receives the version of this
    # worker and can name it in its error.
    _parse_hello(hello)
    rest = yield b"", _checked_length(*_LENGTH.unpack(header)) + _PROOF_SIZE
    text, proof = rest[:-_PROOF_SIZE], rest[-_PROOF_SIZE:]
    bound += _digest(text)
    _verify(key, b"client", bound, proof, "a peer that connected")
    peer = _parse_json(text)
    reason = refuse(peer)
    if reason is not None:
        data = reason.encode()[:MAX_INTRODUCTION]
        yield _REPLY.pack(0, len(data)) + data + _proof(key, b"refusal", bound + data), 0
        raise ProtocolError(f"refused {peer.get('name')!r}: {reason}")
    text = _pack_json(introduce(peer))
    bound += _digest(text)
    yield _REPLY.pack(1, len(text)) + text + _proof(key, b"welcome", bound), 0
    return HandshakeResult(peer, _proof(key, b"session", bound))


def refuse_without_tls() -> bytes:
    """Return the reply of a worker that requires TLS to a client that does not use it."""
    return _HELLO.pack(MAGIC, TLS_REQUIRED, bytes(32)) + bytes(_PROOF_SIZE)


def run_in_memory(near: Steps, far: Steps) -> tuple[Introduction, Introduction]:
    """Run both sides of a handshake in this thread.

    Return the introduction of the far side, then of the near side.
    """
    results: dict[int, HandshakeResult] = {}
    received = {0: b"", 1: b""}
    wanted = {0: 0, 1: 0}
    sides = (near, far)

    def step(side: int, advance: Callable[[], tuple[bytes, int]]) -> None:
        try:
            sent, wanted[side] = advance()
            received[1 - side] += sent
        except StopIteration as end:
            results[side] = end.value

    step(0, lambda: next(near))
    step(1, lambda: next(far))
    while len(results) < 2:
        for side in (0, 1):
            while side not in results and len(received[side]) >= wanted[side]:
                data = received[side][: wanted[side]]
                received[side] = received[side][wanted[side] :]
                step(side, lambda side=side, data=data: sides[side].send(data))  # type: ignore[misc]
                if side == 1:
                    break  # the near side reads a refusal before the far side raises its error
    return results[0].peer, results[1].peer


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _proof(key: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.digest(key, b"telegrad " + label + b"\0" + data, "sha256")


def _verify(key: bytes, label: bytes, data: bytes, proof: bytes, who: str) -> None:
    if not hmac.compare_digest(_proof(key, label, data), proof):
        raise AuthenticationError(
            f"{who} does not know this group's secret; set the same TELEGRAD_SECRET (or "
            "Config.secret) on every worker"
        )


def _parse_hello(data: bytes) -> bytes:
    """Return the nonce of the peer. Raise `ProtocolError` if it has another protocol version."""
    magic, version, nonce = _HELLO.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("not a Telegrad connection")
    if version == TLS_REQUIRED:
        raise ProtocolError(
            "the peer requires TLS, which is off here: give every worker the same TELEGRAD_TLS"
        )
    if version != VERSION:
        raise ProtocolError(
            f"the peer uses version {version} of the protocol, this worker version {VERSION}: "
            "install the same version of telegrad on both"
        )
    return bytes(nonce)


def _checked_length(length: int) -> int:
    if length > MAX_INTRODUCTION:
        raise ProtocolError(
            f"an introduction of {length} bytes exceeds the limit of {MAX_INTRODUCTION}"
        )
    return length


def _pack_json(introduction: Introduction) -> bytes:
    text = json.dumps(introduction).encode()
    _checked_length(len(text))
    return text


def _parse_json(text: bytes) -> Introduction:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"received an introduction that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError("received an introduction that is not a JSON object")
    return value
