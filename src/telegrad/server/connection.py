"""`ServerConnection`: read the calls of one connection, run them, and reply.

The leader of the `EventLoop` runs a call on the thread that read it, and sends the replies to one
peer together. If the function waits, another thread leads the loop meanwhile. A function that was
seen to run long, or to block in a wait that the loop does not know of, runs on the executor from
then on (`ServedFunction` has its average duration), so it never delays the calls behind it.

Every call is answered exactly once, whatever is raised on the way: unpickling, the function,
pickling, `str()` of an exception and callbacks run code of the user, and memory or threads may run
out. `_unanswered` holds the calls that have no answer yet. `_send_failure` answers with the
exception, else with its name alone. If not even that can be sent, the connection ends, and the
caller notices that. Calls whose callers no longer wait are answered too, because the callers keep
what the calls use until then.

State: `_unanswered` (calls by id) and `_cancelled` (ids of calls whose callers no longer wait) are
changed by atomic operations of dict and set. The thread that removes a call from `_unanswered`
records it. `_running` belongs to the leader of the loop. `_deferred` (calls whose function returned
a future) is changed by atomic operations of the dict. `_functions` is that of `PeerFunctions`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from telegrad import thread_roles
from telegrad.config import Config
from telegrad.cuda.sole_reference import is_exclusive
from telegrad.current import ServedCall, thread_state
from telegrad.errors import ProtocolError, SerializationError, TelegradError, error_text
from telegrad.futures import Future
from telegrad.group.endpoint import MULTIPLEXED
from telegrad.messages import call_scope as scopes
from telegrad.messages import trace_context
from telegrad.messages.call_scope import current_scope
from telegrad.messages.device_routes import ANY_DEVICE, DeviceRoute, reply_route
from telegrad.messages.packing import (
    MessageContext,
    ReceivedResource,
    SharedMessage,
    pack,
    shared_reply_for,
    unpack,
)
from telegrad.messages.remote_functions import (
    DeferredReply,
    FunctionRegistry,
    ServedFunction,
    UndecodableFunction,
    no_future_error,
    unregistered_error,
)
from telegrad.recorder import FlightRecorder
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loop import EventLoop
from telegrad.scheduling.event_loops import EventLoops
from telegrad.scheduling.executor import (
    SLOW_SECONDS,
    Executor,
    ThreadPool,
    apply_torch_num_threads,
)
from telegrad.scheduling.poller import LoopConnection
from telegrad.server.future_replies import FutureReplies
from telegrad.server.peer_functions import PeerFunctions
from telegrad.transport.channel import (
    Channel,
    ChannelClosed,
    PeerClosed,
    SenderTimedOut,
    close_with_reason,
)
from telegrad.wire.codec import locate
from telegrad.wire.failures import encode_failure, encode_failure_name, remote_traceback
from telegrad.wire.frames import (
    DEFINES_FUNCTION,
    HAS_KEYWORDS,
    HAS_SCOPE,
    HAS_TRACE,
    INLINE_FUNCTION,
    PARTING,
    Frame,
    Kind,
    message_bytes,
)
from telegrad.wire.handshake import Incarnation

_LARGE_BODY = 1 << 14  # bytes; smaller replies to one peer are sent together
_LONG_COPY = 1 << 20  # bytes of a reply that takes long enough to let other calls run meanwhile
_REPLY, _FAILURE = int(Kind.REPLY), int(Kind.FAILURE)
_LOADING = "a function that is being loaded"  # its module is imported, or it is sent by value
_FAST = 0.0002  # seconds: replies may be held back while a function that takes less runs
_CALL = int(Kind.CALL)
_now = time.monotonic
_log = logging.getLogger(__name__)


class ReplyRuntime(Protocol):
    """What sending replies needs of the agent."""

    name: str
    threads: ThreadPool
    clock: Clock
    recorder: FlightRecorder
    failure_log_level: int


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
        self._record = runtime.recorder.add_served
        self._unanswered: dict[int, ServedCall] = {}
        self._cancelled: set[int] = set()

    @property
    def calls_in_progress(self) -> int:
        """The number of calls of users that have not been answered."""
        return sum(not call.internal for call in self.unanswered_calls())

    def unanswered_calls(self) -> list[ServedCall]:
        """Return the calls that have no answer yet."""
        return list(self._unanswered.copy().values())

    def _send_reply(
        self,
        call: ServedCall,
        function: ServedFunction,
        value: Any,
        loop: EventLoop | None = None,
        epoch: int = 0,
        exclusive: bool = False,
        received: Sequence[ReceivedResource] = (),
        shared: SharedMessage | None = None,
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
            self._explain_unsendable(error, function)
            self._send_failure(call, function, error)
            return
        call_id = call.call_id
        call.reply_bytes = len(body) if not buffers else message_bytes(body, buffers)
        try:
            if shared is not None and (buffers or len(body) >= _LARGE_BODY):
                copies = shared.snapshot(buffers, self.channel)
                self._send_on_thread(call, function, body, copies, shared)
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
            self._explain_unsendable(error, function)
            self._send_failure(call, function, error)
        self._mark_answered(call, "ok")

    def _explain_unsendable(self, error: BaseException, function: ServedFunction) -> None:
        """Say in the error of a reply whose result it is, and where in it the value is."""
        if isinstance(error, SerializationError):
            message = f"the result of {function.name} on worker {self._runtime.name!r}"
            locate(error, message, f"result{error.path}")
            error.peer, error.call = self._runtime.name, function.name

    def _send_empty_reply(self, call: ServedCall, outcome: str) -> None:
        """Answer a call whose caller no longer waits, so that it frees what the call uses."""
        try:
            self.channel.send_nowait(_REPLY, call.call_id, b"")
        except ChannelClosed as error:
            _log.debug("the caller of a cancelled call is gone: %s", error)
        self._mark_answered(call, outcome)

    def _send_on_thread(
        self,
        call: ServedCall,
        function: ServedFunction,
        body: bytes,
        buffers: list[memoryview],
        shared: SharedMessage,
    ) -> None:
        """Send one of several large replies on a thread of its own.

        Neither the thread that completed the future nor other receivers wait for this receiver.
        """

        def send() -> None:
            try:
                self.channel.send(_REPLY, call.call_id, body, buffers, copies=shared.copies)
            except ChannelClosed as error:
                _log.debug("the caller of %s is gone and gets no result: %s", function.name, error)
            except BaseException as error:
                self._explain_unsendable(error, function)
                self._send_failure(call, function, error)
            self._mark_answered(call, "ok")
            shared.close()

        shared.add_user()
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
        call: ServedCall,
        function: ServedFunction | None,
        error: BaseException,
        function_id: int = 0,
    ) -> None:
        """Answer a call with an error; if that cannot be sent, end the connection. Never raise.

        If the function could not be decoded, the reply names its id, and the caller defines it
        again with the next call.
        """
        if call.outcome:
            return  # it was answered before this error was raised
        call.answered_at = _now()
        name = function.name if function is not None else "a function sent by value"
        undefined_id = 0
        if function is not None and type(function.function) is UndecodableFunction:
            undefined_id = function_id
        level = logging.WARNING  # unless the caller gets the error and reports it
        for encode in (encode_failure, encode_failure_name):
            try:
                body = encode(error, self._runtime.name, name)
                self.channel.send(_FAILURE, call.call_id, body, function=undefined_id)
                level = self._runtime.failure_log_level
                break
            except ChannelClosed as closed:
                _log.debug("the caller of %s is gone and gets no failure: %s", name, closed)
                break
            except BaseException as failure:
                _log.debug("the failure of %s could not be sent: %s", name, type(failure))
        else:
            _log.error("%s gets no answer of %s; its connection ends", self.peer_name, name)
            self.channel.shutdown()
        self._log_failure(name, error, level)
        self._mark_answered(call, type(error).__name__)

    def _log_failure(self, name: str, error: BaseException, level: int) -> None:
        if isinstance(error, TelegradError) or not _log.isEnabledFor(level):
            return
        try:
            trace = remote_traceback(error)
            _log.log(level, "%s called %s, which raised\n%s", self.peer_name, name, trace)
        except BaseException as failure:
            _log.log(
                level,
                "%s called %s, which raised %s (%s)",
                self.peer_name,
                name,
                type(error),
                type(failure),
            )

    def _mark_answered(self, call: ServedCall, outcome: str) -> None:
        if self._unanswered.pop(call.call_id, None) is not None:
            call.outcome = outcome
            self._record(call)
        if self._cancelled:
            self._cancelled.discard(call.call_id)


def prepare_replies(received: Sequence[ReceivedResource]) -> None:
    """Let the senders of the resources of a call reuse them."""
    for resource in received:  # pragma: gpu
        resource.prepare_reply()


def _add_duration(function: ServedFunction, seconds: float) -> None:
    """Update the moving average of the seconds that a function takes."""
    average = function.seconds
    function.seconds = seconds if average < 0 else average + (seconds - average) * 0.25


class ServerRuntime(ReplyRuntime, Protocol):
    """What serving calls needs of the agent."""

    config: Config
    executor: Executor
    event_loops: EventLoops
    functions: FunctionRegistry
    count_served_call: Callable[[], int]
    forked: bool

    def message_context(
        self, peer: str, incarnation: Incarnation, route: DeviceRoute
    ) -> MessageContext: ...
    def connection_ended(self, connection: ServerConnection, error: BaseException) -> None: ...


class ServerConnection(ReplyingConnection):
    """One connection that a peer opened to this agent."""

    calls_on_flushed = True
    _runtime: ServerRuntime

    def __init__(self, runtime: ServerRuntime, channel: Channel, peer: dict[str, Any]) -> None:
        name, incarnation = peer["name"], peer["incarnation"]
        route = reply_route(peer.get("devices", {}), runtime.config.unmapped_devices)
        context = runtime.message_context(name, incarnation, route)
        super().__init__(runtime, channel, name, context)
        self.incarnation: Incarnation = incarnation
        self.heartbeat: float = float(peer["heartbeat"])
        self.group: str = peer["purpose"]  # the event loops get equal numbers of each
        self.is_multiplexed = self.group == MULTIPLEXED  # it carries the heartbeats
        self._peer_functions = PeerFunctions(runtime.functions)
        self._functions = self._peer_functions.by_id
        self._running: ServedFunction | None = None  # what the leader of the loop runs
        self._deferred: dict[int, Any] = {}
        self._next_call: ServedCall | None = None  # made when there is time

    def __repr__(self) -> str:
        return (
            f"<ServerConnection from {self.peer_name!r}: {self.channel!r}, "
            f"{len(self._deferred)} futures>"
        )

    def call_states(self) -> list[tuple[ServedCall, str]]:
        """Return the calls that have no answer yet: queued, running, deferred or replying."""
        return [(call, self._state_of(call)) for call in self.unanswered_calls()]

    def _state_of(self, call: ServedCall) -> str:
        if call.call_id in self._deferred:
            return "deferred"
        if call.returned_at:
            return "replying"
        return "running" if call.started_at else "queued"

    @property
    def deferred_calls(self) -> int:
        """The number of calls that a future will answer."""
        return len(self._deferred)

    # Frames

    def handle(self, frame: Frame) -> None:
        """Run a call or hand it to the executor, or handle another frame of the caller."""
        if frame.kind == _CALL:
            call = self._begin(frame)
            function = (
                self._find_function(frame)
                if frame.flags
                else self._functions.get(frame.function_id)
            )
            if function is not None:
                call.function, call.internal = function.name, function.internal
            elif not frame.flags & INLINE_FUNCTION:
                self._wait_for_definition(frame, call)
                return
            if function is not None and function.seconds > SLOW_SECONDS:
                self._submit_to_executor(frame, function, call)
                return
            if function is None or not 0 <= function.seconds < _FAST:
                self.channel.flush_nowait()
            self._running = function
            self._execute(frame, function, call, self.loop)
        elif frame.kind == Kind.CANCEL:
            self._cancel(frame.call_id)
        elif frame.kind in PARTING:
            raise PeerClosed(frame)
        elif frame.kind != Kind.HEARTBEAT:
            raise ProtocolError(f"received a frame of kind {frame.kind} where a call was due")

    def on_blocked(self) -> None:
        """Run the function that blocks the leader of the loop on the executor from now on."""
        if self._running is not None:
            self._running.seconds = max(self._running.seconds, 2 * SLOW_SECONDS)

    def on_ended(self, error: BaseException) -> None:
        """Close the channel and cancel the calls that wait for futures."""
        if not isinstance(error, ChannelClosed):
            reason = f"worker {self._runtime.name!r} closed the connection: {error_text(error)}"
            close_with_reason(self.channel, reason, Kind.CLOSE)
        self.channel.close()
        for call_id in list(self._deferred):
            self._cancel(call_id)
        self._runtime.connection_ended(self, error)

    def _submit_to_executor(self, frame: Frame, function: ServedFunction, call: ServedCall) -> None:
        call.function, call.internal = function.name, function.internal

        def job() -> None:
            deadline = call.deadline
            expired = deadline is not None and deadline.passed()
            if (expired or frame.call_id in self._cancelled) and not function.must_run:
                self._send_empty_reply(call, "expired" if expired else "cancelled")
            else:
                # without the loop: only its leader flushes replies that are held back
                self._execute(frame, function, call)

        try:
            self._runtime.executor.submit(job)
        except BaseException as error:
            self._send_failure(call, function, error)

    def _begin(self, frame: Frame) -> ServedCall:
        """Note a call that has arrived and must be answered."""
        call = self._next_call
        if call is None:
            call = self._new_call()
        else:
            self._next_call = None
        call.call_id = call_id = frame.call_id
        call.timeout_ms = frame.timeout_ms
        call.request_bytes = (
            len(frame.body) if not frame.buffers else message_bytes(frame.body, frame.buffers)
        )
        call.received_at = _now()
        call.outcome = ""
        self._unanswered[call_id] = call
        return call

    def _new_call(self) -> ServedCall:
        call = ServedCall()
        call.caller = self.peer_name
        call.function, call.internal = _LOADING, False
        call.started_at = call.returned_at = call.answered_at = 0.0
        call.reply_bytes = 0
        return call

    def on_flushed(self) -> None:
        """Prepare for the next call, now that the callers have their answers."""
        if self._next_call is None:
            self._next_call = self._new_call()

    def _cancel(self, call_id: int) -> None:
        """Answer a call whose caller no longer waits, and cancel what it waits for."""
        deferred = self._deferred.pop(call_id, None)
        if deferred is None and call_id in self._unanswered:
            self._cancelled.add(call_id)
            deferred = self._deferred.pop(call_id, None)  # it may have been added in between
            if call_id not in self._unanswered:  # it may have been answered in between
                self._cancelled.discard(call_id)
        if deferred is None:
            return
        call = self._unanswered.get(call_id)
        if call is not None:
            self._send_empty_reply(call, "cancelled")
        if type(deferred) is DeferredReply:
            if deferred.on_abandoned is not None:
                deferred.on_abandoned()
        elif isinstance(deferred, Future) and deferred.remove_caller() and deferred.is_call:
            # not a future that the user completes: the next caller may get the same one
            deferred.cancel()

    # Functions

    def _find_function(self, frame: Frame) -> ServedFunction | None:
        """Return the function of a call; None if it is in the pickle, or is still being loaded."""
        if frame.flags & DEFINES_FUNCTION:
            function, waiting = self._peer_functions.define(frame)
            for later, call in waiting:
                self._submit_to_executor(later, function, call)
        return self._functions.get(frame.function_id)

    def _wait_for_definition(self, frame: Frame, call: ServedCall) -> None:
        """Run a call when its function is defined, which another thread does at the moment."""
        function = self._peer_functions.wait_for(frame, call)
        if function is not None:
            self._submit_to_executor(frame, function, call)

    def _check_allowed(self, function: ServedFunction | None) -> None:
        """Raise `UsageError` if peers may not call a function; None: it is sent by value."""
        if not self._runtime.functions.is_allowed(None if function is None else function.function):
            name = "a function sent by value" if function is None else function.name
            raise unregistered_error(self._runtime.name, name)

    # Running calls

    def _execute(
        self,
        frame: Frame,
        function: ServedFunction | None,
        call: ServedCall,
        loop: EventLoop | None = None,
    ) -> None:
        """Run a call and send its reply, or arrange for it to be sent. Never raise."""
        self._runtime.count_served_call()
        try:
            thread_state.call = call
            if self._runtime.config.only_registered:
                self._check_allowed(function)  # before anything of the call is unpickled
            if not frame.flags & HAS_SCOPE or not len(frame.body):
                self._run(frame, function, call, loop)
            else:
                self._run_scoped(frame, function, call, loop)
        except BaseException as error:
            self._send_failure(call, function, error, frame.function_id)

    def _run_scoped(
        self,
        frame: Frame,
        function: ServedFunction | None,
        call: ServedCall,
        loop: EventLoop | None,
    ) -> None:
        body = trace_context.without(frame.body) if frame.flags & HAS_TRACE else frame.body
        scope = scopes.open_scope(body, self._context)
        token = current_scope.set(scope)
        try:
            if scope is None:
                self._run(frame, function, call, loop)
            else:
                scope.run(lambda: self._run(frame, function, call, loop))
        finally:
            current_scope.reset(token)

    def _run(
        self,
        frame: Frame,
        function: ServedFunction | None,
        call: ServedCall,
        loop: EventLoop | None,
    ) -> None:
        epoch, waits = (loop.own_epoch, loop.wait_count) if loop is not None else (0, 0)
        received: list[ReceivedResource] = []
        if type(frame.receive_error) is SenderTimedOut:
            self._send_empty_reply(call, "expired")
            return
        try:
            if frame.flags or function is None or frame.receive_error is not None:
                function, args, kwargs = self._decode_call(frame, function, received)
                call.function = function.name
            else:
                args, kwargs = self._unpack(frame.body, frame.buffers, received), {}
            waited = thread_roles.waited_seconds() if loop is None else 0.0
            if loop is None or call.request_bytes >= _LARGE_BODY:
                call.started_at = started = _now()
            else:  # it took no time to unpack
                call.started_at = started = call.received_at
            apply_torch_num_threads()
            try:
                value = function.run(*args, **kwargs)
            finally:
                # The function has forked, and this is the child: the parent replies.
                if self._runtime.forked:
                    os._exit(0)
            call.returned_at = returned = _now()
            if loop is None:
                waited = thread_roles.waited_seconds() - waited
                _add_duration(function, returned - started - waited)
            # else it has waited, or `on_blocked` has recorded that it took long
            elif loop.epoch == epoch and loop.wait_count == waits:
                _add_duration(function, returned - started)
            del args, kwargs
            for resource in received:  # pragma: gpu
                resource.forget()
            if function.is_deferred or type(value) is DeferredReply:
                prepare_replies(received)
                self._reply_later(call, function, value)
                return
        except BaseException:
            prepare_replies(received)
            raise
        exclusive = torch.cuda._initialized and is_exclusive(value)  # type: ignore[attr-defined]
        self._send_reply(call, function, value, loop, epoch, exclusive, received)

    def _decode_call(
        self, frame: Frame, function: ServedFunction | None, received: list[ReceivedResource]
    ) -> tuple[ServedFunction, tuple[Any, ...], dict[str, Any]]:
        """Return the function and the arguments of a call of any kind."""
        flags, body = frame.flags, frame.body
        if flags & DEFINES_FUNCTION:
            body = memoryview(body)[4 + int.from_bytes(body[:4], "little") :]
        if frame.receive_error is not None:
            raise SerializationError(
                f"worker {self._runtime.name!r} could not receive the arguments: "
                f"{type(frame.receive_error).__name__}: {error_text(frame.receive_error)}"
            ) from frame.receive_error
        value = self._unpack(body, frame.buffers, received)
        kwargs: dict[str, Any] = {}
        if function is None:
            callable_, value, kwargs = value
            function = ServedFunction(callable_)
        elif flags & HAS_KEYWORDS:
            value, kwargs = value
        return function, value, kwargs

    def _unpack(self, body: Any, buffers: Sequence[Any], received: list[ReceivedResource]) -> Any:
        try:
            return unpack(self._context, body, buffers, received)
        except BaseException as error:
            raise SerializationError(
                f"worker {self._runtime.name!r} could not unpickle the arguments: "
                f"{type(error).__name__}: {error_text(error)}. "
                "Whatever they refer to must be importable there"
            ) from error

    def _reply_later(self, call: ServedCall, function: ServedFunction, value: Any) -> None:
        """Reply when a future completes. If all its callers abandon their calls, cancel it."""
        call_id = call.call_id
        is_deferred_reply = type(value) is DeferredReply
        # what torch's own `then` returns is only that
        if not is_deferred_reply and not isinstance(value, torch._C.Future):
            raise no_future_error(function.name, value)
        # not for a `DeferredReply`: others may use its future, whether or not they wait now
        if isinstance(value, Future):
            value.add_caller()
        self._deferred[call_id] = value
        scope = current_scope.get()

        def reply(done: Any, shared: SharedMessage | None = None) -> None:
            if self._deferred.pop(call_id, None) is None:
                return  # cancelled
            call.answered_at = _now()
            token = current_scope.set(scope)
            try:
                result = done.value()
                if scope is not None:
                    shared = None  # the gradients of the result differ for each receiver
                elif shared is None:
                    shared = shared_reply_for(result)
                self._send_reply(call, function, result, shared=shared)
            except BaseException as error:
                self._send_failure(call, function, error)
            finally:
                current_scope.reset(token)

        if call_id in self._cancelled:  # before it was added to `_deferred`
            self._cancel(call_id)
        if is_deferred_reply:
            value.listen(reply)
        else:
            FutureReplies.add(value, reply)
