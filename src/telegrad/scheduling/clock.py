"""The agent's one thread that watches time: deadlines, heartbeats, and whether a reader is stuck in a call.

Timers run on this thread, so they must be short and never block. What a timer raises is logged; it runs again when it
is next due. While connections are busy it also ticks every few milliseconds (see `TickListener`); when nothing happens
for a while, it sleeps until the next timer. `awake` is read without a lock by readers on their fast path: only if it is
False do they pay for waking the clock.

State: the heap of timers and the set of watched objects, under `_lock`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

TICK = 0.005
_IDLE_TICKS = 40

_log = logging.getLogger(__name__)


class TickListener(Protocol):
    def tick(self) -> bool:
        """Called every few milliseconds while the clock is awake. True if anything happened since the last time."""


class Clock:
    def __init__(self, name: str) -> None:
        self.awake = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._listeners: tuple[TickListener, ...] = ()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-clock", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Clock {len(self._timers)} timers, {'awake' if self.awake else 'asleep'}>"

    def at(self, moment: float, run: Callable[[], None]) -> None:
        """Run a short function at a moment of `time.monotonic`."""
        with self._lock:
            soonest = not self._timers or moment < self._timers[0][0]
            heapq.heappush(self._timers, (moment, next(self._order), run))
            if soonest:
                self._changed.notify()

    def every(self, seconds: float, run: Callable[[], None]) -> None:
        """Run a short function again and again until the clock is closed."""

        def again() -> None:
            try:
                run()
            finally:
                self.at(time.monotonic() + seconds, again)

        self.at(time.monotonic() + seconds, again)

    def watch(self, listener: TickListener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def unwatch(self, listener: TickListener) -> None:
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

    def wake(self) -> None:
        """Start ticking: something is going on."""
        with self._lock:
            if not self.awake:
                self.awake = True
                self._changed.notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
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
            if self.awake:
                idle_ticks = 0 if self._tick() else idle_ticks + 1
                if idle_ticks > _IDLE_TICKS:
                    idle_ticks = 0
                    self._stop_ticking()

    def _tick(self) -> bool:
        """Look at all that is watched. True if anything happened."""
        active = [_run_logged(each.tick) for each in self._listeners]  # every one of them
        return any(active)

    def _stop_ticking(self) -> None:
        """Stop ticking, unless something has begun that counted on the clock: it did so before it read `awake`."""
        self.awake = False
        if self._tick():
            self.awake = True

    def _wait_for_due(self) -> list[Callable[[], None]] | None:
        """Wait for the next timer or tick; what is due, or None at the end."""
        with self._lock:
            if not self._closed:
                now = time.monotonic()
                until = self._timers[0][0] if self._timers else now + 3600
                if self.awake:
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
    try:
        return run()
    except BaseException:
        _log.exception("a timer of Telegrad failed; it will run again when it is next due")
        return None
