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

    pause, resume
        Around a wait. While the thread waits, its duty is done by another thread.
    pause_when_needed, resume
        Around a wait of a thread that can also wait for a descriptor. `pause_when_needed` returns a
        `DelayedPause` if the duty has nothing to do now. The thread must call its `pause` as soon
        as its descriptor becomes readable. None: the duty was handed over, as by `pause`.
    begin_backpressure, end_backpressure
        Around a wait that applies back-pressure to one peer. The event loop goes on in another
        thread, but does not read the connection that this thread was serving. A thread of the
        executor keeps its place.
    has_pending_messages
        Whether the thread has received further messages that it will handle next. A batch can wait
        for these at no cost.
    run_when_drained
        Run a job once `has_pending_messages` is false. Each key has at most one job.
    run_at
        Run a job at a time of `time.monotonic`. Each key has at most one job; a new one replaces
        it. Return False if this role cannot run timers.

Roles are nested: code that sets a role for a while remembers the role that `set_role` returned,
passes the calls that it does not handle on to it, and sets it again at the end.

State: for each thread its role and the time that it has waited. Only the thread itself changes
them, so there is no lock. A thread without a role, such as one of the user, skips all of this.
"""

from __future__ import annotations

import _thread
import collections
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol

_release = _thread.LockType.release


class DelayedPause(Protocol):
    """A duty that is not handed over until its descriptor becomes readable."""

    def fileno(self) -> int: ...
    def pause(self) -> None: ...


class ThreadRole(Protocol):
    """The duty of a thread. The module docstring describes the methods."""

    def pause(self) -> None: ...
    def pause_when_needed(self) -> DelayedPause | None: ...
    def resume(self) -> None: ...
    def begin_backpressure(self) -> None: ...
    def end_backpressure(self) -> None: ...
    def has_pending_messages(self) -> bool: ...
    def run_when_drained(self, key: Hashable, job: Callable[[], None]) -> None: ...
    def run_at(self, key: Hashable, when: float, job: Callable[[], None]) -> bool: ...


class OneShotEvent:
    """An event that is set once (`set`) and that threads wait for.

    Unlike `threading.Event`, it has no lock that all threads share. If a signal handler raises
    inside `Event.wait`, that lock may stay locked, and the thread that sets the event would wait
    forever. Here, each waiting thread adds a lock of its own to a list. `set` takes the locks from
    the list, with one atomic operation each, and releases them.
    """

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[_thread.LockType] = []

    def __repr__(self) -> str:
        return f"<OneShotEvent {'set' if self.is_set else 'not set'}, {len(self._waiters)} waiting>"

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the event is set. Return False if it is not after `timeout` seconds."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if not self.is_set and not waiter.acquire(True, _lock_timeout(timeout)):
            try:
                self._waiters.remove(waiter)
            except ValueError:
                pass  # `set` has just taken it
        return self.is_set

    def set(self) -> None:
        """Let all threads that wait go on, now and later."""
        self.is_set = True
        try:
            # One C call: no signal handler runs between removing a lock and releasing it.
            collections.deque(map(_release, iter(self._waiters.pop, None)), 0)
        except IndexError:  # there are no more
            return


def _lock_timeout(timeout: float | None) -> float:
    """Return a timeout in the form that `Lock.acquire` accepts."""
    return -1 if timeout is None else min(max(timeout, 0.0), _thread.TIMEOUT_MAX)


class _ThreadRoleState(threading.local):
    role: ThreadRole | None = None
    paused_at = 0.0  # when `pause` was called last
    waited_seconds = 0.0  # between `pause` and `resume`, in total


_thread_state = _ThreadRoleState()


def set_role(role: ThreadRole | None) -> ThreadRole | None:
    """Set the role of this thread. Return its previous role."""
    previous, _thread_state.role = _thread_state.role, role
    return previous


def current_role() -> ThreadRole | None:
    """Return the role of this thread; None if it has none."""
    return _thread_state.role


def pause() -> ThreadRole | None:
    """Hand over the duty of this thread before it blocks. Pass the result to `resume`."""
    role = _thread_state.role
    if role is not None:
        _thread_state.paused_at = time.perf_counter()
        role.pause()
    return role


def pause_when_needed(role: ThreadRole) -> DelayedPause | None:
    """Do what `pause` does for the role of this thread, or delay it. Pass the role to `resume`."""
    _thread_state.paused_at = time.perf_counter()
    return role.pause_when_needed()


def resume(role: ThreadRole | None) -> None:
    """End the wait that began with `pause` or `pause_when_needed`."""
    if role is not None:
        role.resume()
        _thread_state.waited_seconds += time.perf_counter() - _thread_state.paused_at


def waited_seconds() -> float:
    """Return the seconds that this thread has spent between `pause` and `resume`."""
    return _thread_state.waited_seconds


def begin_backpressure() -> ThreadRole | None:
    """Apply back-pressure to the current peer while this thread blocks.

    Pass the result to `end_backpressure`.
    """
    role = _thread_state.role
    if role is not None:
        role.begin_backpressure()
    return role


def end_backpressure(role: ThreadRole | None) -> None:
    """End the wait that began with `begin_backpressure`."""
    if role is not None:
        role.end_backpressure()


def has_pending_messages() -> bool:
    """Return whether this thread has received further messages that it will handle next."""
    role = _thread_state.role
    return role is not None and role.has_pending_messages()


def run_when_drained(key: Hashable, job: Callable[[], None]) -> None:
    """Run `job` on this thread as soon as `has_pending_messages` is false, once for each key.

    Call it only if `has_pending_messages` is true.
    """
    assert _thread_state.role is not None
    _thread_state.role.run_when_drained(key, job)


def run_at(key: Hashable, when: float, job: Callable[[], None]) -> bool:
    """Run `job` on this thread at a time of `time.monotonic`, in place of the key's previous job.

    Return False if this thread cannot run timers.
    """
    role = _thread_state.role
    return role is not None and role.run_at(key, when, job)
