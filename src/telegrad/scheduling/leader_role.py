"""`LeaderRole`: what `telegrad.thread_roles` calls on the thread that leads an event loop.

A thread keeps its role after it has handed the loop over: it still runs its call. All methods name
the epoch in which the thread led, and the loop ignores requests of a former leader.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from telegrad.scheduling.loop_connection import LoopConnection
from telegrad.scheduling.thread_pool import Job

if TYPE_CHECKING:
    from telegrad.scheduling.event_loop import EventLoop


class LeaderRole:
    """The `ThreadRole` of the thread that leads `loop` in `epoch`."""

    def __init__(self, loop: EventLoop, epoch: int) -> None:
        self._loop = loop
        self._epoch = epoch
        self._held_connections: list[LoopConnection] = []

    def pause(self) -> None:
        """Hand the loop over, because this thread is about to block."""
        self._loop.hand_over(self._epoch)

    def resume(self) -> None:
        """Do nothing: another thread leads now, and this one ends after its call."""
        return

    def begin_backpressure(self) -> None:
        """Hand the loop over, and stop reading the connection whose frame is handled here."""
        connection = self._loop.begin_backpressure(self._epoch)
        if connection is not None:
            self._held_connections.append(connection)

    def end_backpressure(self) -> None:
        """Undo the last `begin_backpressure`: read the connection again."""
        if self._held_connections:
            self._loop.end_backpressure(self._held_connections.pop())

    def has_pending_messages(self) -> bool:
        """Return whether this thread will handle another frame at once."""
        return self._loop.has_more_input(self._epoch)

    def run_when_drained(self, key: Hashable, job: Job) -> None:
        """Run `job` when no more frames are here; at once if this thread no longer leads."""
        if not self._loop.run_when_idle(self._epoch, key, job):
            job()

    def run_at(self, key: Hashable, when: float, job: Job) -> bool:
        """Run `job` at time `when`. Return False if this thread no longer leads."""
        return self._loop.run_at(self._epoch, key, when, job)
