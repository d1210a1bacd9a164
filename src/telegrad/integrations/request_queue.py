"""Requests of other workers that a server takes in batches: `enqueue` is the remote function.

State: `RequestQueues`, one per agent, has the queues by name; a queue is made by the first request
or by its server, so either may start first. A queue has the requests that nobody has taken, under
`_changed`. A request whose caller no longer waits is removed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from telegrad.agent import Agent
from telegrad.futures import Future
from telegrad.messages.remote_functions import DeferredReply, trusted
from telegrad.runtime import active_service

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


@dataclass(eq=False)
class Request:
    """A request. Whoever takes it must complete `reply`."""

    value: Any
    reply: Future[Any] = field(default_factory=Future)
    received_at: float = field(default_factory=time.monotonic)


class RequestQueue:
    """The requests of one name."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._changed = threading.Condition()

    def add(self, request: Request) -> None:
        """Add a request to the end."""
        with self._changed:
            self._requests.append(request)
            self._changed.notify()

    def discard(self, request: Request) -> None:
        """Remove a request, unless it was taken."""
        with self._changed:
            if request in self._requests:
                self._requests.remove(request)

    def wait(self, timeout: float) -> None:
        """Wait until there is a request, up to `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._requests), timeout)

    def take(self, count: int) -> list[Request]:
        """Remove and return up to `count` requests, oldest first."""
        with self._changed:
            return [self._requests.popleft() for _ in range(min(count, len(self._requests)))]


class RequestQueues:
    """The queues of one agent."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self._queues: dict[str, RequestQueue] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, agent: Agent | None = None) -> RequestQueues:
        """Return the queues of an agent; by default of the one that serves the current call."""
        return active_service(cls) if agent is None else agent._runtime.service(cls)

    def queue(self, name: str) -> RequestQueue:
        """Return the queue of a name."""
        with self._lock:
            return self._queues.setdefault(name, RequestQueue())


@trusted
def enqueue(name: str, value: Any) -> Any:
    """Reply to a request when the server of this name has done so."""
    queue, request = RequestQueues.of().queue(name), Request(value)
    queue.add(request)
    return DeferredReply(request.reply, on_abandoned=lambda: queue.discard(request))
