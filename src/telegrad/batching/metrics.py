"""Metrics of batched functions: counters of one queue, and the queues of one agent.

State of `QueueMetrics`: changed under the lock of the queue, and read without it. State of
`QueueRegistry`: the queues that have served calls of its agent, held weakly, under `_lock`.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


@dataclass(slots=True)
class Times:
    """Durations in seconds: their sum, the longest one and their number."""

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
    """A snapshot of the metrics of a batched function."""

    calls: int = 0
    waiting: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    """Histogram of batch sizes: the number of batches by their number of calls."""
    queue_time: Times = field(default_factory=Times)
    """From the arrival of a call to the start of its batch."""
    batch_time: Times = field(default_factory=Times)
    """The run time of the function."""
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


class QueueMetrics:
    """The counters of one queue."""

    __slots__ = (
        "_batch_time",
        "_sizes",
        "alone_time",
        "expired",
        "failed",
        "given_up",
        "queue_time",
        "rejected",
    )

    def __init__(self) -> None:
        self._sizes: collections.Counter[int] = collections.Counter()
        self._batch_time = Times()
        # Calls that ran alone are counted separately, because that costs a lone caller less.
        self.alone_time = Times()
        self.queue_time = Times()
        self.failed = self.given_up = self.expired = self.rejected = 0

    @property
    def sizes(self) -> dict[int, int]:
        sizes = self._sizes.copy()
        if self.alone_time.count:
            sizes[1] += self.alone_time.count
        return dict(sorted(sizes.items()))

    @property
    def calls(self) -> int:
        return sum(size * count for size, count in self.sizes.items())

    @property
    def batches(self) -> int:
        return sum(self.sizes.values())

    def record_batch(self, size: int, failed: int, seconds: float) -> None:
        """Count a batch of `size` calls, of which `failed` raised."""
        self._sizes[size] += 1
        self._batch_time.add(seconds)
        self.failed += failed

    def merge(self, other: QueueMetrics) -> None:
        """Add the counters of another queue."""
        self._sizes.update(other._sizes)
        for name in ("_batch_time", "alone_time", "queue_time"):
            getattr(self, name).merge(getattr(other, name))
        for name in ("failed", "given_up", "expired", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def snapshot(self, waiting: int) -> Statistics:
        """Return a copy for the user; `waiting` calls are in the queue now."""
        queue_time, batch_time = Times(), Times()
        queue_time.merge(self.queue_time)
        batch_time.merge(self._batch_time)
        batch_time.merge(self.alone_time)
        return Statistics(
            calls=self.calls,
            waiting=waiting,
            sizes=self.sizes,
            queue_time=queue_time,
            batch_time=batch_time,
            failed=self.failed,
            given_up=self.given_up,
            expired=self.expired,
            rejected=self.rejected,
        )


class RegisteredQueue(Protocol):
    """The part of `BatchQueue` that `QueueRegistry` uses."""

    metrics: QueueMetrics

    @property
    def name(self) -> str: ...
    def __len__(self) -> int: ...
    def caller_lost(self, name: str) -> None: ...
    def close(self, runtime: AgentRuntime) -> None: ...


class QueueRegistry:
    """Notify the queues of an agent of lost workers and of its end, and report their metrics."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self._queues: weakref.WeakSet[RegisteredQueue] = weakref.WeakSet()
        self._lock = threading.Lock()
        runtime.on_loss(lambda name, _: self._for_each_queue(lambda queue: queue.caller_lost(name)))
        runtime.on_close(lambda: self._for_each_queue(lambda queue: queue.close(runtime)))
        runtime.add_statistics(self.statistics)
        runtime.add_report("batching", self.report)

    def add(self, queue: RegisteredQueue) -> None:
        """Register a queue."""
        with self._lock:
            self._queues.add(queue)

    def queues(self) -> list[RegisteredQueue]:
        """Return the registered queues that are alive."""
        with self._lock:
            return list(self._queues)

    def statistics(self) -> dict[str, int]:
        """Return the totals for `Agent.statistics`."""
        queues = self.queues()
        return {
            "batched_calls": sum(queue.metrics.calls for queue in queues),
            "batches": sum(queue.metrics.batches for queue in queues),
            "batched_calls_waiting": sum(len(queue) for queue in queues),
        }

    def report(self) -> list[dict[str, Any]]:
        """Return the metrics of each queue as values of JSON."""
        rows = []
        for queue in self.queues():
            found = queue.metrics.snapshot(len(queue))
            rows.append(
                {
                    "function": queue.name,
                    "calls": found.calls,
                    "batches": found.batches,
                    "mean_size": found.mean_size,
                    "sizes": {str(size): count for size, count in found.sizes.items()},
                    "waiting": found.waiting,
                    "mean_queue_time": found.queue_time.mean,
                    "longest_queue_time": found.queue_time.longest,
                    "mean_batch_time": found.batch_time.mean,
                    "failed": found.failed,
                }
            )
        return rows

    def _for_each_queue(self, action: Callable[[RegisteredQueue], None]) -> None:
        for queue in self.queues():
            action(queue)
