"""What is counted about a batched function.

State of `Figures`: changed by the thread that runs a batch or holds the lock of the queue, read by anybody. Two batches
may overlap while one of them waits for a nested call; then a count may be lost, nothing more.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass
class Times:
    """Seconds spent: all together, the longest, and how many were measured."""

    total: float = 0.0
    longest: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1
        self.longest = max(self.longest, seconds)

    def merge(self, other: Times) -> None:
        self.total += other.total
        self.count += other.count
        self.longest = max(self.longest, other.longest)


@dataclass
class Statistics:
    """A snapshot: how many calls ran in batches of which size, and how long they waited and took."""

    calls: int = 0
    waiting: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    """The histogram of batch sizes: how many batches had so many calls."""
    queue_time: Times = field(default_factory=Times)
    """From the arrival of a call to the start of its batch."""
    batch_time: Times = field(default_factory=Times)
    """How long the function ran."""
    failed: int = 0
    given_up: int = 0
    expired: int = 0
    rejected: int = 0

    @property
    def batches(self) -> int:
        return sum(self.sizes.values())

    @property
    def mean_size(self) -> float:
        return self.calls / self.batches if self.batches else 0.0


class Figures:
    """The counters of one queue."""

    __slots__ = ("batch_time", "expired", "failed", "given_up", "queue_time", "rejected", "sizes")

    def __init__(self) -> None:
        self.sizes: collections.Counter[int] = collections.Counter()
        self.queue_time = Times()
        self.batch_time = Times()
        self.failed = self.given_up = self.expired = self.rejected = 0

    @property
    def calls(self) -> int:
        return sum(size * count for size, count in list(self.sizes.items()))

    def ran(self, size: int, failed: int, seconds: float) -> None:
        self.sizes[size] += 1
        self.failed += failed
        self.batch_time.add(seconds)

    def merge(self, other: Figures) -> None:
        self.sizes.update(other.sizes)
        self.queue_time.merge(other.queue_time)
        self.batch_time.merge(other.batch_time)
        for name in ("failed", "given_up", "expired", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def snapshot(self, waiting: int) -> Statistics:
        return Statistics(
            self.calls,
            waiting,
            dict(sorted(self.sizes.items())),
            Times(self.queue_time.total, self.queue_time.longest, self.queue_time.count),
            Times(self.batch_time.total, self.batch_time.longest, self.batch_time.count),
            self.failed,
            self.given_up,
            self.expired,
            self.rejected,
        )
