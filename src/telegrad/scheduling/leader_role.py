"""The role of the thread that leads an event loop."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from telegrad.scheduling.loop_connection import LoopConnection
from telegrad.scheduling.thread_pool import Job

if TYPE_CHECKING:
    from telegrad.scheduling.event_loop import EventLoop


class LeaderRole:
    """The role of a thread that leads."""

    def __init__(self, loop: EventLoop, epoch: int) -> None:
        self._loop = loop
        self._epoch = epoch
        self._held_connections: list[LoopConnection] = []

    def pause(self) -> None:
        self._loop.hand_over(self._epoch)

    def resume(self) -> None:
        return  # another thread leads now; this one ends after its call

    def hold(self) -> None:
        connection = self._loop.hold(self._epoch)
        if connection is not None:
            self._held_connections.append(connection)

    def release(self) -> None:
        if self._held_connections:
            self._loop.release(self._held_connections.pop())

    def more(self) -> bool:
        return self._loop.has_more_input(self._epoch)

    def afterwards(self, key: Hashable, job: Job) -> None:
        if not self._loop.run_when_idle(self._epoch, key, job):
            job()

    def at(self, key: Hashable, moment: float, job: Job) -> bool:
        return self._loop.run_at(self._epoch, key, moment, job)
