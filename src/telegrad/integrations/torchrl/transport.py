"""`TelegradTransport`: the requests of actors to an `InferenceServer` in another worker.

State: `_queue`, the requests that have arrived (see `request_queue`); only the server has one.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.modules.inference_server import InferenceTransport

from telegrad.agent import Agent
from telegrad.errors import UsageError, as_exception
from telegrad.futures import Future
from telegrad.integrations.membership import Membership
from telegrad.integrations.request_queue import RequestQueue, RequestQueues, enqueue
from telegrad.timeouts import duration, time_limit
from telegrad.worker_group import WorkerGroup


class TelegradTransport(InferenceTransport):
    """Carries the requests of actors to the `InferenceServer` in the worker `server`.

    Both sides make it with the same arguments, or the actors get a copy. The actors and the server
    use `agent`, their current agent, or join the group at `store`. An actor whose server is lost
    gets `PeerLost`; the server may come back under its name. `timeout` limits each request.
    """

    def __init__(
        self,
        server: str,
        name: str = "policy",
        *,
        agent: Agent | None = None,
        store: str | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        self.server = server
        self.name = name
        self.timeout: float | None = time_limit(timeout, positive=True)
        self._membership = Membership(agent, store)
        self._queue: RequestQueue | None = None
        self._has_server = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_queue": None, "_has_server": False}

    # The actors

    def submit(self, td: TensorDictBase) -> Future[Any]:
        """Send a request. Return a future of its result."""
        agent = self._membership.agent(prefix=f"{self.name}-actor")
        if not self._has_server:  # the actors may be started first
            servers = WorkerGroup(agent, include_self=True).match(self.server)
            servers.wait_for(1, self.timeout)
            self._has_server = True
        return agent.with_timeout(self.timeout).submit(self.server, enqueue, self.name, td)

    # The server

    def wait_for_work(self, timeout: float) -> None:
        """Wait until there is a request, up to `timeout` seconds."""
        self._requests().wait(duration(timeout))

    def drain(self, max_items: int) -> tuple[list[Any], list[Future[Any]]]:
        """Return up to `max_items` requests, and what `resolve` needs for each."""
        requests = self._requests().take(max_items)
        return [each.value for each in requests], [each.reply for each in requests]

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[Any], list[Future[Any]], list[float | None]]:
        """Like `drain`, with the times of the monotonic clock at which the requests arrived."""
        requests = self._requests().take(max_items)
        times: list[float | None] = [each.received_at for each in requests]
        return [each.value for each in requests], [each.reply for each in requests], times

    def resolve(self, callback: Future[Any], result: TensorDictBase) -> None:
        """Send a result."""
        callback.set_result(result)

    def resolve_exception(self, callback: Future[Any], exc: BaseException) -> None:
        """Send an exception."""
        callback.set_exception(as_exception(exc))

    def close(self) -> None:
        """Leave the group, if this transport has joined it."""
        self._membership.close()

    def _requests(self) -> RequestQueue:
        if self._queue is None:
            agent = self._membership.agent_of_host(self.server)
            if agent.name != self.server:
                raise UsageError(
                    f"the transport is for a server in worker {self.server!r}, but this is worker "
                    f"{agent.name!r}"
                )
            self._queue = RequestQueues.of(agent).queue(self.name)
        return self._queue
