"""`Peer`: all connections to one incarnation of another worker, and the calls to it.

A synchronous call has an `ExclusiveConnection` for itself, and the calling thread reads the reply;
nothing is passed between threads. Asynchronous calls share one `MultiplexedConnection`.

If an exclusive connection breaks, only the call that uses it fails. Whether the peer is alive is
decided by the multiplexed connection, which carries the heartbeats.

A `Peer` is made before it is connected: the directory has all that encoding a call needs.
Asynchronous calls are queued until the connection is there; synchronous callers wait for
`connected_or_lost`.

State: `_idle` (exclusive connections that no call uses), `_busy` (the calls on the others) and
`_dialing` (calls that open one) are changed by atomic operations of list and dict. Under `_lock`:
`_error` (set once when the peer is lost or could not be connected; never cleared, the next call
gets a new `Peer`), `lost` (whether it is set), `ready`, and the channel of the multiplexed
connection, which is set once.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from typing import Any, Protocol

from telegrad import thread_roles
from telegrad.client.dialer import DialedConnection
from telegrad.client.multiplexed import MultiplexedConnection, MultiplexedRuntime
from telegrad.client.requests import (
    Args,
    FunctionTable,
    Request,
    RequestCodec,
    time_left,
    timeout_error,
)
from telegrad.config import Config
from telegrad.current import current_call
from telegrad.errors import (
    CallTimeout,
    PeerLost,
    ProtocolError,
    as_exception,
)
from telegrad.group.endpoint import EXCLUSIVE, MULTIPLEXED
from telegrad.group.failure_detector import FailureDetector, lost_notice
from telegrad.group.membership import Member
from telegrad.locks import new_lock
from telegrad.messages.call_scope import current_scope
from telegrad.messages.device_routes import DeviceRoute, request_route
from telegrad.messages.packing import MessageContext, return_resources
from telegrad.messages.remote_functions import Function, describe
from telegrad.recorder import (
    ENDED_AT,
    FUNCTION,
    OUTCOME,
    PARENT,
    REPLY_BYTES,
    REQUEST_BYTES,
    CallRecord,
    MadeCall,
)
from telegrad.transport.channel import Channel, ChannelClosed, close_with_reason, text_of_frame
from telegrad.wire.failures import decode_failure
from telegrad.wire.frames import DEFINES_FUNCTION, Frame, Kind, encode_timeout, message_bytes
from telegrad.wire.handshake import Incarnation

_CALL, _REPLY, _FAILURE = int(Kind.CALL), int(Kind.REPLY), int(Kind.FAILURE)
_LARGE_REQUEST = 1 << 16  # bytes; while such a request is sent, another thread leads the loop
# seconds to wait for the LEAVE frame of a peer when another connection to it broke
_LEAVE_WAIT = 0.2
_log = logging.getLogger(__name__)


class PeerRuntime(MultiplexedRuntime, Protocol):
    """What a peer needs from its agent."""

    config: Config
    function_table: FunctionTable
    failures: FailureDetector
    name: str
    local_member: Member

    def message_context(
        self, peer: str, incarnation: Incarnation, route: DeviceRoute
    ) -> MessageContext: ...
    def dial(
        self, member: Member, purpose: str, timeout: float | None = None
    ) -> DialedConnection: ...


class ExclusiveConnection:
    """A connection for one call at a time."""

    __slots__ = ("channel", "known_functions", "last_used")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.known_functions: set[int] = set()  # ids that the peer knows on this connection
        self.last_used = 0.0

    def send(self, call_id: int, request: Request, timeout: float | None, until: float) -> None:
        """Send a request."""
        function_id, flags, body, buffers = request
        left = time_left(timeout, until)
        self.channel.send(
            _CALL, call_id, body, buffers, function_id, encode_timeout(left), flags, left
        )
        if flags & DEFINES_FUNCTION:
            self.known_functions.add(function_id)

    def receive(
        self,
        call_id: int,
        timeout: float | None,
        until: float,
        delayed: thread_roles.DelayedPause | None,
    ) -> Frame:
        """Return the frame that answers a request."""
        while True:
            if delayed is None:
                frame = self.channel.recv(time_left(timeout, until))
            else:
                frame = self.channel.recv_or_pause(time_left(timeout, until), delayed)
            if frame.kind == Kind.CLOSE:
                raise ChannelClosed(text_of_frame(frame))
            if frame.call_id == call_id or frame.kind not in (_REPLY, _FAILURE):
                return frame


class Peer:
    """All connections to one incarnation of another worker."""

    def __init__(self, runtime: PeerRuntime, member: Member) -> None:
        self.member = member
        self.heartbeat = 0.0
        self.ready = False  # it is connected, and the queued calls were sent
        self.lost = False  # `_error` is set: it was lost, or could not be connected
        self.connect_failed = False  # which does not mean that the peer is lost
        self.connected_or_lost = thread_roles.OneShotEvent()
        # taken by the thread that connects, and released only if its time is over
        self._connect_lock = new_lock()
        self._runtime = runtime
        config = runtime.config
        route = request_route(config.device_maps, member.name, config.unmapped_devices)
        context = runtime.message_context(member.name, member.incarnation, route)
        by_value = member.main != runtime.local_member.main
        self._codec = RequestCodec(context, runtime.function_table, by_value)
        self._encode = self._codec.encode
        self._decode = self._codec.decode
        self._name = member.name
        self._call_ids = itertools.count(1)
        self._idle: list[ExclusiveConnection] = []
        self._busy: dict[ExclusiveConnection, CallRecord] = {}
        self._dialing: dict[object, CallRecord] = {}
        self._record = runtime.recorder.add_made
        self._error: Exception | None = None
        self._lost_event = thread_roles.OneShotEvent()
        self._lock = new_lock()
        self.multiplexed = MultiplexedConnection(self, runtime, self._codec, self._call_ids)

    def __repr__(self) -> str:
        if self._error is not None:
            state = f"lost: {self._error}"
        else:
            state = f"{len(self._idle)} idle connections, {self.multiplexed!r}"
        return f"<Peer {self.member.name!r} {state}>"

    @property
    def calls_in_progress(self) -> int:
        """The number of calls of users to this peer whose callers wait."""
        active = self.multiplexed.active_calls()
        return len(self._busy) + sum(not pending.internal for pending in active)

    def unanswered_calls(self) -> list[tuple[MadeCall, str]]:
        """Return the calls to this peer that have not ended, with their states."""
        dialing = [(MadeCall(*call), "connecting") for call in self._dialing.copy().values()]
        sent = [(MadeCall(*call), "sent") for call in self._busy.copy().values()]
        return [*dialing, *sent, *self.multiplexed.unanswered_calls()]

    def describe(self) -> dict[str, Any]:
        """Return the state of the connections as values of JSON."""
        if self._error is not None:
            state = "not reached" if self.connect_failed else "lost"
        else:
            state = "connected" if self.multiplexed.attached else "connecting"
        return {
            "name": self.member.name,
            "incarnation": self.member.incarnation,
            "state": state,
            "reason": "" if self._error is None else str(self._error),
            "transport": self.multiplexed.channel.kind if self.multiplexed.attached else "",
            "idle_connections": len(self._idle),
        }

    # Connecting

    @property
    def connect_started(self) -> bool:
        """Whether a thread connects to this peer, or has done so."""
        return self._connect_lock.locked()

    def connect(self, timeout: float | None = None) -> None:
        """Connect to the peer and send the queued calls. Only the first call of this does so.

        After a `TimeoutError`, the next call connects.
        """
        if not self._connect_lock.acquire(blocking=False):
            return
        try:
            dialed = self._runtime.dial(self.member, MULTIPLEXED, timeout)
        except TimeoutError:
            self._connect_lock.release()
            raise
        try:
            with self._lock:
                if self._error is not None:
                    raise self.error_for()
                self.heartbeat = dialed.heartbeat
                self.multiplexed.attach(dialed.channel)
            self.multiplexed.start()
        except BaseException as error:
            if isinstance(error, ChannelClosed):
                reason = f"worker {self._runtime.name!r} has left the group"
                error = PeerLost(reason, peer=self.member.name, sent=False)
            # The event loop, if it reads the channel, must not take its end for a loss of the peer.
            self.fail_to_connect(as_exception(error))
            if self._runtime.event_loops.is_reading(self.multiplexed):
                dialed.channel.shutdown()
            else:
                dialed.channel.close()
            raise error from None
        self.connected_or_lost.set()
        self.multiplexed.send_queue()
        with self._lock:
            self.ready = self._error is None

    def fail_to_connect(self, error: Exception) -> None:
        """Fail the calls that wait for the connection, because it could not be made."""
        with self._lock:
            if self._error is not None:
                return
            self.connect_failed, self._error = True, error
            self.lost = True
        self._wake_waiters()
        self.multiplexed.fail_all()

    # Calls

    def call(
        self,
        function: Function,
        args: Args,
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        until: float | None = None,
    ) -> Any:
        """Call a function and return its result.

        `timeout` is in seconds. They end at `until`, if they began before this call.
        """
        if until is None:
            started = time.monotonic()
            until = 0.0 if timeout is None else started + timeout
        else:
            started = until - (timeout or 0.0)
        call_id = next(self._call_ids)
        record = [call_id, self._name, function, started, timeout, 0.0, 0, 0, "", False, None]
        connection: ExclusiveConnection | None = None
        retained: list[Any] = []  # until this returns
        paused_role: thread_roles.ThreadRole | None = None
        delayed: thread_roles.DelayedPause | None = None
        try:
            connection = self._take_idle() or self._open_connection(record, timeout, until)
            request = self._encode(
                connection.known_functions,
                function,
                args,
                kwargs,
                retained,
                current_scope.get(),
                True,
            )
            role = thread_roles.current_role()
            if role is not None:  # else this thread serves no calls
                record[PARENT] = current_call()
                if message_bytes(request[2], request[3]) > _LARGE_REQUEST:
                    paused_role = thread_roles.pause()  # it takes long to send
            self._busy[connection] = record
            # `mark_lost` did not shut the connection if it was not in `_busy` yet.
            if self._error is not None:
                raise ChannelClosed("the peer was lost")
            self._runtime.count_made_call()
            connection.send(call_id, request, timeout, until)
            # while the callee works: a part of the record
            function_id, _, body, buffers = request
            record[REQUEST_BYTES] = len(body) if not buffers else message_bytes(body, buffers)
            if not function_id:
                record[FUNCTION] = describe(function)
            if role is not None and paused_role is None:
                paused_role = role
                delayed = thread_roles.pause_when_needed(role)
            frame = connection.receive(call_id, timeout, until, delayed)
        except BaseException as error:
            if connection is not None:
                if connection in self._busy:
                    connection.channel.close()
                else:  # nothing was sent
                    self._release(connection)
                self._busy.pop(connection, None)
            return_resources(retained, answered=False)
            error = self._explain(error, function, timeout)
            record[FUNCTION], record[OUTCOME] = describe(function), type(error).__name__
            record[ENDED_AT] = time.monotonic()
            self._record(record)
            raise error from None
        finally:
            thread_roles.resume(paused_role)
        self._busy.pop(connection, None)
        if frame.kind == _FAILURE and frame.function_id:
            connection.known_functions.discard(frame.function_id)
        self._release(connection)
        record[ENDED_AT] = connection.last_used
        record[REPLY_BYTES] = (
            len(frame.body) if not frame.buffers else message_bytes(frame.body, frame.buffers)
        )
        record[OUTCOME] = "ok" if frame.kind == _REPLY else "failed"
        self._record(record)
        try:
            if frame.kind == _REPLY:
                return self._decode(frame, function)
            if frame.kind == _FAILURE:
                raise decode_failure(frame.body)
        finally:
            if retained:
                # after decoding: the result may order the next use of these resources
                return_resources(retained, answered=True)
        self.peer_left(frame)
        raise self.error_for(describe(function))

    def _explain(
        self, error: BaseException, function: Function, timeout: float | None
    ) -> BaseException:
        """Return the error to raise instead of an error of the transport."""
        if isinstance(error, CallTimeout):
            return error
        if not isinstance(error, TimeoutError | ChannelClosed | ProtocolError):
            return error
        name, call = self.member.name, describe(function)
        if isinstance(error, TimeoutError):
            return timeout_error(name, call, timeout)
        # the reader of the multiplexed connection may know the reason
        if self._lost_event.wait(_LEAVE_WAIT):
            return self.error_for(call)
        return PeerLost(
            f"the connection to worker {name!r} ended ({error}) while it ran {call}, "
            "which may or may not have completed. Other calls to the worker go on",
            peer=name,
            call=call,
        )

    # Exclusive connections

    def _take_idle(self) -> ExclusiveConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _open_connection(
        self, record: CallRecord, timeout: float | None, until: float
    ) -> ExclusiveConnection:
        if self._error is not None:
            raise self.error_for()
        key = object()
        record[PARENT] = current_call()
        self._dialing[key] = record
        try:
            dialed = self._runtime.dial(self.member, EXCLUSIVE, time_left(timeout, until))
        except TimeoutError:
            call = describe(record[FUNCTION])
            raise timeout_error(self.member.name, call, timeout, sent=False) from None
        finally:
            del self._dialing[key]
        return ExclusiveConnection(dialed.channel)

    def _release(self, connection: ExclusiveConnection) -> None:
        """Keep a connection for the next call, or close it if there are enough."""
        connection.last_used = time.monotonic()
        if self._error is None and len(self._idle) < self._runtime.config.max_idle_connections:
            self._idle.append(connection)
            # If the peer was lost meanwhile, `mark_lost` may have missed this connection.
            if self._error is not None:
                self._close_idle()
        else:
            connection.channel.close()

    def close_idle_connections(self, older_than: float) -> None:
        """Close exclusive connections that no call has used since; one stays."""
        for connection in self._idle[:-1]:  # the last is the one that is taken next
            if connection.last_used < older_than:
                try:
                    self._idle.remove(connection)
                except ValueError:
                    continue  # a call took it
                connection.channel.close()

    def _close_idle(self) -> None:
        while (connection := self._take_idle()) is not None:
            connection.channel.close()

    # Losing and closing

    @property
    def silence_limit(self) -> float:
        """The seconds of silence that are no reason to consider this peer lost."""
        return self.multiplexed.channel.silence_limit if self.multiplexed.attached else 0.0

    def send_heartbeat(self, interval: float, timeout: float) -> bool:
        """Send a heartbeat; return False if the peer has sent none for `timeout` seconds."""
        if not self.multiplexed.attached or self.lost:
            return True
        return self.multiplexed.send_heartbeat(interval, timeout)

    def mark_lost(self, reason: str, leave_reason: str = "", notify: bool = True) -> None:
        """Mark the peer as lost and fail all calls to it at once.

        `leave_reason` is the reason that it sent when it left. `notify` it that it was declared
        lost, in case that it is alive.
        """
        with self._lock:
            if self._error is not None:
                return
            name = self.member.name
            detail = f" The reason it gave: {leave_reason}" if leave_reason else ""
            self._error = PeerLost(
                f"worker {name!r} was lost: {reason}.{detail}",
                peer=name,
                leave_reason=leave_reason,
                expelled=self._runtime.failures.has_expelled(self.member.incarnation),
            )
            self.lost = True
            self.ready = False
        self._wake_waiters()
        for connection in list(self._busy):
            connection.channel.shutdown()
        self._close_idle()
        self.multiplexed.fail_all()
        # A peer that is alive must know that it was declared lost, whichever connection broke: what
        # it sends from now on is refused.
        if self.multiplexed.attached:
            notice = lost_notice(reason) if notify else None
            close_with_reason(self.multiplexed.channel, notice, Kind.EXPEL)
        self._runtime.failures.declare_lost(name, self.member.incarnation, reason=reason)

    def connection_broke(self, error: Exception) -> None:
        """Mark the peer as lost after a send failed, unless the event loop reports the reason
        first.
        """
        if not self._lost_event.wait(_LEAVE_WAIT):
            self.mark_lost(f"the connection ended ({error})")

    def peer_left(self, frame: Frame) -> None:
        """Mark the peer as lost, because it has left or has declared this worker lost."""
        text = text_of_frame(frame)
        if frame.kind == Kind.EXPEL:
            name, incarnation = self.member.name, self.member.incarnation
            self._runtime.failures.expelled_by(name, incarnation, text)
        else:
            self.mark_lost("it left the group", text, notify=False)

    def error_for(self, call: str | None = None) -> Exception:
        """Return a new error for a call that was sent to the lost peer; None: it was not sent."""
        assert self._error is not None
        error = self._error
        if self.connect_failed or not isinstance(error, PeerLost):
            return copy.copy(error)
        text = str(error)
        if call is not None:
            text += f" The call of {call} there may or may not have run."
        return PeerLost(
            text,
            peer=error.peer,
            call=call,
            leave_reason=error.leave_reason,
            sent=call is not None,
            expelled=error.expelled,
        )

    def close(self, reason: str | None = "") -> None:
        """Close every connection. Tell the peer the reason; None: tell it nothing."""
        with self._lock:
            if self._error is None:
                name = self.member.name
                self._error = PeerLost(
                    f"this worker has left the group and cannot call {name!r}", peer=name
                )
                self.lost = True
            self.ready = False
        self._wake_waiters()
        self._close_idle()
        for connection in list(self._busy):
            connection.channel.shutdown()
        self.multiplexed.fail_all()
        self.multiplexed.complete_all_queued()  # the executor will not run them
        if self.multiplexed.attached:
            self.multiplexed.close(reason)

    def close_after_fork(self) -> None:
        """In the child of a fork: free this process's copies of the connections."""
        for connection in (*self._idle, *self._busy):
            connection.channel.close_after_fork()
        if self.multiplexed.attached:
            self.multiplexed.channel.close_after_fork()

    def _wake_waiters(self) -> None:
        self._lost_event.set()
        self.connected_or_lost.set()
