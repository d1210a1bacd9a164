"""Threads that are reused.

`ThreadPool` starts a function on an idle thread or a new one, without a bound; idle ones end after a while.

A job that has ended is referenced by nobody, since it holds the message that it served, and with
that shared memory of the sender. A thread runs one job after the other, and what it was started
with lives as long as it does. So a job is given to a thread in a list, from which the thread takes it.

State: `ThreadPool._idle` under its lock.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable

from telegrad import blocking
from telegrad.scheduling.clock import Clock

Job = Callable[[], None]

_IDLE_SECONDS = 10.0
_RETRY_SECONDS = 0.05  # seconds until a thread that the system refused is asked for again
_log = logging.getLogger(__name__)


class ThreadPool:
    """Daemon threads, each running one job at a time. `initializer` runs first on each new one.

    The thread that was idle for the shortest time is used first: its caches are warm, and so are the threads that
    OpenMP made for it.
    """

    def __init__(self, name: str, initializer: Job) -> None:
        self._name = name
        self._initializer = initializer
        self._idle: list[_IdleThread] = []
        self._count = 0
        self._closed = False
        self._lock = threading.Lock()
        self._alive: set[threading.Thread] = set()

    def __repr__(self) -> str:
        return f"<ThreadPool {self._name}: {len(self._alive)} alive, {len(self._idle)} idle>"

    def start(self, job: Job) -> None:
        """Run `job` at once on a thread of its own."""
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

    def start_when_possible(self, job: Job, clock: Clock) -> None:
        """Like `start`, but if the system refuses a thread, try again until it does not. For what must not be lost."""
        try:
            self.start(job)
        except RuntimeError as error:
            if self._closed:
                return
            _log.warning("%s cannot start a thread (%s); trying again", self._name, error)
            clock.at(
                time.monotonic() + _RETRY_SECONDS, lambda: self.start_when_possible(job, clock)
            )

    def _run(self, job_box: list[Job]) -> None:
        # Free-threaded Python 3.14 lets a thread inherit the context variables of the one that starts it, such as the
        # scope of the call that it happens to run.
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
                blocking.take(None)
                try:
                    job = self._wait_for_job()
                # a shortage: one idle thread fewer
                except (MemoryError, OSError, SystemExit) as error:
                    _log.info("an idle thread ends: %s", error)
                    return
        finally:
            self._alive.discard(threading.current_thread())

    def _wait_for_job(self) -> Job | None:
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
            idle_thread.sleep(None)  # it was given a job at this moment
        return idle_thread.job

    def close(self, timeout: float) -> None:
        """End the idle threads and wait for the others, which must have been told to end."""
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
    """An idle thread."""

    __slots__ = ("_lock", "job")

    def __init__(self) -> None:
        self.job: Job | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self, job: Job | None) -> None:
        self.job = job
        self._lock.release()

    def sleep(self, timeout: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)
