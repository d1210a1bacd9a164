"""The connections of an event loop: `LoopConnection`, and `ConnectionPoller`, which watches them.

A `LoopConnection` is a connection that an event loop reads. Subclasses say how the frames are
handled: `server.connection` for the calls that peers send, `client.multiplexed` for replies.

`ConnectionPoller` knows the connections of one loop and what epoll watches of them. A connection is
not read while

- its peer does not receive what was sent to it (`_watch_until_writable`),
- a thread holds it for back-pressure (`hold_count`), or
- another thread receives a large frame from it (`receives_large_frame`).

State of a `LoopConnection`: `hold_count`, `watched_events` and `fd` are changed under the lock of
the loop; `queued`, `readable`, `error` and `unfinished` belong to the leader of the loop;
`received` and `receives_large_frame` are set by the leader and by the thread that receives a large
frame, one after the other.

State of a `ConnectionPoller`: `_connections` (all of them), `_by_fd` (those that epoll watches) and
the registrations with epoll are changed under `_lock`.
"""

from __future__ import annotations

import collections
import logging
import os
import select
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from telegrad.errors import InternalError
from telegrad.locks import new_lock
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from telegrad.scheduling.event_loop import EventLoop


READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_log = logging.getLogger(__name__)


class LoopConnection(ABC):
    """A channel, and what is done with the frames that arrive through it."""

    channel: Channel
    loop: EventLoop  # the loop that reads this connection
    group = ""  # connections of one group have similar traffic; see `EventLoops`
    pauses_reading_when_blocked = (
        True  # do not read while the peer does not receive what was sent to it
    )
    # The following attributes are set by the event loop only.
    queued = False  # in the loop's queue of connections that are ready
    error: BaseException | None = None  # why the connection has ended
    readable = False  # epoll has reported bytes that were not received yet
    receives_large_frame = False  # another thread receives the rest of a large frame
    hold_count = 0  # threads that asked the loop not to read this connection
    watched_events = 0  # the events that epoll watches; 0: not registered
    fd = -1  # the descriptor that is registered with epoll
    _silent_seconds = 0.0

    # whether to call `on_flushed`; a call that does nothing would cost time for each message
    calls_on_flushed: ClassVar[bool] = False

    def __init__(self) -> None:
        # frames, or the error, that another thread received; handled before those of the channel
        self.received: collections.deque[Frame | BaseException] = collections.deque()
        # what `handle` has left for `finish`
        self.unfinished: collections.deque[Any] = collections.deque()

    def take_received(self) -> Frame:
        """Return the next frame that another thread received, or raise its error."""
        frame = self.received.popleft()
        if isinstance(frame, BaseException):
            raise frame
        return frame

    @abstractmethod
    def handle(self, frame: Frame) -> None:
        """Handle one frame. `ChannelClosed` and `ProtocolError` end the connection."""

    def finish(self) -> None:
        """Do what `handle` has left in `unfinished`, at most as long as this thread leads the loop.

        Called when all frames that are here have been handled, or after a large one. If another
        thread leads the loop then, it calls this again.
        """
        raise InternalError(f"{type(self).__name__} leaves nothing unfinished")

    @abstractmethod
    def on_ended(self, error: BaseException) -> None:
        """Clean up after the connection has ended because of `error`. Called once."""

    def on_flushed(self) -> None:
        """Do what has time until the replies to the frames that were handled have been sent."""
        return

    def on_blocked(self) -> None:
        """Take note that the current `handle` blocks or runs long. Called while it still runs.

        The lock of the loop is held, so this must neither block nor call the loop.
        """
        return

    def send_heartbeat(self, interval: float, timeout: float) -> bool:
        """Send a heartbeat. Return False if the peer has sent nothing for `timeout` seconds.

        Called every `interval` seconds. A connection that is held is not read, so its silence does
        not count.
        """
        channel = self.channel
        try:
            channel.try_send(Kind.HEARTBEAT)
        except ChannelClosed:
            return True  # the loop will end the connection
        if channel.received_since_heartbeat or self.hold_count:
            self._silent_seconds = 0.0
        else:
            self._silent_seconds += interval
        channel.received_since_heartbeat = False
        return self._silent_seconds < timeout


class ConnectionPoller(ABC):
    """Register connections with epoll. The base class of `EventLoop`, which reads them."""

    def __init__(self) -> None:
        self._lock = new_lock()
        # Not `selectors`: with it a poll takes 0.6 us instead of 0.3 us, and 1.1 us instead of 0.6
        # if a socket is readable (Python 3.13, 1 to 64 sockets).
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # -1 once it is closed
        self._epoll.register(self._wake_fd, READ)
        self._by_fd: dict[int, LoopConnection] = {}
        self._connections: set[LoopConnection] = set()

    # Called by any thread

    def is_reading(self, connection: LoopConnection) -> bool:
        """Return whether this loop reads the connection, so that the loop will close it."""
        return connection in self._connections

    @abstractmethod
    def post(self, connection: LoopConnection | None) -> None:
        """Let the leader check a connection for frames. None only wakes the leader."""

    def close_after_fork(self) -> None:
        """Close the descriptors in the child of a fork. The connections belong to the parent."""
        self._epoll.close()
        os.close(self._wake_fd)

    # Registration with epoll

    def _update_epoll(self, connection: LoopConnection, fd: int, events: int) -> None:
        """Under the lock: let epoll watch the connection for `events`; 0 unregisters it."""
        if events == connection.watched_events:
            return
        if not events:
            self._epoll.unregister(fd)
            self._by_fd.pop(fd, None)
        elif connection.watched_events:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
            self._by_fd[fd] = connection
            connection.fd = fd
        connection.watched_events = events

    def _watch(
        self, connection: LoopConnection, events: int, only_if_watched: bool = False
    ) -> None:
        """Watch a connection for other events from now on, unless it has ended."""
        channel = connection.channel
        with self._lock, channel.descriptor_lock:
            fd = channel.fileno()
            if fd is None or connection not in self._connections:
                return
            if only_if_watched and not connection.watched_events:
                return
            try:
                self._update_epoll(connection, fd, events)
            except (OSError, ValueError) as error:
                _log.debug("a connection ended before it could be watched: %s", error)
        if events & READ:
            self.post(connection)  # the channel may have complete frames that epoll cannot see

    def _watch_until_writable(self, connection: LoopConnection) -> None:
        """Send the rest of the queued frames once the peer receives again.

        A connection that epoll does not watch is held, or a large frame is received from it. Then
        nothing is changed: the rest is sent after that.
        """
        events = WRITE if connection.pauses_reading_when_blocked else READ | WRITE
        self._watch(connection, events, only_if_watched=True)

    def _watch_new_descriptor(self, connection: LoopConnection) -> None:
        """Watch the present descriptor of a channel in place of an earlier one, if there is one."""
        with self._lock:
            if connection in self._connections:
                self._unregister(connection)
                with connection.channel.descriptor_lock:
                    fd = connection.channel.fileno()
                    held = connection.hold_count or connection.receives_large_frame
                    if fd is not None and fd >= 0 and not held:
                        self._update_epoll(connection, fd, READ)
        self.post(connection)

    def _remove(self, connection: LoopConnection) -> None:
        """Under the lock: forget a connection that has ended."""
        self._connections.discard(connection)
        self._unregister(connection)

    def _unregister(self, connection: LoopConnection) -> None:
        """Under the lock: let epoll not watch a connection, whose descriptor may be closed."""
        if connection.watched_events:
            self._by_fd.pop(connection.fd, None)
            try:
                self._epoll.unregister(connection.fd)
            except (OSError, ValueError) as error:
                _log.debug("a connection was already closed: %s", error)
            connection.watched_events = 0

    def _close_descriptors(self) -> None:
        """Under the lock: free epoll and the eventfd, because the loop has ended."""
        self._epoll.close()
        os.close(self._wake_fd)
        self._wake_fd = -1
