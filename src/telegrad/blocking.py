"""Thread roles: what a thread of Telegrad must do before and after it blocks.

Some threads have a duty that others depend on. The thread that runs the event loop reads all
connections, and also runs short calls itself. A thread of the executor occupies one of a limited
number of places. If such a thread blocks in user code, for example in a nested call, another thread
must take over its duty. The thread therefore sets a `ThreadRole`, and each function of Telegrad
that blocks calls the role:

    role = blocking.pause()      # the role hands its duty over to another thread
    try:
        ...block...
    finally:
        blocking.resume(role)    # the wait is over; the other thread may keep the duty

The protocol of a role:

    pause, resume        Around a wait. While the thread waits, its duty is done by another thread.
    hold, release        Around a wait that applies back-pressure to one peer. The event loop goes
                         on in another thread, but does not read the connection that this thread
                         was serving. A thread of the executor keeps its place.
    more                 Whether the thread has received further messages that it will handle next.
                         A batch can wait for these at no cost.
    afterwards           Run a job once `more` is false. Each key has at most one job.
    at                   Run a job at a time of `time.monotonic`. Each key has at most one job; a
                         new one replaces it. Return False if this role cannot run timers.

Roles are nested: code that sets a role for a while remembers the role that `take` returned, passes
the calls that it does not handle on to it, and sets it again at the end.

State: for each thread its role and the time that it has waited. Only the thread itself changes
them, so there is no lock. A thread without a role, such as one of the user, skips all of this.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol


class ThreadRole(Protocol):
    """The duty of a thread. The module docstring describes the methods."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def more(self) -> bool: ...
    def afterwards(self, key: Hashable, job: Callable[[], None]) -> None: ...
    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool: ...


class OneShotEvent:
    """An event that is set once (`open`) and that threads wait for.

    Unlike `threading.Event`, it has no lock that all threads share. If a signal handler raises
    inside `Event.wait`, that lock may stay locked, and the thread that sets the event would wait
    forever. Here, each waiting thread adds a lock of its own to a list. `open` takes the locks from
    the list, with one atomic operation each, and releases them.
    """

    __slots__ = ("_waiters", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._waiters: list[_thread.LockType] = []

    def __repr__(self) -> str:
        return (
            f"<OneShotEvent {'open' if self.is_open else 'closed'}, {len(self._waiters)} waiting>"
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the event is open. Return False if it is not after `timeout` seconds."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if not self.is_open and not waiter.acquire(True, _lock_timeout(timeout)):
            try:
                self._waiters.remove(waiter)
            except ValueError:
                pass  # `open` has just taken it
        return self.is_open

    def open(self) -> None:
        """Let all threads that wait go on, now and later."""
        self.is_open = True
        while True:
            try:
                waiter = self._waiters.pop()
            except IndexError:
                return
            waiter.release()


def _lock_timeout(timeout: float | None) -> float:
    """Return a timeout in the form that `Lock.acquire` accepts."""
    return -1 if timeout is None else min(max(timeout, 0.0), _thread.TIMEOUT_MAX)


class _ThreadState(threading.local):
    role: ThreadRole | None = None
    paused_at = 0.0  # when `pause` was called last
    waited = 0.0  # seconds between `pause` and `resume`, in total


_thread_state = _ThreadState()


def take(role: ThreadRole | None) -> ThreadRole | None:
    """Set the role of this thread. Return its previous role."""
    previous, _thread_state.role = _thread_state.role, role
    return previous


def role() -> ThreadRole | None:
    """Return the role of this thread; None if it has none."""
    return _thread_state.role


def pause() -> ThreadRole | None:
    """Hand over the duty of this thread before it blocks. Pass the result to `resume`."""
    role = _thread_state.role
    if role is not None:
        _thread_state.paused_at = time.perf_counter()
        role.pause()
    return role


def resume(role: ThreadRole | None) -> None:
    """End the wait that began with `pause`."""
    if role is not None:
        role.resume()
        _thread_state.waited += time.perf_counter() - _thread_state.paused_at


def waited() -> float:
    """Return the seconds that this thread has spent between `pause` and `resume`."""
    return _thread_state.waited


def hold() -> ThreadRole | None:
    """Apply back-pressure to the current peer while this thread blocks.

    Pass the result to `release`.
    """
    role = _thread_state.role
    if role is not None:
        role.hold()
    return role


def release(role: ThreadRole | None) -> None:
    """End the wait that began with `hold`."""
    if role is not None:
        role.release()


def more() -> bool:
    """Return whether this thread has received further messages that it will handle next."""
    role = _thread_state.role
    return role is not None and role.more()


def afterwards(key: Hashable, job: Callable[[], None]) -> None:
    """Run `job` on this thread as soon as `more` is false, once for each key.

    Call it only if `more` is true.
    """
    assert _thread_state.role is not None
    _thread_state.role.afterwards(key, job)


def at(key: Hashable, moment: float, job: Callable[[], None]) -> bool:
    """Run `job` on this thread at a time of `time.monotonic`, in place of the key's previous job.

    Return False if this thread cannot run timers.
    """
    role = _thread_state.role
    return role is not None and role.at(key, moment, job)
