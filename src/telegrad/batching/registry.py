"""Where batches find threads and timers: the agent they run on, or the process if there is none.

State of a `QueueRegistry`: the queues that calls of its agent have gone through, held weakly.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from telegrad.batching.metrics import QueueMetrics

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

Job = Callable[[], None]


class RegisteredQueue(Protocol):
    """What a desk needs of a queue."""

    figures: QueueMetrics

    def __len__(self) -> int: ...
    def lost(self, name: str) -> None: ...
    def close(self, agent: AgentRuntime) -> None: ...


class QueueRegistry:
    """Tells the queues of an agent who was lost and when it closes, and reports what they count."""

    def __init__(self, agent: AgentRuntime) -> None:
        self._agent = agent
        self._queues: weakref.WeakSet[RegisteredQueue] = weakref.WeakSet()
        self._lock = threading.Lock()
        agent.on_loss(lambda name, _: self._tell(lambda queue: queue.lost(name)))
        agent.on_close(lambda: self._tell(lambda queue: queue.close(agent)))
        agent.add_statistics(self.statistics)

    def add(self, queue: RegisteredQueue) -> None:
        with self._lock:
            self._queues.add(queue)

    def queues(self) -> list[RegisteredQueue]:
        with self._lock:
            return list(self._queues)

    def statistics(self) -> dict[str, int]:
        queues = self.queues()
        return {
            "batched_calls": sum(queue.figures.calls for queue in queues),
            "batches": sum(queue.figures.batches for queue in queues),
            "batched_calls_waiting": sum(len(queue) for queue in queues),
        }

    def _tell(self, what: Callable[[RegisteredQueue], None]) -> None:
        for queue in self.queues():
            what(queue)


def is_connected(agent: AgentRuntime, name: str) -> bool:
    """Does a worker of this name have a connection to the agent?"""
    return any(inbound.peer_name == name for inbound in agent.listener.connections)


def start(agent: AgentRuntime | None, job: Job) -> None:
    """Run `job` on a thread of its own."""
    if agent is not None and not agent.closing:
        agent.threads.start(job)
    else:
        threading.Thread(target=job, name="batch", daemon=True).start()


def at(agent: AgentRuntime | None, moment: float, job: Job) -> None:
    """Run a short `job` at a moment of `time.monotonic`."""
    if agent is not None and not agent.closing:
        agent.clock.at(moment, job)
        return
    timer = threading.Timer(max(moment - time.monotonic(), 0), job)
    timer.daemon = True
    timer.start()
