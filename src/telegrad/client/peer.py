"""The caller's side: a `Peer` to one peer holds a pipe for asynchronous calls and lanes for synchronous ones.

A synchronous caller owns a lane for the length of its call and reads the reply itself; nothing is handed between
threads. Asynchronous calls share the pipe (`client/multiplexed.py`).

A lane that breaks costs the call that used it. Whether the peer is alive is for the pipe to say, which carries the
signs of life.

A link is made before it is connected: the directory has all that packing a call needs. Asynchronous calls wait in the
pipe for the connection, synchronous callers for the link to be `settled`.

State: `Peer._idle` (lanes nobody uses; list operations are atomic) and, under `_lock`, `Peer._error` (set once when the
peer is lost or could not be reached; never cleared: the next call gets a new link), `ready`, and the channel of the
pipe, which is set once.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from typing import Any, Protocol

from telegrad import blocking
from telegrad.client.dialer import DialedConnection
from telegrad.client.multiplexed import MultiplexedConnection, timeout_error
from telegrad.config import Config
from telegrad.deadline import to_wire
from telegrad.errors import (
    CallTimeout,
    PeerLost,
    ProtocolError,
    SerializationError,
    as_exception,
    text_of,
)
from telegrad.futures import CompletionListener
from telegrad.group.membership import Member
from telegrad.messages import scope as scopes
from telegrad.messages.packing import MessageContext, pack, return_resources, unpack
from telegrad.messages.routes import ANY_DEVICE, ANY_DEVICE_MARK, DeviceRoute, request_route
from telegrad.messages.scope import CallScope, current_scope
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loop import EventLoops
from telegrad.scheduling.threads import Executor, ThreadPool
from telegrad.transport.channel import Channel, ChannelClosed, close_with_reason, text_of_frame
from telegrad.wire.failures import decode_failure
from telegrad.wire.frames import DEFINES, INLINE_FUNCTION, KEYWORDS, SCOPED, Frame, Kind
from telegrad.wire.function_table import Function, FunctionTable, defined_in_main, describe

_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)
_SMALL_DIFFERENCE = 0.02  # seconds
# seconds that the good-bye of a peer may take to be read when another connection to it broke
_LAST_WORDS = 0.2

Args = tuple[Any, ...]
Message = tuple[int, int, bytes, list[memoryview]]  # function number, flags, body, buffers


class PeerRuntime(Protocol):
    """What links need of their agent."""

    config: Config
    threads: ThreadPool
    executor: Executor
    clock: Clock
    event_loops: EventLoops
    numbers: FunctionTable
    calls_made: int
    name: str
    local_member: Member

    def envelope(self, peer: str, incarnation: str, route: DeviceRoute) -> MessageContext: ...
    def dial(
        self, member: Member, purpose: str, timeout: float | None = None
    ) -> DialedConnection: ...
    def peer_lost(self, link: Peer, reason: str) -> None: ...


class ExclusiveConnection:
    """A connection for one call at a time."""

    __slots__ = ("channel", "heard", "used")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        # function numbers that the other side knows on this connection
        self.heard: set[int] = set()
        self.used = 0.0


class Peer:
    """All connections to one incarnation of a peer."""

    def __init__(self, agent: PeerRuntime, member: Member) -> None:
        self.member = member
        self.heartbeat = 0.0
        self.ready = False  # it is connected, and no call waits for that any more
        self.abandoned = False  # it could not be made, which says nothing about the peer
        self.settled = blocking.OneShotEvent()  # opens when the link is connected or lost
        # taken by the thread that connects, and never given back
        self._connector = threading.Lock()
        self._agent = agent
        self._route = request_route(
            agent.config.device_maps, member.name, agent.config.unmapped_devices
        )
        self._envelope = agent.envelope(member.name, member.incarnation, self._route)
        self._at_rest = self._envelope._replace(exclusive=True)
        self._ids = itertools.count(1)
        self._idle: list[ExclusiveConnection] = []
        self._busy: set[ExclusiveConnection] = set()
        self._error: Exception | None = None
        self._same_main = member.main == agent.local_member.main
        self._is_lost = blocking.OneShotEvent()
        self._lock = threading.Lock()
        self.pipe = MultiplexedConnection(self, agent)

    @property
    def has_connector(self) -> bool:
        """Does a thread connect this link, or has it done so?"""
        return self._connector.locked()

    def connect(self) -> None:
        """Connect to the peer and send the calls that wait for that. Only the first thread that comes here does so."""
        if not self._connector.acquire(blocking=False):
            return
        dialled = self._agent.dial(self.member, "pipe")
        try:
            with self._lock:
                if self._error is not None:
                    raise self.error_for()
                self.heartbeat = dialled.heartbeat
                self.pipe.attach(dialled.channel)
            self.pipe.start()
        except BaseException as error:
            if isinstance(error, ChannelClosed):
                left = f"worker {self._agent.name!r} has left the group"
                error = PeerLost(left, peer=self.member.name, sent=False)
            # the loop, if it reads the pipe, must not take this for a loss
            self.abandon(as_exception(error))
            if self._agent.event_loops.reads(self.pipe):
                dialled.channel.shut()
            else:
                dialled.channel.close()
            raise error from None
        self.settled.open()
        self.pipe.catch_up()
        with self._lock:
            self.ready = self._error is None

    def abandon(self, error: Exception) -> None:
        """The link could not be made: this is an error of the calls that wait for it."""
        with self._lock:
            if self._error is not None:
                return
            self.abandoned, self._error = True, error
        self._wake()
        self.pipe.fail_all()

    def __repr__(self) -> str:
        state = (
            f"lost: {self._error}"
            if self._error
            else f"{len(self._idle)} idle lanes, {self.pipe!r}"
        )
        return f"<Peer to {self.member.name!r} {state}>"

    @property
    def lost(self) -> bool:
        return self._error is not None

    @property
    def under_way(self) -> bool:
        """Is a call of a user under way to this peer?"""
        return self.calls_under_way > 0

    @property
    def calls_under_way(self) -> int:
        """Calls of users to this peer that somebody waits for."""
        return len(self._busy) + sum(not pending.internal for pending in self.pipe.waited_for())

    def call(
        self,
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        until: float | None = None,
    ) -> Any:
        """Call and wait for the result, for `timeout` seconds, which end at `until` if they have begun before."""
        if until is None:
            until = 0.0 if timeout is None else time.monotonic() + timeout
        lane: ExclusiveConnection | None = None
        kept: list[Any] = []  # until this returns
        role = None
        try:
            lane = self._take_lane() or self._open_lane(function, timeout, until)
            message = self.encode(
                lane.heard, function, args, kwargs, kept, current_scope.get(), lane
            )
            self._busy.add(lane)
            role = blocking.pause()
            # lost since the lane was taken: nobody else will wake this call
            if self._error is not None:
                raise ChannelClosed("the peer was lost")
            frame = self._exchange(lane, message, timeout, until)
        except BaseException as error:
            if lane is not None:
                if lane in self._busy:
                    lane.channel.close()
                else:  # nothing was sent
                    self._give_back(lane)
                self._busy.discard(lane)
            return_resources(kept, answered=False)
            raise self._explain(error, function, timeout) from None
        finally:
            blocking.resume(role)
        self._busy.discard(lane)
        if frame.kind == _FAILURE and frame.function:
            lane.heard.discard(frame.function)
        self._give_back(lane)
        try:
            if frame.kind == _REPLY:
                return self.decode(frame, function)
            if frame.kind == _FAILURE:
                raise decode_failure(frame.body)
        finally:
            if kept:
                # not before the result: it may be what orders their next use
                return_resources(kept, answered=True)
        self.lose_to(frame)
        raise self.error_for(describe(function))

    def submit(
        self,
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        outcome: CompletionListener,
        internal: bool = False,
        keep: object = None,
    ) -> None:
        """Call and tell `outcome` how it ended. `internal` calls do not count as work under way.

        `keep` is kept alive until the callee has answered.
        """
        self.pipe.submit(next(self._ids), function, args, kwargs, timeout, internal, outcome, keep)

    def encode(
        self,
        heard: set[int],
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        kept: list[Any],
        scope: CallScope | None,
        lane: ExclusiveConnection | None = None,
    ) -> Message:
        """Return a call as the body of a frame."""
        try:
            exclusive = lane is not None  # the caller waits, and lets its arguments be
            number, flags, body, buffers = self._encode(
                heard, function, args, kwargs, kept, exclusive
            )
            said = None if scope is None else scope.follow(self._envelope)
            if said:
                flags |= SCOPED
                body = scopes.append_scope(body, said)
            return number, flags, body, buffers
        except SerializationError as error:
            error.peer, error.call = self.member.name, describe(function)
            raise

    def _encode(
        self,
        heard: set[int],
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        kept: list[Any],
        exclusive: bool,
    ) -> Message:
        entry = self._agent.numbers.find(function)
        by_value = not self._same_main
        envelope = self._at_rest if exclusive else self._envelope
        if hasattr(function, ANY_DEVICE_MARK):
            envelope = envelope._replace(route=ANY_DEVICE)
        if entry is None or (by_value and defined_in_main(function)):
            body, buffers = pack(
                envelope, (function, args, kwargs or {}), by_value=by_value, kept=kept
            )
            return 0, INLINE_FUNCTION, body, buffers
        number, definition = entry
        flags = 0
        if kwargs:
            flags = KEYWORDS
            body, buffers = pack(envelope, (args, kwargs), by_value=by_value, kept=kept)
        else:
            body, buffers = pack(envelope, args, by_value=by_value, kept=kept)
        if number not in heard:
            flags |= DEFINES
            body = len(definition).to_bytes(4, "little") + definition + body
        return number, flags, body, buffers

    def decode(self, frame: Frame, call: str | Function, arrivals: list[Any] | None = None) -> Any:
        try:
            if frame.damage is not None:
                raise frame.damage
            return unpack(self._envelope, frame.body, frame.buffers, arrivals)
        except Exception as error:
            raise self.undecodable(call, error) from error

    def undecodable(self, call: str | Function, error: BaseException) -> SerializationError:
        """Return the error for a result that cannot be made here."""
        name = call if isinstance(call, str) else describe(call)
        failure = SerializationError(
            f"the result of {name} from worker {self.member.name!r} could not be unpickled: "
            f"{type(error).__name__}: {text_of(error)}. Whatever it refers to must be importable here",
            peer=self.member.name,
            call=name,
        )
        failure.__cause__ = error
        return failure

    def lose(self, reason: str, last_words: str = "", tell: bool = True) -> None:
        """The peer is gone: fail everything that waits for it, at once. `tell` it, in case that it is not."""
        with self._lock:
            if self._error is not None:
                return
            said = f" Its last words: {last_words}" if last_words else ""
            name = self.member.name
            self._error = PeerLost(
                f"worker {name!r} was lost: {reason}.{said}", peer=name, last_words=last_words
            )
            self.ready = False
        self._wake()
        for lane in list(self._busy):
            lane.channel.shut()
        self._close_idle()
        self.pipe.fail_all()
        # The peer must hear that it was given up, whatever it was that broke: what it sends now is for nobody.
        if self.pipe.attached:
            close_with_reason(
                self.pipe.channel, lost_notice(self._agent.name, reason) if tell else None
            )
        self._agent.peer_lost(self, reason)

    def broke(self, error: Exception) -> None:
        """The pipe broke under a sender. Its reader may know better why, so it goes first."""
        if not self._is_lost.wait(_LAST_WORDS):
            self.lose(f"the connection ended ({error})")

    def lose_to(self, frame: Frame) -> None:
        """The peer said good-bye."""
        self.lose("it left the group", text_of_frame(frame), tell=False)

    def error_for(self, call: str | None = None) -> Exception:
        """A fresh error for a call that was sent to the lost peer, or (None) for one that was not."""
        assert self._error is not None
        reason = self._error
        if self.abandoned or not isinstance(reason, PeerLost):
            return copy.copy(reason)
        fate = "" if call is None else f" The call of {call} there may or may not have run."
        words, sent = reason.last_words, call is not None
        return PeerLost(f"{reason}{fate}", peer=reason.peer, call=call, last_words=words, sent=sent)

    def trim(self, older_than: float) -> None:
        """Close lanes that nobody has used since; one stays."""
        for lane in self._idle[:-1]:  # the last is the one that is taken next
            if lane.used < older_than:
                try:
                    self._idle.remove(lane)
                except ValueError:
                    continue  # somebody took it
                lane.channel.close()

    def drop(self) -> None:
        """After a fork, in the child."""
        for lane in (*self._idle, *self._busy):
            lane.channel.drop()
        if self.pipe.attached:
            self.pipe.channel.drop()

    def close(self, last_words: str | None = "") -> None:
        """Say good-bye, unless `last_words` is None, and close every connection."""
        with self._lock:
            if self._error is None:
                name = self.member.name
                self._error = PeerLost(
                    f"this worker has left the group and cannot call {name!r}", peer=name
                )
            self.ready = False
        self._wake()
        self._close_idle()
        for lane in list(self._busy):
            lane.channel.shut()
        self.pipe.fail_all()
        self.pipe.complete_rest()  # the executor forgets them
        if self.pipe.attached:
            self.pipe.close(last_words)

    def _wake(self) -> None:
        """The peer is lost: nobody waits for it any more."""
        self._is_lost.open()
        self.settled.open()

    def _take_lane(self) -> ExclusiveConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _close_idle(self) -> None:
        while (lane := self._take_lane()) is not None:
            lane.channel.close()

    def _open_lane(
        self, function: Function, timeout: float | None, until: float
    ) -> ExclusiveConnection:
        if self._error is not None:
            raise self.error_for()
        try:
            return ExclusiveConnection(
                self._agent.dial(self.member, "lane", _time_left(timeout, until)).channel
            )
        except TimeoutError:
            raise timeout_error(self.member.name, describe(function), timeout, sent=False) from None

    def _give_back(self, lane: ExclusiveConnection) -> None:
        if self._error is None and len(self._idle) < self._agent.config.idle_lanes:
            lane.used = time.monotonic()
            self._idle.append(lane)
            # lost meanwhile: whoever closed the idle lanes may have missed this one
            if self._error is not None:
                self._close_idle()
        else:
            lane.channel.close()

    def _exchange(
        self, lane: ExclusiveConnection, message: Message, timeout: float | None, until: float
    ) -> Frame:
        number, flags, body, buffers = message
        channel = lane.channel
        self._agent.calls_made += 1
        call = next(self._ids)
        left = _time_left(timeout, until)
        channel.send(_CALL, call, body, buffers, number, to_wire(left), flags, left)
        if flags & DEFINES:
            lane.heard.add(number)
        del message, body, buffers
        while True:
            frame = channel.recv(_time_left(timeout, until))
            if frame.kind == Kind.END:
                raise ChannelClosed(text_of_frame(frame))
            if frame.call == call or frame.kind not in (_REPLY, _FAILURE):
                return frame

    def _explain(
        self, error: BaseException, function: Function, timeout: float | None
    ) -> BaseException:
        """What the user should see instead of an error of the transport."""
        if isinstance(error, CallTimeout):
            return error
        if isinstance(error, TimeoutError):
            return timeout_error(self.member.name, describe(function), timeout)
        if isinstance(error, ChannelClosed | ProtocolError):
            if self._is_lost.wait(_LAST_WORDS):  # the reader of the pipe knows best why
                return self.error_for(describe(function))
            name, call = self.member.name, describe(function)
            return PeerLost(
                f"the connection to worker {name!r} ended ({error}) while it ran {call}, which may or may not have "
                "completed. Other calls to the worker go on",
                peer=name,
                call=call,
            )
        return error


def _time_left(timeout: float | None, until: float) -> float | None:
    """Return what is left of a time limit. A small difference does not count: setting a new limit is a system call."""
    if timeout is None:
        return None
    left = until - time.monotonic()
    return timeout if timeout - left < _SMALL_DIFFERENCE else max(left, 0.0)


def lost_notice(name: str, reason: str) -> str:
    """Return what a worker tells a peer that it gives up."""
    return f"worker {name!r} has given this worker up ({reason}); to go on, this worker must join the group again"
