"""Pack and unpack the values of messages, with the agent and the peer known to reducers.

Some objects (references, CUDA tensors) mean something only to one agent and one peer. While a
message is packed or unpacked, `current_message()` returns the `MessageContext` of the connection,
for the reducers and constructors of such objects. They register

- with `before_sending`: what must happen once the message is packed, before it is sent;
- with `keep_until_answered`: what must live until a call has been answered;
- with `message_resource`: what belongs to one message, on either side.

State: per thread, the message that it packs or unpacks and the replies that it shares, changed only
by that thread.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from telegrad.locks import new_lock
from telegrad.messages.device_routes import DeviceRoute
from telegrad.transport.channel import Channel
from telegrad.transport.host_image import fill_images
from telegrad.transport.shared_memory import SharedCopies
from telegrad.wire import codec
from telegrad.wire.handshake import Incarnation


class MessageContext(NamedTuple):
    """The agent that packs or unpacks, the incarnation of its peer, and the route of tensors."""

    # The `AgentRuntime`. It has no type here, because packages of every layer above read it.
    runtime: Any
    peer: str
    incarnation: Incarnation
    route: DeviceRoute
    # no thread writes to the tensors of this message before the peer has copied them
    exclusive: bool = False


class MessageResource(Protocol):
    """Something that belongs to one message. See `message_resource`."""

    def finish(self) -> None:
        """Called when the message is packed, or unpacked."""


class LentResource(ABC):
    """Something that the callee may use until it has answered. See `keep_until_answered`."""

    @abstractmethod
    def on_call_ended(self, answered: bool) -> None:
        """The call is over. If it was not `answered`, the callee may still use the resource."""


class ReceivedResource(MessageResource, Protocol):
    """A resource that a message contained, where the message is unpacked."""

    def wait_on_current_stream(self) -> None:
        """Called by a thread that uses the result but did not unpack it."""

    def forget(self) -> None:
        """Called if no thread will call `wait_on_current_stream`."""

    def prepare_reply(self, reply_resources: Collection[Any] = ()) -> None:
        """Called before the reply is sent, with its resources: the sender may reuse this then."""


R = TypeVar("R", bound=MessageResource)


class _Message:
    """The state of a message while it is packed or unpacked."""

    __slots__ = ("actions", "context", "depends_on_receiver", "resources", "retained")

    def __init__(self, context: MessageContext, retained: list[Any] | None) -> None:
        self.context = context
        self.retained = retained
        self.resources: dict[Hashable, Any] | None = None
        self.actions: dict[int, tuple[Any, Callable[[MessageContext], None]]] | None = None
        self.depends_on_receiver = False


class _PackingThreadState(threading.local):
    message: _Message | None = None
    shared_replies: dict[int, SharedMessage] | None = None


_local = _PackingThreadState()


# For reducers and constructors


def current_message() -> MessageContext | None:
    """Return the context of the message that this thread is packing or unpacking."""
    message = _local.message
    if message is None:
        return None
    message.depends_on_receiver = True
    return message.context


def before_sending(subject: object, action: Callable[[MessageContext], None]) -> None:
    """Run `action(context)` when the message is packed.

    It runs once for each subject, even if packing starts again.
    """
    message = _local.message
    assert message is not None
    message.depends_on_receiver = True
    if message.actions is None:
        message.actions = {}
    message.actions[id(subject)] = subject, action


def message_resource(key: Hashable, make: Callable[[], R]) -> R:
    """Return the resource of the current message that has this key, made on first use."""
    message = _local.message
    assert message is not None
    message.depends_on_receiver = True
    if message.resources is None:
        message.resources = {}
    resource: R | None = message.resources.get(key)
    if resource is None:
        resource = message.resources[key] = make()
    return resource


def keep_until_answered(subject: object) -> bool:
    """Keep `subject` alive until the call that is being packed is answered.

    Return False if the current message is not a call.
    """
    message = _local.message
    if message is None:
        return False
    message.depends_on_receiver = True
    if message.retained is None:
        return False
    message.retained.append(subject)
    return True


# Packing and unpacking


_NONE = codec.encode_small(None)


def pack(
    context: MessageContext,
    value: Any,
    *,
    by_value: bool = False,
    retained: list[Any] | None = None,
    received: Sequence[ReceivedResource] = (),
) -> codec.Encoded:
    """Encode `value` for the peer of `context`.

    For a call, `retained` collects what must live until it is answered. For a reply, `received` is
    the resources of the call.
    """
    if not received:
        body = codec.encode_small(value)
        if body is not None:
            return body, []
    return _pack(_Message(context, retained), value, by_value, received)


def _pack(
    message: _Message,
    value: Any,
    by_value: bool = False,
    received: Sequence[ReceivedResource] = (),
) -> codec.Encoded:
    outer = _local.message
    _local.message = message
    try:
        encoded = codec.encode(value, by_value=by_value)
        if message.resources or received:
            resources = (message.resources or {}).values()
            for resource in resources:
                resource.finish()
            for each in received:
                each.prepare_reply(resources)  # pragma: gpu
        if message.actions:
            for _, action in message.actions.values():
                action(message.context)
        return encoded
    finally:
        _local.message = outer


def unpack(
    context: MessageContext,
    body: bytes | memoryview,
    buffers: Sequence[Any],
    received: list[ReceivedResource] | None = None,
) -> Any:
    """Decode what the peer of `context` sent.

    The resources of the message are added to `received`, also if decoding fails. Without that list,
    the result is used on the streams that are current now.
    """
    if body == _NONE:
        return None
    outer = _local.message
    message = _local.message = _Message(context, None)
    try:
        return codec.decode(body, buffers)
    finally:
        _local.message = outer
        if message.resources:  # pragma: gpu
            _finish_unpacking(message.resources, received)


def _finish_unpacking(  # pragma: gpu
    resources: dict[Hashable, Any], received: list[ReceivedResource] | None
) -> None:
    for resource in resources.values():
        resource.finish()
    if received is None:
        for resource in resources.values():
            resource.forget()
    else:
        received.extend(resources.values())


def return_resources(retained: list[Any], answered: bool) -> None:
    """Tell the lent resources of a call that it is over."""
    for each in retained:
        if isinstance(each, LentResource):  # pragma: gpu
            each.on_call_ended(answered)


# Values that several messages carry


_SMALL_TYPES = frozenset({int, float, bool, str, type(None)})


class SharedMessage:
    """A value that several messages carry: replies to several calls, or arguments of several calls.

    It is packed once, and its buffers are copied once for all receivers on this host.

    State: `_packed` and `_snapshot` are set by the thread that packs the messages, `_users` is
    changed under `_lock`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.copies: SharedCopies | None = SharedCopies()
        self._packed: codec.Encoded | None = None
        self._snapshot: list[memoryview] | None = None
        self._users = 1
        self._lock = new_lock()

    def pack(
        self, context: MessageContext, by_value: bool = False, retained: list[Any] | None = None
    ) -> codec.Encoded:
        """Encode the value: once for all peers, or for each if the encoding depends on the peer.

        For a call, `retained` collects what must live until it is answered.
        """
        if self._packed is not None:
            return self._packed
        message = _Message(context, retained)
        packed = _pack(message, self.value, by_value)
        if message.depends_on_receiver:
            self.copies = None
        else:
            self._packed = packed
        return packed

    def snapshot(self, buffers: list[memoryview], channel: Channel) -> list[memoryview]:
        """Return copies of the buffers as they are now, made once if all receivers get the same."""
        fill_images(buffers)
        if self._packed is None:
            return [memoryview(bytearray(buffer)) for buffer in buffers]
        if self._snapshot is None:
            assert self.copies is not None
            self._snapshot = [
                channel.copy_to_shared_block(self.copies, index, buffer)
                or memoryview(bytearray(buffer))
                for index, buffer in enumerate(buffers)
            ]
        return self._snapshot

    def add_user(self) -> None:
        """Let one more thread use the copies until it calls `close`."""
        with self._lock:
            self._users += 1

    def close(self) -> None:
        """End one use. After the last one, the copies belong to their receivers."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last and self.copies is not None:
            self.copies.close()


class SharedArguments:
    """The arguments of a function that one thread calls on several workers.

    They are packed once, and copied once for all of these workers on this host.
    """

    def __init__(self) -> None:
        # by whether functions of `__main__` are sent by value, which depends on the peer
        self._messages: dict[bool, SharedMessage] = {}
        self.copies: SharedCopies | None = None  # of the message that was packed last

    def pack(
        self, context: MessageContext, value: Any, by_value: bool, retained: list[Any]
    ) -> codec.Encoded:
        """Encode `value`, which contains the arguments; see `SharedMessage.pack`."""
        message = self._messages.get(by_value)
        if message is None:
            message = self._messages[by_value] = SharedMessage(value)
        packed = message.pack(context, by_value, retained)
        self.copies = message.copies
        return packed

    def close(self) -> None:
        """Leave the copies to their receivers. No more calls may follow."""
        for message in self._messages.values():
            message.close()


@contextlib.contextmanager
def sharing_replies(values: Sequence[Any]) -> Iterator[None]:
    """In this block, this thread replies with `values`: pack one that occurs several times once."""
    distinct = {id(value): value for value in values}
    if len(distinct) == len(values):
        yield
        return
    counts = collections.Counter(map(id, values))
    _local.shared_replies = {
        key: SharedMessage(value)
        for key, value in distinct.items()
        if counts[key] > 1 and type(value) not in _SMALL_TYPES
    }
    try:
        yield
    finally:
        for shared in _local.shared_replies.values():
            shared.close()
        _local.shared_replies = None


def shared_reply_for(value: Any) -> SharedMessage | None:
    """Return the `SharedMessage` of a value in a block of `sharing_replies`."""
    shared_replies = _local.shared_replies
    return None if shared_replies is None else shared_replies.get(id(value))
