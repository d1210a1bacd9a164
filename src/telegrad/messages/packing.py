"""Values on their way in or out of an agent: pickling that knows who is talking to whom.

Some objects (references) mean something only to an agent and a peer. While a message is packed or unpacked, the
`MessageContext` of the connection is in `current_message()`; their reducers and constructors look there. What has to
happen once the message is packed, but before it leaves, they register with `before_sending`; what must live until a
call has been answered, with `keep_until_answered`; what belongs to one message, on either side, with
`message_resource`.

State: of each thread, what it is packing, changed only by that thread.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from telegrad.messages.routes import DeviceRoute
from telegrad.transport.channel import Channel
from telegrad.transport.shared_memory import SharedCopies
from telegrad.wire import codec

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class MessageContext(NamedTuple):
    """Which agent packs or unpacks, which incarnation of which peer is at the other end, and where tensors go there."""

    agent: AgentRuntime
    peer: str
    incarnation: str
    route: DeviceRoute
    # nobody writes to the tensors of this message before the peer has copied them
    exclusive: bool = False


class MessageResource(Protocol):
    """Something that belongs to one message."""

    def finish(self) -> None:
        """The message is packed, or unpacked."""


class LentResource(ABC):
    """Something that the callee may use until it has answered. See `keep_until_answered`."""

    @abstractmethod
    def returned(self, answered: bool) -> None:
        """The call is over: it was answered, or it failed here and the callee may still be at it."""


class ReceivedResource(MessageResource, Protocol):
    """What a message brought: a companion where it is unpacked."""

    def join(self) -> None:
        """Called by a thread that uses the result but did not unpack it."""

    def forget(self) -> None:
        """Nobody will call `join`."""

    def settle(self, companions: Collection[Any] = ()) -> None:
        """The answer, with its companions, is about to be sent: from then on the sender does with it what it wants."""


C = TypeVar("C", bound=MessageResource)


class _Message:
    """What is known of a message while it is packed or unpacked."""

    __slots__ = ("actions", "companions", "envelope", "is_personal", "kept")

    def __init__(self, envelope: MessageContext, kept: list[Any] | None) -> None:
        self.envelope = envelope
        self.kept = kept
        self.companions: dict[Hashable, Any] | None = None
        self.actions: dict[int, tuple[Any, Callable[[MessageContext], None]]] | None = None
        self.is_personal = False  # what it contains depends on who receives it


class _Local(threading.local):
    message: _Message | None = None
    shared: dict[int, SharedReply] | None = None


_local = _Local()


def current_message() -> MessageContext | None:
    """The envelope of the message that this thread is packing or unpacking."""
    message = _local.message
    if message is None:
        return None
    message.is_personal = True
    return message.envelope


def before_sending(subject: object, action: Callable[[MessageContext], None]) -> None:
    """Run `action(envelope)` when the message is packed; once per subject, however often packing starts again."""
    message = _local.message
    assert message is not None
    message.is_personal = True
    if message.actions is None:
        message.actions = {}
    message.actions[id(subject)] = subject, action


def message_resource(key: Hashable, make: Callable[[], C]) -> C:
    """The one companion of the message in hand that is known by `key`, made on first use."""
    message = _local.message
    assert message is not None
    message.is_personal = True
    if message.companions is None:
        message.companions = {}
    companion: C | None = message.companions.get(key)
    if companion is None:
        companion = message.companions[key] = make()
    return companion


def keep_until_answered(subject: object) -> bool:
    """Keep `subject` alive as long as the call that is being packed is under way. False: it is no call."""
    message = _local.message
    if message is None:
        return False
    message.is_personal = True
    if message.kept is None:
        return False
    message.kept.append(subject)
    return True


def return_resources(kept: list[Any], answered: bool) -> None:
    """A call is over for which these were kept."""
    for each in kept:
        if isinstance(each, LentResource):
            each.returned(answered)


class SharedReply:
    """A value that answers several calls: packed once, and its buffers copied once for all receivers on this host."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.copies: SharedCopies | None = SharedCopies()
        self._packed: codec.Encoded | None = None
        self._snapshot: list[memoryview] | None = None
        self._users = 1
        self._lock = threading.Lock()

    def pack(self, envelope: MessageContext) -> codec.Encoded:
        """Encode the value for the peer of `envelope`. If what is sent depends on the peer, for each anew."""
        if self._packed is not None:
            return self._packed
        message = _Message(envelope, None)
        packed = _pack(message, self.value)
        if message.is_personal:
            self.copies = None
        else:
            self._packed = packed
        return packed

    def snapshot(self, buffers: list[memoryview], channel: Channel) -> list[memoryview]:
        """The buffers as they are now, for those who are sent them later; copied once if all get the same."""
        if self._packed is None:
            return [memoryview(bytearray(buffer)) for buffer in buffers]
        if self._snapshot is None:
            assert self.copies is not None
            self._snapshot = [
                channel.copy_to_shared_block(self.copies, number, buffer)
                or memoryview(bytearray(buffer))
                for number, buffer in enumerate(buffers)
            ]
        return self._snapshot

    def join(self) -> None:
        """One more thread uses the copies until it calls `close`."""
        with self._lock:
            self._users += 1

    def close(self) -> None:
        """A user is done; after the last one, the copies belong to their receivers."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last and self.copies is not None:
            self.copies.close()


@contextlib.contextmanager
def sharing_replies(values: Sequence[Any]) -> Iterator[None]:
    """In this block, this thread answers calls with `values`. One that occurs several times is packed once."""
    numbers = {id(value) for value in values}
    if len(numbers) == len(values):
        yield
        return
    counts = collections.Counter(map(id, values))
    several = {
        id(value): value
        for value in values
        if counts[id(value)] > 1 and type(value) not in _SMALL_TYPES
    }
    _local.shared = {number: SharedReply(value) for number, value in several.items()}
    try:
        yield
    finally:
        for shared in _local.shared.values():
            shared.close()
        _local.shared = None


def shared_reply_for(value: Any) -> SharedReply | None:
    """What `sharing_replies` knows of a value."""
    return None if _local.shared is None else _local.shared.get(id(value))


_NOTHING = codec.encode_atoms(None)
_SMALL_TYPES = frozenset({int, float, bool, str, type(None)})


def pack(
    envelope: MessageContext,
    value: Any,
    *,
    by_value: bool = False,
    kept: list[Any] | None = None,
    owed: Sequence[ReceivedResource] = (),
) -> codec.Encoded:
    """Encode `value` for the peer of `envelope`.

    Who packs a call gives a list to keep things in; who packs an answer, what the call brought.
    """
    if not owed:
        body = codec.encode_atoms(value)
        if body is not None:
            return body, []
    return _pack(_Message(envelope, kept), value, by_value, owed)


def _pack(
    message: _Message, value: Any, by_value: bool = False, owed: Sequence[ReceivedResource] = ()
) -> codec.Encoded:
    outer = _local.message
    _local.message = message
    try:
        encoded = codec.encode(value, by_value=by_value)
        if message.companions or owed:
            companions = (message.companions or {}).values()
            for companion in companions:
                companion.finish()
            for each in owed:
                each.settle(companions)
        if message.actions:
            for _, action in message.actions.values():
                action(message.envelope)
        return encoded
    finally:
        _local.message = outer


def unpack(
    envelope: MessageContext,
    body: bytes | memoryview,
    buffers: Sequence[Any],
    arrivals: list[ReceivedResource] | None = None,
) -> Any:
    """Decode what the peer of `envelope` sent.

    What came along is added to `arrivals`, also if decoding fails. Without that list, the result is used on the
    streams that are current now.
    """
    if body == _NOTHING:
        return None
    outer = _local.message
    message = _local.message = _Message(envelope, None)
    try:
        return codec.decode(body, buffers)
    finally:
        _local.message = outer
        if message.companions:
            _finish_unpacking(message.companions, arrivals)


def _finish_unpacking(
    companions: dict[Hashable, Any], arrivals: list[ReceivedResource] | None
) -> None:
    for companion in companions.values():
        companion.finish()
    if arrivals is None:
        for companion in companions.values():
            companion.forget()
    else:
        arrivals.extend(companions.values())
