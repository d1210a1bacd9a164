"""`SlowCallbacks`: the callbacks of futures that must not run on the event loop.

State: written by atomic operations of the dict, by the leader of the event loop and by threads of
the executor. A race loses a sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from telegrad.scheduling.executor import SLOW_SECONDS
from telegrad.wire.function_table import MAX_FUNCTIONS


class SlowCallbacks(dict[Hashable, float]):
    """The average seconds that slow callbacks take, by their code."""

    def mark(self, callbacks: Iterable[Hashable]) -> None:
        """Add callbacks that have blocked the event loop."""
        for callback in callbacks:
            if len(self) < MAX_FUNCTIONS:
                self[callback] = 2 * SLOW_SECONDS

    def add_duration(self, callbacks: Iterable[Hashable], seconds: float) -> None:
        """Update the averages, and remove callbacks that no longer take long."""
        for callback in callbacks:
            average = self.get(callback)
            if average is not None:
                average += (seconds - average) * 0.25
                self[callback] = average
                if average < SLOW_SECONDS:
                    self.pop(callback, None)
