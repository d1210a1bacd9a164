"""Things that tests and the functions they call remotely share: they travel by name and arrive as
the same object.

All agents of a local cluster live in this process, so a test can hold a remote function at a point
(`Gate`), count how often it ran and see what it was given (`Log`).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

PATIENCE = 20.0  # seconds after which a test has hung; nothing is expected to take that long

_shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Shared:
    """Pickles to the very same object, for use inside one process."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        _shared[self._number] = self

    def __reduce__(self) -> tuple[Callable[[int], Shared], tuple[int]]:
        return _find, (self._number,)


def _find(number: int) -> Shared:
    return _shared[number]


class Gate(Shared):
    """Holds those who come to it until it is opened, and lets the test wait for them to come."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = threading.Event()
        self._arrived = threading.Semaphore(0)

    def open(self) -> None:
        self._opened.set()

    def hold(self, patience: float = PATIENCE) -> None:
        """Wait here until the gate is open."""
        self._arrived.release()
        if not self._opened.wait(patience):
            raise AssertionError("nobody opened the gate")

    def wait_for(self, count: int = 1) -> None:
        """Until so many have come, since the last time this was asked."""
        for number in range(count):
            if not self._arrived.acquire(timeout=PATIENCE):
                raise AssertionError(f"only {number} of {count} came to the gate")


class Meeting(Shared):
    """A `threading.Barrier` that travels."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self._barrier = threading.Barrier(parties)

    def join(self) -> int:
        return self._barrier.wait(PATIENCE)


class Log(Shared):
    """What remote functions noted, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self._changed = threading.Condition()

    def note(self, entry: Any) -> None:
        with self._changed:
            self.entries.append(entry)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.entries) >= count, PATIENCE):
                raise AssertionError(f"only {self.entries} were noted, not {count}")
            return list(self.entries)


def hold_at(gate: Gate, result: Any = None) -> Any:
    """A remote function that blocks until the test opens the gate."""
    gate.hold()
    return result


def note_in(log: Log, entry: Any) -> None:
    log.note(entry)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that has no event of its own, such as a counter of an agent."""
    moment = threading.Event()
    for _ in range(int(PATIENCE / 4 / 0.005)):
        if condition():
            return
        moment.wait(0.005)
    raise AssertionError("it did not happen")
