"""A pool that grows when its threads are blocked rather than busy.

`Executor` runs calls on threads of a `ThreadPool`: up to `initial_limit` at once. More wait in a queue, but

- a call that is inside a wait we know of (a nested call, `Future.wait`) does not count, and
- when nothing has finished between two ticks of the watchdog, the calls are taken to be blocked and the limit doubles,

so calls that wait for each other always make progress, and calls that compute do not trample each other. `max_limit` is
the end of it: from there on the queue is back-pressure.

State: the counters and the queue under `Executor._lock`.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Hashable

from telegrad import blocking
from telegrad.errors import InternalError
from telegrad.scheduling.thread_pool import Job, ThreadPool

SLOW = 0.002  # seconds: a function or a callback that takes longer is run by the executor
_log = logging.getLogger(__name__)


class Executor:
    """Runs calls on threads; see the top of the file."""

    def __init__(self, threads: ThreadPool, initial_limit: int, max_limit: int) -> None:
        self._threads = threads
        self._initial_limit = initial_limit
        self._max_limit = max_limit
        self._limit = initial_limit
        self._active = 0
        self._finished = 0
        self._finished_at_tick = 0
        self._queue: collections.deque[Job] = collections.deque()
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Executor {self._active} of {self._limit} active, {len(self._queue)} queued>"

    @property
    def active(self) -> int:
        """Calls that run or wait for a thread."""
        return self._active + len(self._queue)

    @property
    def limit(self) -> int:
        """How many calls may run at once now."""
        return self._limit

    def submit(self, job: Job) -> None:
        """Run `job` as soon as a place is free. Blocks while too many wait already."""
        if len(self._queue) >= self._max_limit:
            self._wait_for_room()
        with self._lock:
            if self._active >= self._limit:
                self._queue.append(job)
                return
            self._active += 1
        try:
            self._threads.start(functools.partial(self._run_jobs, [job]))
        except BaseException:
            with self._lock:
                self._active -= 1
            raise

    def offer(self, job: Job) -> bool:
        """Like `submit`, but never blocks. False: the job might wait for those before it for ever, or has no thread."""
        if self._active + len(self._queue) >= self._max_limit:
            return False
        try:
            self.submit(job)
        except RuntimeError as error:
            _log.warning("the system refuses a thread: %s", error)
            return False
        return True

    def _wait_for_room(self) -> None:
        """Hold up the thread that brings calls, so that the caller feels it."""
        role = blocking.hold()
        try:
            with self._lock:
                while len(self._queue) >= self._max_limit and not self._closed:
                    self._has_room.wait()
        finally:
            blocking.release(role)

    def _run_jobs(self, job_box: list[Job]) -> None:
        job: Job | None = job_box.pop()
        blocking.take(self)
        while job is not None:
            try:
                job()
            except BaseException:
                _log.exception("a call failed in an unexpected way; please report this")
            with self._lock:
                self._finished += 1
                job = self._next_job()
                if job is None:
                    self._active -= 1

    def _next_job(self) -> Job | None:
        """The next queued job, if the calling thread may run it."""
        if not self._queue or self._active > self._limit:
            return None
        job = self._queue.popleft()
        self._has_room.notify()
        return job

    def pause(self) -> None:
        """This thread is about to block in a wait that we know of: its place is free."""
        with self._lock:
            self._active -= 1
            self._start_queued()

    def resume(self) -> None:
        with self._lock:
            self._active += 1

    def hold(self) -> None:
        return  # its place stays taken, which is what back-pressure means here

    def release(self) -> None:
        return

    def more(self) -> bool:
        return False

    def afterwards(self, key: Hashable, job: Job) -> None:
        raise InternalError("a thread that reads nothing has nothing to wait for")

    def at(self, key: Hashable, moment: float, job: Job) -> bool:
        return False

    def close(self) -> None:
        """Forget the calls that have not begun and let nobody wait for room."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._has_room.notify_all()

    def tick(self) -> bool:
        """Called by the clock: let more calls run if those that run make no progress."""
        with self._lock:
            if self._queue and self._finished == self._finished_at_tick:
                self._limit = min(self._limit * 2, self._max_limit)
                self._start_queued()
            elif not self._queue:
                self._limit = self._initial_limit
            moved = self._finished_at_tick != self._finished or bool(self._queue)
            self._finished_at_tick = self._finished
            return moved

    def _start_queued(self) -> None:
        """Start queued calls while places are free. If the system refuses a thread, the next tick tries again."""
        while self._queue and self._active < self._limit:
            try:
                self._threads.start(functools.partial(self._run_jobs, [self._queue[0]]))
            except RuntimeError as error:
                _log.warning("%s calls wait for a thread: %s", len(self._queue), error)
                return
            self._queue.popleft()
            self._has_room.notify()
            self._active += 1
