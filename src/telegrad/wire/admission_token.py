"""Admission tokens: the first bytes of a TCP connection, by which a server knows a member.

    client -> server   MAGIC, nonce, MAC over the nonce and the address that was dialled

A TLS handshake takes the server a millisecond of a thread, or longer if the client stops in the
middle. A token is checked in microseconds, before TLS begins. So a server can let members in while
others, perhaps at the same address, open thousands of connections.

A token proves nothing else: the handshakes that follow it are the same with and without it. Who
records a token can use it once at the same worker, if the member's own connection did not arrive
there, and occupies one place for an unfinished handshake. The key of tokens is derived from the key
of the group, which is stretched (`group.secret`): guessing the secret by a recorded token costs as
much as by a recorded handshake.
"""

from __future__ import annotations

import hmac
import os
import struct

MAGIC = b"TLGA"
_TOKEN = struct.Struct("<4s16s16s")
SIZE = _TOKEN.size


def make_token(key: bytes, address: str) -> bytes:
    """Return a new token for the worker that listens at `address`, with the key of the group."""
    nonce = os.urandom(16)
    return _TOKEN.pack(MAGIC, nonce, _mac(key, nonce, address))


def verified_nonce(key: bytes, token: bytes, address: str) -> bytes | None:
    """Return the nonce of a token that was made for `address`; None if it was not."""
    if len(token) != SIZE or not token.startswith(MAGIC):
        return None
    _, nonce, mac = _TOKEN.unpack(token)
    return nonce if hmac.compare_digest(mac, _mac(key, nonce, address)) else None


def _mac(key: bytes, nonce: bytes, address: str) -> bytes:
    own_key = hmac.digest(key, b"telegrad admission token", "sha256")
    return hmac.digest(own_key, nonce + address.encode(), "sha256")[:16]
