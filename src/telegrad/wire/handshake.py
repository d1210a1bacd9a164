"""Who is there? A mutual proof that both ends know the secret, before one byte is unpickled.

    client -> server   MAGIC, version, client nonce
    server -> client   MAGIC, version, server nonce, proof that the server knows the secret for these two nonces
    client -> server   length, introduction (JSON), proof that the client knows it, over the introduction too
    server -> client   1, length, introduction (JSON), proof   or   0, length, reason

Proofs are HMAC-SHA256 over a label, both nonces and the introduction, so nothing that was recorded can be replayed.
Everything before a valid proof has a fixed or bounded size. No I/O here: `client` and `server` are generators that
yield `(bytes to send, number of bytes to read next)`, are resumed with those bytes, and return the peer's introduction.
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
_ANSWER = struct.Struct("<BH")
_PROOF = hashlib.sha256().digest_size


def client(secret: bytes, introduction: Introduction) -> Steps:
    """The connecting side."""
    mine = os.urandom(32)
    reply = yield _HELLO.pack(MAGIC, VERSION, mine), _HELLO.size + _PROOF
    theirs = _open_hello(reply[: _HELLO.size])
    _verify(secret, b"server", mine + theirs, reply[_HELLO.size :], "the worker that was called")
    text = _pack_json(introduction)
    answer = yield (
        _LENGTH.pack(len(text)) + text + _proof(secret, b"client", mine + theirs + text),
        _ANSWER.size,
    )
    accepted, length = _ANSWER.unpack(answer)
    if accepted > 1:
        raise ProtocolError(f"an answer that is neither yes nor no: {accepted}")
    if not accepted:
        reason = yield b"", min(length, MAX_INTRODUCTION)
        raise ProtocolError(f"the connection was refused: {reason.decode('utf-8', 'replace')}")
    rest = yield b"", _bounded(length) + _PROOF
    _verify(
        secret,
        b"welcome",
        mine + theirs + rest[:-_PROOF],
        rest[-_PROOF:],
        "the worker that was called",
    )
    return _parse_json(rest[:-_PROOF])


def server(
    secret: bytes, introduction: Introduction, refuse: Callable[[Introduction], str | None]
) -> Steps:
    """The accepting side. `refuse(introduction)` says why a proven peer is not welcome, or None."""
    hello = yield b"", _HELLO.size
    if hello[:4] != MAGIC:
        raise ProtocolError("not a Telegrad connection")
    mine = os.urandom(32)
    theirs = hello[6:]
    proof = _proof(secret, b"server", theirs + mine)
    head = yield _HELLO.pack(MAGIC, VERSION, mine) + proof, _LENGTH.size
    _open_hello(hello)
    rest = yield b"", _bounded(*_LENGTH.unpack(head)) + _PROOF
    text = rest[:-_PROOF]
    _verify(secret, b"client", theirs + mine + text, rest[-_PROOF:], "a stranger")
    peer = _parse_json(text)
    reason = refuse(peer)
    if reason is not None:
        data = reason.encode()[:MAX_INTRODUCTION]
        yield _ANSWER.pack(0, len(data)) + data, 0
        raise ProtocolError(f"refused {peer.get('name')!r}: {reason}")
    text = _pack_json(introduction)
    yield _ANSWER.pack(1, len(text)) + text + _proof(secret, b"welcome", theirs + mine + text), 0
    return peer


def converse(near: Steps, far: Steps) -> tuple[Introduction, Introduction]:
    """Run both sides of a handshake against each other; what the far and the near side said of themselves."""
    results: dict[int, Introduction] = {}
    inbox = {0: b"", 1: b""}
    wants = {0: 0, 1: 0}
    sides = (near, far)

    def step(side: int, advance: Callable[[], tuple[bytes, int]]) -> None:
        try:
            sent, wants[side] = advance()
            inbox[1 - side] += sent
        except StopIteration as done:
            results[side] = done.value

    step(0, lambda: next(near))
    step(1, lambda: next(far))
    while len(results) < 2:
        for side in (0, 1):
            while side not in results and len(inbox[side]) >= wants[side]:
                data, inbox[side] = inbox[side][: wants[side]], inbox[side][wants[side] :]
                step(side, lambda side=side, data=data: sides[side].send(data))  # type: ignore[misc]
    return results[0], results[1]


def _proof(secret: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.new(secret, b"telegrad " + label + b"\0" + data, hashlib.sha256).digest()


def _verify(secret: bytes, label: bytes, data: bytes, proof: bytes, who: str) -> None:
    if not hmac.compare_digest(_proof(secret, label, data), proof):
        raise AuthenticationError(
            f"{who} does not know this group's secret; set the same TELEGRAD_SECRET (or Config.secret) on every worker"
        )


def _open_hello(data: bytes) -> bytes:
    magic, version, nonce = _HELLO.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("not a Telegrad connection")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the protocol, this worker version {VERSION}: "
            "install the same version of telegrad on both"
        )
    return bytes(nonce)


def _bounded(length: int) -> int:
    if length > MAX_INTRODUCTION:
        raise ProtocolError(f"an introduction of {length} bytes")
    return length


def _pack_json(introduction: Introduction) -> bytes:
    text = json.dumps(introduction).encode()
    _bounded(len(text))
    return text


def _parse_json(text: bytes) -> Introduction:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"an introduction that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError("an introduction that is not an object")
    return value
