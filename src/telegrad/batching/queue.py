"""`BatchQueue`: when the calls of one batched function run, and where.

A call that finds nobody waiting and nothing running runs at once, on the thread that brought it. Otherwise it goes to
the `BatchScheduler`. The thread that brings the last one that was needed runs the batch, unless it has more to read,
which may belong to the batch; what gathers meanwhile runs next, on a thread of the agent. One batch runs at a time, but
a batch that blocks in a wait we know of (a nested call) lets the next one run, so that batched functions may call each
other, and themselves, in circles.

State, under `_lock`: `_room`, `_running` (batches that are not in such a wait) and `_alarm` (the earliest moment for
which a timer is set). Whoever raises `_running` from 0 calls `_follow` in the end. A call is completed by whoever took
it out, never under the lock.
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

_SLOW = 0.002  # seconds: a batch that takes longer does not run on a thread that reads a connection
_now = time.monotonic

Args = tuple[Any, ...]
NOT_ALONE = object()


class BatchQueue:
    def __init__(self, work: BatchExecutor, options: BatchOptions) -> None:
        self.figures = QueueMetrics()
        self._work = work
        self._options = options
        self._room = BatchScheduler(options, self.figures)
        self._running = 0
        self._alarm = math.inf
        self._seconds = 0.0  # that a batch takes, a moving average
        self._agent: AgentRuntime | None = None
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)  # somebody left the room

    def __repr__(self) -> str:
        return f"<BatchQueue of {self._work.name}: {len(self._room)} wait, {self._running} running>"

    def __len__(self) -> int:
        return len(self._room)

    def run_alone(
        self,
        agent: AgentRuntime | None,
        caller: str | int,
        receiver: Args,
        args: Args,
        kwargs: dict[str, Any],
    ) -> Any:
        """A call arrives: its result if it may run at once, by itself, else `NOT_ALONE`.

        This is what a lone caller pays for batching, so it is written to cost little.
        """
        if agent is not self._agent:
            self._meet(agent)
        if blocking.role() is not None and (self._seconds > _SLOW or blocking.more()):
            return NOT_ALONE
        with self._lock:
            if (
                self._running
                or len(self._room)
                or self._work.is_deferred
                or not self._room.suffices(caller)
            ):
                return NOT_ALONE
            self._running = 1
        turn = BatchRole(self)
        turn.outer = blocking.take(turn)
        started = _now()
        try:
            return self._work.run_one(receiver, args, kwargs)
        except BaseException:
            self.figures.failed += 1
            raise
        finally:
            blocking.take(turn.outer)
            seconds = _now() - started
            with self._lock:
                self._running -= 1
                self._seconds += (seconds - self._seconds) * 0.25
                self.figures.alone.add(seconds)
                batch = self._next_if_any()
            if batch or self._room.expired:
                self._start(batch)

    def enter(self, entry: BatchedCall) -> Any:
        """A call that does not run at once: its result, or a `DeferredReply`. Raises what the function raises."""
        here = self._seconds < _SLOW or blocking.role() is None
        batch = self._push(entry)
        if here and batch:
            outcome = self._run(batch, own=entry)
            self._start(self._follow())
            if outcome is not None:
                return outcome.get()
        else:
            self._start(batch)
        return DeferredReply(entry, lambda: self._give_up(entry))

    def lost(self, name: str) -> None:
        """A worker is gone: its calls leave, and nobody waits for it."""
        with self._lock:
            gone = self._room.lost(name)
            self._left.notify(len(gone))
            batch = self._next()
        for entry in gone:
            entry.settle(PeerLost(f"worker {name!r} was lost while its call waited", peer=name))
        self._start(batch)

    def close(self, agent: AgentRuntime) -> None:
        """An agent closes: what waits for it will not be sent."""
        with self._lock:
            gone = self._room.remove_all(lambda entry: entry.agent is agent)
            self._left.notify(len(gone))
            if self._agent is agent:
                self._agent, self._alarm = None, math.inf  # its clock no longer rings
                self._set_alarm()
        for entry in gone:
            entry.settle(PeerLost(f"worker {agent.name!r} has left the group", peer=agent.name))

    def pause(self) -> None:
        """The running batch is about to block: it may wait for what a call that waits here would do."""
        self._start(self._follow())

    def resume(self) -> None:
        with self._lock:
            self._running += 1

    # Arriving and leaving

    def _meet(self, agent: AgentRuntime | None) -> None:
        """The first call through this agent, or the first since one through another."""
        if agent is not None:
            agent.service(QueueRegistry).add(self)
            self._agent = agent

    def _push(self, entry: BatchedCall) -> list[BatchedCall]:
        """Queue a call; the batch that may start now, if there is one."""
        entry.prepare()  # may fail, so not under the lock
        more = blocking.more()
        while True:
            with self._lock:
                if self._has_room():
                    self._room.add(entry, bool(self._running), 2 * self._seconds)
                    more = more and len(self._room) < self._options.max_size
                    batch = [] if more else self._next()
                    self._set_alarm()
                    break
            self._wait_for_room(entry)
        if more:
            blocking.afterwards(self, self._wake)
        if self._room.expired:
            self._tell_expired()
        self._check_newcomers()
        return batch

    def _check_newcomers(self) -> None:
        """A call may be read after its caller was found to be lost: such a caller must not be waited for."""
        while (name := self._room.newcomer()) is not None:
            if self._agent is not None and not _is_connected(self._agent, name):
                self.lost(name)

    def _has_room(self) -> bool:
        limit = self._options.max_queue
        if limit is None or len(self._room) < limit:
            return True
        if self._options.when_full == "wait":
            return False
        self.figures.rejected += 1
        raise QueueFull(
            f"{len(self._room)} calls of {self._work.name} wait already", call=self._work.name
        )

    def _wait_for_room(self, entry: BatchedCall) -> None:
        """Hold up the thread that brings calls, so that the caller feels it."""
        limit, deadline = self._options.max_queue or 0, entry.deadline
        role = blocking.hold()
        try:
            with self._lock:
                timeout = None if deadline is None else max(deadline.left(), 0)
                in_time = self._left.wait_for(lambda: len(self._room) < limit, timeout)
        finally:
            blocking.release(role)
        if not in_time:
            raise self._too_late()

    def _give_up(self, entry: BatchedCall) -> None:
        """The caller no longer waits."""
        with self._lock:
            if self._room.remove(entry):
                self.figures.given_up += 1
                self._left.notify()

    # Whose turn it is; all under the lock

    def _next(self) -> list[BatchedCall]:
        """If nothing runs: the batch that does now. Empty if there is none."""
        if self._running:
            return []
        before = len(self._room)
        batch = self._room.take(_now())
        self._left.notify(before - len(self._room))
        self._running = int(bool(batch))
        return batch

    def _next_if_any(self) -> list[BatchedCall]:
        """`_next`, for when it is likely that nobody waits."""
        if not len(self._room):
            return []
        batch = self._next()
        self._set_alarm()
        return batch

    def _set_alarm(self) -> None:
        """Make sure that a wait with an end does end. One timer at a time: it looks again when it rings."""
        until = self._room.until
        if self._running or until in (self._alarm, math.inf):
            return
        if blocking.at(self, until, self._wake):
            self._alarm = until
        elif until < self._alarm:
            self._alarm = until
            _run_at(self._agent, until, self._ring)

    def _ring(self) -> None:
        """Runs on the clock, without the lock."""
        with self._lock:
            self._alarm = math.inf
            batch = self._next()
            self._set_alarm()
        self._start(batch)

    def _wake(self) -> None:
        """Runs on a thread that reads, which has nothing else to do right now."""
        with self._lock:
            self._alarm = math.inf
            batch = self._next()
            self._set_alarm()
        if self._seconds > _SLOW:
            self._start(batch)
        else:
            self._run_all(batch)

    # Running

    def _start(self, batch: list[BatchedCall]) -> None:
        if batch or self._room.expired:
            _start_thread(self._agent, lambda: self._run_all(batch))

    def _run_all(self, batch: list[BatchedCall]) -> None:
        """On a thread of its own: run batches until nobody waits."""
        while batch:
            self._run(batch)
            batch = self._follow()
        self._tell_expired()

    def _run(self, batch: list[BatchedCall], own: BatchedCall | None = None) -> CallOutcome | None:
        """Run a batch and answer its calls, except `own` if it is one of them: its outcome is returned."""
        if self._work.is_deferred:
            self._begin(batch)
            return None
        started = _now()
        try:
            with running_batch(BatchRole(self), batch):
                outcomes = self._work.run(batch)
        # the thread is being ended; the calls are answered all the same
        except BaseException as error:
            outcomes = [error] * len(batch)
        self._took(len(batch), _failures(outcomes), _now() - started)
        mine = None
        with sharing_replies(outcomes):
            for entry, outcome in zip(batch, outcomes, strict=True):
                if entry is own:
                    mine = CallOutcome(outcome)
                else:
                    entry.settle(outcome)
        return mine

    def _begin(self, batch: list[BatchedCall]) -> None:
        """Run a batch of a function that returns a future. With that it is over; the calls are answered later."""
        started = _now()

        def finish(outcomes: list[Any]) -> None:
            self._took(len(batch), _failures(outcomes), _now() - started)
            with sharing_replies(outcomes):
                for entry, outcome in zip(batch, outcomes, strict=True):
                    entry.settle(outcome)

        with running_batch(BatchRole(self), batch):
            self._work.begin(batch, finish)

    def _took(self, size: int, failed: int, seconds: float) -> None:
        self._seconds += (seconds - self._seconds) * 0.25
        self.figures.ran(size, failed, seconds)

    def _follow(self) -> list[BatchedCall]:
        """A batch is over: the next one, which the caller has to run or start."""
        with self._lock:
            self._running -= 1
            return self._next_if_any()

    # Too late

    def _tell_expired(self) -> None:
        with self._lock:
            expired, self._room.expired = self._room.expired, []
        for entry in expired:
            entry.settle(self._too_late())

    def _too_late(self) -> CallTimeout:
        return CallTimeout(
            f"the deadline passed while the call of {self._work.name} waited", call=self._work.name
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


def _is_connected(agent: AgentRuntime, name: str) -> bool:
    """Does a worker of this name have a connection to the agent?"""
    return any(inbound.peer_name == name for inbound in agent.connections.server_connections)


def _start_thread(agent: AgentRuntime | None, job: Callable[[], None]) -> None:
    """Run `job` on a thread of its own."""
    if agent is not None and not agent.closing:
        agent.threads.start(job)
    else:
        threading.Thread(target=job, name="batch", daemon=True).start()


def _run_at(agent: AgentRuntime | None, moment: float, job: Callable[[], None]) -> None:
    """Run a short `job` at a moment of `time.monotonic`."""
    if agent is not None and not agent.closing:
        agent.clock.at(moment, job)
        return
    timer = threading.Timer(max(moment - time.monotonic(), 0), job)
    timer.daemon = True
    timer.start()
