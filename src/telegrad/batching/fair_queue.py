"""`FairQueue`: calls that may run together, in the order in which they will.

The highest priority goes first. Among equals, callers take turns, so that one who sends many calls does not keep the
others waiting; each caller's own calls stay in order.

State: changed under the lock of the queue. Whoever leaves (`BatchedCall.queued` is False) is skipped when its turn
comes.
"""

from __future__ import annotations

import collections

from telegrad.batching.calls import BatchedCall

Turns = dict[str | int, collections.deque[BatchedCall]]  # by caller; the first in the dict is next


class FairQueue:
    def __init__(self) -> None:
        self._levels: dict[float, Turns] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: BatchedCall) -> None:
        turns = self._levels.setdefault(entry.priority, {})
        turns.setdefault(entry.caller, collections.deque()).append(entry)
        self._count += 1

    def left(self) -> None:
        """Somebody in this line no longer wants to be in it."""
        self._count -= 1

    def take(self, count: int) -> list[BatchedCall]:
        """The next calls, `count` of them or as many as there are."""
        taken: list[BatchedCall] = []
        while len(taken) < count and self._levels:
            priority = max(self._levels)
            turns = self._levels[priority]
            _take_turns(turns, count - len(taken), taken)
            if not turns:
                del self._levels[priority]
        self._count -= len(taken)
        return taken

    def entries(self) -> list[BatchedCall]:
        return [
            entry
            for turns in self._levels.values()
            for entries in turns.values()
            for entry in entries
            if entry.queued
        ]

    def rank(self) -> tuple[float, float]:
        """Of several lines, the one with the smallest rank goes first: by priority, then by age."""
        priority = max(self._levels)
        return -priority, min(entries[0].arrived for entries in self._levels[priority].values())


def _take_turns(turns: Turns, count: int, taken: list[BatchedCall]) -> None:
    end = len(taken) + count
    while turns and len(taken) < end:
        caller = next(iter(turns))
        entries = turns.pop(caller)
        entry = entries.popleft()
        if entries:
            turns[caller] = entries  # at the end
        if entry.queued:
            taken.append(entry)
