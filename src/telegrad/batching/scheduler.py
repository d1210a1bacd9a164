"""`BatchScheduler`: the waiting calls of one batched function, and which of them run next.

A call first waits in the `BatchPolicy`, if there is one, until enough calls are there.
`AdaptivePolicy` (`max_wait`) waits for the callers that recently called at the same time as others;
a caller that is always alone does not wait. `MinimumSizePolicy` (`min_size`) waits for a number of
calls. `AllCallersPolicy` (`min_size="all"`) waits for every worker that has called and is alive.
For all of them, `max_wait` limits the wait.

Then the call waits in the `FairQueue` of the calls that it may run with (those with the same
`batch_key`). In a fair queue, the highest priority goes first. Calls of equal priority are taken
from their callers in turn, so that a caller with many calls does not delay the others; the calls of
one caller stay in order.

`BatchOptions` has the settings of a batched function.

State: the calls that wait, and what a policy has learned about callers, changed under the lock of
the `BatchQueue`. Nothing here blocks or runs user code. `expired` has the calls that were removed
because their deadline passed; the `BatchQueue` completes them.
"""

from __future__ import annotations

import collections
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

from telegrad.batching.calls import BatchedCall
from telegrad.batching.metrics import QueueMetrics
from telegrad.errors import UsageError
from telegrad.timeouts import time_limit

_TRIAL_WAITS = 3  # how often a new queue waits without knowing its callers
CallsByCaller = dict[str | int, collections.deque[BatchedCall]]  # the first caller is the next


@dataclass(frozen=True)
class BatchOptions:
    """The settings of a batched function; `docs/batching.md` explains them."""

    max_size: int = 64
    max_wait: float | None = None
    min_size: int | Literal["all"] = 1
    pad_to: tuple[int, ...] = ()
    cuda_graph: bool = False
    max_queue: int | None = None
    when_full: Literal["wait", "reject"] = "wait"
    priority: Callable[..., float] | None = None
    retry_alone: bool = True
    version: Callable[..., int] | None = None

    def __post_init__(self) -> None:
        def require(is_valid: bool, message: str) -> None:
            if not is_valid:
                raise UsageError(f"batched: {message}")

        sizes = {"max_size": self.max_size, "max_queue": self.max_queue}
        sizes |= {f"pad_to[{index}]": size for index, size in enumerate(self.pad_to)}
        for name, size in sizes.items():
            is_number = isinstance(size, int) or (size is None and name == "max_queue")
            require(is_number, f"{name} must be a number, not {size!r}")
        require(self.max_size >= 1, f"max_size must be at least 1, not {self.max_size!r}")
        wait = time_limit(self.max_wait, "batched: max_wait")
        require(wait is None or wait >= 0, f"max_wait must not be negative, not {self.max_wait!r}")
        object.__setattr__(self, "max_wait", wait)
        require(
            self.min_size == "all"
            or (isinstance(self.min_size, int) and 1 <= self.min_size <= self.max_size),
            f"min_size must be 'all' or a number from 1 to max_size, not {self.min_size!r}",
        )
        require(
            all(size >= 1 for size in self.pad_to)
            and list(self.pad_to) == sorted(set(self.pad_to)),
            f"pad_to must be increasing positive sizes, not {self.pad_to!r}",
        )
        require(
            not self.pad_to or self.pad_to[-1] >= self.max_size,
            f"max_size must be at most the largest size in pad_to={self.pad_to!r}, "
            f"not {self.max_size!r}",
        )
        require(
            not self.cuda_graph or bool(self.pad_to),
            "cuda_graph needs pad_to, because a graph is captured for each of its sizes",
        )
        require(
            self.max_queue is None or self.max_queue >= self.max_size,
            f"max_queue must be None or at least max_size, not {self.max_queue!r}",
        )
        require(
            self.when_full in ("wait", "reject"),
            f"when_full must be 'wait' or 'reject', not {self.when_full!r}",
        )
        require(
            self.version is None or callable(self.version),
            f"version must be a function that returns a number, not {self.version!r}",
        )

    def padded_size(self, size: int) -> int:
        """Return the number of rows of a batch of `size` calls after padding."""
        return next((padded_to for padded_to in self.pad_to if padded_to >= size), size)


class BatchPolicy(ABC):
    """Base class: hold calls that wait for others, and decide when they may start."""

    def __init__(self, options: BatchOptions) -> None:
        self._max_size = options.max_size
        self._max_wait = options.max_wait
        self._calls: dict[BatchedCall, None] = {}
        self._waiting_by_caller: dict[str | int, int] = {}  # number of waiting calls
        self._latest_start = math.inf
        # Workers to wait for from now on. The queue checks whether they are still connected.
        self.unverified_callers: list[str] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: BatchedCall) -> bool:
        return call in self._calls

    @property
    def latest_start(self) -> float:
        """Return when the waiting calls start even if others are missing."""
        return self._latest_start

    @abstractmethod
    def runs_alone(self, caller: str | int) -> bool:
        """Return whether a call of this caller may start without waiting for others."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Return whether no further call is waited for."""

    @abstractmethod
    def caller_lost(self, caller: str) -> None:
        """Stop waiting for a lost worker. The queue removes its calls."""

    def record_overlap(self, caller: str | int) -> None:  # noqa: B027 (optional)
        """Note that a call arrived while others waited or ran."""

    def add(self, call: BatchedCall, margin: float) -> None:
        """Add a call, which should start `margin` seconds before its deadline."""
        self._calls[call] = None
        self._waiting_by_caller[call.caller] = self._waiting_by_caller.get(call.caller, 0) + 1
        self._latest_start = min(self._latest_start, self._latest_start_of(call, margin))

    def remove(self, call: BatchedCall) -> None:
        """Remove a call that no longer waits."""
        del self._calls[call]
        self._waiting_by_caller[call.caller] -= 1
        if not self._waiting_by_caller[call.caller]:
            del self._waiting_by_caller[call.caller]
        self._latest_start = min(
            (self._latest_start_of(each, 0.0) for each in self._calls), default=math.inf
        )

    def is_ready(self, now: float) -> bool:
        """Return whether the waiting calls may start now."""
        return bool(self._calls) and (
            len(self) >= self._max_size or now >= self._latest_start or self.is_complete()
        )

    def release(self, now: float) -> list[BatchedCall]:
        """Remove and return all waiting calls."""
        calls = list(self._calls)
        self._calls.clear()
        self._waiting_by_caller.clear()
        self._latest_start = math.inf
        return calls

    def calls(self) -> list[BatchedCall]:
        """Return the waiting calls."""
        return list(self._calls)

    def _latest_start_of(self, call: BatchedCall, margin: float) -> float:
        """Return when a call stops waiting for others."""
        if self._max_wait is None:
            return math.inf
        limit = call.arrival_time + self._max_wait
        return limit if call.deadline is None else min(limit, call.deadline.at - margin)


class AdaptivePolicy(BatchPolicy):
    """Wait for the callers that are expected because they recently called with others."""

    def __init__(self, options: BatchOptions) -> None:
        super().__init__(options)
        self._expected: set[str | int] = set()
        self._trial_waits = _TRIAL_WAITS

    def runs_alone(self, caller: str | int) -> bool:
        expected = self._expected
        return not self._trial_waits and (
            not expected or (len(expected) == 1 and caller in expected)
        )

    def is_complete(self) -> bool:
        return not self._trial_waits and self._expected <= self._waiting_by_caller.keys()

    def record_overlap(self, caller: str | int) -> None:
        self._expected.add(caller)

    def caller_lost(self, caller: str) -> None:
        self._expected.discard(caller)

    def release(self, now: float) -> list[BatchedCall]:
        # A caller that did not call in time is not expected again until its calls overlap others.
        if now >= self._latest_start:
            self._expected.intersection_update(self._waiting_by_caller)
            self._trial_waits = max(self._trial_waits - 1, 0)
        if len(self._waiting_by_caller) > 1:
            self._expected.update(self._waiting_by_caller)
        return super().release(now)


class MinimumSizePolicy(BatchPolicy):
    """Wait for a number of calls, less one for each caller that was lost."""

    def __init__(self, options: BatchOptions, size: int) -> None:
        super().__init__(options)
        self._min_size = size
        self._seen: set[str | int] = set()
        self._lost: set[str] = set()

    def runs_alone(self, caller: str | int) -> bool:
        self._record_caller(caller)
        return self._needed_calls <= 1

    def is_complete(self) -> bool:
        return len(self) >= self._needed_calls

    def add(self, call: BatchedCall, margin: float) -> None:
        self._record_caller(call.caller)
        super().add(call, margin)

    def caller_lost(self, caller: str) -> None:
        if caller in self._seen:
            self._lost.add(caller)

    @property
    def _needed_calls(self) -> int:
        """Return the number of calls to wait for. A lost caller counts again when it calls."""
        return max(self._min_size - len(self._lost), 1)

    def _record_caller(self, caller: str | int) -> None:
        self._seen.add(caller)
        if isinstance(caller, str) and caller in self._lost:
            self._lost.discard(caller)
            self.unverified_callers.append(caller)


class AllCallersPolicy(BatchPolicy):
    """Wait for a call of every worker that has called and is alive."""

    def __init__(self, options: BatchOptions) -> None:
        super().__init__(options)
        self._alive: set[str] = set()

    def runs_alone(self, caller: str | int) -> bool:
        self._record_caller(caller)
        return not self._alive - {caller}

    def is_complete(self) -> bool:
        return self._alive <= self._waiting_by_caller.keys()

    def add(self, call: BatchedCall, margin: float) -> None:
        self._record_caller(call.caller)
        super().add(call, margin)

    def caller_lost(self, caller: str) -> None:
        self._alive.discard(caller)

    def _record_caller(self, caller: str | int) -> None:
        if isinstance(caller, str) and caller not in self._alive:
            self._alive.add(caller)
            self.unverified_callers.append(caller)


def policy_for(options: BatchOptions) -> BatchPolicy | None:
    """Return the policy for these options; None if calls do not wait for others."""
    if options.min_size == "all":
        return AllCallersPolicy(options)
    if options.min_size > 1:
        return MinimumSizePolicy(options, options.min_size)
    return None if options.max_wait is None else AdaptivePolicy(options)


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
