"""`BatchScheduler`: the waiting calls of one batched function, and which of them run next.

A call first waits in the `BatchPolicy`, if there is one, until enough calls are there. Then it
waits in the `FairQueue` of the calls that it may run with (those with the same `batch_key`). In a
fair queue, the highest priority goes first. Calls of equal priority are taken from their callers in
turn, so that a caller with many calls does not delay the others; the calls of one caller stay in
order.

State: changed under the lock of the `BatchQueue`. Nothing here blocks or runs user code. `expired`
has the calls that were removed because their deadline passed; the `BatchQueue` completes them.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable

from telegrad.batching.calls import BatchedCall
from telegrad.batching.metrics import QueueMetrics
from telegrad.batching.policy import BatchOptions, policy_for

CallsByCaller = dict[str | int, collections.deque[BatchedCall]]  # the first caller is the next


class BatchScheduler:
    """Hold the waiting calls and select batches from them."""

    def __init__(self, options: BatchOptions, metrics: QueueMetrics) -> None:
        self.expired: list[BatchedCall] = []
        self._max_size = options.max_size
        self._metrics = metrics
        self._policy = policy_for(options)
        self._fair_queues: dict[Hashable, FairQueue] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def latest_start(self) -> float:
        """Return when the calls of the policy start even if others are missing; may be infinite."""
        return math.inf if self._policy is None else self._policy.latest_start

    def runs_alone(self, caller: str | int) -> bool:
        """Return whether a call of this caller may start without waiting for others."""
        return self._policy is None or self._policy.runs_alone(caller)

    def next_unverified_caller(self) -> str | None:
        """Return a worker that the policy has started to wait for, each of them once; or None."""
        if self._policy is None or not self._policy.unverified_callers:
            return None
        return self._policy.unverified_callers.pop()

    def add(self, call: BatchedCall, running: bool, margin: float) -> None:
        """Add a call, which should start `margin` seconds before its deadline."""
        call.queued = True
        self._count += 1
        if self._policy is None:
            self._fair_queue(call.batch_key).add(call)
            return
        if running or len(self._policy):
            self._policy.record_overlap(call.caller)
        self._policy.add(call, margin)

    def remove(self, call: BatchedCall) -> bool:
        """Remove a call; return False if it is no longer queued."""
        if not call.queued:
            return False
        call.queued = False
        self._count -= 1
        if self._policy is not None and call in self._policy:
            self._policy.remove(call)
        else:
            fair_queue = self._fair_queues[call.batch_key]
            fair_queue.discard_one()
            if not len(fair_queue):
                del self._fair_queues[call.batch_key]
        return True

    def remove_all(self, matches: Callable[[BatchedCall], bool]) -> list[BatchedCall]:
        """Remove and return the calls for which `matches(call)` is true."""
        calls = [] if self._policy is None else self._policy.calls()
        for fair_queue in self._fair_queues.values():
            calls += fair_queue.calls()
        return [call for call in calls if matches(call) and self.remove(call)]

    def caller_lost(self, name: str) -> list[BatchedCall]:
        """Stop waiting for a lost worker, and remove and return its calls."""
        if self._policy is not None:
            self._policy.caller_lost(name)
        return self.remove_all(lambda call: call.caller == name)

    def pop_batch(self, now: float) -> list[BatchedCall]:
        """Remove and return the next batch; empty if no call may start."""
        if self._policy is not None and self._policy.is_ready(now):
            released = self._policy.release(now)
            if (
                not self._fair_queues
                and len(released) <= self._max_size
                and _have_same_key(released)
            ):
                # All of them run together, so their order does not matter.
                return self._start_calls(released, now)
            for call in released:
                self._fair_queue(call.batch_key).add(call)
        batch: list[BatchedCall] = []
        while self._fair_queues and not batch:
            batch = self._pop_fair(now)
        return batch

    def _pop_fair(self, now: float) -> list[BatchedCall]:
        """Remove and return the calls of the first fair queue, without those that have expired."""
        fair_queues = self._fair_queues
        if len(fair_queues) == 1:
            batch_key = next(iter(fair_queues))
        else:
            batch_key = min(fair_queues, key=lambda key: fair_queues[key].sort_key())
        selected = fair_queues[batch_key].pop(self._max_size)
        if not len(fair_queues[batch_key]):
            del fair_queues[batch_key]
        return self._start_calls(selected, now)

    def _start_calls(self, selected: list[BatchedCall], now: float) -> list[BatchedCall]:
        """Mark calls as no longer queued, and return those that have not expired."""
        self._count -= len(selected)
        batch = []
        for call in selected:
            call.queued = False
            if call.has_expired(now):
                self._metrics.expired += 1
                self.expired.append(call)
            else:
                self._metrics.queue_time.add(now - call.arrival_time)
                batch.append(call)
        return batch

    def _fair_queue(self, batch_key: Hashable) -> FairQueue:
        fair_queue = self._fair_queues.get(batch_key)
        if fair_queue is None:
            fair_queue = self._fair_queues[batch_key] = FairQueue()
        return fair_queue


def _have_same_key(calls: list[BatchedCall]) -> bool:
    batch_key = calls[0].batch_key
    return all(call.batch_key == batch_key for call in calls[1:])


class FairQueue:
    """Calls that may run together, by priority and caller.

    A call that is removed (`BatchedCall.queued` is False) stays inside until its turn and is then
    skipped.
    """

    def __init__(self) -> None:
        self._by_priority: dict[float, CallsByCaller] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, call: BatchedCall) -> None:
        """Append a call to those of its caller."""
        by_caller = self._by_priority.setdefault(call.priority, {})
        by_caller.setdefault(call.caller, collections.deque()).append(call)
        self._count += 1

    def discard_one(self) -> None:
        """Decrease the length, because a call was removed."""
        self._count -= 1

    def pop(self, count: int) -> list[BatchedCall]:
        """Remove and return the next calls, at most `count`."""
        selected: list[BatchedCall] = []
        while len(selected) < count and self._by_priority:
            priority = max(self._by_priority)
            by_caller = self._by_priority[priority]
            _pop_round_robin(by_caller, count - len(selected), selected)
            if not by_caller:
                del self._by_priority[priority]
        self._count -= len(selected)
        return selected

    def calls(self) -> list[BatchedCall]:
        """Return the calls that are queued."""
        return [
            call
            for by_caller in self._by_priority.values()
            for calls in by_caller.values()
            for call in calls
            if call.queued
        ]

    def sort_key(self) -> tuple[float, float]:
        """Return a key that is smaller for queues that go first: by priority, then by age."""
        priority = max(self._by_priority)
        return -priority, min(
            calls[0].arrival_time for calls in self._by_priority[priority].values()
        )


def _pop_round_robin(by_caller: CallsByCaller, count: int, selected: list[BatchedCall]) -> None:
    """Move up to `count` queued calls to `selected`, one of each caller in turn."""
    end = len(selected) + count
    while by_caller and len(selected) < end:
        caller = next(iter(by_caller))
        calls = by_caller.pop(caller)
        call = calls.popleft()
        if calls:
            by_caller[caller] = calls  # its next turn is after those of the other callers
        if call.queued:
            selected.append(call)
