"""Threads that run jobs: `ThreadPool`, which has no limit, and `Executor`, which has one.

`ThreadPool` has daemon threads that are reused: `start` uses an idle thread or creates one. Idle
threads end after `_IDLE_SECONDS`. Nothing refers to a job that has ended, because a job holds the
message that it served, and with that shared memory of the sender. The arguments of a thread live as
long as the thread does. So a job is passed to a new thread in a list (`job_box`), from which the
thread removes it.

`Executor` runs calls on threads of a pool. It runs up to `initial_limit` calls at once. More calls
wait in a queue, except that

- a call inside a known wait (a nested call, `Future.wait`) does not count, and
- the limit doubles when no call has finished between two ticks of the clock, because the running
  calls are then considered blocked. It returns to `initial_limit` when the queue is empty.

So calls that wait for each other always progress, and calls that compute do not compete for cores.
The limit never exceeds `max_limit`. When as many calls wait in the queue, `submit` blocks, which is
back-pressure on the callers.

If the running calls compete for the interpreter lock, the limit may be lower (`contention`).

Threads of the executor have the executor as their `ThreadRole` (`telegrad.thread_roles`).

`SlowCallbacks` has the callbacks of futures that the executor runs because they blocked the event
loop.

State of a `ThreadPool`: `_idle`, `_count` and `_closed`, under `_lock`. `_alive` is changed by
single operations. State of an `Executor`: the counters, the queue and the `ContentionControl`,
under `_lock`.
`SlowCallbacks` is written by atomic operations of the dict, by the leader of the event loop and by
threads of the executor; a race loses a sample.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import logging
import resource
import threading
import time
from collections.abc import Callable, Hashable, Iterable

import torch

from telegrad import thread_roles
from telegrad.errors import InternalError
from telegrad.locks import new_lock
from telegrad.messages.remote_functions import MAX_FUNCTIONS
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.contention import ContentionControl

Job = Callable[[], None]
_IDLE_SECONDS = 10.0  # after which an idle thread ends
_RETRY_SECONDS = 0.05  # after which a thread that the system refused is requested again
SLOW_SECONDS = 0.002  # seconds; a function or callback that takes longer is run by the executor
_log = logging.getLogger(__name__)

# Make torch's operations on this thread use the number of `torch.set_num_threads`. A thread takes
# that number over when it first asks for it. Until then, its matrix products use a thread for each
# core, on cores that other workers need. Called before a thread runs a function of the user. When
# the thread starts would be too early: most programs set the number later.
apply_torch_num_threads = torch.get_num_threads


class ThreadPool:
    """Threads that each run one job at a time. `initializer` runs first on each new thread.

    The thread that became idle last is used first: its caches, and the threads that OpenMP created
    for it, were used most recently.
    """

    def __init__(self, name: str, initializer: Job) -> None:
        self._name = name
        self._initializer = initializer
        self._idle: list[_IdleThread] = []
        self._count = 0  # threads created so far
        self._closed = False
        self._lock = new_lock()
        self._alive: set[threading.Thread] = set()

    def __repr__(self) -> str:
        return f"<ThreadPool {self._name}: {len(self._alive)} alive, {len(self._idle)} idle>"

    def start(self, job: Job) -> None:
        """Run `job` at once on a thread that runs nothing else.

        Raise `RuntimeError` if the system refuses a thread.
        """
        with self._lock:
            if self._idle:
                self._idle.pop().wake(job)
                return
            self._count += 1
            name = f"{self._name}-{self._count}"
            thread = threading.Thread(target=self._run, args=([job],), name=name, daemon=True)
            self._alive.add(thread)
        try:
            thread.start()
        except BaseException:
            self._alive.discard(thread)
            raise

    def start_with_retry(self, job: Job, clock: Clock, *, is_retry: bool = False) -> None:
        """Start `job`; if the system refuses a thread, retry until it does not.

        For jobs that must not be lost.
        """
        try:
            self.start(job)
        except RuntimeError as error:
            if self._closed:
                return
            if not is_retry:
                _log.warning("%s cannot start a thread (%s); retrying", self._name, error)
            retry_at = time.monotonic() + _RETRY_SECONDS
            clock.call_at(retry_at, lambda: self.start_with_retry(job, clock, is_retry=True))

    def _run(self, job_box: list[Job]) -> None:
        # In free-threaded Python 3.14 a thread inherits the context variables of the thread that
        # starts it, such as the scope of the call that happens to run there. Start without them.
        contextvars.Context().run(self._run_jobs, job_box)

    def _run_jobs(self, job_box: list[Job]) -> None:
        job: Job | None = job_box.pop()
        try:
            self._initializer()
            while job is not None:
                try:
                    job()
                except BaseException:
                    _log.exception("a thread of Telegrad failed; please report this")
                del job
                thread_roles.set_role(None)
                try:
                    job = self._wait_for_job()
                # out of memory or descriptors: one idle thread fewer
                except (MemoryError, OSError, SystemExit) as error:
                    _log.info("an idle thread ends: %s", error)
                    return
        finally:
            self._alive.discard(threading.current_thread())

    def _wait_for_job(self) -> Job | None:
        """Wait for the next job of this thread. Return None if the thread shall end."""
        idle_thread = _IdleThread()
        with self._lock:
            if self._closed:
                return None
            self._idle.append(idle_thread)
        if not idle_thread.sleep(_IDLE_SECONDS):
            with self._lock:
                if idle_thread in self._idle:
                    self._idle.remove(idle_thread)
                    return None
            idle_thread.sleep(None)  # `start` has just chosen this thread: the job is on its way
        return idle_thread.job

    def close(self, timeout: float) -> None:
        """End the idle threads and wait for the others, whose jobs must be ending."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().wake(None)
            alive = list(self._alive)
        until = time.monotonic() + timeout
        for thread in alive:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0))


class _IdleThread:
    """A thread that waits for a job."""

    __slots__ = ("_lock", "job")

    def __init__(self) -> None:
        self.job: Job | None = None
        self._lock = new_lock()
        self._lock.acquire()

    def wake(self, job: Job | None) -> None:
        """Give the thread a job; None ends the thread."""
        self.job = job
        self._lock.release()

    def sleep(self, timeout: float | None) -> bool:
        """Wait for `wake`. Return False after `timeout` seconds."""
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)


class SlowCallbacks(dict[Hashable, float]):
    """The average seconds that slow callbacks take, by their code."""

    def mark(self, callbacks: Iterable[Hashable]) -> None:
        """Add callbacks that have blocked the event loop."""
        for callback in callbacks:
            if len(self) < MAX_FUNCTIONS:
                self[callback] = 2 * SLOW_SECONDS

    def add_duration(self, callbacks: Iterable[Hashable], seconds: float) -> None:
        """Update the averages, and remove callbacks that no longer take long."""
        for callback in callbacks:
            average = self.get(callback)
            if average is not None:
                average += (seconds - average) * 0.25
                self[callback] = average
                if average < SLOW_SECONDS:
                    self.pop(callback, None)


class Executor:
    """Run calls on threads of `threads`; see the module's docstring."""

    def __init__(self, threads: ThreadPool, initial_limit: int, max_limit: int) -> None:
        self._threads = threads
        self._initial_limit = initial_limit
        self._max_limit = max_limit
        self._limit = initial_limit
        self._active = 0  # threads that run calls and are not in a known wait
        self._finished = 0
        self._finished_at_tick = 0
        self._queue: collections.deque[Job] = collections.deque()
        self._lock = new_lock()
        self._has_room = threading.Condition(self._lock)
        self._contention = ContentionControl()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Executor {self._active} of {self._limit} active, {len(self._queue)} queued>"

    @property
    def active(self) -> int:
        """Return the number of calls that run or are queued."""
        return self._active + len(self._queue)

    @property
    def running(self) -> int:
        """Return the number of calls that run and are not in a known wait."""
        return self._active

    @property
    def limit(self) -> int:
        """Return how many calls may run at once now."""
        return self._limit

    def submit(self, job: Job) -> None:
        """Run `job` as soon as the limit permits. Block while the queue is full."""
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

    def try_submit(self, job: Job) -> bool:
        """Submit `job` without blocking. Return False if it was not accepted.

        That is the case if it might wait forever for the calls before it, or if the system refuses
        a thread.
        """
        if self._active + len(self._queue) >= self._max_limit:
            return False
        try:
            self.submit(job)
        except RuntimeError as error:
            _log.warning("the system refuses a thread: %s", error)
            return False
        return True

    def _wait_for_room(self) -> None:
        """Block the thread that delivers calls. Its connection is not read meanwhile."""
        role = thread_roles.begin_backpressure()
        try:
            with self._lock:
                while len(self._queue) >= self._max_limit and not self._closed:
                    self._has_room.wait()
        finally:
            thread_roles.end_backpressure(role)

    def _run_jobs(self, job_box: list[Job]) -> None:
        """Run a job, then queued jobs while the limit permits. `job_box`: see `ThreadPool`."""
        job: Job | None = job_box.pop()
        thread_roles.set_role(self)
        started, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD)
        while job is not None:
            try:
                job()
            except BaseException:
                _log.exception("a call failed in an unexpected way; please report this")
            began, before = started, usage
            started, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD)
            processor_seconds = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
            with self._lock:
                self._contention.add(
                    started - began, processor_seconds, usage.ru_nvcsw - before.ru_nvcsw
                )
                self._finished += 1
                job = self._next_job()
                if job is None:
                    self._active -= 1

    def _next_job(self) -> Job | None:
        """Under the lock: remove and return a queued job that the calling thread may run."""
        if not self._queue or self._active > self._limit:
            return None
        job = self._queue.popleft()
        self._has_room.notify()
        return job

    # The role of the executor's threads

    def pause(self) -> None:
        """Let another call run, because this thread is about to block in a known wait."""
        with self._lock:
            self._active -= 1
            self._start_queued()

    def pause_when_needed(self) -> None:
        """Do what `pause` does: a queued call can run."""
        self.pause()

    def resume(self) -> None:
        """Count this thread again after its wait."""
        with self._lock:
            self._active += 1

    def begin_backpressure(self) -> None:
        """Do nothing: the thread still counts, so back-pressure reaches the queue."""
        return

    def end_backpressure(self) -> None:
        """Do nothing; see `begin_backpressure`."""
        return

    def has_pending_messages(self) -> bool:
        """Return False: this thread reads no connection."""
        return False

    def run_when_drained(self, key: Hashable, job: Job) -> None:
        """Raise `InternalError`: this is only called if `has_pending_messages` returned True."""
        raise InternalError(
            "a thread of the executor reads no connection: `has_pending_messages` is never true"
        )

    def run_at(self, key: Hashable, when: float, job: Job) -> bool:
        """Return False: this thread does not run timers."""
        return False

    def close(self) -> None:
        """Discard the calls that have not begun, and wake the threads that wait for room."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._has_room.notify_all()

    def tick(self) -> bool:
        """Raise the limit if the running calls do not progress.

        Called by the clock. Return True if there has been activity since the last tick.
        """
        with self._lock:
            if self._queue and self._finished == self._finished_at_tick:
                self._limit = min(self._limit * 2, self._max_limit)
                self._start_queued()
            elif not self._queue and self._active < self._limit:
                self._limit = self._initial_limit
            limit = self._contention.limit(self._limit, self._active)
            if limit != self._limit:
                self._limit = limit
                self._start_queued()
            is_active = self._finished_at_tick != self._finished or bool(self._queue)
            self._finished_at_tick = self._finished
            return is_active

    def _start_queued(self) -> None:
        """Under the lock: start queued calls while the limit permits.

        If the system refuses a thread, the next tick tries again.
        """
        while self._queue and self._active < self._limit:
            try:
                self._threads.start(functools.partial(self._run_jobs, [self._queue[0]]))
            except RuntimeError as error:
                _log.warning("%s calls wait for a thread: %s", len(self._queue), error)
                return
            self._queue.popleft()
            self._has_room.notify()
            self._active += 1
