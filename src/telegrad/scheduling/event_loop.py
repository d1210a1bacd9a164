"""`EventLoop`: one thread at a time reads many connections of an agent and handles each frame where it read it.

Handing a message to another thread costs more than most calls do, and a thread for each connection would compete for
the interpreter lock with all others. So one thread, the *leader*, waits for all of them (epoll). It reads what has
arrived, handles every frame, and sends what a connection's frames were answered with in one go. It must not hold up
the frames behind the one it handles, so it gives the loop to another thread

- before it blocks in a wait that we know of (`waiting.pause`: a nested call, `Future.wait`, a full socket), or
- when the clock finds it inside the same frame at two ticks (`tick`).

Either thread continues on its own from there: the new leader with the next frame, the old one with its call.

A connection is not read while its peer does not take what it was answered with, and while a thread holds it up on
purpose (`waiting.hold`: back-pressure). The rest of a frame of more than `_LARGE_FRAME` bytes is received by
a thread of its own, so that the others do not wait for it.

An agent has one loop for all connections. Where Python has no interpreter lock, threads do not compete, and it has
several (`EventLoops`). A connection stays with the loop that it was given to.

State: under `_lock`, `_epoch` counts the hand-overs; a thread leads while its own epoch is the current one. `_busy` is
True while the leader handles something; only then can the loop be taken from it. `_by_fd` (those with a file
descriptor) and what epoll watches are changed under the lock, too. `_ready`, `_current`, `_last_read`, `_is_repeated`,
`_idle_jobs` and `_timers` belong to the leader. `_posted` and `_deferred` are added to by anybody.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Hashable
from typing import Any

from telegrad import blocking
from telegrad.errors import ProtocolError
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.leader_role import LeaderRole
from telegrad.scheduling.loop_connection import LoopConnection
from telegrad.scheduling.poller import READ, ConnectionPoller
from telegrad.scheduling.thread_pool import Job, ThreadPool
from telegrad.transport.channel import ChannelClosed
from telegrad.transport.spinning import CONTENDED_SECONDS, CORES, SPIN_SECONDS, spin_permit
from telegrad.wire.frames import Frame

_FRAMES_PER_READ = 32  # of one connection, while others may have something to read
_LARGE_FRAME = 1 << 20  # bytes of a frame that are still to come
_POLLS_PER_EPOLL = 16  # at one connection, for each look at all

_log = logging.getLogger(__name__)
_now = time.monotonic


class _Local(threading.local):
    epoch = -1


_local = _Local()


class EventLoop(ConnectionPoller):
    """Reads connections until they end; see the top of the file."""

    def __init__(self, threads: ThreadPool, clock: Clock) -> None:
        super().__init__()
        self._threads = threads
        self._clock = clock
        self._current: LoopConnection | None = None
        self._deferred: set[LoopConnection] = set()  # added to by anybody
        self._idle_jobs: dict[Hashable, Job] = {}
        self._timers: dict[Hashable, tuple[float, Job]] = {}
        self._last_read: LoopConnection | None = None  # the one that was read last
        self._is_repeated = False  # it was read twice in a row
        self._should_spin = False
        self._started = False
        self._closed = False
        self._epoch = 0
        self._busy = False
        self._handled = 0
        self._handled_at_tick = -1
        self.hand_overs = 0

    def __repr__(self) -> str:
        state = "busy" if self._busy else "waiting"
        return f"<EventLoop {len(self._connections)} connections, {self._handled} frames, {state}>"

    # Connections; by any thread

    def add(self, connection: LoopConnection) -> None:
        """Read a connection from now on. Raises `ChannelClosed` if the loop is over."""
        fd = connection.channel.fileno()
        connection.loop = self
        with self._lock:
            if self._wake_fd < 0:
                raise ChannelClosed("this worker is shutting down")
            self._connections.add(connection)
            try:
                if fd is not None:
                    self._update_epoll(connection, fd, READ)
                if not self._started:
                    self._threads.start(lambda: self._lead(0))
                    self._clock.watch(self)
                    self._started = True
            except BaseException:
                self._remove(connection)
                raise
        connection.channel.on_send_blocked = lambda: self._watch_until_writable(connection)
        if fd is None:
            connection.channel.on_frame = lambda: self.post(connection)
        self.post(connection)  # what came before

    def flush_soon(self, connection: LoopConnection) -> None:
        """Send what was corked late when there is nothing else to do, or at the next tick."""
        self._deferred.add(connection)
        if self._asleep:
            self.post(None)

    def _flush_deferred(self) -> None:
        while self._deferred:
            try:
                connection = self._deferred.pop()
            except KeyError:
                return  # another thread was faster: the leader and the clock come here
            try:
                connection.channel.flush_deferred()
            except ChannelClosed as error:
                _log.debug("nobody is left to take an answer: %s", error)
            except BaseException:
                self._deferred.add(connection)  # the next tick tries again
                raise

    def close(self) -> None:
        """End with the last connection. All must have been told to end."""
        with self._lock:
            self._closed = True
            if not self._started:
                self._close_descriptors()
        self.post(None)

    # The leader

    def _lead(self, epoch: int) -> None:
        """Begin to lead once the hand-over is complete."""
        with self._lock:
            pass
        blocking.take(LeaderRole(self, epoch))
        _local.epoch = epoch
        try:
            while True:
                if self._current is None and not self._wait_for_connection(epoch):
                    return
                if not self._read_current(epoch):
                    return
        except BaseException:
            _log.exception("the event loop failed; it goes on. Please report this")
            with self._lock:
                if self._epoch != epoch or self._closed:
                    return
                self._current, self._busy = None, False
            self._threads.start_when_possible(lambda: self._lead(epoch), self._clock)

    def _read_current(self, epoch: int) -> bool:
        """Handle what the current connection has received. False if another thread leads now."""
        connection = self._current
        assert connection is not None
        channel, lock = connection.channel, self._lock
        next_frame, received = channel.next_frame, connection.received
        clock, count = self._clock, 0
        try:
            if connection.readable:
                connection.readable = False
                channel.receive()
            while count < _FRAMES_PER_READ:
                frame = next_frame() if not received else _take_received(received)
                if frame is None:
                    break
                count += 1
                self._handled += 1
                self._busy = True
                if not clock.awake:  # asked last: see `Clock._drowse`
                    clock.wake()
                connection.handle(frame)
                del frame
                with lock:
                    if self._epoch != epoch:
                        return False
                    self._busy = False
            channel.flush_nowait()
        except BaseException as error:
            if not isinstance(error, ChannelClosed | ProtocolError):
                _log.exception("a connection failed in an unexpected way; please report this")
            return self._end_connection(connection, error, epoch)
        self._current = None
        if count == _FRAMES_PER_READ:
            self._enqueue(connection)
            self._poll(0)
        elif channel.missing_bytes > _LARGE_FRAME:
            connection.receives_large_frame = True
            self._watch(connection, 0)
            self._threads.start_when_possible(lambda: self._receive_large(connection), self._clock)
        return True

    def _end_connection(self, connection: LoopConnection, error: BaseException, epoch: int) -> bool:
        """A connection is over. False if another thread leads now, which will find that out itself."""
        with self._lock:
            if self._epoch != epoch:
                connection.channel.shut()
                return False
            self._remove(connection)
            self._current = None
        return self._run_job(lambda: connection.ended(error), epoch)

    def _receive_large(self, connection: LoopConnection) -> None:
        """Receive a large frame on a thread of its own, then let the loop go on with the connection."""
        try:
            connection.received.append(connection.channel.recv())
        except BaseException as error:
            connection.received.append(error)
        connection.receives_large_frame = False
        self._watch(connection, READ)
        self.post(connection)

    def _wait_for_connection(self, epoch: int) -> bool:
        """Wait until a connection has something to read. False if another thread leads now, or the loop is over."""
        while True:
            if self._posted:
                self._enqueue_posted()
            if self._ready:
                self._set_current(self._ready.popleft())
                return True
            if self._closed and not self._connections:
                self._clock.unwatch(self)
                with self._lock:
                    self._close_descriptors()
                return False
            if self._idle_jobs:
                self._poll(0)  # what has arrived meanwhile goes first
                if not self._ready and not self._run_job(self._idle_jobs.popitem()[1], epoch):
                    return False
                continue
            due = self._take_due_timer() if self._timers else None
            if due is not None:
                if not self._run_job(due, epoch):
                    return False
            elif self._sleep():
                return True

    def _set_current(self, connection: LoopConnection) -> None:
        """Let the next turn be that of this connection."""
        connection.queued = False
        self._is_repeated = connection is self._last_read and connection.watched_events == READ
        self._last_read = self._current = connection

    def _run_job(self, job: Job, epoch: int) -> bool:
        """Run a job that is no frame. False if another thread leads now."""
        self._handled += 1
        self._busy = True
        if not self._clock.awake:
            self._clock.wake()
        job()
        with self._lock:
            if self._epoch != epoch:
                return False
            self._busy = False
            return True

    def _take_due_timer(self) -> Job | None:
        """Return an alarm whose moment has come."""
        now = _now()
        for key, (moment, job) in self._timers.items():
            if moment <= now:
                del self._timers[key]
                return job
        return None

    def _sleep(self) -> bool:
        """Sleep until something arrives or an alarm is due. Where the last wait was short, stay awake for a moment:

        waking a core that went to sleep takes longer than a short call. True: the next turn has been chosen.
        """
        if self._should_spin and not self._timers:
            if self._spin():
                return True
            if self._ready or self._posted:
                return False
        if self._deferred:
            self._flush_deferred()
        timeout: float | None = None
        if self._timers:
            timeout = max(min(moment for moment, _ in self._timers.values()) - _now(), 0.0)
        started = _now()
        self._asleep = True
        if not self._posted:  # whoever posts from now on wakes us
            self._poll(timeout)
        self._asleep = False
        self._should_spin = CORES > 1 and _now() - started < SPIN_SECONDS
        return False

    def _spin(self) -> bool:
        """Look for bytes for a moment without sleeping. True: the next turn has been chosen.

        If one connection has had the last two turns, it is looked at most often: that costs less than a look at all.
        """
        if not spin_permit.acquire(blocking=False):
            return False
        try:
            now = _now()
            last, until = self._last_read, now + SPIN_SECONDS
            if (
                not self._is_repeated or last is None or last.watched_events != READ
            ):  # it must not be read now
                last = None
            while not self._ready and not self._posted:
                if last is not None and last.channel.poll(_POLLS_PER_EPOLL):
                    self._current = last
                    return True
                self._poll(0)
                before, now = now, _now()
                if now > until or now > before + CONTENDED_SECONDS:
                    self._should_spin = False
                    return False
                os.sched_yield()
        except ChannelClosed:
            assert last is not None
            last.readable = True  # `_read_current` meets the end again
            self._enqueue(last)
        finally:
            spin_permit.release()
        return False

    # Handing over

    @property
    def epoch(self) -> int:
        """Which leader leads; a thread that finds another number than `own_epoch` leads no more."""
        return self._epoch

    @property
    def own_epoch(self) -> int:
        """In a thread that leads or has led: when it did. Unlike `epoch`, this never changes during a call."""
        return _local.epoch

    def hand_over(self, epoch: int) -> bool:
        """Let another thread lead, if the thread of `epoch` still does and is handling something.

        If no thread can be started, the loop stays where it is, and the error is raised.
        """
        with self._lock:
            return self._hand_over_locked(epoch)

    def _hand_over_locked(self, epoch: int) -> bool:
        if self._epoch != epoch or not self._busy:
            return False
        self._threads.start(lambda: self._lead(epoch + 1))
        self._epoch = epoch + 1
        self._busy = False
        self.hand_overs += 1
        return True

    def hold(self, epoch: int) -> LoopConnection | None:
        """The thread of `epoch` blocks on purpose: hand over, and do not read the connection it came from."""
        with self._lock:
            connection = self._current
            if not self._hand_over_locked(epoch) or connection is None:
                return None
            connection.hold_count += 1
            self._current = None
            fd = connection.channel.fileno()
            if fd is not None and connection.watched_events:
                self._update_epoll(connection, fd, 0)
            return connection

    def release(self, connection: LoopConnection) -> None:
        """Read a connection that was held up again."""
        with self._lock:
            connection.hold_count -= 1
            if connection.hold_count:
                return
        self._watch(connection, READ)
        self.post(connection)

    def tick(self) -> bool:
        """The clock looks in: has the leader been inside one frame since the last time?"""
        if self._deferred:
            self._flush_deferred()
        serial, busy, epoch, connection = self._handled, self._busy, self._epoch, self._current
        if busy and serial == self._handled_at_tick:
            if self.hand_over(epoch) and connection is not None:
                connection.blocked()
            return True
        moved = serial != self._handled_at_tick
        self._handled_at_tick = serial
        return moved

    # What a thread that leads can ask for (see `waiting`)

    def has_more_input(self, epoch: int) -> bool:
        """Will the thread of `epoch` read another frame at once?"""
        current = self._current
        return self._epoch == epoch and bool(
            self._ready or (current is not None and current.channel.has_frame())
        )

    def run_when_idle(self, epoch: int, key: Hashable, job: Job) -> bool:
        """Do this when nothing more is here. False: the thread of `epoch` does not lead any more."""
        with self._lock:
            if self._epoch == epoch:
                self._idle_jobs[key] = job
            return self._epoch == epoch

    def run_at(self, epoch: int, key: Hashable, moment: float, job: Job) -> bool:
        """Do this at that moment. False: the thread of `epoch` does not lead any more."""
        with self._lock:
            if self._epoch == epoch:
                self._timers[key] = moment, job
            return self._epoch == epoch


def _take_received(received: collections.deque[Any]) -> Frame:
    frame = received.popleft()
    if isinstance(frame, BaseException):
        raise frame
    return frame  # type: ignore[no-any-return]


# Until all importers use the modules that these names moved to. At the end of the file, because
# `event_loops` imports `EventLoop`.
from telegrad.scheduling.event_loops import EventLoops  # noqa: E402

__all__ = ["EventLoop", "EventLoops", "LoopConnection"]
