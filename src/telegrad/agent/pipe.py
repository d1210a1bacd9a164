"""The connection of a `Link` that asynchronous calls share; the thread that reads it completes their futures.

State: `Pipe.pending` (calls by id; whoever pops an entry completes its future) and `_next_look`, the moment for which
the clock was last asked to look at deadlines: never later than the earliest of those that are pending.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.agent.reading import ReadLoop
from telegrad.agent.scope import Scope, current_scope
from telegrad.deadline import to_wire
from telegrad.errors import CallTimeout, ProtocolError, SerializationError
from telegrad.futures import Future
from telegrad.transport.channel import Channel, ChannelClosed, say_goodbye
from telegrad.wire.callables import Function, describe
from telegrad.wire.failures import decode_failure
from telegrad.wire.frames import DEFINES, Frame, Kind

if TYPE_CHECKING:
    from telegrad.agent.links import Args, Dialer, Link

_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)
_COARSEST = 0.01  # seconds between two looks at the deadlines of a pipe


class Pending(NamedTuple):
    future: Future[Any]
    until: float
    timeout: float | None
    call: str
    internal: bool
    scope: Scope | None
    kept: list[Any]


class Pipe:
    """The connection that asynchronous calls share."""

    def __init__(self, link: Link, channel: Channel, agent: Dialer) -> None:
        self.channel = channel
        self.pending: dict[int, Pending] = {}
        self._link = link
        self._agent = agent
        self._heard: set[int] = set()
        self._next_look = math.inf
        self.loop: ReadLoop[Frame] = ReadLoop(channel, self._handle, self._ended, agent.threads, agent.clock)
        self.loop.start()

    def __repr__(self) -> str:
        return f"<Pipe {len(self.pending)} pending, {self.channel!r}>"

    def submit(
        self,
        call: int,
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        internal: bool,
    ) -> Future[Any]:
        link = self._link
        kept: list[Any] = []
        scope = None if internal else current_scope.get()
        number, flags, body, buffers = link.encode(self._heard, function, args, kwargs, kept, scope)
        future: Future[Any] = Future()
        future._on_cancel = lambda: self._cancel(call)
        until = math.inf if timeout is None else time.monotonic() + timeout
        self.pending[call] = Pending(future, until, timeout, describe(function), internal, scope, kept)
        if until < self._next_look:
            self._look_at(until)
        if not internal:
            self._agent.calls_made += 1
        try:
            self.channel.send(_CALL, call, body, buffers, number, to_wire(timeout), flags, timeout)
        except TimeoutError:
            self._complete(call, lambda pending: timed_out(link.member.name, pending.call, timeout))
        except ChannelClosed as error:
            link.broke(error)
            self.fail_all()
        except BaseException:
            self.pending.pop(call, None)
            raise
        else:
            if flags & DEFINES:
                self._heard.add(number)
            if link.lost:  # it may have been lost before this call was pending
                self.fail_all()
            if until <= time.monotonic() and call not in self.pending:
                self._tell_cancelled(call)  # its deadline passed before it was sent, and the callee was told too early
        return future

    def fail_all(self) -> None:
        """The peer is lost: every pending call ends now."""
        for call in list(self.pending):
            self._complete(call, lambda pending: self._link.error_for(pending.call))

    def close(self, last_words: str | None) -> None:
        say_goodbye(self.channel, last_words)
        self.channel.shut()

    def _handle(self, frame: Frame) -> None:
        if frame.kind in (_REPLY, _FAILURE):
            pending = self.pending.pop(frame.call, None)
            if pending is None:
                return  # timed out or cancelled
            value: Any = None
            error: Exception | None = None
            arrivals: list[Any] = []
            if frame.kind == _REPLY:
                token = current_scope.set(pending.scope)
                try:
                    value = self._link.decode(frame, pending.call, arrivals)
                except SerializationError as failure:
                    error = failure
                finally:
                    current_scope.reset(token)
            else:
                error = decode_failure(frame.body)
            del frame
            if arrivals:
                pending.future._arrivals = arrivals
            pending.future._settle(value, error)
        elif frame.kind == Kind.BYE:
            self._link.lose_to(frame)
        elif frame.kind != Kind.ALIVE:
            raise ProtocolError(f"a frame of kind {frame.kind} where a reply was due")

    def _ended(self, error: Exception) -> None:
        self.channel.close()
        self._link.lose(f"the connection ended ({error})")

    def _cancel(self, call: int) -> None:
        if self.pending.pop(call, None) is not None:
            self._tell_cancelled(call)

    def _tell_cancelled(self, call: int) -> None:
        try:
            self.channel.send(Kind.CANCEL, call, b"", timeout=1.0)
        except (ChannelClosed, TimeoutError):
            return  # the callee cannot be told; its reply is ignored

    def _complete(self, call: int, error: Callable[[Pending], Exception]) -> None:
        pending = self.pending.pop(call, None)
        if pending is not None:
            pending.future._settle(None, error(pending))

    def _look_at(self, moment: float) -> None:
        self._next_look = moment
        self._agent.clock.at(moment, self._expire)

    def _expire(self) -> None:
        """Runs on the clock: end the calls whose deadline has passed. Callbacks of the user run elsewhere."""
        now, soonest, late = time.monotonic(), math.inf, []
        self._next_look = math.inf  # first, so that a call that becomes pending now asks for a look of its own
        for call, pending in list(self.pending.items()):
            if pending.until <= now:
                late.append(call)
            else:
                soonest = min(soonest, pending.until)
        if soonest < math.inf:
            self._look_at(max(soonest, now + _COARSEST))
        if late:
            self._agent.threads.start(lambda: self._end(late))

    def _end(self, calls: list[int]) -> None:
        for call in calls:
            self._complete(call, lambda pending: timed_out(self._link.member.name, pending.call, pending.timeout))
            self._tell_cancelled(call)


def timed_out(peer: str, call: str, timeout: float | None) -> CallTimeout:
    milliseconds = int((timeout or 0) * 1000)
    return CallTimeout(
        f"{call} on worker {peer!r}: RPC ran for more than set timeout ({milliseconds} ms) and will now be marked with "
        "an error. Give the call a larger timeout if it is meant to take so long",
        peer=peer,
        call=call,
    )
