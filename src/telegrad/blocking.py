"""What a thread of ours does before it blocks, so that nothing is ever serialised behind it.

A thread that reads a connection and runs calls where it read them, or that occupies a place in the pool, puts a
`ThreadRole` here. Every wait that Telegrad knows of (a nested call, `Future.wait`) brackets itself with `pause` and
`resume`:

    role = waiting.pause()
    try: ...block...
    finally: waiting.resume(role)

A wait that is meant to hold up those behind (back-pressure) uses `hold` and `release` in the same way.

A thread that reads knows whether more has arrived already (`more`); what is better done once for all of it can be left
until then (`afterwards`). If it reads many connections, it can also watch the time (`at`).

State: one role per thread, changed only by that thread. No locks. Threads of the user have no role and pay nothing.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol


class ThreadRole(Protocol):
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def more(self) -> bool: ...
    def afterwards(self, key: Hashable, job: Callable[[], None]) -> None: ...
    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool: ...


class OneShotEvent:
    """A flag that threads wait for and that is set once.

    It has no lock of its own, unlike `threading.Event`: a signal handler that raises inside `Event.wait` may leave the
    lock of the event locked, and then the thread that sets it waits for ever. Each waiter brings a lock; whoever opens
    the gate takes every waiter from the list, with one atomic operation each, and releases its lock.
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
        """Block until the gate is open; False after `timeout` seconds."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if not self.is_open and not waiter.acquire(True, _lock_timeout(timeout)):
            try:
                self._waiters.remove(waiter)
            except ValueError:
                pass  # it has been opened at this moment
        return self.is_open

    def open(self) -> None:
        self.is_open = True
        while True:
            try:
                waiter = self._waiters.pop()
            except IndexError:
                return
            waiter.release()


def _lock_timeout(timeout: float | None) -> float:
    """Return a time limit as `Lock.acquire` takes it."""
    return -1 if timeout is None else min(max(timeout, 0.0), _thread.TIMEOUT_MAX)


class _Local(threading.local):
    role: ThreadRole | None = None
    since = 0.0
    waited = 0.0


_local = _Local()


def take(role: ThreadRole | None) -> ThreadRole | None:
    """From now on, this thread plays `role`. Returns the one that it played before."""
    before, _local.role = _local.role, role
    return before


def role() -> ThreadRole | None:
    """What this thread plays."""
    return _local.role


def pause() -> ThreadRole | None:
    """Call before blocking; give what it returns to `resume` afterwards."""
    role = _local.role
    if role is not None:
        _local.since = time.perf_counter()
        role.pause()
    return role


def resume(role: ThreadRole | None) -> None:
    if role is not None:
        role.resume()
        _local.waited += time.perf_counter() - _local.since


def waited() -> float:
    """Return the seconds that this thread has spent between `pause` and `resume`."""
    return _local.waited


def hold() -> ThreadRole | None:
    """Call before blocking on purpose: nobody takes over what this thread does. Ended by `release`."""
    role = _local.role
    if role is not None:
        role.hold()
    return role


def release(role: ThreadRole | None) -> None:
    if role is not None:
        role.release()


def more() -> bool:
    """Has this thread something else to read at once, so that waiting for it costs nothing?"""
    role = _local.role
    return role is not None and role.more()


def afterwards(key: Hashable, job: Callable[[], None]) -> None:
    """Do this on this thread, of which `more` was true, when it no longer is; once for each key."""
    assert _local.role is not None
    _local.role.afterwards(key, job)


def at(key: Hashable, moment: float, job: Callable[[], None]) -> bool:
    """Do this on this thread at a moment of `time.monotonic`, instead of what was set for the key. False: it cannot."""
    role = _local.role
    return role is not None and role.at(key, moment, job)
