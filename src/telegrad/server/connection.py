"""The callee's side of a connection: read a call, run it, send the reply.

The leader of the `EventLoop` runs a call where it read it, and sends the replies to one peer together. If the function
waits, the loop goes on without it. A function that was seen to run long, or to block in a wait that we do not know of,
goes to the executor from then on (`ServedFunction` remembers), so it never delays the calls behind it.

Every call is answered exactly once, whatever is raised on the way: unpickling, the function, pickling, `str()` of an
exception and callbacks run code of the user, and memory or threads may run out. `_owed` holds the calls that have no
answer yet; `_execute` leaves none behind. `_fail` answers with the exception, else with its name alone; if not even
that can be sent, the connection ends, and the caller hears of that. Calls that nobody waits for are answered too: their
callers keep what the calls use until then.

State of an `ServerConnection`: `_functions` and `_reading` belong to the leader of the loop; `_owed` (calls that are
not answered; True for those of users), `_waiting` (calls whose function returned a future) and `_cancelled` are changed
by single dict and set operations only.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from telegrad import blocking
from telegrad.config import Config
from telegrad.cuda.exclusive import is_exclusive
from telegrad.current import thread_state
from telegrad.deadline import Deadline
from telegrad.errors import ProtocolError, SerializationError, TelegradError, UsageError, text_of
from telegrad.futures import Future
from telegrad.messages import scope as scopes
from telegrad.messages.packing import (
    MessageContext,
    ReceivedResource,
    SharedReply,
    pack,
    shared_reply_for,
    unpack,
)
from telegrad.messages.routes import ANY_DEVICE, DeviceRoute, reply_route
from telegrad.messages.scope import current_scope
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loop import EventLoop, EventLoops, LoopConnection
from telegrad.scheduling.threads import SLOW, Executor, ThreadPool
from telegrad.server.functions import DeferredReply, ServedFunction
from telegrad.transport.channel import Channel, ChannelClosed, PeerClosed, close_with_reason
from telegrad.wire import codec
from telegrad.wire.failures import encode_failure, encode_name_of_failure, remote_traceback
from telegrad.wire.frames import DEFINES, INLINE_FUNCTION, KEYWORDS, SCOPED, Frame, Kind
from telegrad.wire.function_table import MAX_FUNCTIONS, Function

_FAST = 0.0002  # seconds: replies may be held back while a function that takes less runs
_CORK_BELOW = 1 << 14
_LONG_COPY = 1 << 20  # bytes of a reply that others should not wait for
_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)

_log = logging.getLogger(__name__)
_now = time.perf_counter


def _settle(owed: Sequence[ReceivedResource]) -> None:
    for each in owed:
        each.settle()


class ServerRuntime(Protocol):
    """What serving needs of its agent."""

    name: str
    threads: ThreadPool
    executor: Executor
    clock: Clock
    event_loops: EventLoops
    calls_served: int
    forked: bool

    config: Config

    def envelope(self, peer: str, incarnation: str, route: DeviceRoute) -> MessageContext: ...
    def target(self, function: Function) -> ServedFunction: ...
    def allowed(self, function: Function | None) -> bool: ...
    def connection_ended(self, inbound: ServerConnection, error: BaseException) -> None: ...


class ServerConnection(LoopConnection):
    """One connection that a peer opened to this agent."""

    def __init__(self, host: ServerRuntime, channel: Channel, peer: dict[str, Any]) -> None:
        super().__init__()
        self.peer_name: str = peer["name"]
        self.incarnation: str = peer["incarnation"]
        self.heartbeat: float = float(peer["heartbeat"])
        self.channel = channel
        self.group: str = peer["purpose"]
        self.is_shared = self.group == "pipe"  # by many calls; it carries the signs of life
        self._owed: dict[int, bool] = {}
        self._host = host
        route = reply_route(peer.get("devices", {}), host.config.unmapped_devices)
        self._envelope = host.envelope(self.peer_name, self.incarnation, route)
        self._functions: dict[int, ServedFunction] = {}
        self._reading: ServedFunction | None = None  # what the leader of the loop is running
        self._waiting: dict[int, Any] = {}
        self._cancelled: set[int] = set()

    def __repr__(self) -> str:
        return f"<ServerConnection from {self.peer_name!r}: {self.channel!r}, {len(self._waiting)} futures>"

    @property
    def under_way(self) -> bool:
        """Is a call of a user from this peer under way?"""
        return self.calls_under_way > 0

    @property
    def calls_under_way(self) -> int:
        """Calls of users that have not been answered."""
        return sum(list(self._owed.values()))

    @property
    def calls_answered_later(self) -> int:
        """Calls that a future will answer."""
        return len(self._waiting)

    def ended(self, error: BaseException) -> None:
        """The peer is gone, or this connection to it: nobody waits for what its calls would still answer."""
        if not isinstance(error, ChannelClosed):
            reason = f"worker {self._host.name!r} closed the connection: {text_of(error)}"
            close_with_reason(self.channel, reason, Kind.END)
        self.channel.close()
        for call in list(self._waiting):
            self._cancel(call)
        self._host.connection_ended(self, error)

    def handle(self, frame: Frame) -> None:
        if frame.kind == _CALL:
            target = self._target(frame)
            if target is not None and target.seconds > SLOW:
                self._enqueue(frame, target)
                return
            if target is None or not 0 <= target.seconds < _FAST:
                self.channel.flush_nowait()
            self._reading = target
            self._execute(frame, target, self.loop)
        elif frame.kind == Kind.CANCEL:
            self._cancel(frame.call)
        elif frame.kind == Kind.BYE:
            raise PeerClosed(frame)
        elif frame.kind != Kind.ALIVE:
            raise ProtocolError(f"a frame of kind {frame.kind} where a call was due")

    def blocked(self) -> None:
        """The leader is stuck in a call: from now on, calls of that function go to the executor."""
        if self._reading is not None:
            self._reading.seconds = max(self._reading.seconds, 2 * SLOW)

    def _enqueue(self, frame: Frame, target: ServedFunction) -> None:
        deadline = Deadline.from_wire(frame.left_ms)

        def job() -> None:
            unwanted = frame.call in self._cancelled or (deadline is not None and deadline.passed())
            if unwanted and not target.must_run:
                self._decline(frame.call)
            else:
                # not the reader: it must not cork a reply, for nobody may flush it
                self._execute(frame, target)

        self._owed[frame.call] = not target.internal
        try:
            self._host.executor.submit(job)
        except BaseException as error:
            self._fail(frame.call, target, error)

    def _cancel(self, call: int) -> None:
        waiting = self._waiting.pop(call, None)
        if waiting is None and call in self._owed:
            self._cancelled.add(call)
            waiting = self._waiting.pop(call, None)  # it may have begun to wait in between
        if waiting is None:
            return
        self._decline(call)
        if type(waiting) is DeferredReply:
            if waiting.given_up is not None:
                waiting.given_up()
        elif isinstance(waiting, Future) and waiting.leave() and waiting.is_call:
            # not a promise of the user's: the next caller may be given the same one
            waiting.cancel()

    def _target(self, frame: Frame) -> ServedFunction | None:
        """The numbered function of a call; None if the function is inside the pickle."""
        if frame.flags & INLINE_FUNCTION:
            return None
        if frame.flags & DEFINES:
            self._define(frame)
        target = self._functions.get(frame.function)
        if target is None:
            raise ProtocolError(
                f"a call of function number {frame.function}, which was never defined"
            )
        return target

    def _define(self, frame: Frame) -> None:
        lost = frame.damage is not None and not len(frame.body)  # there was no memory for the body
        size = int.from_bytes(frame.body[:4], "little")
        if not 0 < frame.function <= MAX_FUNCTIONS or (size > len(frame.body) - 4 and not lost):
            raise ProtocolError(
                f"a definition of {size} bytes for function number {frame.function}"
            )
        try:
            if frame.damage is not None and lost:
                raise frame.damage
            target = self._host.target(codec.decode(bytes(frame.body[4 : 4 + size])))
        except BaseException as error:
            target = ServedFunction(_UndecodableFunction(error))
        self._functions[frame.function] = target

    def _execute(
        self, frame: Frame, target: ServedFunction | None, loop: EventLoop | None = None
    ) -> None:
        """Run a call and send its reply, or arrange for it to be sent. Never raises."""
        self._host.calls_served += 1
        self._owed[frame.call] = target is None or not target.internal
        try:
            thread_state.caller = self.peer_name
            thread_state.deadline = Deadline.from_wire(frame.left_ms)
            if not frame.flags & SCOPED or not len(frame.body):
                self._run(frame, target, loop)
            else:
                self._run_scoped(frame, target, loop)
        except BaseException as error:
            self._fail(frame.call, target, error, frame.function)

    def _run_scoped(
        self, frame: Frame, target: ServedFunction | None, loop: EventLoop | None
    ) -> None:
        scope = scopes.open_scope(frame.body, self._envelope)
        token = current_scope.set(scope)
        try:
            if scope is None:
                self._run(frame, target, loop)
            else:
                scope.run(lambda: self._run(frame, target, loop))
        finally:
            current_scope.reset(token)

    def _run(self, frame: Frame, target: ServedFunction | None, loop: EventLoop | None) -> None:
        epoch = loop.own_epoch if loop is not None else 0
        arrivals: list[ReceivedResource] = []
        try:
            if (
                frame.flags
                or target is None
                or frame.damage is not None
                or self._host.config.only_registered
            ):
                target, args, kwargs = self._open(frame, target, arrivals)
            else:
                args, kwargs = self._unpack(frame.body, frame.buffers, arrivals), {}
            waited = blocking.waited() if loop is None else 0.0
            started = _now()
            try:
                value = target.run(*args, **kwargs)
            finally:
                # by the function, which has ended in the child now; the parent answers
                if self._host.forked:
                    os._exit(0)
            if loop is None:
                target.took(_now() - started - (blocking.waited() - waited))
            elif loop.epoch == epoch:  # else it has waited, or `blocked` knows that it took long
                target.took(_now() - started)
            del args, kwargs
            for arrival in arrivals:
                arrival.forget()
            if target.is_deferred or type(value) is DeferredReply:
                _settle(arrivals)
                self._answer_later(frame.call, target, value)
                return
        except BaseException:
            _settle(arrivals)
            raise
        exclusive = torch.cuda._initialized and is_exclusive(value)  # type: ignore[attr-defined]
        self._answer(frame.call, target, value, loop, epoch, exclusive, arrivals)

    def _open(
        self, frame: Frame, target: ServedFunction | None, arrivals: list[ReceivedResource]
    ) -> tuple[ServedFunction, tuple[Any, ...], dict[str, Any]]:
        """The function and arguments of a call, of any kind."""
        flags, body = frame.flags, frame.body
        self._check_allowed(target)  # before the arguments are unpickled
        if flags & DEFINES:
            body = memoryview(body)[4 + int.from_bytes(body[:4], "little") :]
        if frame.damage is not None:
            raise SerializationError(
                f"worker {self._host.name!r} could not receive the arguments: "
                f"{type(frame.damage).__name__}: {text_of(frame.damage)}"
            ) from frame.damage
        value = self._unpack(body, frame.buffers, arrivals)
        kwargs: dict[str, Any] = {}
        if target is None:
            function, value, kwargs = value
            target = ServedFunction(function)
        elif flags & KEYWORDS:
            value, kwargs = value
        return target, value, kwargs

    def _unpack(self, body: Any, buffers: Sequence[Any], arrivals: list[ReceivedResource]) -> Any:
        try:
            return unpack(self._envelope, body, buffers, arrivals)
        except BaseException as error:
            raise SerializationError(
                f"worker {self._host.name!r} could not unpickle the arguments: {type(error).__name__}: "
                f"{text_of(error)}. Whatever they refer to must be importable there"
            ) from error

    def _check_allowed(self, target: ServedFunction | None) -> None:
        """A function that is sent by value (no target yet) was never registered."""
        if not self._host.allowed(None if target is None else target.function):
            name = "a function sent by value" if target is None else target.name
            raise UsageError(
                f"worker {self._host.name!r} serves only registered functions, and {name} is not one: "
                "mark it with @telegrad.expose there"
            )

    def _answer(
        self,
        call: int,
        target: ServedFunction,
        value: Any,
        loop: EventLoop | None = None,
        epoch: int = 0,
        exclusive: bool = False,
        owed: Sequence[ReceivedResource] = (),
        shared: SharedReply | None = None,
    ) -> None:
        """Send a reply. If the leader of `loop` does, it goes out at the end of this connection's turn.

        A `shared` one answers other calls, too.
        """
        try:
            envelope = self._envelope
            if target.anywhere:
                envelope = envelope._replace(route=ANY_DEVICE)
            if exclusive:
                envelope = envelope._replace(exclusive=True)
            body, buffers = (
                pack(envelope, value, owed=owed) if shared is None else shared.pack(envelope)
            )
        except BaseException as error:
            _settle(owed)
            self._fail(call, target, error)
            return
        try:
            if shared is not None and (buffers or len(body) >= _CORK_BELOW):
                self._send_on_a_thread(
                    call, target, body, shared.snapshot(buffers, self.channel), shared
                )
                return
            if buffers or len(body) >= _CORK_BELOW:
                self._send_large(call, body, buffers)
            elif target.reply_may_wait:
                self.channel.cork_deferred(_REPLY, call, body)
                self.loop.flush_soon(self)
            else:
                self.channel.cork(_REPLY, call, body)
                if loop is None or loop.epoch != epoch:
                    self.channel.flush_nowait()
        except ChannelClosed as error:
            _log.debug("nobody is left to take the result of %s: %s", target.name, error)
        except BaseException as error:  # too large for the caller, or no memory
            self._fail(call, target, error)
        self._answered(call)

    def _decline(self, call: int) -> None:
        """Answer a call that nobody waits for: its caller keeps what the call uses until then."""
        try:
            self.channel.offer(_REPLY, call, b"")
        except ChannelClosed as error:
            _log.debug("nobody is left to hear that a call was given up: %s", error)
        self._answered(call)

    def _send_on_a_thread(
        self,
        call: int,
        target: ServedFunction,
        body: bytes,
        buffers: list[memoryview],
        shared: SharedReply,
    ) -> None:
        """Send one of several large replies: neither who completed the future nor other receivers wait for this one."""

        def send() -> None:
            try:
                self.channel.send(_REPLY, call, body, buffers, copies=shared.copies)
            except ChannelClosed as error:
                _log.debug("nobody is left to take the result of %s: %s", target.name, error)
            except BaseException as error:
                self._fail(call, target, error)
            self._answered(call)
            shared.close()

        shared.join()
        self._host.threads.start_when_possible(send, self._host.clock)

    def _send_large(self, call: int, body: bytes, buffers: list[memoryview]) -> None:
        role = blocking.pause() if sum(buffer.nbytes for buffer in buffers) >= _LONG_COPY else None
        try:
            self.channel.send(_REPLY, call, body, buffers)
        finally:
            blocking.resume(role)

    def _answer_later(self, call: int, target: ServedFunction, value: Any) -> None:
        """The function returned a future: reply when it completes. If all its callers give up, it is cancelled."""
        is_later = type(value) is DeferredReply
        # what torch's own `then` returns is only that
        if not is_later and not isinstance(value, torch._C.Future):
            raise UsageError(
                f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but {target.name} returned {type(value).__name__}"
            )
        if isinstance(value, Future):
            value.join()
        self._waiting[call] = (
            # a `DeferredReply` belongs to others too, whether or not they wait for it right now
            value
        )
        scope = current_scope.get()

        def reply(done: Any, shared: SharedReply | None = None) -> None:
            if self._waiting.pop(call, None) is None:
                return  # cancelled
            token = current_scope.set(scope)
            try:
                answer = done.value()
                if scope is not None:
                    shared = None  # gradients travel with what it is sent
                elif shared is None:
                    shared = shared_reply_for(answer)
                self._answer(call, target, answer, shared=shared)
            except BaseException as error:
                self._fail(call, target, error)
            finally:
                current_scope.reset(token)

        if call in self._cancelled:  # before it began to wait
            self._cancel(call)
        if is_later:
            value.listen(reply)
        else:
            _FutureReplies.add(value, reply)

    def _fail(
        self, call: int, target: ServedFunction | None, error: BaseException, function: int = 0
    ) -> None:
        """Answer a call with an error; if that cannot be, end the connection. Never raises.

        A caller that is told the number of its `function` defines it again with the next call.
        """
        if call not in self._owed:
            return  # it was answered before this error was raised
        name = target.name if target is not None else "a function sent by value"
        unknown = (
            function if target is not None and type(target.function) is _UndecodableFunction else 0
        )
        try:
            if not isinstance(error, TelegradError):
                _log.warning(
                    "%s called %s, which raised\n%s", self.peer_name, name, remote_traceback(error)
                )
        except BaseException as failure:
            _log.warning(
                "%s called %s, which raised %s (%s)",
                self.peer_name,
                name,
                type(error),
                type(failure),
            )
        for encode in (encode_failure, encode_name_of_failure):
            try:
                body = encode(error, self._host.name, name)
                self.channel.send(_FAILURE, call, body, function=unknown)
                break
            except ChannelClosed as closed:
                _log.debug("nobody is left to hear that %s failed: %s", name, closed)
                break
            except BaseException as failure:
                _log.debug("the failure of %s could not be sent: %s", name, type(failure))
        else:
            _log.error("%s gets no answer of %s; its connection ends", self.peer_name, name)
            self.channel.shut()
        self._answered(call)

    def _answered(self, call: int) -> None:
        self._owed.pop(call, None)
        if self._cancelled:
            self._cancelled.discard(call)


_Reply = Callable[[Any, SharedReply | None], None]


class _FutureReplies:
    """The calls that one future answers: together, when it completes, so that its value is packed and copied once.

    They get what the value is at that moment. `_replies` is None from then on.
    """

    def __init__(self, reply: _Reply) -> None:
        self._replies: list[_Reply] | None = [reply]

    @classmethod
    def add(cls, future: Any, reply: _Reply) -> None:
        """Call `reply(future, shared)` when the future completes, or at once if it has."""
        with _joining:
            waiters = getattr(future, _REPLIES_ATTRIBUTE, None)
            if waiters is not None and waiters._replies is not None:
                waiters._replies.append(reply)
                return
            waiters = cls(reply)
            try:
                setattr(future, _REPLIES_ATTRIBUTE, waiters)
            except AttributeError:
                # one of torch's that has no attributes: each of its calls is answered by itself
                pass
        future.add_done_callback(waiters._complete)

    def _complete(self, done: Any) -> None:
        with _joining:
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


_REPLIES_ATTRIBUTE = "_telegrad_waiters"
_joining = threading.Lock()


class _UndecodableFunction:
    """Stands for a function whose definition could not be received or unpickled; calling it says so.

    It keeps what went wrong as text: the exception would keep the message that it was raised for.
    """

    def __init__(self, error: BaseException) -> None:
        self._reason = f"{type(error).__name__}: {text_of(error)}"
        self.__qualname__ = "a function that this worker does not have"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SerializationError(
            f"this worker cannot find the function: {self._reason}. "
            "The RPC pickler does not serialize functions that are importable on the caller: "
            "the same module must be importable here and hold the function under the same name"
        )
