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

CallsByCaller = dict[
    str | int, collections.deque[BatchedCall]
]  # by caller; the first in the dict is next


class BatchScheduler:
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
        """When those who wait for company start, whoever is missing; infinity if there is no such moment."""
        return math.inf if self._policy is None else self._policy.latest_start

    def runs_alone(self, caller: str | int) -> bool:
        """Would a call of this caller run at once, if it were the only one?"""
        return self._policy is None or self._policy.runs_alone(caller)

    def next_unverified_caller(self) -> str | None:
        """A worker that is waited for from now on, if there is one that was not named here before."""
        return (
            self._policy.unverified_callers.pop()
            if self._policy is not None and self._policy.unverified_callers
            else None
        )

    def add(self, call: BatchedCall, running: bool, margin: float) -> None:
        """One more call, which should start `margin` seconds before its deadline."""
        call.queued = True
        self._count += 1
        if self._policy is None:
            self._fair_queue(call.batch_key).add(call)
            return
        if running or len(self._policy):
            self._policy.record_overlap(call.caller)
        self._policy.add(call, margin)

    def remove(self, call: BatchedCall) -> bool:
        """A call leaves; False if it is not here any more."""
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
        calls = [] if self._policy is None else self._policy.calls()
        for fair_queue in self._fair_queues.values():
            calls += fair_queue.calls()
        return [call for call in calls if matches(call) and self.remove(call)]

    def caller_lost(self, name: str) -> list[BatchedCall]:
        """A worker is gone: nobody waits for it, and its calls leave."""
        if self._policy is not None:
            self._policy.caller_lost(name)
        return self.remove_all(lambda call: call.caller == name)

    def pop_batch(self, now: float) -> list[BatchedCall]:
        """The next batch; empty if there is none."""
        if self._policy is not None and self._policy.is_ready(now):
            released = self._policy.release(now)
            if (
                not self._fair_queues
                and len(released) <= self._max_size
                and _have_same_key(released)
            ):
                # all of them run, so it does not matter who would go first
                return self._start_calls(released, now)
            for call in released:
                self._fair_queue(call.batch_key).add(call)
        batch: list[BatchedCall] = []
        while self._fair_queues and not batch:
            batch = self._pop_fair(now)
        return batch

    def _pop_fair(self, now: float) -> list[BatchedCall]:
        """Calls that can run together, less those that are too late."""
        fair_queues = self._fair_queues
        batch_key = (
            min(fair_queues, key=lambda each: fair_queues[each].sort_key())
            if len(fair_queues) > 1
            else next(iter(fair_queues))
        )
        selected = fair_queues[batch_key].pop(self._max_size)
        if not len(fair_queues[batch_key]):
            del fair_queues[batch_key]
        return self._start_calls(selected, now)

    def _start_calls(self, selected: list[BatchedCall], now: float) -> list[BatchedCall]:
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
    def __init__(self) -> None:
        self._by_priority: dict[float, CallsByCaller] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, call: BatchedCall) -> None:
        by_caller = self._by_priority.setdefault(call.priority, {})
        by_caller.setdefault(call.caller, collections.deque()).append(call)
        self._count += 1

    def discard_one(self) -> None:
        """Somebody in this line no longer wants to be in it."""
        self._count -= 1

    def pop(self, count: int) -> list[BatchedCall]:
        """The next calls, `count` of them or as many as there are."""
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
        return [
            call
            for by_caller in self._by_priority.values()
            for calls in by_caller.values()
            for call in calls
            if call.queued
        ]

    def sort_key(self) -> tuple[float, float]:
        """Of several lines, the one with the smallest rank goes first: by priority, then by age."""
        priority = max(self._by_priority)
        return -priority, min(
            calls[0].arrival_time for calls in self._by_priority[priority].values()
        )


def _pop_round_robin(by_caller: CallsByCaller, count: int, selected: list[BatchedCall]) -> None:
    end = len(selected) + count
    while by_caller and len(selected) < end:
        caller = next(iter(by_caller))
        calls = by_caller.pop(caller)
        call = calls.popleft()
        if calls:
            by_caller[caller] = calls  # at the end
        if call.queued:
            selected.append(call)
