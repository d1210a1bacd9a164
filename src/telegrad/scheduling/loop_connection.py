"""What an event loop reads."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from telegrad.scheduling.event_loop import EventLoop


class LoopConnection(ABC):
    """What a loop reads: a channel, and what is done with its frames."""

    channel: Channel
    loop: EventLoop  # that reads it
    group = ""  # connections of one group have about the same traffic
    stops_reading = True  # while its peer takes nothing
    queued = False  # the rest belongs to the loop
    readable = False
    receives_large_frame = False  # another thread receives a large frame
    hold_count = 0  # threads that hold it up
    watched_events = 0
    fd = -1
    _silent_seconds = 0.0

    def __init__(self) -> None:
        self.received: collections.deque[Frame | BaseException] = collections.deque()

    @abstractmethod
    def handle(self, frame: Frame) -> None:
        """Handle one frame. `ChannelClosed` and `ProtocolError` end the connection."""

    @abstractmethod
    def ended(self, error: BaseException) -> None:
        """The connection is over; called once."""

    def blocked(self) -> None:
        """The handling of a frame blocks or runs long; called while it still does."""
        return

    def beat(self, interval: float, timeout: float) -> bool:
        """Give a sign of life; False if the peer has given none for `timeout` seconds."""
        channel = self.channel
        try:
            channel.try_send(Kind.ALIVE)
        except ChannelClosed:
            return True  # the reader is about to find out
        if channel.heard or self.hold_count:
            self._silent_seconds = 0.0
        else:
            self._silent_seconds += interval
        channel.heard = False
        return self._silent_seconds < timeout
