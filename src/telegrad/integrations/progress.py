"""Which version of weights each worker uses, and how a sender waits for it.

A receiver in a worker has a `VersionProgress`. A sender asks all workers of the group
(`wait_for_workers`, `version_of`). Lost workers, and those without a receiver of that name, do not
count.

State: `ProgressRegistry`, one per agent, has the receivers by name. A `VersionProgress` has the
version that is in use, the error of the last one that could not be used, and the futures of those
who wait. Both are changed under their `_lock`; futures are completed without it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from telegrad.agent import Agent
from telegrad.errors import PeerLost
from telegrad.futures import Future
from telegrad.messages.remote_functions import trusted
from telegrad.runtime import active_service
from telegrad.worker_group import WorkerGroup

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class VersionProgress:
    """The version that a receiver uses."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.tried: int | None = None  # the newest version, also if it could not be used
        self._failed: tuple[int, Exception] | None = None
        self._waiting: list[tuple[int, Future[None]]] = []
        self._lock = threading.Lock()

    def reached(self, version: int) -> Future[None]:
        """Return a future that completes when this version or a newer one is in use."""
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append((version, future))
        self._complete()
        return future

    def set(self, version: int) -> None:
        """Note that a version is in use."""
        with self._lock:
            self.version = version
        self._complete()

    def fail(self, version: int | None, error: Exception) -> None:
        """Note that a version could not be used."""
        with self._lock:
            self.tried = version
            self._failed = None if version is None else (version, error)
        self._complete()

    def close(self) -> None:
        """Let those who wait go on: there is no receiver any more."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.set_result(None)

    def _complete(self) -> None:
        ready: list[tuple[Future[None], Exception | None]] = []
        with self._lock:
            waiting = []
            for wanted, future in self._waiting:
                if self.version is not None and self.version >= wanted:
                    ready.append((future, None))
                elif self._failed is not None and self._failed[0] >= wanted:
                    ready.append((future, self._failed[1]))
                else:
                    waiting.append((wanted, future))
            self._waiting = waiting
        for future, error in ready:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class ProgressRegistry:
    """The receivers of one agent, by name."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self._receivers: dict[str, list[VersionProgress]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, agent: Agent | None = None) -> ProgressRegistry:
        """Return the registry of an agent; by default of the one that serves the current call."""
        return active_service(cls) if agent is None else agent._runtime.service(cls)

    def add(self, name: str, progress: VersionProgress) -> None:
        """Let senders see a receiver."""
        with self._lock:
            self._receivers.setdefault(name, []).append(progress)

    def remove(self, name: str, progress: VersionProgress) -> None:
        """Undo `add`, and let those who wait for this receiver go on. May be repeated."""
        with self._lock:
            found = self._receivers.get(name, [])
            if progress in found:
                found.remove(progress)
        progress.close()

    def receivers(self, name: str) -> list[VersionProgress]:
        """Return the receivers of a name."""
        with self._lock:
            return list(self._receivers.get(name, ()))


@trusted
def version_of(name: str, wait_for: int | None, seconds: float | None) -> int | None:
    """Return the version that this worker uses; None if it has no receiver of this name.

    Wait up to `seconds` until it is `wait_for` or newer. Raise the error if it cannot be used.
    """
    receivers = ProgressRegistry.of().receivers(name)
    if wait_for is not None:
        for future in [receiver.reached(wait_for) for receiver in receivers]:
            future.result(seconds)
    versions = [each.version for each in receivers if each.version is not None]
    return min(versions, default=None)


def wait_for_workers(
    agent: Agent, name: str, version: int | None, timeout: float | None
) -> dict[str, int]:
    """Return the version that each worker of the group uses, by the name of the worker.

    Wait until all of them use `version` or a newer one. Workers that are lost do not count.
    """
    group = WorkerGroup(agent, include_self=True).with_timeout(timeout)
    found = group.call_all(version_of, name, version, timeout)
    for error in found.failures.values():
        if not isinstance(error, PeerLost):
            raise error
    return {worker: used for worker, used in found.results.items() if used is not None}
