"""`BatchQueue`: when the calls of one batched function run, and where.

A call that finds nobody waiting and nothing running runs at once, on the thread that brought it.
Otherwise it goes to the `BatchScheduler`. The thread that brings the last one that was needed runs
the batch, unless it has more to read, which may belong to the batch; what gathers meanwhile runs
next, on a thread of the agent. One batch runs at a time, but a batch that blocks in a wait we know
of (a nested call) lets the next one run, so that batched functions may call each other, and
themselves, in circles.

State, under `_lock`: `_scheduler`, `_running` (batches that are not in such a wait) and
`_timer_time` (the earliest moment for which a timer is set). Whoever raises `_running` from 0 calls
`_finish_batch` in the end. A call is completed by whoever took it out, never under the lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad import blocking
from telegrad.batching.calls import BatchedCall
from telegrad.batching.execution import BatchExecutor, BatchRole, running_batch
from telegrad.batching.metrics import QueueMetrics, QueueRegistry
from telegrad.batching.policy import BatchOptions
from telegrad.batching.scheduler import BatchScheduler
from telegrad.errors import CallTimeout, PeerLost, QueueFull
from telegrad.messages.packing import sharing_replies
from telegrad.server.functions import DeferredReply

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_SLOW_BATCH = (
    0.002  # seconds: a batch that takes longer does not run on a thread that reads a connection
)
_now = time.monotonic

Args = tuple[Any, ...]
NOT_ALONE = object()


class BatchQueue:
    def __init__(self, executor: BatchExecutor, options: BatchOptions) -> None:
        self.metrics = QueueMetrics()
        self._executor = executor
        self._options = options
        self._scheduler = BatchScheduler(options, self.metrics)
        self._running = 0
        self._timer_time = math.inf
        self._mean_seconds = 0.0  # that a batch takes, a moving average
        self._runtime: AgentRuntime | None = None
        self._lock = threading.Lock()
        self._space_freed = threading.Condition(self._lock)  # somebody left the room

    def __repr__(self) -> str:
        return f"<BatchQueue of {self._executor.name}: {len(self._scheduler)} wait, {self._running} running>"

    def __len__(self) -> int:
        return len(self._scheduler)

    def try_run_alone(
        self,
        runtime: AgentRuntime | None,
        caller: str | int,
        receiver: Args,
        args: Args,
        kwargs: dict[str, Any],
    ) -> Any:
        """A call arrives: its result if it may run at once, by itself, else `NOT_ALONE`.

        This is what a lone caller pays for batching, so it is written to cost little.
        """
        if runtime is not self._runtime:
            self._register_with(runtime)
        if blocking.role() is not None and (self._mean_seconds > _SLOW_BATCH or blocking.more()):
            return NOT_ALONE
        with self._lock:
            if (
                self._running
                or len(self._scheduler)
                or self._executor.is_deferred
                or not self._scheduler.runs_alone(caller)
            ):
                return NOT_ALONE
            self._running = 1
        role = BatchRole(self)
        role.outer = blocking.take(role)
        started = _now()
        try:
            return self._executor.run_one(receiver, args, kwargs)
        except BaseException:
            self.metrics.failed += 1
            raise
        finally:
            blocking.take(role.outer)
            seconds = _now() - started
            with self._lock:
                self._running -= 1
                self._mean_seconds += (seconds - self._mean_seconds) * 0.25
                self.metrics.alone_time.add(seconds)
                batch = self._take_batch_if_any()
            if batch or self._scheduler.expired:
                self._start_batch(batch)

    def submit(self, call: BatchedCall) -> Any:
        """A call that does not run at once: its result, or a `DeferredReply`. Raises what the function raises."""
        run_here = self._mean_seconds < _SLOW_BATCH or blocking.role() is None
        batch = self._enqueue(call)
        if run_here and batch:
            outcome = self._run_batch(batch, own_call=call)
            self._start_batch(self._finish_batch())
            if outcome is not None:
                return outcome.get()
        else:
            self._start_batch(batch)
        return DeferredReply(call, lambda: self._abandon(call))

    def caller_lost(self, name: str) -> None:
        """A worker is gone: its calls leave, and nobody waits for it."""
        with self._lock:
            removed = self._scheduler.caller_lost(name)
            self._space_freed.notify(len(removed))
            batch = self._take_batch()
        for call in removed:
            call.complete(PeerLost(f"worker {name!r} was lost while its call waited", peer=name))
        self._start_batch(batch)

    def close(self, runtime: AgentRuntime) -> None:
        """An agent closes: what waits for it will not be sent."""
        with self._lock:
            removed = self._scheduler.remove_all(lambda call: call.runtime is runtime)
            self._space_freed.notify(len(removed))
            if self._runtime is runtime:
                self._runtime, self._timer_time = None, math.inf  # its clock no longer rings
                self._set_timer()
        for call in removed:
            call.complete(
                PeerLost(f"worker {runtime.name!r} has left the group", peer=runtime.name)
            )

    def pause(self) -> None:
        """The running batch is about to block: it may wait for what a call that waits here would do."""
        self._start_batch(self._finish_batch())

    def resume(self) -> None:
        with self._lock:
            self._running += 1

    # Arriving and leaving

    def _register_with(self, runtime: AgentRuntime | None) -> None:
        """The first call through this agent, or the first since one through another."""
        if runtime is not None:
            runtime.service(QueueRegistry).add(self)
            self._runtime = runtime

    def _enqueue(self, call: BatchedCall) -> list[BatchedCall]:
        """Queue a call; the batch that may start now, if there is one."""
        call.prepare()  # may fail, so not under the lock
        more = blocking.more()
        while True:
            with self._lock:
                if self._has_space():
                    self._scheduler.add(call, bool(self._running), 2 * self._mean_seconds)
                    more = more and len(self._scheduler) < self._options.max_size
                    batch = [] if more else self._take_batch()
                    self._set_timer()
                    break
            self._wait_for_space(call)
        if more:
            blocking.afterwards(self, self._on_idle)
        if self._scheduler.expired:
            self._fail_expired()
        self._verify_callers()
        return batch

    def _verify_callers(self) -> None:
        """A call may be read after its caller was found to be lost: such a caller must not be waited for."""
        while (name := self._scheduler.next_unverified_caller()) is not None:
            if self._runtime is not None and not _has_connection(self._runtime, name):
                self.caller_lost(name)

    def _has_space(self) -> bool:
        limit = self._options.max_queue
        if limit is None or len(self._scheduler) < limit:
            return True
        if self._options.when_full == "wait":
            return False
        self.metrics.rejected += 1
        raise QueueFull(
            f"{len(self._scheduler)} calls of {self._executor.name} wait already",
            call=self._executor.name,
        )

    def _wait_for_space(self, call: BatchedCall) -> None:
        """Hold up the thread that brings calls, so that the caller feels it."""
        limit, deadline = self._options.max_queue or 0, call.deadline
        role = blocking.hold()
        try:
            with self._lock:
                timeout = None if deadline is None else max(deadline.left(), 0)
                in_time = self._space_freed.wait_for(lambda: len(self._scheduler) < limit, timeout)
        finally:
            blocking.release(role)
        if not in_time:
            raise self._timeout_error()

    def _abandon(self, call: BatchedCall) -> None:
        """The caller no longer waits."""
        with self._lock:
            if self._scheduler.remove(call):
                self.metrics.given_up += 1
                self._space_freed.notify()

    # Whose turn it is; all under the lock

    def _take_batch(self) -> list[BatchedCall]:
        """If nothing runs: the batch that does now. Empty if there is none."""
        if self._running:
            return []
        before = len(self._scheduler)
        batch = self._scheduler.pop_batch(_now())
        self._space_freed.notify(before - len(self._scheduler))
        self._running = int(bool(batch))
        return batch

    def _take_batch_if_any(self) -> list[BatchedCall]:
        """`_take_batch`, for when it is likely that nobody waits."""
        if not len(self._scheduler):
            return []
        batch = self._take_batch()
        self._set_timer()
        return batch

    def _set_timer(self) -> None:
        """Make sure that a wait with an end does end. One timer at a time: it looks again when it rings."""
        latest_start = self._scheduler.latest_start
        if self._running or latest_start in (self._timer_time, math.inf):
            return
        if blocking.at(self, latest_start, self._on_idle):
            self._timer_time = latest_start
        elif latest_start < self._timer_time:
            self._timer_time = latest_start
            _run_at(self._runtime, latest_start, self._on_timer)

    def _on_timer(self) -> None:
        """Runs on the clock, without the lock."""
        with self._lock:
            self._timer_time = math.inf
            batch = self._take_batch()
            self._set_timer()
        self._start_batch(batch)

    def _on_idle(self) -> None:
        """Runs on a thread that reads, which has nothing else to do right now."""
        with self._lock:
            self._timer_time = math.inf
            batch = self._take_batch()
            self._set_timer()
        if self._mean_seconds > _SLOW_BATCH:
            self._start_batch(batch)
        else:
            self._run_batches(batch)

    # Running

    def _start_batch(self, batch: list[BatchedCall]) -> None:
        if batch or self._scheduler.expired:
            _start_thread(self._runtime, lambda: self._run_batches(batch))

    def _run_batches(self, batch: list[BatchedCall]) -> None:
        """On a thread of its own: run batches until nobody waits."""
        while batch:
            self._run_batch(batch)
            batch = self._finish_batch()
        self._fail_expired()

    def _run_batch(
        self, batch: list[BatchedCall], own_call: BatchedCall | None = None
    ) -> CallOutcome | None:
        """Run a batch and answer its calls, except `own_call` if it is one of them: its outcome is returned."""
        if self._executor.is_deferred:
            self._run_deferred(batch)
            return None
        started = _now()
        try:
            with running_batch(BatchRole(self), batch):
                outcomes = self._executor.run(batch)
        # the thread is being ended; the calls are answered all the same
        except BaseException as error:
            outcomes = [error] * len(batch)
        self._record_batch(len(batch), _failures(outcomes), _now() - started)
        own_outcome = None
        with sharing_replies(outcomes):
            for call, outcome in zip(batch, outcomes, strict=True):
                if call is own_call:
                    own_outcome = CallOutcome(outcome)
                else:
                    call.complete(outcome)
        return own_outcome

    def _run_deferred(self, batch: list[BatchedCall]) -> None:
        """Run a batch of a function that returns a future. With that it is over; the calls are answered later."""
        started = _now()

        def finish(outcomes: list[Any]) -> None:
            self._record_batch(len(batch), _failures(outcomes), _now() - started)
            with sharing_replies(outcomes):
                for call, outcome in zip(batch, outcomes, strict=True):
                    call.complete(outcome)

        with running_batch(BatchRole(self), batch):
            self._executor.run_deferred(batch, finish)

    def _record_batch(self, size: int, failed: int, seconds: float) -> None:
        self._mean_seconds += (seconds - self._mean_seconds) * 0.25
        self.metrics.record_batch(size, failed, seconds)

    def _finish_batch(self) -> list[BatchedCall]:
        """A batch is over: the next one, which the caller has to run or start."""
        with self._lock:
            self._running -= 1
            return self._take_batch_if_any()

    # Too late

    def _fail_expired(self) -> None:
        with self._lock:
            expired, self._scheduler.expired = self._scheduler.expired, []
        for call in expired:
            call.complete(self._timeout_error())

    def _timeout_error(self) -> CallTimeout:
        return CallTimeout(
            f"the deadline passed while the call of {self._executor.name} waited",
            call=self._executor.name,
        )


class CallOutcome(NamedTuple):
    """What came out of a call on the thread that brought it."""

    value: Any

    def get(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


def _failures(outcomes: list[Any]) -> int:
    return sum(isinstance(outcome, BaseException) for outcome in outcomes)


def _has_connection(runtime: AgentRuntime, name: str) -> bool:
    """Does a worker of this name have a connection to the agent?"""
    return any(inbound.peer_name == name for inbound in runtime.connections.server_connections)


def _start_thread(runtime: AgentRuntime | None, job: Callable[[], None]) -> None:
    """Run `job` on a thread of its own."""
    if runtime is not None and not runtime.closing:
        runtime.threads.start(job)
    else:
        threading.Thread(target=job, name="batch", daemon=True).start()


def _run_at(runtime: AgentRuntime | None, moment: float, job: Callable[[], None]) -> None:
    """Run a short `job` at a moment of `time.monotonic`."""
    if runtime is not None and not runtime.closing:
        runtime.clock.at(moment, job)
        return
    timer = threading.Timer(max(moment - time.monotonic(), 0), job)
    timer.daemon = True
    timer.start()
