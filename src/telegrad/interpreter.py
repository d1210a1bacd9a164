"""Whether this interpreter runs threads in parallel (free-threaded Python), and what then no longer holds.

With the interpreter lock, only one thread runs Python code at a time. Without it, single operations of `dict`, `set`,
`list` and `deque` and `next` of an `itertools.count` are still atomic, so code that relies on them needs no change.
These do not hold any more, and code of this package must not rely on them:

- `list(deque)` raises if another thread appends meanwhile: use `snapshot`.
- `defaultdict[key]` may make two values for one key: use `setdefault` where the value must be the same for all.
- `sys.getrefcount` may be too low while a reference passes from one thread to another.
- A callback of a weak reference runs on any thread, some time after the reference is dead.
"""

from __future__ import annotations

import collections
import sys
from typing import TypeVar

T = TypeVar("T")


def has_lock() -> bool:
    """Return False if threads run in parallel. An extension module may switch the lock on at any import."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


def snapshot(queue: collections.deque[T]) -> list[T]:
    """Return what is in a deque that other threads append to. Nobody may remove anything meanwhile."""
    return list(map(queue.__getitem__, range(len(queue))))
