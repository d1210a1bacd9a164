"""Support for free-threaded Python, whose threads run in parallel without the interpreter lock.

The rules for state that several threads use without a lock of their own:

1. Single operations of `dict`, `set`, `list` and `deque`, and `next` of an `itertools.count`, are
   atomic. So are `list(container)` and `container.copy()` of a dict, set or list, of a view of a
   dict, and `dict(other)` and `set(other)`. Everything else that visits the items of a container is
   not: loops, comprehensions, `tuple`, `sum`, `any`, `max`, `map`. Visit `list(container)` instead.
2. Copies of a deque are not atomic, not even `copy`. Use `snapshot`.
3. An operation in several steps needs a lock, or one atomic operation instead: `get` instead of
   `in` and a lookup, `pop(key, None)` instead of `in` and `del`, `setdefault` instead of a
   `defaultdict` if all threads need the same value.
4. `x += 1` is several steps. Count under a lock, or with an `AtomicCounter`.
5. A thread that sets a flag and then reads another one, while a second thread does so in the
   opposite order, sees what the second one has set, or the second one sees what it has set.
6. `sys.getrefcount` may be too low while a reference passes between threads. It decides nothing
   without the lock.
7. The callback of a weak reference may run later, and in another thread than the one that dropped
   the last reference.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable
from typing import TypeVar

from telegrad.locks import new_lock

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


class AtomicCounter:
    """A number that any thread increases by one, without a lock.

    >>> counter = AtomicCounter()
    >>> _ = counter.increment(), counter.increment()
    >>> counter.value
    2
    """

    __slots__ = ("_lock", "_reads", "increment")

    def __init__(self) -> None:
        self.increment: Callable[[], int] = itertools.count().__next__
        self._reads = 0  # how often `value` has increased the count itself
        self._lock = new_lock()

    def __repr__(self) -> str:
        return f"<AtomicCounter {self.value}>"

    @property
    def value(self) -> int:
        """How often `increment` was called."""
        with self._lock:
            value = self.increment() - self._reads
            self._reads += 1
            return value


class CounterTable:
    """Numbers by name that any thread increases by one."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = new_lock()

    def __repr__(self) -> str:
        return f"<CounterTable {self.counts()}>"

    def increment(self, name: str) -> None:
        """Add one to the number `name`."""
        with self._lock:
            self._counts[name] += 1

    def counts(self) -> dict[str, int]:
        """Return the numbers that are not zero."""
        with self._lock:
            return dict(self._counts)
