"""Support for free-threaded Python, whose threads run in parallel without the interpreter lock.

Without the lock, single operations of `dict`, `set`, `list` and `deque`, and `next` of an
`itertools.count`, are still atomic. This package relies on that. It must not rely on the following,
which is true only with the lock:

- `list(deque)` succeeds while another thread appends. Use `snapshot`.
- `defaultdict[key]` makes one value for a key. Use `setdefault` where all threads need the same.
- `sys.getrefcount` is exact. It may be too low while a reference passes between threads.
- The callback of a weak reference runs at once, in the thread that dropped the last reference.
"""

from __future__ import annotations

import collections
import sys
from typing import TypeVar

T = TypeVar("T")


def has_gil() -> bool:
    """Return whether the interpreter lock is enabled, so that threads do not run in parallel.

    In a free-threaded Python, the import of an extension module may enable the lock at any time.
    """
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


def snapshot(queue: collections.deque[T]) -> list[T]:
    """Return the items of a deque to which other threads append. No thread may remove items."""
    return list(map(queue.__getitem__, range(len(queue))))
