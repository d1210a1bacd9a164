"""`BatchScheduler`: the calls of one batched function that wait, and which of them run next.

A call first waits in the `Company` that gathers until enough are there, if there is such a rule, then in the
`FairQueue` of those it can run with.

State: all of it is changed under the lock of the queue; nothing here blocks or runs code of the user. `expired` are
calls that were taken out because they are late; the queue tells their callers.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable

from telegrad.batching.calls import BatchedCall
from telegrad.batching.metrics import QueueMetrics
from telegrad.batching.policy import BatchOptions, policy_for

Turns = dict[str | int, collections.deque[BatchedCall]]  # by caller; the first in the dict is next


class BatchScheduler:
    def __init__(self, options: BatchOptions, figures: QueueMetrics) -> None:
        self.expired: list[BatchedCall] = []
        self._max_size = options.max_size
        self._figures = figures
        self._company = policy_for(options)
        self._lines: dict[Hashable, FairQueue] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def until(self) -> float:
        """When those who wait for company start, whoever is missing; infinity if there is no such moment."""
        return math.inf if self._company is None else self._company.until

    def suffices(self, caller: str | int) -> bool:
        """Would a call of this caller run at once, if it were the only one?"""
        return self._company is None or self._company.suffices(caller)

    def newcomer(self) -> str | None:
        """A worker that is waited for from now on, if there is one that was not named here before."""
        return (
            self._company.newcomers.pop()
            if self._company is not None and self._company.newcomers
            else None
        )

    def add(self, entry: BatchedCall, running: bool, margin: float) -> None:
        """One more call, which should start `margin` seconds before its deadline."""
        entry.queued = True
        self._count += 1
        if self._company is None:
            self._line(entry.bucket).add(entry)
            return
        if running or len(self._company):
            self._company.overlapped(entry.caller)
        self._company.add(entry, margin)

    def remove(self, entry: BatchedCall) -> bool:
        """A call leaves; False if it is not here any more."""
        if not entry.queued:
            return False
        entry.queued = False
        self._count -= 1
        if self._company is not None and entry in self._company:
            self._company.remove(entry)
        else:
            line = self._lines[entry.bucket]
            line.left()
            if not len(line):
                del self._lines[entry.bucket]
        return True

    def remove_all(self, matches: Callable[[BatchedCall], bool]) -> list[BatchedCall]:
        entries = [] if self._company is None else self._company.entries()
        for line in self._lines.values():
            entries += line.entries()
        return [entry for entry in entries if matches(entry) and self.remove(entry)]

    def lost(self, name: str) -> list[BatchedCall]:
        """A worker is gone: nobody waits for it, and its calls leave."""
        if self._company is not None:
            self._company.lost(name)
        return self.remove_all(lambda entry: entry.caller == name)

    def take(self, now: float) -> list[BatchedCall]:
        """The next batch; empty if there is none."""
        if self._company is not None and self._company.ready(now):
            gathered = self._company.release(now)
            if not self._lines and len(gathered) <= self._max_size and _alike(gathered):
                # all of them run, so it does not matter who would go first
                return self._taken(gathered, now)
            for entry in gathered:
                self._line(entry.bucket).add(entry)
        batch: list[BatchedCall] = []
        while self._lines and not batch:
            batch = self._cut(now)
        return batch

    def _cut(self, now: float) -> list[BatchedCall]:
        """Calls that can run together, less those that are too late."""
        lines = self._lines
        bucket = (
            min(lines, key=lambda each: lines[each].rank()) if len(lines) > 1 else next(iter(lines))
        )
        taken = lines[bucket].take(self._max_size)
        if not len(lines[bucket]):
            del lines[bucket]
        return self._taken(taken, now)

    def _taken(self, taken: list[BatchedCall], now: float) -> list[BatchedCall]:
        self._count -= len(taken)
        batch = []
        for entry in taken:
            entry.queued = False
            if entry.expired(now):
                self._figures.expired += 1
                self.expired.append(entry)
            else:
                self._figures.queue_time.add(now - entry.arrived)
                batch.append(entry)
        return batch

    def _line(self, bucket: Hashable) -> FairQueue:
        line = self._lines.get(bucket)
        if line is None:
            line = self._lines[bucket] = FairQueue()
        return line


def _alike(entries: list[BatchedCall]) -> bool:
    bucket = entries[0].bucket
    return all(entry.bucket == bucket for entry in entries[1:])


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
