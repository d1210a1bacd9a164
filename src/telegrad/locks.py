"""Locks that stay free if a signal handler raises.

Python 3.14 runs signal handlers also between `Lock.__enter__` and the block of its `with`
statement. If the handler raises there, the lock stays taken for ever. So from 3.14 on, the
locks of this module have an `__enter__` of their own: one C call takes the lock and records that,
and what is raised after it releases the lock again. Python runs no signal handler when a function
that is written in Python returns. `__exit__` is that of the lock itself, a C function, because a
handler may run at the start of a Python function.

Signal handlers run on the main thread. So these locks are used wherever a thread of the user may
take a lock that other threads need: in `transport`, `client`, `scheduling`, `messages`, `refs` and
`futures`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_ONCE = (True,)


class _SignalSafeLock:
    """A lock with the `__enter__` that the docstring of the module describes."""

    __slots__ = ("__exit__", "acquire", "locked", "release")

    def __init__(self, lock: Any) -> None:
        self.acquire, self.release, self.locked = lock.acquire, lock.release, lock.locked
        # A `with` statement looks attributes up in the class, which has a descriptor for this one.
        self.__exit__ = lock.__exit__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'locked' if self.locked() else 'unlocked'}>"

    def __enter__(self) -> None:
        acquired: list[bool] = []
        try:
            acquired.extend(map(self.acquire, _ONCE))
        except BaseException:
            if acquired:
                self.release()
            raise


class _SignalSafeReentrantLock(_SignalSafeLock):
    """The same for a reentrant lock, with what `threading.Condition` needs of one."""

    __slots__ = ("_acquire_restore", "_is_owned", "_release_save")

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self._acquire_restore, self._is_owned = lock._acquire_restore, lock._is_owned
        self._release_save = lock._release_save


if sys.version_info >= (3, 14):

    def new_lock() -> threading.Lock:
        """Return a lock like `threading.Lock`."""
        return _SignalSafeLock(threading.Lock())  # type: ignore[return-value]

    def new_reentrant_lock() -> threading.RLock:
        """Return a lock like `threading.RLock`."""
        return _SignalSafeReentrantLock(threading.RLock())  # type: ignore[return-value]

else:
    new_lock, new_reentrant_lock = threading.Lock, threading.RLock
