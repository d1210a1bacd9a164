"""The connection of a `Peer` that asynchronous calls share; the thread that reads it completes their futures.

A call ends when its callee has answered it or is lost, not when its caller gives up. So an entry of
`pending` stays until then: a deadline or a cancellation completes its future and marks it
`given_up`, and what the call uses (`kept`: references, for example) is kept until the callee no
longer needs it. The callee answers every call, also one that was cancelled.

A call that is made before the pipe has a channel is packed at once and waits in `_queue`, with
copies of its buffers. `catch_up` sends what waits. Calls that are made meanwhile go to the end of
the queue, so that none overtakes another.

Callbacks of futures run where the answer was read. Those that were seen to block there in a wait
that we do not know of run on the executor from then on, until they no longer take long (`_slow`).

State: `MultiplexedConnection.pending` (calls by id; whoever pops an entry makes sure that its
future is complete); `_next_look`, the moment for which the clock was last asked to look at
deadlines: never later than the earliest of those that are pending; `_queue`, changed under `_lock`,
None once all that waited was sent; `_answered`, the calls whose futures the executor completes
(whoever pops an entry completes it); and `_slow`, the seconds that callbacks take, by their code.
"""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad import blocking
from telegrad.deadline import to_wire
from telegrad.errors import CallTimeout, ProtocolError, as_exception
from telegrad.futures import CompletionListener
from telegrad.messages.scope import CallScope, current_scope
from telegrad.scheduling.event_loop import LoopConnection
from telegrad.scheduling.threads import SLOW
from telegrad.transport.channel import (
    Channel,
    ChannelClosed,
    SendTimeout,
    send_goodbye,
    text_of_frame,
)
from telegrad.wire.failures import decode_failure
from telegrad.wire.frames import DEFINES, Frame, Kind
from telegrad.wire.function_table import MAX_FUNCTIONS, Function, describe

if TYPE_CHECKING:
    from telegrad.client.peer import Args, Message, Peer, PeerRuntime

_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)
# seconds that a call waits for those before it to be sent: the queue must not grow while it is
# emptied
PACE = 0.05
_COARSEST = 0.01  # seconds between two looks at the deadlines of a pipe


class PendingCall:
    """A call that its callee has not answered."""

    __slots__ = (
        "call",
        "definition_lost",
        "given_up",
        "internal",
        "kept",
        "outcome",
        "scope",
        "sent",
        "timeout",
        "until",
    )

    def __init__(
        self,
        outcome: CompletionListener,
        until: float,
        timeout: float | None,
        call: str,
        internal: bool,
        scope: CallScope | None,
        kept: list[Any],
    ) -> None:
        self.outcome = outcome
        self.until = until
        self.timeout = timeout
        self.call = call
        self.internal = internal
        self.scope = scope
        self.kept = kept
        self.given_up = False  # its caller no longer waits
        self.sent = False  # the callee may have heard of it
        self.definition_lost = False  # its callee does not know the function that it defined

    def give_up(self, error: Exception | None) -> None:
        """Tell its outcome of `error`, unless it was cancelled; the call itself goes on."""
        self.given_up = True
        if error is not None:
            self.outcome._settle(None, error)


class _QueuedCall(NamedTuple):
    """A call that waits for the connection."""

    call: int
    pending: PendingCall
    message: Message
    must_run: bool  # even if its caller gives up


class MultiplexedConnection(LoopConnection):
    """The connection that asynchronous calls share."""

    # answers are read whatever the callee takes, so that it is never held up by them
    stops_reading = False

    def __init__(self, link: Peer, agent: PeerRuntime) -> None:
        super().__init__()
        self.attached = False
        self.pending: dict[int, PendingCall] = {}
        self._link = link
        self._agent = agent
        self._heard: set[int] = set()
        self._next_look = math.inf
        # opens when no call waits for the connection any more
        self.caught_up = blocking.OneShotEvent()
        self._queue: collections.deque[_QueuedCall] | None = collections.deque()
        self._lock = threading.Lock()
        self._answered: dict[int, tuple[PendingCall, Frame]] = {}
        self._running: tuple[Hashable, ...] = ()  # the callbacks that the leader of the loop runs
        self._slow: dict[Hashable, float] = {}

    def __repr__(self) -> str:
        channel = repr(self.channel) if self.attached else "not connected"
        return f"<MultiplexedConnection {len(self.pending)} pending, {channel}>"

    def attach(self, channel: Channel) -> None:
        """The connection is there."""
        self.channel = channel
        self.attached = True

    def start(self) -> None:
        """Begin to read. The link must be complete: the first frame may be a good-bye."""
        self._agent.event_loops.add(self)

    def waited_for(self) -> list[PendingCall]:
        """Return the calls that somebody waits for."""
        return [pending for pending in list(self.pending.values()) if not pending.given_up]

    def submit(
        self,
        call: int,
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        internal: bool,
        outcome: CompletionListener,
        keep: object = None,
    ) -> None:
        """Send a call, or let it wait for the connection, and tell `outcome` how it ended.

        `keep` is kept alive until the callee has answered.
        """
        link = self._link
        kept: list[Any] = [] if keep is None else [keep]
        scope = None if internal else current_scope.get()
        message = link.encode(self._heard, function, args, kwargs, kept, scope)
        outcome._on_cancel = lambda: self._cancel(call)
        until = math.inf if timeout is None else time.monotonic() + timeout
        try:
            pending = PendingCall(
                outcome, until, timeout, describe(function), internal, scope, kept
            )
            self.pending[call] = pending
            if until < self._next_look:
                self._look_at(until)
            if not internal:
                self._agent.calls_made += 1
            if self._queue is None or not self._wait(call, pending, message, function):
                self._send(call, pending, message, timeout)
        except BaseException:
            self.pending.pop(call, None)
            raise
        if link.lost:  # it may have been lost before this call was pending
            self.fail_all()

    def _send(self, call: int, pending: PendingCall, message: Message, left: float | None) -> None:
        link = self._link
        number, flags, body, buffers = message
        pending.sent = True
        try:
            self.channel.send(_CALL, call, body, buffers, number, to_wire(left), flags, left)
        except SendTimeout as error:
            late = timeout_error(link.member.name, pending.call, pending.timeout, sent=error.begun)
            if error.begun:  # the rest goes out before the next frame
                pending.give_up(late)
                self.channel.offer(Kind.CANCEL, call, b"")
            else:
                self._finish(call, lambda _: late)
        except ChannelClosed as error:
            link.broke(error)
            self.fail_all()
        else:
            if flags & DEFINES:
                self._heard.add(number)
                if pending.definition_lost:  # its answer came before this was noted
                    self._heard.discard(number)
            if pending.given_up:  # before it was sent, and the callee was told too early
                self._tell_cancelled(call, pending)

    def _wait(self, call: int, pending: PendingCall, message: Message, function: Function) -> bool:
        """Let a call wait for the connection. False: it can be sent now."""
        if self.attached:  # those before it are being sent
            role = blocking.pause()
            try:
                self.caught_up.wait(PACE)
            finally:
                blocking.resume(role)
        if self._queue is None:
            return False
        number, flags, body, buffers = message
        message = number, flags, body, [memoryview(bytearray(buffer)) for buffer in buffers]
        queued = _QueuedCall(call, pending, message, getattr(function, "must_run", False))
        with self._lock:
            if self._queue is not None:
                self._queue.append(queued)
                return True
        return False

    def catch_up(self) -> None:
        """Send the calls that waited for the connection, in order."""
        while (queued := self._next_queued()) is not None:
            call, pending, message, must_run = queued
            if call not in self.pending or (pending.given_up and not must_run):
                self.pending.pop(call, None)
                continue
            left = None if pending.timeout is None else max(pending.until - time.monotonic(), 0.0)
            try:
                self._send(call, pending, message, left)
            except BaseException as error:
                self.pending.pop(call, None)
                pending.outcome._settle(None, as_exception(error))
        self.caught_up.open()

    def _next_queued(self) -> _QueuedCall | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._queue = None
            return None

    def fail_all(self) -> None:
        """The peer is lost: every pending call ends now."""
        with self._lock:
            if self._queue is not None:
                self._queue.clear()
        for call in list(self.pending):
            self._finish(
                call, lambda pending: self._link.error_for(pending.call if pending.sent else None)
            )

    def close(self, last_words: str | None) -> None:
        send_goodbye(self.channel, last_words)
        self.channel.shut()

    def handle(self, frame: Frame) -> None:
        if frame.kind in (_REPLY, _FAILURE):
            pending = self.pending.pop(frame.call, None)
            if frame.kind == _FAILURE and frame.function:
                if pending is not None:
                    pending.definition_lost = True
                self._heard.discard(frame.function)
            if pending is not None and not pending.given_up:
                codes = pending.outcome._callbacks
                if self._slow and not self._slow.keys().isdisjoint(codes):
                    self._complete_elsewhere(frame.call, pending, frame)
                else:
                    self._running = codes
                    self._complete(pending, frame)
        elif frame.kind == Kind.BYE:
            self._link.lose_to(frame)
        elif frame.kind == Kind.END:
            raise ChannelClosed(text_of_frame(frame))
        elif frame.kind != Kind.ALIVE:
            raise ProtocolError(f"a frame of kind {frame.kind} where a reply was due")

    def blocked(self) -> None:
        """The leader is stuck in callbacks: from now on, those run on the executor."""
        for code in self._running:
            if len(self._slow) < MAX_FUNCTIONS:
                self._slow[code] = 2 * SLOW

    def _complete_elsewhere(self, call: int, pending: PendingCall, frame: Frame) -> None:
        self._answered[call] = pending, frame
        if not self._agent.executor.offer(lambda: self._complete_slowly(call)) or self._link.lost:
            self._complete_slowly(call)

    def _complete_slowly(self, call: int) -> None:
        """Complete a future whose callbacks blocked before, and note how long they take now."""
        answered = self._answered.pop(call, None)
        if answered is None:
            return
        codes = answered[0].outcome._callbacks
        started, waited = time.perf_counter(), blocking.waited()
        self._complete(*answered)
        seconds = time.perf_counter() - started - (blocking.waited() - waited)
        for code in codes:
            known = self._slow.get(code)
            if known is not None:
                self._slow[code] = known = known + (seconds - known) * 0.25
                if known < SLOW:
                    self._slow.pop(code, None)

    def complete_rest(self) -> None:
        """Complete the futures that the executor has not come to."""
        for call in list(self._answered):
            self._complete_slowly(call)

    def _complete(self, pending: PendingCall, frame: Frame) -> None:
        """Give a call its answer. Unpickling runs code of the user, so anything may be raised here."""
        value: Any = None
        error: Exception | None = None
        try:
            if frame.kind == _REPLY and frame.damage is None and not len(frame.body):
                # The callee found the deadline passed before it began, a moment before this worker
                # did.
                error = timeout_error(self._link.member.name, pending.call, pending.timeout)
            elif frame.kind == _REPLY:
                token = current_scope.set(pending.scope)
                try:
                    arrivals: list[Any] = []
                    value = self._link.decode(frame, pending.call, arrivals)
                    if arrivals:
                        pending.outcome._arrivals = arrivals
                finally:
                    current_scope.reset(token)
            else:
                error = decode_failure(frame.body)
        except Exception as failure:
            error = failure
        except BaseException as failure:
            error = self._link.undecodable(pending.call, failure)
        finally:
            del frame  # callbacks of a future may run for long
            pending.outcome._settle(value, error)

    def ended(self, error: BaseException) -> None:
        self.channel.close()
        self._link.lose(f"the connection ended ({error})")

    def _cancel(self, call: int) -> None:
        pending = self.pending.get(call)
        if pending is not None:
            pending.give_up(None)
            self._tell_cancelled(call, pending)

    def _tell_cancelled(self, call: int, pending: PendingCall) -> None:
        if not pending.sent:
            return
        try:
            self.channel.offer(Kind.CANCEL, call, b"")
        except ChannelClosed:
            return  # the callee cannot be told; its reply is ignored

    def _finish(self, call: int, error: Callable[[PendingCall], Exception]) -> None:
        """End a call that the callee will not answer."""
        pending = self.pending.pop(call, None)
        if pending is not None:
            pending.outcome._settle(None, error(pending))

    def _look_at(self, moment: float) -> None:
        self._next_look = moment
        self._agent.clock.at(moment, self._expire)

    def _expire(self) -> None:
        """Runs on the clock: end the calls whose deadline has passed. Callbacks of the user run elsewhere."""
        now, soonest, late = time.monotonic(), math.inf, []
        # first, so that a call that becomes pending now asks for a look of its own
        self._next_look = math.inf
        for call, pending in list(self.pending.items()):
            if pending.given_up:
                continue
            if pending.until <= now:
                late.append(call)
            else:
                soonest = min(soonest, pending.until)
        if soonest < math.inf:
            self._look_at(max(soonest, now + _COARSEST))
        if late:
            self._agent.threads.start_when_possible(lambda: self._end(late), self._agent.clock)

    def _end(self, calls: list[int]) -> None:
        """Give up the calls whose deadline has passed, and tell the callee."""
        for call in calls:
            pending = self.pending.get(call)
            if pending is not None and not pending.given_up:
                pending.give_up(
                    timeout_error(
                        self._link.member.name, pending.call, pending.timeout, pending.sent
                    )
                )
                self._tell_cancelled(call, pending)


def timeout_error(peer: str, call: str, timeout: float | None, sent: bool = True) -> CallTimeout:
    milliseconds = int((timeout or 0) * 1000)
    return CallTimeout(
        f"{call} on worker {peer!r}: RPC ran for more than set timeout ({milliseconds} ms) and will now be marked with "
        "an error. Give the call a larger timeout if it is meant to take so long",
        peer=peer,
        call=call,
        sent=sent,
    )
