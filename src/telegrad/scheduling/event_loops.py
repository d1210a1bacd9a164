"""`EventLoops`: the event loops of an agent.

With an interpreter lock, an agent has one loop: more threads would only compete for the lock.
Without it, an agent has several, each with a leader of its own. A connection stays with the loop
that it was added to.

State: `_loops`, `_count` and `_added_per_group`, under `_lock`.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Iterator

from telegrad.cores import CORES
from telegrad.free_threading import has_gil
from telegrad.locks import new_lock
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loop import EventLoop
from telegrad.scheduling.executor import ThreadPool
from telegrad.scheduling.poller import LoopConnection

_MAX_LOOPS = 4
_log = logging.getLogger(__name__)


def default_loop_count() -> int:
    """Return how many loops an agent has: several only if threads run in parallel.

    Half of the cores are left to other threads. On two cores, which callers on the same machine use
    as well, a second loop gained nothing.
    """
    return 1 if has_gil() else max(min(CORES // 2, _MAX_LOOPS), 1)


class EventLoops:
    """The loops of an agent, at most `count`.

    The connections of each group are distributed round-robin. Loops after the first are created
    when they are first needed.
    """

    def __init__(self, threads: ThreadPool, clock: Clock, count: int | None) -> None:
        self._create_loop = functools.partial(EventLoop, threads, clock)
        self._count = count if count is not None else default_loop_count()
        self._loops = [self._create_loop()]
        self._added_per_group: collections.Counter[str] = collections.Counter()
        self._lock = new_lock()

    def __repr__(self) -> str:
        return f"<EventLoops {self._loops}>"

    def __iter__(self) -> Iterator[EventLoop]:
        return iter(list(self._loops))

    def add(self, connection: LoopConnection) -> None:
        """Let one of the loops read a connection. Raise `ChannelClosed` if the loops are closed."""
        self._next_loop(connection.group).add(connection)

    def is_reading(self, connection: LoopConnection) -> bool:
        """Return whether a loop reads this connection, so that the loop will close it."""
        return any(loop.is_reading(connection) for loop in self)

    def close(self) -> None:
        """Let each loop end after its last connection. All connections must be ending."""
        with self._lock:
            self._count = len(self._loops)  # create no more loops
        for loop in self:
            loop.close()

    def close_after_fork(self) -> None:
        """Close the descriptors in the child of a fork. The connections belong to the parent."""
        for loop in self._loops:
            loop.close_after_fork()

    def _next_loop(self, group: str) -> EventLoop:
        with self._lock:
            index = self._added_per_group[group] % self._count
            self._added_per_group[group] += 1
            if index >= len(self._loops):
                try:
                    self._loops.append(self._create_loop())
                except OSError as error:
                    _log.warning(
                        "cannot create another event loop (%s); continuing with %d",
                        error,
                        len(self._loops),
                    )
                    self._count = len(self._loops)
            return self._loops[index % self._count]
