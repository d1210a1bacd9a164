"""The callee's side of a connection: read a call, run it, send the reply.

A *lane* carries one call at a time: its thread runs each call where it read it. Lanes whose calls are answered later
share a thread (`Switchboard`). A *pipe* carries many calls: its `ReadLoop` runs short ones where it read them and
gathers their replies; a function that was seen to block or run long goes to the executor instead (`Target` remembers),
so it never delays the calls behind it.

Every call is answered exactly once, whatever is raised on the way: unpickling, the function, pickling, `str()` of an
exception and callbacks run code of the user, and memory or threads may run out. `_owed` holds the calls that have no
answer yet; `_execute` leaves none behind. `_fail` answers with the exception, else with its name alone; if not even
that can be sent, the connection ends, and the caller hears of that. Calls that nobody waits for are answered too: their
callers keep what the calls use until then.

State of an `Inbound`: `_functions`, `_reading` and `_deferred` belong to the reading thread; `_owed` (calls that are
not answered; True for those of users), `_waiting` (calls whose function returned a future) and `_cancelled` are changed
by single dict and set operations only.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from telegrad.agent import scope as scopes
from telegrad.agent.clock import Clock
from telegrad.agent.current import local
from telegrad.agent.packing import Brought, Envelope, pack, unpack
from telegrad.agent.reading import ReadLoop
from telegrad.agent.resting import is_sole
from telegrad.agent.routes import ANYWHERE, Route, backward
from telegrad.agent.scope import current_scope
from telegrad.agent.switchboard import Switchboard
from telegrad.agent.targets import Later, Target
from telegrad.agent.threads import Executor, Threads
from telegrad.config import Config
from telegrad.deadline import Deadline
from telegrad.errors import ProtocolError, SerializationError, TelegradError, UsageError, text_of
from telegrad.futures import Future
from telegrad.transport.channel import Channel, ChannelClosed, SaidGoodbye, end_quickly
from telegrad.wire import codec
from telegrad.wire.callables import LIMIT, Function
from telegrad.wire.failures import encode_failure, encode_name_of_failure, remote_traceback
from telegrad.wire.frames import DEFINES, INLINE_FUNCTION, KEYWORDS, SCOPED, Frame, Kind

_SLOW = 0.002  # seconds: a function that takes longer is run by the executor
_FAST = 0.0002  # seconds: replies may be held back while a function that takes less runs
_CORK_BELOW = 1 << 14
_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)

_log = logging.getLogger("telegrad")
_now = time.perf_counter


def _shares(target: Target) -> bool:
    """May calls of this function run on a thread that others wait for?"""
    return target.defers and 0 <= target.seconds <= _SLOW


def _settle(owed: Sequence[Brought]) -> None:
    for each in owed:
        each.settle()


class Host(Protocol):
    """What serving needs of its agent."""

    name: str
    threads: Threads
    executor: Executor
    clock: Clock
    switchboard: Switchboard
    calls_served: int
    forked: bool

    config: Config

    def envelope(self, peer: str, incarnation: str, route: Route) -> Envelope: ...
    def target(self, function: Function) -> Target: ...
    def allowed(self, function: Function | None) -> bool: ...
    def inbound_ended(self, inbound: Inbound, error: BaseException) -> None: ...


class Inbound:
    """One connection that a peer opened to this agent."""

    def __init__(self, host: Host, channel: Channel, peer: dict[str, Any]) -> None:
        self.peer_name: str = peer["name"]
        self.incarnation: str = peer["incarnation"]
        self.heartbeat: float = float(peer["heartbeat"])
        self.channel = channel
        self.loop: ReadLoop[Frame] | None = None
        self._owed: dict[int, bool] = {}
        self._host = host
        route = backward(peer.get("devices", {}), host.config.unmapped_devices)
        self._envelope = host.envelope(self.peer_name, self.incarnation, route)
        self._functions: dict[int, Target] = {}
        self._reading: Target | None = None  # what the reader of a pipe is running
        self._deferred = False  # the last call of a lane is answered later
        self._waiting: dict[int, Any] = {}
        self._cancelled: set[int] = set()

    def __repr__(self) -> str:
        return f"<Inbound from {self.peer_name!r}: {self.channel!r}, {len(self._waiting)} futures>"

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

    def serve_lane(self, given: list[Frame] | None = None) -> None:
        """Serve one call after the other until the peer goes. Runs on a thread of its own.

        A frame that was read before is `given` in a list, from which it is taken: see `agent/threads.py`.
        """
        recv = self.channel.recv
        frame = given.pop() if given else None
        try:
            while True:
                if frame is None:
                    frame = recv()
                if frame.kind == _CALL:
                    target = self._target(frame)
                    self._deferred = False
                    self._execute(frame, target)
                    if self._deferred and target is not None and _shares(target) and self._host.switchboard.take(self):
                        return
                elif frame.kind == Kind.BYE:
                    raise SaidGoodbye(frame)
                frame = None
        except (ChannelClosed, ProtocolError) as error:
            self.ended(error)
        except BaseException as error:
            _log.exception("a connection failed in an unexpected way; please report this")
            self.ended(error)

    def serve_here(self, frame: Frame) -> bool:
        """Serve a call on the thread that reads many lanes. False: it has to have its own."""
        target = self._target(frame) if frame.kind == _CALL else None
        if target is None or not _shares(target):
            return False
        self._execute(frame, target)
        return True

    def serve_pipe(self) -> None:
        """Serve many calls at once. Returns at once; the loop runs on threads of the agent."""
        host = self._host
        self.loop = ReadLoop(self.channel, self._handle, self.ended, host.threads, host.clock, self._blocked)
        self.loop.start()

    def ended(self, error: BaseException) -> None:
        """The peer is gone, or this connection to it: nobody waits for what its calls would still answer."""
        if not isinstance(error, ChannelClosed):
            reason = f"worker {self._host.name!r} closed the connection: {text_of(error)}"
            end_quickly(self.channel, reason, Kind.END)
        self.channel.close()
        for call in list(self._waiting):
            self._cancel(call)
        self._host.inbound_ended(self, error)

    def _handle(self, frame: Frame) -> None:
        if frame.kind == _CALL:
            target = self._target(frame)
            if target is not None and target.seconds > _SLOW:
                self._enqueue(frame, target)
                return
            if target is None or not 0 <= target.seconds < _FAST:
                self.channel.flush()
            self._reading = target
            self._execute(frame, target, self.loop)
        elif frame.kind == Kind.CANCEL:
            self._cancel(frame.call)
        elif frame.kind == Kind.BYE:
            raise SaidGoodbye(frame)
        elif frame.kind != Kind.ALIVE:
            raise ProtocolError(f"a frame of kind {frame.kind} where a call was due")

    def _blocked(self) -> None:
        """The reader is stuck in a call: from now on, calls of that function go to the executor."""
        if self._reading is not None:
            self._reading.seconds = max(self._reading.seconds, 2 * _SLOW)

    def _enqueue(self, frame: Frame, target: Target) -> None:
        assert self.loop is not None
        deadline = Deadline.from_wire(frame.left_ms)

        def job() -> None:
            unwanted = frame.call in self._cancelled or (deadline is not None and deadline.passed())
            if unwanted and not target.must_run:
                self._offer(frame.call, target.name, b"")  # its caller has given up
            else:
                self._execute(frame, target)  # not the reader: it must not cork a reply, for nobody may flush it

        self._owed[frame.call] = not target.internal
        self.loop.pinned = True
        try:
            self._host.executor.submit(job)
        except BaseException as error:
            self._fail(frame.call, target, error)
        finally:
            self.loop.pinned = False

    def _cancel(self, call: int) -> None:
        waiting = self._waiting.pop(call, None)
        if waiting is None and call in self._owed:
            self._cancelled.add(call)
            waiting = self._waiting.pop(call, None)  # it may have begun to wait in between
        if waiting is None:
            return
        self._offer(call, "a call that was cancelled", b"")
        if type(waiting) is Later:
            if waiting.given_up is not None:
                waiting.given_up()
        elif isinstance(waiting, Future) and waiting.leave() and waiting.is_call:
            waiting.cancel()  # not a promise of the user's: the next caller may be given the same one

    def _target(self, frame: Frame) -> Target | None:
        """The numbered function of a call; None if the function is inside the pickle."""
        if frame.flags & INLINE_FUNCTION:
            return None
        if frame.flags & DEFINES:
            self._define(frame)
        target = self._functions.get(frame.function)
        if target is None:
            raise ProtocolError(f"a call of function number {frame.function}, which was never defined")
        return target

    def _define(self, frame: Frame) -> None:
        lost = frame.damage is not None and not len(frame.body)  # there was no memory for the body
        size = int.from_bytes(frame.body[:4], "little")
        if not 0 < frame.function <= LIMIT or (size > len(frame.body) - 4 and not lost):
            raise ProtocolError(f"a definition of {size} bytes for function number {frame.function}")
        try:
            if frame.damage is not None and lost:
                raise frame.damage
            target = self._host.target(codec.decode(bytes(frame.body[4 : 4 + size])))
        except BaseException as error:
            target = Target(_Unknown(error))
        self._functions[frame.function] = target

    def _execute(self, frame: Frame, target: Target | None, loop: ReadLoop[Frame] | None = None) -> None:
        """Run a call and send its reply, or arrange for it to be sent. Never raises."""
        call = frame.call
        self._host.calls_served += 1
        self._owed[call] = target is None or not target.internal
        try:
            local.caller = self.peer_name
            local.deadline = Deadline.from_wire(frame.left_ms)
            if not frame.flags & SCOPED or not len(frame.body):
                self._run(frame, target, loop)
            else:
                self._run_scoped(frame, target, loop)
        except BaseException as error:
            self._fail(call, target, error, frame.function)

    def _run_scoped(self, frame: Frame, target: Target | None, loop: ReadLoop[Frame] | None) -> None:
        scope = scopes.opened(frame.body, self._envelope)
        token = current_scope.set(scope)
        try:
            if scope is None:
                self._run(frame, target, loop)
            else:
                scope.run(lambda: self._run(frame, target, loop))
        finally:
            current_scope.reset(token)

    def _run(self, frame: Frame, target: Target | None, loop: ReadLoop[Frame] | None) -> None:
        epoch = loop.epoch if loop is not None else 0
        arrivals: list[Brought] = []
        try:
            target, args, kwargs = self._open(frame, target, arrivals)
            started = _now()
            try:
                value = target.run(*args, **kwargs)
            finally:
                if self._host.forked:  # by the function, which has ended in the child now; the parent answers
                    os._exit(0)
            target.took(_now() - started)
            del args, kwargs
            for arrival in arrivals:
                arrival.forget()
            if target.answers_later or type(value) is Later:
                _settle(arrivals)
                self._answer_later(frame.call, target, value)
                return
        except BaseException as error:
            _settle(arrivals)
            self._fail(frame.call, target, error, frame.function)
            return
        self._answer(frame.call, target, value, loop, epoch, at_rest=is_sole(value), owed=arrivals)

    def _open(
        self, frame: Frame, target: Target | None, arrivals: list[Brought]
    ) -> tuple[Target, tuple[Any, ...], dict[str, Any]]:
        """The function and arguments of a call."""
        flags, body = frame.flags, frame.body
        self._check_allowed(target)  # before the arguments are unpickled
        if flags & DEFINES:
            body = memoryview(body)[4 + int.from_bytes(body[:4], "little") :]
        if frame.damage is not None:
            raise SerializationError(
                f"worker {self._host.name!r} could not receive the arguments: "
                f"{type(frame.damage).__name__}: {text_of(frame.damage)}"
            ) from frame.damage
        try:
            value = unpack(self._envelope, body, frame.buffers, arrivals)
        except BaseException as error:
            raise SerializationError(
                f"worker {self._host.name!r} could not unpickle the arguments: {type(error).__name__}: "
                f"{text_of(error)}. Whatever they refer to must be importable there"
            ) from error
        kwargs: dict[str, Any] = {}
        if target is None:
            function, value, kwargs = value
            target = Target(function)
        elif flags & KEYWORDS:
            value, kwargs = value
        return target, value, kwargs

    def _check_allowed(self, target: Target | None) -> None:
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
        target: Target,
        value: Any,
        loop: ReadLoop[Frame] | None = None,
        epoch: int = 0,
        shared: bool = False,
        at_rest: bool = False,
        owed: Sequence[Brought] = (),
    ) -> None:
        """Send a reply; if the thread answers others as well (`shared`), without waiting for who takes nothing."""
        try:
            envelope = self._envelope._replace(route=ANYWHERE) if target.anywhere else self._envelope
            body, buffers = pack(envelope._replace(at_rest=True) if at_rest else envelope, value, owed=owed)
        except BaseException as error:
            _settle(owed)
            self._fail(call, target, error)
            return
        if shared and not buffers and len(body) < _CORK_BELOW:
            self._offer(call, target.name, body)
        else:
            self._send(call, target, body, buffers, loop, epoch)

    def _offer(self, call: int, name: str, body: bytes) -> None:
        """Send a small reply without waiting for a peer that takes nothing."""
        try:
            complete = self.channel.offer(_REPLY, call, body)
        except ChannelClosed as error:
            _log.debug("nobody is left to take the result of %s: %s", name, error)
            complete = True
        self._answered(call)
        if not complete:
            self._host.threads.start_when_possible(self._finish, self._host.clock)

    def _finish(self) -> None:
        try:
            self.channel.finish()
        except ChannelClosed as error:
            _log.debug("nobody is left to take a result: %s", error)

    def _send(
        self,
        call: int,
        target: Target,
        body: bytes,
        buffers: list[memoryview],
        loop: ReadLoop[Frame] | None,
        epoch: int,
    ) -> None:
        channel = self.channel
        try:
            if buffers or loop is None or len(body) >= _CORK_BELOW or loop.epoch != epoch or not channel.has_frame():
                channel.send(_REPLY, call, body, buffers)
            else:
                channel.cork(_REPLY, call, body)
                if loop.epoch != epoch:  # somebody else reads now and may be asleep
                    channel.flush()
        except ChannelClosed as error:
            _log.debug("nobody is left to take the result of %s: %s", target.name, error)
        except BaseException as error:  # too large for the caller, or no memory
            self._fail(call, target, error)
        self._answered(call)

    def _answer_later(self, call: int, target: Target, value: Any) -> None:
        """The function returned a future: reply when it completes. If all its callers give up, it is cancelled."""
        is_later = type(value) is Later
        if not is_later and not isinstance(value, torch._C.Future):  # what torch's own `then` returns is only that
            raise UsageError(
                f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but {target.name} returned {type(value).__name__}"
            )
        if isinstance(value, Future):
            value.join()
        self._deferred = target.defers = True
        self._waiting[call] = value  # a `Later` belongs to others too, whether or not they wait for it right now
        scope = current_scope.get()

        def reply(done: Any) -> None:
            if self._waiting.pop(call, None) is None:
                return  # cancelled
            token = current_scope.set(scope)
            try:
                self._answer(call, target, done.value(), shared=True)
            except BaseException as error:
                self._fail(call, target, error)
            finally:
                current_scope.reset(token)

        if call in self._cancelled:  # before it began to wait
            self._cancel(call)
        if is_later:
            value.listen(reply)
        else:
            value.add_done_callback(reply)

    def _fail(self, call: int, target: Target | None, error: BaseException, function: int = 0) -> None:
        """Answer a call with an error; if that cannot be, end the connection. Never raises.

        A caller that is told the number of its `function` defines it again with the next call.
        """
        if call not in self._owed:
            return  # it was answered before this error was raised
        name = target.name if target is not None else "a function sent by value"
        unknown = function if target is not None and type(target.function) is _Unknown else 0
        try:
            if not isinstance(error, TelegradError):
                _log.warning("%s called %s, which raised\n%s", self.peer_name, name, remote_traceback(error))
        except BaseException as failure:
            _log.warning("%s called %s, which raised %s (%s)", self.peer_name, name, type(error), type(failure))
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
        self._cancelled.discard(call)


class _Unknown:
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
