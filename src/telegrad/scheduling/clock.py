"""`Clock`: one thread per agent that runs timers and detects event loops that do not progress.

Timers run on the clock's thread, so they must be short and must not block. An exception of a timer
is logged, and a periodic timer runs again when it is next due.

While connections are in use the clock also *ticks* every few milliseconds: it calls `tick` of each
`TickListener`. When nothing has happened for `_IDLE_TICKS` ticks, it stops ticking and sleeps until
the next timer. Event loops read `is_ticking` without a lock for each frame; only if it is False do
they call `start_ticking`, which takes the lock.

State: the heap of timers and the tuple of listeners are changed under `_lock`. `is_ticking` is set
under `_lock` by any thread and cleared by the clock's thread (see `_stop_ticking`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from telegrad.errors import error_text
from telegrad.locks import new_lock

T = TypeVar("T")

TICK = 0.005  # seconds between two ticks
_IDLE_TICKS = 40  # ticks without any activity after which the clock stops ticking

_log = logging.getLogger(__name__)


class TickListener(Protocol):
    """An object that the clock calls at every tick."""

    def tick(self) -> bool:
        """Return True if anything has happened since the last tick."""


class Clock:
    """Run timers and ticks on one thread."""

    def __init__(self, name: str) -> None:
        self.is_ticking = False  # whether the clock ticks
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # breaks ties in the heap
        self._listeners: tuple[TickListener, ...] = ()
        self._lock = new_lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-clock", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Clock {len(self._timers)} timers, {'ticking' if self.is_ticking else 'idle'}>"

    def call_at(self, moment: float, run: Callable[[], None]) -> None:
        """Run a short function once, at a moment of `time.monotonic`."""
        with self._lock:
            if self._closed:
                return
            soonest = not self._timers or moment < self._timers[0][0]
            heapq.heappush(self._timers, (moment, next(self._order), run))
            if soonest:
                self._changed.notify()

    def call_every(self, seconds: float, run: Callable[[], None]) -> None:
        """Run a short function periodically until the clock is closed.

        If it raises the same exception several times in a row, only the first one is logged.
        """
        last_error = ""

        def run_and_repeat() -> None:
            nonlocal last_error
            try:
                run()
                last_error = ""
            except BaseException as error:
                before, last_error = last_error, f"{type(error).__name__}: {error_text(error)}"
                if last_error != before:
                    raise
            finally:
                self.call_at(time.monotonic() + seconds, run_and_repeat)

        self.call_at(time.monotonic() + seconds, run_and_repeat)

    def add_listener(self, listener: TickListener) -> None:
        """Call `listener.tick` at every tick from now on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: TickListener) -> None:
        """Undo `add_listener`."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

    def start_ticking(self) -> None:
        """Start to tick, because there is activity."""
        with self._lock:
            if not self.is_ticking:
                self.is_ticking = True
                self._changed.notify()

    def close(self) -> None:
        """End the thread, and wait for it unless this is called by a timer."""
        with self._lock:
            self._closed = True
            self._timers.clear()  # they may refer to much memory
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        idle_ticks = 0
        while True:
            due = self._wait_for_due()
            if due is None:
                return
            for run in due:
                _run_logged(run)
            if self.is_ticking:
                idle_ticks = 0 if self._tick() else idle_ticks + 1
                if idle_ticks > _IDLE_TICKS:
                    idle_ticks = 0
                    self._stop_ticking()

    def _tick(self) -> bool:
        """Call all listeners. Return True if any of them reports activity."""
        # a list, because `any` over a generator would skip the listeners after the first active one
        active = [_run_logged(each.tick) for each in self._listeners]
        return any(active)

    def _stop_ticking(self) -> None:
        """Stop ticking, unless there is activity again.

        An event loop marks itself busy before it reads `is_ticking`. So if it read `is_ticking`
        before this method cleared it, the tick that follows sees that the loop is busy.
        """
        self.is_ticking = False
        if self._tick():
            self.is_ticking = True

    def _wait_for_due(self) -> list[Callable[[], None]] | None:
        """Wait for the next timer or tick. Return the timers that are due, None after `close`."""
        with self._lock:
            if not self._closed:
                now = time.monotonic()
                until = self._timers[0][0] if self._timers else now + 3600
                if self.is_ticking:
                    until = min(until, now + TICK)
                if until > now:
                    self._changed.wait(until - now)
            if self._closed:
                return None
            now, due = time.monotonic(), []
            while self._timers and self._timers[0][0] <= now:
                due.append(heapq.heappop(self._timers)[2])
            return due


def _run_logged(run: Callable[[], T]) -> T | None:
    """Run a timer or a tick; log what it raises, so that the clock continues."""
    try:
        return run()
    except BaseException:
        _log.exception("a timer of Telegrad failed; it will run again when it is next due")
        return None
