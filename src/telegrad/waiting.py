"""What a thread of ours does before it blocks, so that nothing is ever serialised behind it.

A thread that reads a connection and runs calls where it read them, or that occupies a place in the pool, puts a `Role`
here. Every wait that Telegrad knows of (a nested call, `Future.wait`) brackets itself with `pause` and `resume`:

    role = waiting.pause()
    try: ...block...
    finally: waiting.resume(role)

A wait that is meant to hold up those behind (back-pressure) uses `hold` and `release` in the same way.

A thread that reads knows whether more has arrived already (`more`); what is better done once for all of it can be left
until then (`afterwards`). If it reads many connections, it can also watch the time (`at`).

State: one role per thread, changed only by that thread. No locks. Threads of the user have no role and pay nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Protocol


class Role(Protocol):
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def more(self) -> bool: ...
    def afterwards(self, key: Hashable, job: Callable[[], None]) -> None: ...
    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool: ...


class _Local(threading.local):
    role: Role | None = None


_local = _Local()


def take(role: Role | None) -> Role | None:
    """From now on, this thread plays `role`. Returns the one that it played before."""
    before, _local.role = _local.role, role
    return before


def role() -> Role | None:
    """What this thread plays."""
    return _local.role


def pause() -> Role | None:
    """Call before blocking; give what it returns to `resume` afterwards."""
    role = _local.role
    if role is not None:
        role.pause()
    return role


def resume(role: Role | None) -> None:
    if role is not None:
        role.resume()


def hold() -> Role | None:
    """Call before blocking on purpose: nobody takes over what this thread does. Ended by `release`."""
    role = _local.role
    if role is not None:
        role.hold()
    return role


def release(role: Role | None) -> None:
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
