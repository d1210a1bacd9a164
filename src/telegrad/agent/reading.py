"""`ReadLoop`: one thread at a time reads a channel and handles each frame where it read it.

Handing a message to another thread costs more than most calls do, so the reader runs the call itself. It must not hold
up the frames behind it, so it gives the reading to another thread as soon as it blocks in a wait that we know of
(`pause`), or when the clock finds it inside the same frame at two ticks (`tick`).

State, under `_lock`: `_epoch` counts the hand-overs; a thread is the reader while its own epoch is the current one.
`_busy` is True while the reader is handling a frame; only then can the reading be taken from it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from telegrad import waiting
from telegrad.agent.clock import Clock
from telegrad.agent.threads import Threads
from telegrad.errors import ProtocolError
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.frames import Frame, Kind

_log = logging.getLogger("telegrad")


class ReadLoop:
    """Reads `channel` until it ends; `handle(frame)` for each frame, then `ended(error)` once.

    `blocked()` is told when the handling of a frame blocked or ran long, while it still does.
    """

    def __init__(
        self,
        channel: Channel,
        handle: Callable[[Frame], None],
        ended: Callable[[Exception], None],
        threads: Threads,
        clock: Clock,
        blocked: Callable[[], None] | None = None,
    ) -> None:
        self._blocked = blocked
        self._channel = channel
        self._handle = handle
        self._ended = ended
        self._threads = threads
        self._clock = clock
        self._lock = threading.Lock()
        self._epoch = 0
        self._busy = False
        self._serial = 0
        self._seen = -1
        self.hand_overs = 0
        self.pinned = False  # the reader blocks on purpose (back-pressure): nobody is to read on
        self.alive = True  # set by every frame, cleared by the heartbeat
        self._silence = 0.0

    def __repr__(self) -> str:
        return f"<ReadLoop {self._channel!r} {self._serial} frames{', busy' if self._busy else ''}>"

    def start(self) -> None:
        self._clock.watch(self)
        self._threads.start(lambda: self._read(0))

    def _read(self, epoch: int) -> None:
        waiting.take(_Reader(self, epoch))
        channel, handle, clock = self._channel, self._handle, self._clock
        try:
            while True:
                if not channel.has_frame():
                    channel.flush()
                frame = channel.recv()
                self._serial += 1
                self._busy = True
                self.alive = True
                if not clock.awake:
                    clock.wake()
                handle(frame)
                del frame
                with self._lock:
                    if self._epoch != epoch:
                        return
                    self._busy = False
        except Exception as error:
            if not isinstance(error, ChannelClosed | ProtocolError):
                _log.exception("a connection failed in an unexpected way; please report this")
                self._channel.shut()
            with self._lock:
                if self._epoch != epoch:
                    return
            self._clock.unwatch(self)
            self._ended(error)

    def beat(self, interval: float, patience: float) -> bool:
        """Give a sign of life; False if the peer has given none for `patience` seconds."""
        try:
            self._channel.try_send(Kind.ALIVE)
        except ChannelClosed:
            return True  # the reader is about to find out
        if self.alive or self.pinned:
            self._silence = 0.0
        else:
            self._silence += interval
        self.alive = False
        return self._silence < patience

    @property
    def epoch(self) -> int:
        """Which reader is reading; a thread that finds another number than before has lost the reading."""
        return self._epoch

    def hand_over(self, epoch: int) -> None:
        """Let another thread read on, if the thread of `epoch` still holds the reading and is inside a frame."""
        with self._lock:
            if self._epoch != epoch or not self._busy:
                return
            self._epoch = epoch = epoch + 1
            self._busy = False
            self.hand_overs += 1
            if self._blocked is not None:
                self._blocked()
        self._threads.start(lambda: self._read(epoch))

    def pin(self, epoch: int, pinned: bool) -> None:
        """The thread of `epoch` blocks on purpose, if it still holds the reading; or it goes on."""
        with self._lock:
            if self._epoch == epoch:
                self.pinned = pinned

    def tick(self) -> bool:
        """The clock looks in: has the reader been inside one frame since the last time?"""
        serial, busy, epoch = self._serial, self._busy, self._epoch
        if busy and serial == self._seen:
            if not self.pinned:
                self.hand_over(epoch)
            return True
        moved = serial != self._seen
        self._seen = serial
        return moved


class _Reader:
    """The role of a thread that reads."""

    def __init__(self, loop: ReadLoop, epoch: int) -> None:
        self._loop = loop
        self._epoch = epoch

    def pause(self) -> None:
        self._loop.hand_over(self._epoch)

    def resume(self) -> None:
        return  # another thread reads now; this one ends after its call

    def hold(self) -> None:
        self._loop.pin(self._epoch, True)

    def release(self) -> None:
        self._loop.pin(self._epoch, False)
