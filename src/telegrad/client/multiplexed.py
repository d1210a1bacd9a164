"""`MultiplexedConnection`: the connection that all asynchronous calls to one peer share.

The event loop reads it and completes the futures. An entry of `pending` stays until the callee has
answered or is lost, also if the caller no longer waits (see `PendingCall`). The callee answers
every call, also one that was cancelled.

A call that is made before the channel is there is encoded at once and waits in `_queue`, with
copies of its buffers. `send_queue` sends the queued calls. Calls that are made meanwhile go to the
end of the queue, so that none overtakes another.

Callbacks of futures run on the thread that read the reply. Callbacks that blocked there in a wait
that the event loop does not know of run on the executor from then on, until they no longer take
long (`SlowCallbacks`).

State of a `MultiplexedConnection`:
- `pending`: calls by id. The thread that removes an entry completes its future.
- `_next_expiry_check`: the time for which the clock was last asked to check deadlines. It is never
  later than the earliest deadline in `pending`.
- `_queue`: changed under `_lock`; None once all queued calls were sent.
- `_queued_replies`: replies whose futures the executor completes. The thread that removes an entry
  completes its future.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from telegrad import thread_roles
from telegrad.client.requests import Args, Request, RequestCodec, timeout_error
from telegrad.current import CurrentCall, current_call, thread_state
from telegrad.errors import ProtocolError, as_exception
from telegrad.futures import CompletionListener
from telegrad.group.membership import Member
from telegrad.locks import new_lock
from telegrad.messages.call_scope import CallScope, current_scope
from telegrad.messages.packing import SharedArguments
from telegrad.messages.remote_functions import Function, describe
from telegrad.recorder import CallRecord, FlightRecorder, MadeCall
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loops import EventLoops
from telegrad.scheduling.executor import Executor, SlowCallbacks, ThreadPool
from telegrad.scheduling.poller import LoopConnection
from telegrad.transport.channel import (
    Channel,
    ChannelClosed,
    SendTimeout,
    send_leave,
    text_of_frame,
)
from telegrad.transport.host_image import fill_images
from telegrad.transport.shared_memory import SharedCopies
from telegrad.wire.failures import decode_failure
from telegrad.wire.frames import (
    DEFINES_FUNCTION,
    PARTING,
    Frame,
    Kind,
    encode_timeout,
    message_bytes,
)

_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)
# Seconds that a caller waits for the queue to be sent: it must not grow while it is emptied.
QUEUE_WAIT = 0.05
_MIN_EXPIRY_INTERVAL = 0.01  # seconds between two checks of the deadlines


class PendingCall:
    """A call that its callee has not answered.

    A call ends when its callee has answered it or is lost, not when its caller no longer waits. So
    a deadline or a cancellation completes its future and marks it `abandoned`, and what the call
    uses (`retained`) is kept alive until the callee has answered.
    """

    __slots__ = (
        "abandoned",
        "definition_lost",
        "function",
        "internal",
        "listener",
        "parent",
        "request_bytes",
        "retained",
        "scope",
        "sent",
        "started",
        "timeout",
        "until",
    )

    def __init__(
        self,
        listener: CompletionListener,
        until: float,
        timeout: float | None,
        function: Function | str,
        internal: bool,
        scope: CallScope | None,
        retained: list[Any],
        started: float = 0.0,
        request_bytes: int = 0,
        parent: CurrentCall | None = None,
    ) -> None:
        self.listener = listener
        self.started = started
        self.request_bytes = request_bytes
        self.parent = parent  # the served call that made this one
        self.until = until
        self.timeout = timeout
        self.function = function  # its name if it is not in the table of functions
        self.internal = internal
        self.scope = scope
        self.retained = retained
        self.abandoned = False  # its caller no longer waits
        self.sent = False  # the callee may have received it
        self.definition_lost = False  # the callee does not know the function that it defined

    @property
    def call(self) -> str:
        """The name of the function."""
        return self.function if isinstance(self.function, str) else describe(self.function)

    def abandon(self, error: Exception | None) -> None:
        """Complete the future with `error`; None: it was cancelled. The call itself goes on."""
        self.abandoned = True
        if error is not None:
            self.listener._try_complete(None, error)


class MultiplexedRuntime(Protocol):
    """What a multiplexed connection needs from its agent."""

    recorder: FlightRecorder
    threads: ThreadPool
    executor: Executor
    clock: Clock
    event_loops: EventLoops
    count_made_call: Callable[[], int]


class MultiplexedOwner(Protocol):
    """What a multiplexed connection needs of its `Peer`."""

    member: Member
    lost: bool

    def mark_lost(self, reason: str) -> None: ...
    def peer_left(self, frame: Frame) -> None: ...
    def connection_broke(self, error: Exception) -> None: ...
    def error_for(self, call: str | None = None) -> Exception: ...


class _QueuedCall(NamedTuple):
    """A call that waits for the connection."""

    call_id: int
    pending: PendingCall
    request: Request
    must_run: bool  # even if its caller no longer waits


class MultiplexedConnection(LoopConnection):
    """The connection that the asynchronous calls to one peer share."""

    # Replies are read even if the callee receives nothing, so that they never block it.
    pauses_reading_when_blocked = False

    def __init__(
        self,
        peer: MultiplexedOwner,
        runtime: MultiplexedRuntime,
        codec: RequestCodec,
        call_ids: Iterator[int],
    ) -> None:
        super().__init__()
        self.attached = False
        self.pending: dict[int, PendingCall] = {}
        self._peer = peer
        self._runtime = runtime
        self._record = runtime.recorder.add_made
        self._codec = codec
        self._call_ids = call_ids  # the peer takes its ids from it, too
        self._encode = codec.encode
        self._known_functions: set[int] = set()
        self._next_expiry_check = math.inf
        self.queue_sent = thread_roles.OneShotEvent()
        self._queue: collections.deque[_QueuedCall] | None = collections.deque()
        self._lock = new_lock()
        self._queued_replies: dict[int, tuple[PendingCall, Frame]] = {}
        self._announcing: CompletionListener | None = None  # by the leader of the event loop
        self._slow_callbacks = SlowCallbacks()

    def __repr__(self) -> str:
        channel = repr(self.channel) if self.attached else "not connected"
        return f"<MultiplexedConnection {len(self.pending)} pending, {channel}>"

    # Connecting and closing

    def attach(self, channel: Channel) -> None:
        """Use this channel."""
        self.channel = channel
        self.attached = True

    def start(self) -> None:
        """Begin to read. The peer must be set up: the first frame may be LEAVE."""
        self._runtime.event_loops.add(self)

    def close(self, reason: str | None) -> None:
        """Shut the channel. Tell the peer first why this worker leaves; None: tell it nothing."""
        send_leave(self.channel, reason)
        self.channel.shutdown()

    def on_ended(self, error: BaseException) -> None:
        """Close the channel after the event loop could not read from it."""
        self.channel.close()
        self._peer.mark_lost(f"the connection ended ({error})")

    # Sending calls

    def active_calls(self) -> list[PendingCall]:
        """Return the calls whose callers still wait."""
        return [pending for pending in list(self.pending.values()) if not pending.abandoned]

    def unanswered_calls(self) -> list[tuple[MadeCall, str]]:
        """Return the calls that the callee has not answered, with their states."""
        calls = []
        for call_id, pending in self.pending.copy().items():
            state = "sent" if pending.sent else "connecting"
            call = MadeCall(*self._call_record(call_id, pending))
            calls.append((call, "abandoned" if pending.abandoned else state))
        return calls

    def submit(
        self,
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        internal: bool,
        listener: CompletionListener,
        keep: object = None,
        shared: SharedArguments | None = None,
    ) -> None:
        """Send a call, or queue it until the connection is there. Complete `listener` when it ends.

        `internal` calls do not count as calls of a user. `keep` is kept alive until the callee has
        answered. `shared`: other workers are called with these arguments, too.
        """
        call_id = next(self._call_ids)
        retained: list[Any] = [] if keep is None else [keep]
        scope = None if internal else current_scope.get()
        request = self._encode(
            self._known_functions, function, args, kwargs, retained, scope, False, shared
        )
        listener._on_cancel = lambda: self._cancel(call_id)
        started = time.monotonic()
        until = math.inf if timeout is None else started + timeout
        try:
            pending = PendingCall(
                listener,
                until,
                timeout,
                function if request[0] else describe(function),
                internal,
                scope,
                retained,
                started,
                message_bytes(request[2], request[3]),
                None if thread_state.call is None else current_call(),
            )
            self.pending[call_id] = pending
            if until < self._next_expiry_check:
                self._schedule_expiry_check(until)
            if not internal:
                self._runtime.count_made_call()
            if self._queue is None or not self._enqueue(call_id, pending, request, function):
                copies = None if shared is None else shared.copies
                self._send(call_id, pending, request, timeout, copies)
        except BaseException:
            self.pending.pop(call_id, None)
            raise
        if self._peer.lost:  # it may have been lost before this call was pending
            self.fail_all()

    def _send(
        self,
        call_id: int,
        pending: PendingCall,
        request: Request,
        left: float | None,
        copies: SharedCopies | None = None,
    ) -> None:
        function_id, flags, body, buffers = request
        pending.sent = True
        try:
            self.channel.send(
                _CALL,
                call_id,
                body,
                buffers,
                function_id,
                encode_timeout(left),
                flags,
                left,
                copies,
            )
        except SendTimeout as error:
            late = timeout_error(
                self._peer.member.name, pending.call, pending.timeout, sent=error.begun
            )
            if error.begun:  # the rest is sent before the next frame
                self._abandon(call_id, pending, late)
                self.channel.send_nowait(Kind.CANCEL, call_id, b"")
            else:
                self._fail(call_id, lambda _: late)
        except ChannelClosed as error:
            self._peer.connection_broke(error)
            self.fail_all()
        else:
            if flags & DEFINES_FUNCTION:
                self._known_functions.add(function_id)
                if pending.definition_lost:  # its reply was read before the id was added
                    self._known_functions.discard(function_id)
            # It was abandoned while it was sent: the cancellation may have come before the call.
            if pending.abandoned:
                self._send_cancel(call_id, pending)

    def _cancel(self, call_id: int) -> None:
        pending = self.pending.get(call_id)
        if pending is not None:
            self._abandon(call_id, pending, None)
            self._send_cancel(call_id, pending)

    def _abandon(self, call_id: int, pending: PendingCall, error: Exception | None) -> None:
        """Let the caller of a call go on with `error`; None: it has cancelled the call."""
        self._record_end(call_id, pending, "cancelled" if error is None else type(error).__name__)
        pending.abandon(error)

    def _record_end(
        self, call_id: int, pending: PendingCall, outcome: str, reply_bytes: int = 0
    ) -> None:
        if not pending.abandoned:  # else it was recorded then
            ended = time.monotonic()
            self._record(self._call_record(call_id, pending, ended, reply_bytes, outcome))

    def _call_record(
        self,
        call_id: int,
        pending: PendingCall,
        ended: float = 0.0,
        reply_bytes: int = 0,
        outcome: str = "",
    ) -> CallRecord:
        return [
            call_id,
            self._peer.member.name,
            pending.function,
            pending.started,
            pending.timeout,
            ended,
            pending.request_bytes,
            reply_bytes,
            outcome,
            pending.internal,
            pending.parent,
        ]

    def _send_cancel(self, call_id: int, pending: PendingCall) -> None:
        if not pending.sent:
            return
        try:
            self.channel.send_nowait(Kind.CANCEL, call_id, b"")
        except ChannelClosed:
            return  # the callee cannot be notified; its reply is ignored

    # Calls that wait for the connection

    def _enqueue(
        self, call_id: int, pending: PendingCall, request: Request, function: Function
    ) -> bool:
        """Queue a call until the connection is there. Return False if it can be sent now."""
        if self.attached:  # the queue is being sent
            role = thread_roles.pause()
            try:
                self.queue_sent.wait(QUEUE_WAIT)
            finally:
                thread_roles.resume(role)
        if self._queue is None:
            return False
        function_id, flags, body, buffers = request
        fill_images(buffers)
        copies = [memoryview(bytearray(buffer)) for buffer in buffers]
        must_run = getattr(function, "must_run", False)
        queued = _QueuedCall(call_id, pending, (function_id, flags, body, copies), must_run)
        with self._lock:
            if self._queue is not None:
                self._queue.append(queued)
                return True
        return False

    def send_queue(self) -> None:
        """Send the calls that waited for the connection, in order."""
        while (queued := self._next_queued()) is not None:
            call_id, pending, request, must_run = queued
            if call_id not in self.pending or (pending.abandoned and not must_run):
                self.pending.pop(call_id, None)
                continue
            left = None if pending.timeout is None else max(pending.until - time.monotonic(), 0.0)
            try:
                self._send(call_id, pending, request, left)
            except BaseException as error:
                self.pending.pop(call_id, None)
                pending.listener._try_complete(None, as_exception(error))
        self.queue_sent.set()

    def _next_queued(self) -> _QueuedCall | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._queue = None
            return None

    # Replies

    def handle(self, frame: Frame) -> None:
        """Complete the future that a reply belongs to, or handle another frame of the callee."""
        if frame.kind in (_REPLY, _FAILURE):
            pending = self.pending.pop(frame.call_id, None)
            if frame.kind == _FAILURE and frame.function_id:
                if pending is not None:
                    pending.definition_lost = True
                self._known_functions.discard(frame.function_id)
            if pending is not None and not pending.abandoned:
                outcome = "ok" if frame.kind == _REPLY else "failed"
                size = message_bytes(frame.body, frame.buffers)
                self._record_end(frame.call_id, pending, outcome, size)
                if self._slow_callbacks and not self._slow_callbacks.keys().isdisjoint(
                    pending.listener._callback_codes
                ):
                    self._complete_on_executor(frame.call_id, pending, frame)
                else:
                    self.unfinished.append(pending.listener)  # first: whatever `_settle` raises
                    self._settle(pending, frame)
        elif frame.kind in PARTING:
            self._peer.peer_left(frame)
        elif frame.kind == Kind.CLOSE:
            raise ChannelClosed(text_of_frame(frame))
        elif frame.kind != Kind.HEARTBEAT:
            raise ProtocolError(f"received a frame of kind {frame.kind} where a reply was due")

    def _settle(self, pending: PendingCall, frame: Frame) -> None:
        """Store the outcome of a call that has been replied to.

        Unpickling runs code of the user, which may raise anything.
        """
        value: Any = None
        error: Exception | None = None
        try:
            if frame.kind == _REPLY and frame.receive_error is None and not len(frame.body):
                # The callee found that the deadline had passed, a moment before this worker did.
                error = timeout_error(self._peer.member.name, pending.call, pending.timeout)
            elif frame.kind == _REPLY:
                token = current_scope.set(pending.scope)
                try:
                    received: list[Any] = []
                    value = self._codec.decode(frame, pending.function, received)
                    if received:  # pragma: gpu
                        pending.listener._device_copies = received
                finally:
                    current_scope.reset(token)
            else:
                error = decode_failure(frame.body)
        except Exception as failure:
            error = failure
        except BaseException as failure:
            error = self._codec.undecodable(pending.call, failure)
        finally:
            del frame  # callbacks of a future may run for long
            pending.listener._settle(value, error)

    def finish(self) -> None:
        """Announce the calls that have been settled. If a callback blocks, another leader goes on.

        Settling first: if the thread that is woken by the first call wants the interpreter lock,
        each operation on a future of torch hands it over.
        """
        loop, settled = self.loop, self.unfinished
        epoch = loop.own_epoch
        while settled and loop.epoch == epoch:
            try:
                self._announcing = listener = settled.popleft()
            except IndexError:  # another thread leads the loop by now
                return
            loop.note_progress()
            if listener.done():  # not if storing the outcome failed
                listener._announce()
        self._announcing = None

    def on_blocked(self) -> None:
        """Run the callbacks that block the leader of the event loop on the executor from now on."""
        if self._announcing is not None:
            self._slow_callbacks.mark(self._announcing._callback_codes)

    def _complete_on_executor(self, call_id: int, pending: PendingCall, frame: Frame) -> None:
        self._queued_replies[call_id] = pending, frame
        accepted = self._runtime.executor.try_submit(lambda: self._complete_queued(call_id))
        if not accepted or self._peer.lost:
            self._complete_queued(call_id)

    def _complete_queued(self, call_id: int) -> None:
        """Complete a future whose callbacks blocked before, and measure how long they take now."""
        queued = self._queued_replies.pop(call_id, None)
        if queued is None:
            return
        listener = queued[0].listener
        callbacks = listener._callback_codes
        started, waited = time.perf_counter(), thread_roles.waited_seconds()
        try:
            self._settle(*queued)
        finally:
            if listener.done():
                listener._announce()
        seconds = time.perf_counter() - started - (thread_roles.waited_seconds() - waited)
        self._slow_callbacks.add_duration(callbacks, seconds)

    def complete_all_queued(self) -> None:
        """Complete the futures that the executor has not completed yet."""
        for call_id in list(self._queued_replies):
            self._complete_queued(call_id)

    # Lost peers and deadlines

    def fail_all(self) -> None:
        """Fail every pending call, because the peer is lost."""
        with self._lock:
            if self._queue is not None:
                self._queue.clear()
        for call_id in list(self.pending):
            self._fail(
                call_id,
                lambda pending: self._peer.error_for(pending.call if pending.sent else None),
            )

    def _fail(self, call_id: int, error: Callable[[PendingCall], Exception]) -> None:
        """End a call that the callee will not answer."""
        pending = self.pending.pop(call_id, None)
        if pending is not None:
            failure = error(pending)
            self._record_end(call_id, pending, type(failure).__name__)
            pending.listener._try_complete(None, failure)

    def _schedule_expiry_check(self, when: float) -> None:
        self._next_expiry_check = when
        self._runtime.clock.call_at(when, self._check_expiry)

    def _check_expiry(self) -> None:
        """Find the calls whose deadline has passed.

        This runs on the thread of the clock, so callbacks of futures run on another.
        """
        now, soonest, expired = time.monotonic(), math.inf, []
        # first, so that a call that becomes pending now schedules a check of its own
        self._next_expiry_check = math.inf
        for call_id, pending in list(self.pending.items()):
            if pending.abandoned:
                continue
            if pending.until <= now:
                expired.append(call_id)
            else:
                soonest = min(soonest, pending.until)
        if soonest < math.inf:
            self._schedule_expiry_check(max(soonest, now + _MIN_EXPIRY_INTERVAL))
        if expired:
            runtime = self._runtime
            runtime.threads.start_with_retry(lambda: self._time_out(expired), runtime.clock)

    def _time_out(self, call_ids: list[int]) -> None:
        """Abandon the calls whose deadline has passed, and tell the callee."""
        for call_id in call_ids:
            pending = self.pending.get(call_id)
            if pending is not None and not pending.abandoned:
                name = self._peer.member.name
                late = timeout_error(name, pending.call, pending.timeout, pending.sent)
                self._abandon(call_id, pending, late)
                self._send_cancel(call_id, pending)
