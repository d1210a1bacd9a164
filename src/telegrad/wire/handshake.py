"""The handshake: both peers prove that they know the secret before any byte is unpickled.

    client -> server   MAGIC, version, client nonce
    server -> client   MAGIC, version, server nonce, proof over both nonces
    client -> server   length, introduction (JSON), proof over both nonces and the introduction
    server -> client   1, length, introduction (JSON), proof over both nonces and the introduction
                   or  0, length, reason for the refusal

A proof is the HMAC-SHA256 of a label, both nonces and the introduction, with the secret as its key,
so a recorded handshake cannot be replayed. All data before a valid proof has a fixed or bounded
size. An introduction is what a peer tells about itself: its name, its process and so on.

There is no I/O here. `client` and `server` are generators. They yield `(bytes to send, number of
bytes to read next)`, are resumed with the bytes that were read, and return the introduction of the
peer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Callable, Generator
from typing import Any

from telegrad.errors import AuthenticationError, ProtocolError

Introduction = dict[str, Any]
Steps = Generator[tuple[bytes, int], bytes, Introduction]

VERSION = 2
MAGIC = b"TLGD"
MAX_INTRODUCTION = 8192

_HELLO = struct.Struct("<4sH32s")
_LENGTH = struct.Struct("<H")
_REPLY = struct.Struct("<BH")
_PROOF_SIZE = hashlib.sha256().digest_size
_SERVER = "the worker that was called"


def client(secret: bytes, introduction: Introduction) -> Steps:
    """Return the steps of the side that connects."""
    client_nonce = os.urandom(32)
    hello = yield _HELLO.pack(MAGIC, VERSION, client_nonce), _HELLO.size + _PROOF_SIZE
    nonces = client_nonce + _parse_hello(hello[: _HELLO.size])
    _verify(secret, b"server", nonces, hello[_HELLO.size :], _SERVER)
    text = _pack_json(introduction)
    proof = _proof(secret, b"client", nonces + text)
    reply = yield _LENGTH.pack(len(text)) + text + proof, _REPLY.size
    accepted, length = _REPLY.unpack(reply)
    if accepted > 1:
        raise ProtocolError(f"received {accepted} in a handshake where 0 or 1 was expected")
    if not accepted:
        reason = yield b"", min(length, MAX_INTRODUCTION)
        raise ProtocolError(f"the connection was refused: {reason.decode('utf-8', 'replace')}")
    rest = yield b"", _checked_length(length) + _PROOF_SIZE
    text, proof = rest[:-_PROOF_SIZE], rest[-_PROOF_SIZE:]
    _verify(secret, b"welcome", nonces + text, proof, _SERVER)
    return _parse_json(text)


def server(
    secret: bytes, introduction: Introduction, refuse: Callable[[Introduction], str | None]
) -> Steps:
    """Return the steps of the side that accepts.

    `refuse(introduction)` returns the reason why a peer that knows the secret is refused, or None.
    """
    hello = yield b"", _HELLO.size
    if hello[:4] != MAGIC:
        raise ProtocolError("not a Telegrad connection")
    server_nonce = os.urandom(32)
    nonces = hello[6:] + server_nonce
    proof = _proof(secret, b"server", nonces)
    header = yield _HELLO.pack(MAGIC, VERSION, server_nonce) + proof, _LENGTH.size
    # Checked after the reply, so that a client of another version receives the version of this
    # worker and can name it in its error.
    _parse_hello(hello)
    rest = yield b"", _checked_length(*_LENGTH.unpack(header)) + _PROOF_SIZE
    text, proof = rest[:-_PROOF_SIZE], rest[-_PROOF_SIZE:]
    _verify(secret, b"client", nonces + text, proof, "a peer that connected")
    peer = _parse_json(text)
    reason = refuse(peer)
    if reason is not None:
        data = reason.encode()[:MAX_INTRODUCTION]
        yield _REPLY.pack(0, len(data)) + data, 0
        raise ProtocolError(f"refused {peer.get('name')!r}: {reason}")
    text = _pack_json(introduction)
    yield _REPLY.pack(1, len(text)) + text + _proof(secret, b"welcome", nonces + text), 0
    return peer


def run_in_memory(near: Steps, far: Steps) -> tuple[Introduction, Introduction]:
    """Run both sides of a handshake in this thread.

    Return what each of them returned: the introduction of the far side, then of the near side.
    """
    results: dict[int, Introduction] = {}
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
    return results[0], results[1]


def _proof(secret: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.new(secret, b"telegrad " + label + b"\0" + data, hashlib.sha256).digest()


def _verify(secret: bytes, label: bytes, data: bytes, proof: bytes, who: str) -> None:
    if not hmac.compare_digest(_proof(secret, label, data), proof):
        raise AuthenticationError(
            f"{who} does not know this group's secret; set the same TELEGRAD_SECRET (or "
            "Config.secret) on every worker"
        )


def _parse_hello(data: bytes) -> bytes:
    """Return the nonce of the peer. Raise `ProtocolError` if it has another protocol version."""
    magic, version, nonce = _HELLO.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("not a Telegrad connection")
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
