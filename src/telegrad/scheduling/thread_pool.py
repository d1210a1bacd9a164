"""`ThreadPool`: daemon threads that are reused.

The pool has no limit: `start` uses an idle thread or creates one. Idle threads end after
`_IDLE_SECONDS`.

Nothing refers to a job that has ended, because a job holds the message that it served, and with
that shared memory of the sender. The arguments of a thread live as long as the thread does. So a
job is passed to a new thread in a list (`job_box`), from which the thread removes it.

State: `_idle`, `_count` and `_closed`, under `_lock`. `_alive` is changed by single operations.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable

from telegrad import thread_roles
from telegrad.scheduling.clock import Clock

Job = Callable[[], None]

_IDLE_SECONDS = 10.0  # after which an idle thread ends
_RETRY_SECONDS = 0.05  # after which a thread that the system refused is requested again
_log = logging.getLogger(__name__)


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
        self._lock = threading.Lock()
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

    def start_with_retry(self, job: Job, clock: Clock) -> None:
        """Start `job`; if the system refuses a thread, retry until it does not.

        For jobs that must not be lost.
        """
        try:
            self.start(job)
        except RuntimeError as error:
            if self._closed:
                return
            _log.warning("%s cannot start a thread (%s); retrying", self._name, error)
            retry_at = time.monotonic() + _RETRY_SECONDS
            clock.call_at(retry_at, lambda: self.start_with_retry(job, clock))

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
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self, job: Job | None) -> None:
        """Give the thread a job; None ends the thread."""
        self.job = job
        self._lock.release()

    def sleep(self, timeout: float | None) -> bool:
        """Wait for `wake`. Return False after `timeout` seconds."""
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)
