"""Values on their way in or out of an agent: pickling that knows who is talking to whom.

Some objects (references) mean something only to an agent and a peer. While a message is packed or unpacked, the
`Envelope` of the connection is in `current_envelope()`; their reducers and constructors look there. What has to happen
once the message is packed, but before it leaves, they register with `before_sending`; what must live until a call has
been answered, with `keep_until_answered`.

State: of each thread, what it is packing, changed only by that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.wire import codec

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


class Envelope(NamedTuple):
    """Which agent packs or unpacks, and which incarnation of which peer is at the other end."""

    agent: Agent
    peer: str
    incarnation: str


class _Local(threading.local):
    envelope: Envelope | None = None
    actions: dict[int, tuple[Any, Callable[[Envelope], None]]] | None = None
    kept: list[Any] | None = None


_local = _Local()


def current_envelope() -> Envelope | None:
    """The envelope of the message that this thread is packing or unpacking."""
    return _local.envelope


def before_sending(subject: object, action: Callable[[Envelope], None]) -> None:
    """Run `action(envelope)` when the message is packed; once per subject, however often packing starts again."""
    if _local.actions is None:
        _local.actions = {}
    _local.actions[id(subject)] = subject, action


def keep_until_answered(subject: object) -> bool:
    """Keep `subject` alive as long as the call that is being packed is under way. False: it is no call."""
    if _local.kept is None:
        return False
    _local.kept.append(subject)
    return True


def pack(envelope: Envelope, value: Any, *, by_value: bool = False, kept: list[Any] | None = None) -> codec.Encoded:
    """Encode `value` for the peer of `envelope`. Who packs a call gives a list to keep things in."""
    outer = _local.envelope, _local.actions, _local.kept
    _local.envelope, _local.actions, _local.kept = envelope, None, kept
    try:
        encoded = codec.encode(value, by_value=by_value)
        if _local.actions:
            for _, action in _local.actions.values():
                action(envelope)
        return encoded
    finally:
        _local.envelope, _local.actions, _local.kept = outer


def unpack(envelope: Envelope, body: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Decode what the peer of `envelope` sent."""
    outer, _local.envelope = _local.envelope, envelope
    try:
        return codec.decode(body, buffers)
    finally:
        _local.envelope = outer
