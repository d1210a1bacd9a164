"""`ReadLoop`: one thread at a time reads a channel and handles each frame where it read it.

Handing a message to another thread costs more than most calls do, so the reader runs the call itself. It must not hold
up the frames behind it, so it gives the reading to another thread as soon as it blocks in a wait that we know of
(`pause`), or when the clock finds it inside the same frame at two ticks (`tick`).

Frames often come several at once. What is better done once for all of them is left until no more are here
(`afterwards`).

State, under `_lock`: `_epoch` counts the hand-overs; a thread is the reader while its own epoch is the current one.
`_busy` is True while the reader is handling a frame; only then can the reading be taken from it. `_left` (what is to be
done when no more frames are here) is changed by the reader only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from telegrad import waiting
from telegrad.agent.clock import Clock
from telegrad.agent.threads import Threads
from telegrad.errors import ProtocolError
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.wire.frames import Kind

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger("telegrad")


class Source(Protocol[T_co]):
    """What can be read: a channel, or many. See `Channel` for what they promise."""

    def recv(self) -> T_co: ...
    def has_frame(self) -> bool: ...
    def flush(self) -> None: ...
    def shut(self) -> None: ...
    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool: ...


class ReadLoop(Generic[T]):
    """Reads `source` until it ends; `handle(frame)` for each frame, then `ended(error)` once.

    `blocked()` is told when the handling of a frame blocked or ran long, while it still does.
    """

    def __init__(
        self,
        source: Source[T],
        handle: Callable[[T], None],
        ended: Callable[[BaseException], None],
        threads: Threads,
        clock: Clock,
        blocked: Callable[[], None] | None = None,
    ) -> None:
        self._blocked = blocked
        self._source = source
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
        self._silence = 0.0
        self._left: dict[Hashable, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"<ReadLoop {self._source!r} {self._serial} frames{', busy' if self._busy else ''}>"

    def start(self) -> None:
        self._clock.watch(self)
        try:
            self._threads.start(lambda: self._read(0))
        except BaseException:
            self._clock.unwatch(self)
            raise

    def _read(self, epoch: int) -> None:
        waiting.take(_Reader(self, epoch))
        source, handle, clock = self._source, self._handle, self._clock
        try:
            while True:
                if not source.has_frame():
                    if self._left and not self._finish(epoch):
                        return
                    source.flush()
                frame = source.recv()
                self._serial += 1
                self._busy = True
                if not clock.awake:
                    clock.wake()
                handle(frame)
                del frame
                if not self._over(epoch):
                    return
        except BaseException as error:
            if not isinstance(error, ChannelClosed | ProtocolError):
                _log.exception("a connection failed in an unexpected way; please report this")
                self._source.shut()
            with self._lock:
                if self._epoch != epoch:
                    return
            self._clock.unwatch(self)
            self._ended(error)

    def _over(self, epoch: int) -> bool:
        """A frame was handled; False if somebody else reads by now."""
        with self._lock:
            if self._epoch != epoch:
                return False
            self._busy = False
            return True

    def _finish(self, epoch: int) -> bool:
        """Do what was left until no more frames are here; False if somebody else reads by now."""
        while self._left:
            _, job = self._left.popitem()
            self._serial += 1
            self._busy = True
            job()
            if not self._over(epoch):
                return False
        return True

    def more(self, epoch: int) -> bool:
        """Asked by the thread of `epoch`: will it read another frame at once?"""
        return self._epoch == epoch and self._source.has_frame()

    def leave(self, epoch: int, key: Hashable, job: Callable[[], None]) -> bool:
        """Asked by the thread of `epoch`: do this when no more frames are here. False: it no longer reads."""
        with self._lock:
            if self._epoch == epoch:
                self._left[key] = job
            return self._epoch == epoch

    def at(self, epoch: int, key: Hashable, moment: float, job: Callable[[], None]) -> bool:
        """Asked by the thread of `epoch`: do this at that moment. False: it no longer reads, or cannot."""
        with self._lock:
            return self._epoch == epoch and self._source.at(key, moment, job)

    def beat(self, channel: Channel, interval: float, patience: float) -> bool:
        """Give a sign of life through `channel`; False if the peer has given none for `patience` seconds."""
        try:
            channel.try_send(Kind.ALIVE)
        except ChannelClosed:
            return True  # the reader is about to find out
        if channel.heard or self.pinned:
            self._silence = 0.0
        else:
            self._silence += interval
        channel.heard = False
        return self._silence < patience

    @property
    def epoch(self) -> int:
        """Which reader is reading; a thread that finds another number than before has lost the reading."""
        return self._epoch

    def hand_over(self, epoch: int) -> None:
        """Let another thread read on, if the thread of `epoch` still holds the reading and is inside a frame.

        If no thread can be started, the reading stays where it is, and the error is raised.
        """
        with self._lock:
            if self._epoch != epoch or not self._busy:
                return
            self._threads.start(lambda: self._read_from(epoch + 1))
            self._epoch = epoch + 1
            self._busy = False
            self.hand_overs += 1
            if self._blocked is not None:
                self._blocked()

    def _read_from(self, epoch: int) -> None:
        """Begin to read once the hand-over is complete."""
        with self._lock:
            pass
        self._read(epoch)

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

    def __init__(self, loop: ReadLoop[Any], epoch: int) -> None:
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

    def more(self) -> bool:
        return self._loop.more(self._epoch)

    def afterwards(self, key: Hashable, job: Callable[[], None]) -> None:
        if not self._loop.leave(self._epoch, key, job):
            job()

    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool:
        return self._loop.at(self._epoch, key, moment, job)
