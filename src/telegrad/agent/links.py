"""The caller's side: a `Link` to one peer holds a pipe for asynchronous calls and lanes for synchronous ones.

A synchronous caller owns a lane for the length of its call and reads the reply itself; nothing is handed between
threads. Asynchronous calls share the pipe (`agent/pipe.py`).

State: `Link._idle` (lanes nobody uses; list operations are atomic) and `Link._error` (set once when the peer is lost,
under `_lock`; never cleared: a new incarnation gets a new link).
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, NamedTuple, Protocol

from telegrad import waiting
from telegrad.agent import scope as scopes
from telegrad.agent.clock import Clock
from telegrad.agent.membership import Member
from telegrad.agent.packing import Envelope, pack, settle, unpack
from telegrad.agent.pipe import Pipe, timed_out
from telegrad.agent.routes import ANYWHERE, ANYWHERE_MARK, Route, outward
from telegrad.agent.scope import Scope, current_scope
from telegrad.agent.threads import Threads
from telegrad.config import Config
from telegrad.deadline import to_wire
from telegrad.errors import PeerLost, ProtocolError, SerializationError
from telegrad.futures import Future
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.callables import Function, Numbers, defined_in_main, describe
from telegrad.wire.failures import decode_failure
from telegrad.wire.frames import DEFINES, INLINE_FUNCTION, KEYWORDS, SCOPED, Frame, Kind

_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)
_LAST_WORDS = 0.2  # seconds that the good-bye of a peer may take to be read when another connection to it broke

Args = tuple[Any, ...]
Message = tuple[int, int, bytes, list[memoryview]]  # function number, flags, body, buffers


class Dialled(NamedTuple):
    """A new connection and what its other end said of itself."""

    channel: Channel
    same_main: bool
    heartbeat: float


class Dialer(Protocol):
    """What links need of their agent."""

    config: Config
    threads: Threads
    clock: Clock
    numbers: Numbers
    calls_made: int

    def envelope(self, peer: str, incarnation: str, route: Route) -> Envelope: ...
    def dial(self, member: Member, purpose: str) -> Dialled: ...
    def link_lost(self, link: Link) -> None: ...


class Lane:
    """A connection for one call at a time."""

    __slots__ = ("channel", "heard", "used")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.heard: set[int] = set()  # function numbers that the other side knows on this connection
        self.used = 0.0


class Link:
    """All connections to one incarnation of a peer."""

    def __init__(self, agent: Dialer, member: Member) -> None:
        self.member = member
        self._agent = agent
        self._route = outward(agent.config.device_maps, member.name, agent.config.unmapped_devices)
        self._envelope = agent.envelope(member.name, member.incarnation, self._route)
        self._at_rest = self._envelope._replace(at_rest=True)
        self._ids = itertools.count(1)
        self._idle: list[Lane] = []
        self._busy: set[Lane] = set()
        self._error: PeerLost | None = None
        self._is_lost = threading.Event()
        self._lock = threading.Lock()
        dialled = agent.dial(member, "pipe")
        self._same_main = dialled.same_main
        self.heartbeat = dialled.heartbeat
        self.pipe = Pipe(self, dialled.channel, agent)

    def __repr__(self) -> str:
        state = f"lost: {self._error}" if self._error else f"{len(self._idle)} idle lanes, {self.pipe!r}"
        return f"<Link to {self.member.name!r} {state}>"

    @property
    def lost(self) -> bool:
        return self._error is not None

    @property
    def under_way(self) -> bool:
        """Is a call of a user under way to this peer?"""
        return bool(self._busy) or any(not pending.internal for pending in list(self.pipe.pending.values()))

    def call(self, function: Function, args: Args, kwargs: dict[str, Any] | None, timeout: float | None) -> Any:
        """Call and wait for the result."""
        lane = self._take_lane() or self._open_lane()
        kept: list[Any] = []  # until this returns
        message = self.encode(lane.heard, function, args, kwargs, kept, current_scope.get(), lane)
        self._busy.add(lane)
        role = waiting.pause()
        try:
            if self._error is not None:  # lost since the lane was taken: nobody else will wake this call
                raise ChannelClosed("the peer was lost")
            frame = self._exchange(lane, message, timeout)
        except BaseException as error:
            self._busy.discard(lane)
            lane.channel.close()
            settle(kept, answered=False)
            raise self._explain(error, function, timeout) from None
        finally:
            waiting.resume(role)
        self._busy.discard(lane)
        if self._error is None and len(self._idle) < self._agent.config.idle_lanes:
            lane.used = time.monotonic()
            self._idle.append(lane)
        else:
            lane.channel.close()
        try:
            if frame.kind == _REPLY:
                return self.decode(frame, function)
            if frame.kind == _FAILURE:
                raise decode_failure(frame.body)
        finally:
            if kept:
                settle(kept, answered=True)  # not before the result: it may be what orders their next use
        self.lose_to(frame)
        raise self.error_for(describe(function))

    def submit(
        self,
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        internal: bool = False,
    ) -> Future[Any]:
        """Call and return a future for the result. `internal` calls do not count as work under way."""
        return self.pipe.submit(next(self._ids), function, args, kwargs, timeout, internal)

    def encode(
        self,
        heard: set[int],
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        kept: list[Any],
        scope: Scope | None,
        lane: Lane | None = None,
    ) -> Message:
        """A call as the body of a frame. On failure the lane goes back, unused."""
        try:
            at_rest = lane is not None  # the caller waits, and lets its arguments be
            number, flags, body, buffers = self._encode(heard, function, args, kwargs, kept, at_rest)
            said = None if scope is None else scope.follow(self._envelope)
            if said:
                flags |= SCOPED
                body = scopes.append(body, said)
            return number, flags, body, buffers
        except BaseException as error:
            if lane is not None:
                self._idle.append(lane)
            if isinstance(error, SerializationError):
                error.peer, error.call = self.member.name, describe(function)
            raise

    def _encode(
        self,
        heard: set[int],
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        kept: list[Any],
        at_rest: bool,
    ) -> Message:
        entry = self._agent.numbers.find(function)
        by_value = not self._same_main
        envelope = self._at_rest if at_rest else self._envelope
        if hasattr(function, ANYWHERE_MARK):
            envelope = envelope._replace(route=ANYWHERE)
        if entry is None or (by_value and defined_in_main(function)):
            body, buffers = pack(envelope, (function, args, kwargs or {}), by_value=by_value, kept=kept)
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
            return unpack(self._envelope, frame.body, frame.buffers, arrivals)
        except Exception as error:
            name = call if isinstance(call, str) else describe(call)
            raise SerializationError(
                f"the result of {name} from worker {self.member.name!r} could not be unpickled: "
                f"{type(error).__name__}: {error}. Whatever it refers to must be importable here",
                peer=self.member.name,
                call=name,
            ) from error

    def lose(self, reason: str, last_words: str = "") -> None:
        """The peer is gone: fail everything that waits for it, at once."""
        with self._lock:
            if self._error is not None:
                return
            said = f" Its last words: {last_words}" if last_words else ""
            name = self.member.name
            self._error = PeerLost(f"worker {name!r} was lost: {reason}.{said}", peer=name, last_words=last_words)
        self._is_lost.set()
        for lane in list(self._busy):
            lane.channel.shut()
        while self._idle:
            self._idle.pop().channel.close()
        self.pipe.fail_all()
        self._agent.link_lost(self)

    def broke(self, error: Exception) -> None:
        """A connection broke under a sender or caller. The reader of the pipe may know better why, so it goes first."""
        if not self._is_lost.wait(_LAST_WORDS):
            self.lose(f"the connection ended ({error})")

    def lose_to(self, frame: Frame) -> None:
        """The peer said good-bye."""
        self.lose("it left the group", bytes(frame.body).decode("utf-8", "replace"))

    def error_for(self, call: str | None = None) -> PeerLost:
        """A fresh error for a call that was sent to the lost peer, or (None) for one that was not."""
        assert self._error is not None
        reason = self._error
        fate = "" if call is None else f" The call of {call} there may or may not have run."
        return PeerLost(f"{reason}{fate}", peer=reason.peer, call=call, last_words=reason.last_words)

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
        self.pipe.channel.drop()

    def close(self, last_words: str | None = "") -> None:
        """Say good-bye, unless `last_words` is None, and close every connection."""
        with self._lock:
            if self._error is None:
                name = self.member.name
                self._error = PeerLost(f"this worker has left the group and cannot call {name!r}", peer=name)
        self._is_lost.set()
        while self._idle:
            self._idle.pop().channel.close()
        for lane in list(self._busy):
            lane.channel.shut()
        self.pipe.fail_all()
        self.pipe.close(last_words)

    def _take_lane(self) -> Lane | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _open_lane(self) -> Lane:
        if self._error is not None:
            raise self.error_for()
        return Lane(self._agent.dial(self.member, "lane").channel)

    def _exchange(self, lane: Lane, message: Message, timeout: float | None) -> Frame:
        number, flags, body, buffers = message
        channel = lane.channel
        self._agent.calls_made += 1
        channel.send(
            _CALL, next(self._ids), body, buffers, number, 0 if timeout is None else to_wire(timeout), flags, timeout
        )
        if flags & DEFINES:
            lane.heard.add(number)
        del message, body, buffers
        return channel.recv(timeout)

    def _explain(self, error: BaseException, function: Function, timeout: float | None) -> BaseException:
        """What the user should see instead of an error of the transport."""
        if isinstance(error, TimeoutError):
            return timed_out(self.member.name, describe(function), timeout)
        if isinstance(error, ChannelClosed | ProtocolError):
            self.broke(error)
            return self.error_for(describe(function))
        return error
