"""When do calls that wait for company start? `BatchPolicy` keeps them until then.

`AdaptivePolicy` (max_wait) waits for those who have been calling at the same time as others lately, and not for anybody
else: a caller who is alone does not wait at all. `MinimumSizePolicy` (min_size) waits for a number of calls,
`AllCallersPolicy` (min_size="all") for every worker that has called and is alive. In all of them, `max_wait` is the
longest wait.

State: changed under the lock of the queue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from telegrad.batching.calls import BatchedCall
from telegrad.errors import UsageError

_TRIAL_WAITS = 3  # how often a new queue waits to see who else is there


@dataclass(frozen=True)
class BatchOptions:
    max_size: int = 64
    max_wait: float | None = None
    min_size: int | Literal["all"] = 1
    pad_to: tuple[int, ...] = ()
    cuda_graph: bool = False
    max_queue: int | None = None
    when_full: Literal["wait", "reject"] = "wait"
    priority: Callable[..., float] | None = None
    retry_alone: bool = True

    def __post_init__(self) -> None:
        def require(is_valid: bool, message: str) -> None:
            if not is_valid:
                raise UsageError(f"batched: {message}")

        require(self.max_size >= 1, f"max_size must be at least 1, not {self.max_size!r}")
        require(
            self.max_wait is None or 0 <= self.max_wait < math.inf,
            f"max_wait must be seconds or None, not {self.max_wait!r}",
        )
        require(
            self.min_size == "all"
            or (isinstance(self.min_size, int) and 1 <= self.min_size <= self.max_size),
            f"min_size must be 'all' or from 1 to max_size, not {self.min_size!r}",
        )
        require(
            all(size >= 1 for size in self.pad_to)
            and list(self.pad_to) == sorted(set(self.pad_to)),
            f"pad_to must be growing sizes, not {self.pad_to!r}",
        )
        require(
            not self.pad_to or self.pad_to[-1] >= self.max_size,
            f"a batch of {self.max_size} fits none of the sizes {self.pad_to!r}: make max_size smaller",
        )
        require(
            not self.cuda_graph or bool(self.pad_to),
            "cuda_graph needs pad_to: a graph is made for each of its sizes",
        )
        require(
            self.max_queue is None or self.max_queue >= self.max_size,
            f"max_queue must be None or at least max_size, not {self.max_queue!r}",
        )
        require(
            self.when_full in ("wait", "reject"),
            f"when_full must be 'wait' or 'reject', not {self.when_full!r}",
        )

    def padded_size(self, size: int) -> int:
        """How many rows a batch of `size` calls is given."""
        return next((padded_to for padded_to in self.pad_to if padded_to >= size), size)


class BatchPolicy(ABC):
    """Calls that wait for others; the base of the rules."""

    def __init__(self, options: BatchOptions) -> None:
        self._max_size = options.max_size
        self._max_wait = options.max_wait
        self._calls: dict[BatchedCall, None] = {}
        self._waiting_by_caller: dict[str | int, int] = {}  # how many calls each caller has here
        self._latest_start = math.inf
        # workers to be waited for from now on; the queue checks that they are alive
        self.unverified_callers: list[str] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: BatchedCall) -> bool:
        return call in self._calls

    @property
    def latest_start(self) -> float:
        """When the wait ends whoever is missing."""
        return self._latest_start

    @abstractmethod
    def runs_alone(self, caller: str | int) -> bool:
        """Would a call of this caller run at once, if it were the only one?"""

    @abstractmethod
    def is_complete(self) -> bool:
        """Is everybody here who is waited for?"""

    @abstractmethod
    def caller_lost(self, caller: str) -> None:
        """A worker is gone; its calls are taken out by the queue."""

    def record_overlap(self, caller: str | int) -> None:  # noqa: B027 (only some rules care)
        """A call arrived while others waited or ran."""

    def add(self, call: BatchedCall, margin: float) -> None:
        """One more call, which should start `margin` seconds before its deadline."""
        self._calls[call] = None
        self._waiting_by_caller[call.caller] = self._waiting_by_caller.get(call.caller, 0) + 1
        self._latest_start = min(self._latest_start, self._latest_start_of(call, margin))

    def remove(self, call: BatchedCall) -> None:
        del self._calls[call]
        self._waiting_by_caller[call.caller] -= 1
        if not self._waiting_by_caller[call.caller]:
            del self._waiting_by_caller[call.caller]
        self._latest_start = min(
            (self._latest_start_of(each, 0.0) for each in self._calls), default=math.inf
        )

    def is_ready(self, now: float) -> bool:
        return bool(self._calls) and (
            len(self) >= self._max_size or now >= self._latest_start or self.is_complete()
        )

    def release(self, now: float) -> list[BatchedCall]:
        """Everybody who waits; the next wait begins anew."""
        calls = list(self._calls)
        self._calls.clear()
        self._waiting_by_caller.clear()
        self._latest_start = math.inf
        return calls

    def calls(self) -> list[BatchedCall]:
        return list(self._calls)

    def _latest_start_of(self, call: BatchedCall, margin: float) -> float:
        if self._max_wait is None:
            return math.inf
        limit = call.arrival_time + self._max_wait
        return limit if call.deadline is None else min(limit, call.deadline.at - margin)


class AdaptivePolicy(BatchPolicy):
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
        # who was waited for and did not come is not waited for again until it overlaps
        if now >= self._latest_start:
            self._expected.intersection_update(self._waiting_by_caller)
            self._trial_waits = max(self._trial_waits - 1, 0)
        if len(self._waiting_by_caller) > 1:
            self._expected.update(self._waiting_by_caller)
        return super().release(now)


class MinimumSizePolicy(BatchPolicy):
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
        """Those who died cannot come; one who comes back counts again."""
        return max(self._min_size - len(self._lost), 1)

    def _record_caller(self, caller: str | int) -> None:
        self._seen.add(caller)
        if isinstance(caller, str) and caller in self._lost:
            self._lost.discard(caller)
            self.unverified_callers.append(caller)


class AllCallersPolicy(BatchPolicy):
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
    """The rule that the options ask for; None if nobody waits for anybody."""
    if options.min_size == "all":
        return AllCallersPolicy(options)
    if options.min_size > 1:
        return MinimumSizePolicy(options, options.min_size)
    return None if options.max_wait is None else AdaptivePolicy(options)
