"""Replies: `ReplyingConnection` sends those of one connection, `FutureReplies` those of one future.

Every call is answered exactly once, whatever is raised on the way: unpickling, the function,
pickling, `str()` of an exception and callbacks run code of the user, and memory or threads may run
out. `_unanswered` holds the calls that have no answer yet. `_send_failure` answers with the
exception, else with its name alone. If not even that can be sent, the connection ends, and the
caller notices that. Calls whose callers no longer wait are answered too, because the callers keep
what the calls use until then.

`FutureReplies` has the calls that one future answers. They are replied to together when it
completes: the value is packed once and its buffers are copied once for all of them.

State: `_unanswered` (calls by id; True for those of users) and `_cancelled` (ids of calls whose
callers no longer wait) are changed by atomic operations of dict and set. `FutureReplies._replies`
is changed under `_lock` of this module, and None once the future is complete.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from telegrad import thread_roles
from telegrad.errors import TelegradError
from telegrad.messages.device_routes import ANY_DEVICE
from telegrad.messages.packing import MessageContext, ReceivedResource, SharedReply, pack
from telegrad.messages.remote_functions import ServedFunction, UndecodableFunction
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loop import EventLoop
from telegrad.scheduling.executor import ThreadPool
from telegrad.scheduling.poller import LoopConnection
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.failures import encode_failure, encode_failure_name, remote_traceback
from telegrad.wire.frames import Kind

_LARGE_BODY = 1 << 14  # bytes; smaller replies to one peer are sent together
_LONG_COPY = 1 << 20  # bytes of a reply that takes long enough to let other calls run meanwhile
_REPLY, _FAILURE = int(Kind.REPLY), int(Kind.FAILURE)
Reply = Callable[[Any, SharedReply | None], None]
_ATTRIBUTE = "_telegrad_waiters"
_lock = threading.Lock()
_log = logging.getLogger(__name__)


class ReplyRuntime(Protocol):
    """What sending replies needs of the agent."""

    name: str
    threads: ThreadPool
    clock: Clock


class ReplyingConnection(LoopConnection):
    """The part of a `ServerConnection` that sends replies."""

    def __init__(
        self, runtime: ReplyRuntime, channel: Channel, peer_name: str, context: MessageContext
    ) -> None:
        super().__init__()
        self.channel = channel
        self.peer_name = peer_name
        self._runtime = runtime
        self._context = context
        self._unanswered: dict[int, bool] = {}
        self._cancelled: set[int] = set()

    @property
    def calls_in_progress(self) -> int:
        """The number of calls of users that have not been answered."""
        return sum(list(self._unanswered.values()))

    def _send_reply(
        self,
        call_id: int,
        function: ServedFunction,
        value: Any,
        loop: EventLoop | None = None,
        epoch: int = 0,
        exclusive: bool = False,
        received: Sequence[ReceivedResource] = (),
        shared: SharedReply | None = None,
    ) -> None:
        """Send a reply. The leader of `loop` sends the small replies to one peer together.

        `received` has the resources of the call. A `shared` reply answers other calls, too.
        """
        try:
            context = self._context
            if function.any_device:
                context = context._replace(route=ANY_DEVICE)
            if exclusive:
                context = context._replace(exclusive=True)
            if shared is None:
                body, buffers = pack(context, value, received=received)
            else:
                body, buffers = shared.pack(context)
        except BaseException as error:
            prepare_replies(received)
            self._send_failure(call_id, function, error)
            return
        try:
            if shared is not None and (buffers or len(body) >= _LARGE_BODY):
                copies = shared.snapshot(buffers, self.channel)
                self._send_on_thread(call_id, function, body, copies, shared)
                return
            if buffers or len(body) >= _LARGE_BODY:
                self._send_large(call_id, body, buffers)
            elif function.reply_may_wait:
                self.channel.cork_deferred(_REPLY, call_id, body)
                self.loop.flush_soon(self)
            else:
                self.channel.cork(_REPLY, call_id, body)
                if loop is None or loop.epoch != epoch:
                    self.channel.flush_nowait()
        except ChannelClosed as error:
            _log.debug("the caller of %s is gone and gets no result: %s", function.name, error)
        except BaseException as error:  # too large for the caller, or no memory
            self._send_failure(call_id, function, error)
        self._mark_answered(call_id)

    def _send_empty_reply(self, call_id: int) -> None:
        """Answer a call whose caller no longer waits, so that it frees what the call uses."""
        try:
            self.channel.send_nowait(_REPLY, call_id, b"")
        except ChannelClosed as error:
            _log.debug("the caller of a cancelled call is gone: %s", error)
        self._mark_answered(call_id)

    def _send_on_thread(
        self,
        call_id: int,
        function: ServedFunction,
        body: bytes,
        buffers: list[memoryview],
        shared: SharedReply,
    ) -> None:
        """Send one of several large replies on a thread of its own.

        Neither the thread that completed the future nor other receivers wait for this receiver.
        """

        def send() -> None:
            try:
                self.channel.send(_REPLY, call_id, body, buffers, copies=shared.copies)
            except ChannelClosed as error:
                _log.debug("the caller of %s is gone and gets no result: %s", function.name, error)
            except BaseException as error:
                self._send_failure(call_id, function, error)
            self._mark_answered(call_id)
            shared.close()

        shared.join()
        runtime = self._runtime
        runtime.threads.start_with_retry(send, runtime.clock)

    def _send_large(self, call_id: int, body: bytes, buffers: list[memoryview]) -> None:
        is_long = sum(buffer.nbytes for buffer in buffers) >= _LONG_COPY
        role = thread_roles.pause() if is_long else None
        try:
            self.channel.send(_REPLY, call_id, body, buffers)
        finally:
            thread_roles.resume(role)

    def _send_failure(
        self,
        call_id: int,
        function: ServedFunction | None,
        error: BaseException,
        function_id: int = 0,
    ) -> None:
        """Answer a call with an error; if that cannot be sent, end the connection. Never raise.

        If the function could not be decoded, the reply names its id, and the caller defines it
        again with the next call.
        """
        if call_id not in self._unanswered:
            return  # it was answered before this error was raised
        name = function.name if function is not None else "a function sent by value"
        undefined_id = 0
        if function is not None and type(function.function) is UndecodableFunction:
            undefined_id = function_id
        self._log_failure(name, error)
        for encode in (encode_failure, encode_failure_name):
            try:
                body = encode(error, self._runtime.name, name)
                self.channel.send(_FAILURE, call_id, body, function=undefined_id)
                break
            except ChannelClosed as closed:
                _log.debug("the caller of %s is gone and gets no failure: %s", name, closed)
                break
            except BaseException as failure:
                _log.debug("the failure of %s could not be sent: %s", name, type(failure))
        else:
            _log.error("%s gets no answer of %s; its connection ends", self.peer_name, name)
            self.channel.shutdown()
        self._mark_answered(call_id)

    def _log_failure(self, name: str, error: BaseException) -> None:
        try:
            if not isinstance(error, TelegradError):
                trace = remote_traceback(error)
                _log.warning("%s called %s, which raised\n%s", self.peer_name, name, trace)
        except BaseException as failure:
            _log.warning(
                "%s called %s, which raised %s (%s)",
                self.peer_name,
                name,
                type(error),
                type(failure),
            )

    def _mark_answered(self, call_id: int) -> None:
        self._unanswered.pop(call_id, None)
        if self._cancelled:
            self._cancelled.discard(call_id)


def prepare_replies(received: Sequence[ReceivedResource]) -> None:
    """Let the senders of the resources of a call reuse them."""
    for resource in received:
        resource.prepare_reply()


class FutureReplies:
    """The calls that one future answers. They get the value that it has when it completes."""

    def __init__(self, reply: Reply) -> None:
        self._replies: list[Reply] | None = [reply]

    @classmethod
    def add(cls, future: Any, reply: Reply) -> None:
        """Call `reply(future, shared)` when the future completes, or at once if it is complete."""
        with _lock:
            others = getattr(future, _ATTRIBUTE, None)
            if others is not None and others._replies is not None:
                others._replies.append(reply)
                return
            replies = cls(reply)
            try:
                setattr(future, _ATTRIBUTE, replies)
            except AttributeError:
                # a future of torch without attributes: each of its calls is answered by itself
                pass
        future.add_done_callback(replies._complete)

    def _complete(self, done: Any) -> None:
        with _lock:
            replies, self._replies = self._replies or [], None
        shared = None
        if len(replies) > 1:
            try:
                shared = SharedReply(done.value())
            except BaseException as error:  # each of the calls fails with it
                _log.debug("%d calls fail together: %s", len(replies), type(error))
        try:
            for reply in replies:
                reply(done, shared)
        finally:
            if shared is not None:
                shared.close()
