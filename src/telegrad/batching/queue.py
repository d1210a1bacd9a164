"""`BatchQueue`: decide when and on which thread the calls of one batched function run.

A call that finds no other call waiting or running runs at once, on the thread that received it.
Otherwise it goes to the `BatchScheduler`. The thread that adds the last call of a batch runs the
batch, unless it has more messages to read, which may contain calls for the same batch. Calls that
wait meanwhile run next, on a thread of the agent. One batch runs at a time. But a batch that blocks
in a wait that Telegrad knows of (a nested call) lets the next one run, so batched functions may
call each other and themselves recursively.

State, under `_lock`: `_scheduler`, `_running` (the number of batches that run and are not in such a
wait), `metrics` and `_timer_time` (the earliest time for which a timer is set). The thread that
increases `_running` from 0 must call `_finish_batch` in the end. A call is completed by the thread
that has removed it from the scheduler, and never under the lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad import thread_roles
from telegrad.batching.calls import BatchedCall
from telegrad.batching.execution import BatchExecutor, BatchRole, running_batch
from telegrad.batching.metrics import QueueMetrics, QueueRegistry
from telegrad.batching.scheduler import BatchOptions, BatchScheduler
from telegrad.errors import CallTimeout, PeerLost, QueueFull
from telegrad.messages.packing import sharing_replies
from telegrad.messages.remote_functions import DeferredReply

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

# A function whose batches take more seconds does not run on a thread that reads connections.
_SLOW_BATCH = 0.002
_now = time.monotonic

Args = tuple[Any, ...]
NOT_ALONE = object()  # see `BatchQueue.try_run_alone`


class BatchQueue:
    """The calls of one batched function for one object or agent."""

    def __init__(self, executor: BatchExecutor, options: BatchOptions) -> None:
        self.metrics = QueueMetrics()
        self._executor = executor
        self._options = options
        self._scheduler = BatchScheduler(options, self.metrics)
        self._running = 0
        self._timer_time = math.inf
        self._mean_seconds = 0.0  # moving average of the run time of a batch
        self._runtime: AgentRuntime | None = None
        self._lock = threading.Lock()
        self._space_freed = threading.Condition(self._lock)  # notified when calls are removed

    def __repr__(self) -> str:
        return (
            f"<BatchQueue of {self._executor.name}: "
            f"{len(self._scheduler)} waiting, {self._running} running>"
        )

    def __len__(self) -> int:
        return len(self._scheduler)

    @property
    def name(self) -> str:
        """The name of the batched function."""
        return self._executor.name

    def try_run_alone(
        self,
        runtime: AgentRuntime | None,
        caller: str | int,
        receiver: Args,
        args: Args,
        kwargs: dict[str, Any],
        is_versioned: bool,
    ) -> Any:
        """Run a call at once if nothing else waits or runs, and return its result.

        Return `NOT_ALONE` if it has to be queued. This is the overhead of batching for a lone
        caller, so it creates no `BatchedCall`.
        """
        if runtime is not self._runtime:
            self._register_with(runtime)
        # A thread that reads connections must not run slow functions, and first reads the messages
        # that have arrived, because they may contain calls for the same batch.
        if thread_roles.current_role() is not None and (
            self._mean_seconds > _SLOW_BATCH or thread_roles.has_pending_messages()
        ):
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
        role.outer = thread_roles.set_role(role)
        started, failed = _now(), 1
        try:
            result = self._executor.run_one(receiver, args, kwargs, is_versioned)
            failed = 0
            return result
        finally:
            thread_roles.set_role(role.outer)
            seconds = _now() - started
            with self._lock:
                self.metrics.failed += failed
                self._running -= 1
                self._mean_seconds += (seconds - self._mean_seconds) * 0.25
                self.metrics.alone_time.add(seconds)
                batch = self._take_batch_if_any()
            if batch or self._scheduler.expired:
                self._start_batch(batch)

    def submit(self, call: BatchedCall) -> Any:
        """Queue a call. Return its result if it ran on this thread, else a `DeferredReply`.

        Raise what the function raises.
        """
        run_here = self._mean_seconds < _SLOW_BATCH or thread_roles.current_role() is None
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
        """Remove the calls of a lost worker and stop waiting for it."""
        with self._lock:
            removed = self._scheduler.caller_lost(name)
            self._space_freed.notify(len(removed))
            batch = self._take_batch()
        for call in removed:
            call.complete(
                PeerLost(f"worker {name!r} was lost while its call waited for a batch", peer=name)
            )
        self._start_batch(batch)

    def close(self, runtime: AgentRuntime) -> None:
        """Fail the calls of an agent that closes."""
        with self._lock:
            removed = self._scheduler.remove_all(lambda call: call.runtime is runtime)
            self._space_freed.notify(len(removed))
            if self._runtime is runtime:
                self._runtime, self._timer_time = None, math.inf  # its clock has stopped
                self._set_timer()
        for call in removed:
            call.complete(
                PeerLost(f"worker {runtime.name!r} has left the group", peer=runtime.name)
            )

    def pause(self) -> None:
        """Start the next batch, because the running one blocks and may depend on it."""
        self._start_batch(self._finish_batch())

    def resume(self) -> None:
        """Count a batch as running again, after `pause`."""
        with self._lock:
            self._running += 1

    # Adding and removing calls

    def _register_with(self, runtime: AgentRuntime | None) -> None:
        """Use the threads and the clock of the agent that received the latest call."""
        if runtime is not None:
            runtime.service(QueueRegistry).add(self)
            self._runtime = runtime

    def _enqueue(self, call: BatchedCall) -> list[BatchedCall]:
        """Add a call to the scheduler and return the batch that may start now, if any."""
        call.prepare()  # may raise, so not under the lock
        more = thread_roles.has_pending_messages()
        while True:
            with self._lock:
                if self._has_space():
                    # A call should start early enough before its deadline to complete in time.
                    self._scheduler.add(call, bool(self._running), 2 * self._mean_seconds)
                    more = more and len(self._scheduler) < self._options.max_size
                    batch = [] if more else self._take_batch()
                    self._set_timer()
                    break
            self._wait_for_space(call)
        if more:  # this thread runs the batch when it has read everything
            thread_roles.run_when_drained(self, self._on_idle)
        if self._scheduler.expired:
            self._fail_expired()
        self._verify_callers()
        return batch

    def _verify_callers(self) -> None:
        """Do not wait for callers without a connection.

        A call may be read after its caller was found to be lost.
        """
        while (name := self._scheduler.next_unverified_caller()) is not None:
            if self._runtime is not None and not _has_connection(self._runtime, name):
                self.caller_lost(name)

    def _has_space(self) -> bool:
        """Under the lock: return whether a call may be added. Raise `QueueFull` if not."""
        limit = self._options.max_queue
        if limit is None or len(self._scheduler) < limit:
            return True
        if self._options.when_full == "wait":
            return False
        self.metrics.rejected += 1
        raise QueueFull(
            f"the queue of {self._executor.name} is full: {len(self._scheduler)} calls wait. Call "
            "again later, or raise max_queue",
            call=self._executor.name,
        )

    def _wait_for_space(self, call: BatchedCall) -> None:
        """Block the thread that reads the calls, so that the callers are slowed down."""
        limit, deadline = self._options.max_queue or 0, call.deadline
        role = thread_roles.begin_backpressure()
        try:
            with self._lock:
                timeout = None if deadline is None else max(deadline.left(), 0)
                in_time = self._space_freed.wait_for(lambda: len(self._scheduler) < limit, timeout)
        finally:
            thread_roles.end_backpressure(role)
        if not in_time:
            raise self._timeout_error()

    def _abandon(self, call: BatchedCall) -> None:
        """Remove a call whose caller no longer waits."""
        with self._lock:
            if self._scheduler.remove(call):
                self.metrics.given_up += 1
                self._space_freed.notify()

    # Selecting batches and setting timers; the lock is held

    def _take_batch(self) -> list[BatchedCall]:
        """Return the batch that runs now; empty if one runs already or no call may start."""
        if self._running:
            return []
        before = len(self._scheduler)
        batch = self._scheduler.pop_batch(_now())
        self._space_freed.notify(before - len(self._scheduler))
        self._running = int(bool(batch))
        return batch

    def _take_batch_if_any(self) -> list[BatchedCall]:
        """Do what `_take_batch` does, faster if no call waits."""
        if not len(self._scheduler):
            return []
        batch = self._take_batch()
        self._set_timer()
        return batch

    def _set_timer(self) -> None:
        """Set a timer for the latest start of the waiting calls. It is set again when it fires."""
        latest_start = self._scheduler.latest_start
        if self._running or latest_start in (self._timer_time, math.inf):
            return
        # A thread that reads connections can wait itself, which saves a switch to another thread.
        if thread_roles.run_at(self, latest_start, self._on_idle):
            self._timer_time = latest_start
        elif latest_start < self._timer_time:
            self._timer_time = latest_start
            _run_at(self._runtime, latest_start, self._on_timer)

    def _on_timer(self) -> None:
        """Start what is due. The clock calls this, without the lock."""
        with self._lock:
            self._timer_time = math.inf
            batch = self._take_batch()
            self._set_timer()
        self._start_batch(batch)

    def _on_idle(self) -> None:
        """Run what is due, on a thread that reads connections and has nothing else to do."""
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
        """Run a batch on another thread, and the batches that follow it."""
        if batch or self._scheduler.expired:
            _start_thread(self._runtime, lambda: self._run_batches(batch))

    def _run_batches(self, batch: list[BatchedCall]) -> None:
        """Run a batch and those that follow it, until no call waits."""
        while batch:
            self._run_batch(batch)
            batch = self._finish_batch()
        self._fail_expired()

    def _run_batch(
        self, batch: list[BatchedCall], own_call: BatchedCall | None = None
    ) -> CallOutcome | None:
        """Run a batch and complete its calls.

        If `own_call` is one of them, return its outcome instead of completing it.
        """
        if self._executor.is_deferred:
            self._run_deferred(batch)
            return None
        started = _now()
        try:
            with running_batch(BatchRole(self), batch):
                outcomes = self._executor.run(batch)
        # Something such as SystemExit ends this thread. The calls must be completed all the same.
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
        """Run a batch of a function that returns a future.

        The batch is over when the function returns; its calls complete when the future does.
        """
        started = _now()

        def finish(outcomes: list[Any]) -> None:
            self._record_batch(len(batch), _failures(outcomes), _now() - started)
            with sharing_replies(outcomes):
                for call, outcome in zip(batch, outcomes, strict=True):
                    call.complete(outcome)

        with running_batch(BatchRole(self), batch):
            self._executor.run_deferred(batch, finish)

    def _record_batch(self, size: int, failed: int, seconds: float) -> None:
        """Update the metrics after a batch."""
        with self._lock:
            self._mean_seconds += (seconds - self._mean_seconds) * 0.25
            self.metrics.record_batch(size, failed, seconds)
        if self._runtime is not None:
            self._runtime.recorder.add_event("batch", seconds, function=self.name, size=size)

    def _finish_batch(self) -> list[BatchedCall]:
        """End the running batch and return the next one, which the caller must run or start."""
        with self._lock:
            self._running -= 1
            return self._take_batch_if_any()

    # Expired calls

    def _fail_expired(self) -> None:
        """Complete the calls whose deadline passed while they waited."""
        with self._lock:
            expired, self._scheduler.expired = self._scheduler.expired, []
        for call in expired:
            call.complete(self._timeout_error())

    def _timeout_error(self) -> CallTimeout:
        return CallTimeout(
            f"the deadline passed while the call of {self._executor.name} waited for a batch",
            call=self._executor.name,
        )


class CallOutcome(NamedTuple):
    """The outcome of a call on the thread that received it."""

    value: Any

    def get(self) -> Any:
        """Return the result or raise the exception."""
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


def _failures(outcomes: list[Any]) -> int:
    return sum(isinstance(outcome, BaseException) for outcome in outcomes)


def _has_connection(runtime: AgentRuntime, name: str) -> bool:
    """Return whether a worker of this name is connected to the agent."""
    connections = runtime.listener.connections
    return any(connection.peer_name == name for connection in connections)


def _start_thread(runtime: AgentRuntime | None, job: Callable[[], None]) -> None:
    """Run `job` on a thread of the agent, or on a new one if there is no agent."""
    if runtime is not None and not runtime.closing:
        runtime.threads.start(job)
    else:
        threading.Thread(target=job, name="batch", daemon=True).start()


def _run_at(runtime: AgentRuntime | None, moment: float, job: Callable[[], None]) -> None:
    """Run a short `job` at a time of `time.monotonic`."""
    if runtime is not None and not runtime.closing:
        runtime.clock.call_at(moment, job)
        return
    timer = threading.Timer(max(moment - time.monotonic(), 0), job)
    timer.daemon = True
    timer.start()
