"""`EventLoop`: one thread at a time reads many connections of an agent and handles their frames.

Handing a message to another thread costs more than most calls do, and one thread per connection
would compete for the interpreter lock with all others. So the threads follow the leader/follower
pattern: one thread, the *leader*, waits for all connections (epoll). It receives what has arrived,
handles every frame on the spot, and sends the replies to a connection's frames together.

The leader must not delay the frames behind the one that it handles. So it hands the loop over to
another thread

- before it blocks in a known wait (`thread_roles.pause`: `Future.wait`, a full socket),
- inside a nested call, as soon as something arrives for the loop (`pause_when_needed`): often the
  reply is first, and no other thread has to be woken,
- or when the clock finds it inside the same frame at two consecutive ticks (`tick`).

Then the new leader continues with the next frame and the former leader with its call, after which
its thread ends. What a connection can do for several frames together, such as waking those who wait
for replies, it does when all frames that are here have been handled (`unfinished`, `finish`).

A connection becomes *ready* when epoll reports it or when it is posted (`post`);
`ConnectionPoller` says which connections are not read. The rest of a frame of more than
`_LARGE_FRAME` bytes is received by a thread of its own, so that it does not delay the others.

`LeaderRole` is what `thread_roles` calls on the thread that leads. A thread keeps its role after it
has handed the loop over: it still runs its call. All methods name the epoch in which the thread
led, and the loop ignores requests of a former leader.

State of an `EventLoop`: `_epoch` counts the hand-overs, under `_lock`. A thread leads while the
epoch in which it began to lead is the current one; it compares them after each frame. `_busy` is
True while the leader handles something; only then can the loop be handed over. `_current`,
`_last_read`, `_is_repeated`, `_should_spin`, `_poll_all_at`, `_idle_jobs` and `_timers` belong to
the leader; a hand-over passes them on, and so it does with `_ready`. `_in_wait` and `wait_count`
change under `_lock`. Any thread appends to `_posted` and adds to `_deferred`.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Hashable

from telegrad import thread_roles
from telegrad.errors import ProtocolError
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import Job, ThreadPool
from telegrad.scheduling.poller import READ, WRITE, ConnectionPoller, LoopConnection
from telegrad.spinning import SPIN_SECONDS, spinning
from telegrad.transport.channel import ChannelClosed
from telegrad.wire.frames import Frame

_FRAMES_PER_READ = 32  # frames of one connection that are handled before others are checked
_SMALL_FRAME = 1 << 12  # bytes of a frame that takes little time to handle
_LARGE_FRAME = 1 << 20  # missing bytes of a frame from which on another thread receives it
_POLLS_PER_EPOLL = 16  # polls of the last connection for each poll of all connections
_POLL_ALL_SECONDS = 0.0002  # after which all connections are polled, however busy the last one is
_now = time.monotonic
_log = logging.getLogger(__name__)


def _takes_long(frame: Frame) -> bool:
    """Return whether handling a frame has taken so long that nobody should wait for the next."""
    return bool(frame.buffers) or len(frame.body) > _SMALL_FRAME


class _LoopThreadState(threading.local):
    epoch = -1  # the epoch in which this thread leads or led


_local = _LoopThreadState()


class EventLoop(ConnectionPoller):
    """Read connections until they end; see the module's docstring."""

    def __init__(self, threads: ThreadPool, clock: Clock) -> None:
        super().__init__()
        self._threads = threads
        self._clock = clock
        self._ready: collections.deque[LoopConnection] = collections.deque()
        self._posted: collections.deque[LoopConnection | None] = collections.deque()
        self._deferred: set[LoopConnection] = set()  # those with frames for `flush_deferred`
        self._asleep = False  # the leader sleeps in epoll, or is about to
        self._current: LoopConnection | None = None  # the connection whose frames are handled
        self._idle_jobs: dict[Hashable, Job] = {}  # run when no frames are here
        self._timers: dict[Hashable, tuple[float, Job]] = {}
        self._last_read: LoopConnection | None = None
        self._is_repeated = False  # `_last_read` was read twice in succession
        self._should_spin = False  # the last wait was short, so the next one begins with spinning
        self._poll_all_at = 0.0  # when `_spin` polls all connections before the last one
        self._started = False
        self._closed = False
        self._epoch = 0
        self._busy = False
        self._in_wait = False  # the leader waits for a reply, and hands over when it is needed
        self.wait_count = 0  # waits of leaders for a reply so far
        self._handled = 0  # frames and jobs so far
        self._handled_at_tick = -1
        self.hand_over_count = 0

    def __repr__(self) -> str:
        state = "busy" if self._busy else "waiting"
        return f"<EventLoop {len(self._connections)} connections, {self._handled} frames, {state}>"

    def describe(self) -> dict[str, int | bool]:
        """Return the state of the loop as values of JSON."""
        return {
            "connections": len(self._connections),
            "frames": self._handled,
            "busy": self._busy,
            "hand_overs": self.hand_over_count,
        }

    def add(self, connection: LoopConnection) -> None:
        """Read a connection from now on. Raise `ChannelClosed` if the loop has ended."""
        channel = connection.channel
        connection.loop = self
        # before it is watched: its descriptor may change at any moment
        channel.on_send_blocked = lambda: self._watch_until_writable(connection)
        channel.on_descriptor_changed = lambda: self._watch_new_descriptor(connection)
        channel.on_frame = lambda: self.post(connection)
        with self._lock:
            if self._wake_fd < 0:
                raise ChannelClosed("this worker is shutting down")
            self._connections.add(connection)
            try:
                with channel.descriptor_lock:
                    fd = channel.fileno()
                    if fd is not None and not connection.watched_events:
                        self._update_epoll(connection, fd, READ)
                if not self._started:
                    self._threads.start(lambda: self._lead(0))
                    self._clock.add_listener(self)
                    self._started = True
            except BaseException:
                self._remove(connection)
                raise
        self.post(connection)  # frames may have arrived before

    def close(self) -> None:
        """End after the last connection. All connections must be ending."""
        with self._lock:
            self._closed = True
            if not self._started:
                self._close_descriptors()
        self.post(None)

    # Waking the leader

    def post(self, connection: LoopConnection | None) -> None:
        """Let the leader check a connection for frames. None only wakes the leader."""
        self._posted.append(connection)
        if self._asleep:
            self._asleep = False
            self._wake_up()

    def flush_soon(self, connection: LoopConnection) -> None:
        """Send the deferred frames when the leader is idle, at the latest at the next tick."""
        self._deferred.add(connection)
        if self._asleep:
            self.post(None)

    def _wake_up(self) -> None:
        """Interrupt the sleep of the leader."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # The leader

    def _lead(self, epoch: int) -> None:
        """Lead the loop in `epoch`: handle frames until another thread leads or the loop ends."""
        with self._lock:
            pass  # wait until the hand-over that started this thread is complete
        thread_roles.set_role(LeaderRole(self, epoch))
        _local.epoch = epoch
        try:
            while True:
                if self._current is None and not self._wait_for_connection(epoch):
                    return
                if not self._read_current(epoch):
                    return
        except BaseException:
            _log.exception("the event loop failed and is restarted; please report this")
            with self._lock:
                if self._epoch != epoch or self._closed:
                    return
                self._current, self._busy = None, False
            self._threads.start_with_retry(lambda: self._lead(epoch), self._clock)

    def _read_current(self, epoch: int) -> bool:
        """Handle the frames of the current connection. Return False if another thread leads now."""
        connection = self._current
        assert connection is not None
        if connection.error is not None:
            return self._finish_ended(connection, connection.error, epoch)
        channel, lock, clock = connection.channel, self._lock, self._clock
        next_frame, unfinished, count = channel.next_frame, connection.unfinished, 0
        try:
            if connection.readable:
                connection.readable = False
                channel.receive()
            frame = connection.take_received() if connection.received else next_frame()
            while frame is not None or unfinished:
                self._handled += 1
                self._busy = True
                if not clock.is_ticking:  # read after `_busy` is set: see `Clock._stop_ticking`
                    clock.start_ticking()
                if frame is None:
                    connection.finish()
                    must_finish = False
                else:
                    count += 1
                    connection.handle(frame)
                    must_finish = bool(unfinished) and _takes_long(frame)
                    frame = None  # it may keep shared memory of the sender
                with lock:
                    if self._epoch != epoch:
                        return False
                    self._busy = False
                if count < _FRAMES_PER_READ and not must_finish:
                    frame = next_frame()
            channel.flush_nowait()
            if connection.calls_on_flushed:
                connection.on_flushed()
        except BaseException as error:
            if not isinstance(error, ChannelClosed | ProtocolError):
                _log.exception("a connection failed in an unexpected way; please report this")
            return self._end_connection(connection, error, epoch)
        self._current = None
        if count == _FRAMES_PER_READ:
            self._enqueue(connection)  # behind the connections that can be read by now
            self._poll(0)
        elif channel.missing_bytes > _LARGE_FRAME:
            connection.receives_large_frame = True
            self._watch(connection, 0)
            self._threads.start_with_retry(lambda: self._receive_large(connection), self._clock)
        return True

    def _end_connection(self, connection: LoopConnection, error: BaseException, epoch: int) -> bool:
        """Note that a connection has ended. Return False if another thread leads: it does so."""
        with self._lock:
            if self._epoch != epoch:
                connection.channel.shutdown()
                return False
            self._remove(connection)
            connection.error = error
        return True  # `_current` is still this connection

    def _finish_ended(self, connection: LoopConnection, error: BaseException, epoch: int) -> bool:
        """Do what is left to do for a connection that has ended.

        Return False if another thread leads now, which does the rest.
        """
        while connection.unfinished:
            if not self._run_job(connection.finish, epoch):
                return False
        self._current = None
        return self._run_job(lambda: connection.on_ended(error), epoch)

    def _receive_large(self, connection: LoopConnection) -> None:
        """Receive a large frame on a thread of its own, then let the loop read the connection."""
        try:
            connection.received.append(connection.channel.recv())
        except BaseException as error:
            connection.received.append(error)
        connection.receives_large_frame = False
        self._watch(connection, READ)
        self.post(connection)

    def _wait_for_connection(self, epoch: int) -> bool:
        """Wait until `_current` is a connection that can be read; run jobs meanwhile.

        Return False if another thread leads now, or if the loop has ended.
        """
        while True:
            if self._posted:
                self._enqueue_posted()
            if self._ready:
                self._set_current(self._ready.popleft())
                return True
            if self._closed and not self._connections:
                self._clock.remove_listener(self)
                with self._lock:
                    self._close_descriptors()
                return False
            if self._idle_jobs:
                self._poll(0)  # frames that have arrived meanwhile go first
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
        """Let the leader read this connection next."""
        connection.queued = False
        self._is_repeated = connection is self._last_read and connection.watched_events == READ
        self._last_read = self._current = connection

    def _run_job(self, job: Job, epoch: int) -> bool:
        """Run a job that does not handle a frame. Return False if another thread leads now."""
        self._handled += 1
        self._busy = True
        if not self._clock.is_ticking:
            self._clock.start_ticking()
        job()
        with self._lock:
            if self._epoch != epoch:
                return False
            self._busy = False
            return True

    def _take_due_timer(self) -> Job | None:
        """Remove a timer that is due and return its job."""
        now = _now()
        for key, (moment, job) in self._timers.items():
            if moment <= now:
                del self._timers[key]
                return job
        return None

    def _sleep(self) -> bool:
        """Wait until something arrives or a timer is due. Return True if `_current` is set.

        If the last wait was short, poll for a moment before sleeping: waking a core that sleeps
        takes longer than a short call.
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
        # `post` appends before it reads `_asleep`: a later post wakes the leader
        if not self._posted:
            self._poll(timeout)
        self._asleep = False
        self._should_spin = spinning.is_worthwhile(started)
        return False

    def _spin(self) -> bool:
        """Poll for bytes for a moment without sleeping. Return True if `_current` is set.

        If one connection was read twice in succession, poll mostly that one: a `recv` costs less
        than a poll of all connections. Its next frame may always arrive before that poll, so after
        `_POLL_ALL_SECONDS` the others go first.
        """
        now = _now()
        if now < spinning.rest_until or not spinning.permit.acquire(blocking=False):
            return False
        try:
            last, until = self._last_read, now + SPIN_SECONDS
            # not if it must not be read now
            if not self._is_repeated or last is None or last.watched_events != READ:
                last = None
            if now > self._poll_all_at:
                self._poll_all_at = now + _POLL_ALL_SECONDS
                self._poll(0)
            while not self._ready and not self._posted:
                if last is not None and last.channel.poll(_POLLS_PER_EPOLL):
                    self._current = last
                    return True
                self._poll(0)
                before, now = now, _now()
                if spinning.lost_core(before, now) or now > until:
                    self._should_spin = False
                    return False
                os.sched_yield()
        except ChannelClosed:
            assert last is not None
            last.readable = True  # `_read_current` receives the same error and handles it
            self._enqueue(last)
        finally:
            spinning.permit.release()
        return False

    def _poll(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds for events; make connections ready that can be read."""
        for fd, events in self._epoll.poll(timeout):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            connection = self._by_fd.get(fd)
            if connection is None:
                continue
            if events & WRITE:
                self._flush(connection)
            if events != WRITE:
                connection.readable = True
                self._enqueue(connection)

    def _flush(self, connection: LoopConnection) -> None:
        """Send queued frames, because the peer receives again. Read again once all are sent."""
        try:
            complete = connection.channel.flush_nowait()
        except ChannelClosed:
            complete = True  # the next read finds that the channel is closed
        if complete and not connection.hold_count:
            self._watch(connection, READ)

    def _enqueue(self, connection: LoopConnection) -> None:
        """Append a connection to the ready queue, unless it is queued or must not be read."""
        if (
            not connection.queued
            and not connection.hold_count
            and not connection.receives_large_frame
        ):
            connection.queued = True
            self._ready.append(connection)

    def _enqueue_posted(self) -> None:
        """Move the posted connections to the ready queue."""
        while self._posted:
            connection = self._posted.popleft()
            if connection is not None and connection in self._connections:
                self._enqueue(connection)

    def _flush_deferred(self) -> None:
        """Send the deferred frames of all connections. Called by the leader and by the clock."""
        while self._deferred:
            try:
                connection = self._deferred.pop()
            except KeyError:
                return  # the other thread took the last one
            try:
                connection.channel.flush_deferred()
            except ChannelClosed as error:
                _log.debug("a deferred reply was not sent, the channel is closed: %s", error)
            except BaseException:
                self._deferred.add(connection)  # the next tick tries again
                raise

    # Hand-over

    @property
    def epoch(self) -> int:
        """Return the current epoch. A thread for which `own_epoch` differs no longer leads."""
        return self._epoch

    @property
    def own_epoch(self) -> int:
        """Return the epoch in which this thread leads or led. It never changes during a call."""
        return _local.epoch

    def hand_over(self, epoch: int) -> None:
        """Let another thread lead, if the thread of `epoch` still leads and handles something.

        If no thread can be started, nothing changes, and the error is raised.
        """
        with self._lock:
            self._hand_over_locked(epoch)

    def _hand_over_locked(self, epoch: int) -> bool:
        if self._epoch != epoch or not self._busy:
            return False
        self._threads.start(lambda: self._lead(epoch + 1))
        self._epoch = epoch + 1
        self._busy = self._in_wait = False
        self.hand_over_count += 1
        return True

    def begin_wait(self, epoch: int) -> bool:
        """Let the leader wait for a reply until it is needed: then `fileno` becomes readable.

        Return False if another thread leads now, because there is something to do already.
        """
        with self._lock:
            if self._epoch != epoch:
                return False
            self.wait_count += 1
            connection = self._current
        if connection is not None and not self._timers and not self._idle_jobs:
            if self._deferred:
                self._flush_deferred()
            # the replies to earlier frames: the peer that is called may wait for them
            if self._flush_replies(connection) and not self.has_more_input(epoch):
                with self._lock:
                    if self._epoch != epoch:
                        return False
                    self._in_wait = self._asleep = True
                if not self._posted:  # a later post wakes the leader
                    return True
        self.hand_over(epoch)
        return False

    def end_wait(self, epoch: int) -> None:
        """Undo `begin_wait`, if the loop was not handed over meanwhile."""
        if self._in_wait:
            with self._lock:
                if self._epoch == epoch:
                    self._in_wait = self._asleep = False

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the leader has something to do."""
        return self._epoll.fileno()

    @staticmethod
    def _flush_replies(connection: LoopConnection) -> bool:
        """Send the replies to the frames handled so far. Return False if some are left."""
        try:
            return connection.channel.flush_nowait()
        except ChannelClosed:
            return False  # the next read notices it

    def begin_backpressure(self, epoch: int) -> LoopConnection | None:
        """Hand over, and stop reading the connection whose frame the leader handles.

        For back-pressure. Return the connection, or None if the thread of `epoch` does not lead.
        """
        with self._lock:
            connection = self._current
            if not self._hand_over_locked(epoch) or connection is None:
                return None
            connection.hold_count += 1
            self._current = None
            self._unregister(connection)
            return connection

    def end_backpressure(self, connection: LoopConnection) -> None:
        """Undo one `begin_backpressure`. Read the connection again after the last one."""
        with self._lock:
            connection.hold_count -= 1
            if connection.hold_count:
                return
        self._watch(connection, READ)
        self.post(connection)

    def tick(self) -> bool:
        """Hand over if the leader has been inside one frame since the last tick.

        Called by the clock. Return True if anything has happened since the last tick.
        """
        if self._deferred:
            self._flush_deferred()
        with self._lock:
            # `_busy` is read first: the leader sets it last, and clears it under the lock
            is_blocked = self._busy and self._handled == self._handled_at_tick
            if not is_blocked:
                handled, self._handled_at_tick = self._handled_at_tick, self._handled
                return self._handled_at_tick != handled
            connection, in_wait = self._current, self._in_wait
            if self._hand_over_locked(self._epoch) and connection is not None and not in_wait:
                connection.on_blocked()  # before the new leader handles a frame of the connection
            return True

    def note_progress(self) -> None:
        """Count a part of what the leader handles as a frame of its own. The leader calls this."""
        self._handled += 1

    # Requests of the leader's thread (see `LeaderRole`)

    def has_more_input(self, epoch: int) -> bool:
        """Return whether the thread of `epoch` leads and will handle another frame at once."""
        current = self._current
        return self._epoch == epoch and bool(
            self._ready
            or (current is not None and (current.unfinished or current.channel.has_frame()))
        )

    def run_when_idle(self, epoch: int, key: Hashable, job: Job) -> bool:
        """Run `job` when no frames are here. Return False if the thread of `epoch` does not lead.

        A job with the same key is replaced.
        """
        with self._lock:
            if self._epoch == epoch:
                self._idle_jobs[key] = job
            return self._epoch == epoch

    def run_at(self, epoch: int, key: Hashable, moment: float, job: Job) -> bool:
        """Run `job` at `moment`. Return False if the thread of `epoch` does not lead.

        A job with the same key is replaced.
        """
        with self._lock:
            if self._epoch == epoch:
                self._timers[key] = moment, job
            return self._epoch == epoch


class LeaderRole:
    """The `ThreadRole` of the thread that leads `loop` in `epoch`."""

    def __init__(self, loop: EventLoop, epoch: int) -> None:
        self._loop = loop
        self._epoch = epoch
        self._held_connections: list[LoopConnection] = []

    def pause(self) -> None:
        """Hand the loop over, because this thread is about to block."""
        self._loop.hand_over(self._epoch)

    def pause_when_needed(self) -> LeaderRole | None:
        """Return itself as the `DelayedPause`, unless the loop has something to do now."""
        return self if self._loop.begin_wait(self._epoch) else None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the loop has something to do."""
        return self._loop.fileno()

    def resume(self) -> None:
        """Lead on, if the loop was not handed over. Else this thread ends after its call."""
        self._loop.end_wait(self._epoch)

    def begin_backpressure(self) -> None:
        """Hand the loop over, and stop reading the connection whose frame is handled here."""
        connection = self._loop.begin_backpressure(self._epoch)
        if connection is not None:
            self._held_connections.append(connection)

    def end_backpressure(self) -> None:
        """Undo the last `begin_backpressure`: read the connection again."""
        if self._held_connections:
            self._loop.end_backpressure(self._held_connections.pop())

    def has_pending_messages(self) -> bool:
        """Return whether this thread will handle another frame at once."""
        return self._loop.has_more_input(self._epoch)

    def run_when_drained(self, key: Hashable, job: Job) -> None:
        """Run `job` when no more frames are here; at once if this thread no longer leads."""
        if not self._loop.run_when_idle(self._epoch, key, job):
            job()

    def run_at(self, key: Hashable, when: float, job: Job) -> bool:
        """Run `job` at time `when`. Return False if this thread no longer leads."""
        return self._loop.run_at(self._epoch, key, when, job)
