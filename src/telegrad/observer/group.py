"""`Group`: ask all workers of a running group at once.

Each worker has a connection and a limit of time of its own, so one that does not answer delays the
others by no more than that limit, and its row says so.

State: the connections, each used by one thread at a time, inside `ask`.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.observer.connection import Credentials, NoAnswer, WorkerConnection
from telegrad.observer.graph import cycles, waits
from telegrad.timeouts import duration
from telegrad.transport.sockets import clock_id

_CLOCK_REQUESTS = 8  # the fastest of these tells the offset of a worker's clock


class ObservedWorker(NamedTuple):
    """A member of the group, as it is registered."""

    name: str
    rank: int
    incarnation: str
    addresses: tuple[str, ...]


class WorkerReply(NamedTuple):
    """What a worker answered, or the problem why there is no answer."""

    worker: ObservedWorker
    value: Any = None
    problem: str = ""


class ClockOffset(NamedTuple):
    """By how much the clock of a worker is ahead of the observer's, and how wrong this may be."""

    seconds: float
    error: float
    clock: str


def group_state(name: str, replies: Sequence[WorkerReply]) -> dict[str, Any]:
    """Return the snapshots of all workers of a group, and who waits for whom, as values of JSON."""
    found = waits(replies)
    return {
        "group": name,
        "time": time.time(),
        "workers": [
            {
                "name": reply.worker.name,
                "rank": reply.worker.rank,
                "problem": reply.problem,
                "snapshot": reply.value,
            }
            for reply in replies
        ],
        "waits": [wait._asdict() for wait in found],
        "cycles": cycles(found),
    }


class Group:
    """A running group, seen from outside."""

    def __init__(
        self, name: str, workers: Sequence[ObservedWorker], credentials: Credentials, pid: int = 0
    ) -> None:
        self.name = name
        self.workers: list[ObservedWorker] = sorted(workers, key=lambda worker: worker.rank)
        self.pid = pid  # of a worker on this host, if the group was found there
        self._connections = {
            worker.incarnation: WorkerConnection(worker.addresses, credentials, name)
            for worker in self.workers
        }

    def __repr__(self) -> str:
        return f"<Group {self.name}: {', '.join(worker.name for worker in self.workers)}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()

    def connection(self, name: str) -> WorkerConnection:
        """Return the connection to the worker with this name."""
        for worker in self.workers:
            if worker.name == name:
                return self._connections[worker.incarnation]
        names = ", ".join(worker.name for worker in self.workers)
        raise UsageError(f"the group has no worker {name!r}; it has {names}")

    def ask(self, operation: str, timeout: float = 2.0, **options: Any) -> list[WorkerReply]:
        """Ask every worker within `timeout` seconds. The replies are in the order of ranks."""
        limit = duration(timeout, positive=True)

        def ask(worker: ObservedWorker, connection: WorkerConnection) -> WorkerReply:
            return WorkerReply(worker, connection.request(operation, limit, **options))

        return self._for_each(ask)

    def snapshot(self, timeout: float = 2.0, window: float = 10.0) -> dict[str, Any]:
        """Return the state of all workers and who waits for whom, as values of JSON.

        Rates and latencies are those of the last `window` seconds.
        """
        window = duration(window, "window", positive=True)
        replies = self.ask("snapshot", timeout, window=window)
        return group_state(self.name, replies)

    def clock_offsets(self, timeout: float = 2.0) -> dict[str, ClockOffset]:
        """Return the offset of the clock of each worker that answers, by name.

        Workers on one machine share a clock. The request that took least time tells most, because
        the worker read its clock within it.
        """
        limit = duration(timeout, positive=True)

        def ask(worker: ObservedWorker, connection: WorkerConnection) -> WorkerReply:
            until = time.monotonic() + limit
            offsets = []
            for _ in range(_CLOCK_REQUESTS):
                sent = time.monotonic()
                answer = connection.request("clock", max(until - sent, 0.001))
                received = time.monotonic()
                offset = answer["monotonic"] - (sent + received) / 2
                offsets.append(ClockOffset(offset, (received - sent) / 2, answer["clock"]))
            return WorkerReply(worker, min(offsets, key=lambda each: each.error))

        offsets = {
            reply.worker.name: reply.value for reply in self._for_each(ask) if not reply.problem
        }
        best = {clock_id(): ClockOffset(0.0, 0.0, clock_id())}
        for offset in sorted(offsets.values(), key=lambda each: each.error):
            best.setdefault(offset.clock, offset)
        return {name: best[offset.clock] for name, offset in offsets.items()}

    def _for_each(
        self, ask: Callable[[ObservedWorker, WorkerConnection], WorkerReply]
    ) -> list[WorkerReply]:
        def run(worker: ObservedWorker) -> WorkerReply:
            try:
                return ask(worker, self._connections[worker.incarnation])
            except NoAnswer as error:
                return WorkerReply(worker, problem=str(error))

        if not self.workers:
            return []
        with concurrent.futures.ThreadPoolExecutor(len(self.workers)) as threads:
            return list(threads.map(run, self.workers))
