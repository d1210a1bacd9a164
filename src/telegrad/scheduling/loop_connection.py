"""`LoopConnection`: a connection that an event loop reads.

Subclasses say how the frames are handled: `server.connection` for the calls that peers send,
`client.connections` for replies.

State: `hold_count`, `watched_events` and `fd` are changed under the lock of the loop; `queued` and
`readable` belong to the leader of the loop; `received` and `receives_large_frame` are set by the
leader and by the thread that receives a large frame, one after the other.
"""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from telegrad.scheduling.event_loop import EventLoop


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
    readable = False  # epoll has reported bytes that were not received yet
    receives_large_frame = False  # another thread receives the rest of a large frame
    hold_count = 0  # threads that asked the loop not to read this connection
    watched_events = 0  # the events that epoll watches; 0: not registered
    fd = -1  # the descriptor that is registered with epoll
    _silent_seconds = 0.0

    def __init__(self) -> None:
        # frames, or the error, that another thread received; handled before those of the channel
        self.received: collections.deque[Frame | BaseException] = collections.deque()

    def take_received(self) -> Frame:
        """Return the next frame that another thread received, or raise its error."""
        frame = self.received.popleft()
        if isinstance(frame, BaseException):
            raise frame
        return frame

    @abstractmethod
    def handle(self, frame: Frame) -> None:
        """Handle one frame. `ChannelClosed` and `ProtocolError` end the connection."""

    @abstractmethod
    def on_ended(self, error: BaseException) -> None:
        """Clean up after the connection has ended because of `error`. Called once."""

    def on_blocked(self) -> None:
        """Take note that the current `handle` blocks or runs long. Called while it still runs."""
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
