"""`Agent`: a worker of a group. It calls functions of the others and serves their calls.

An agent is an object and a context manager; many can live in one process. Connections, threads and
pending calls belong to its `AgentRuntime`, which the other packages use.
"""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, SupportsFloat, TypeVar

from telegrad import cluster
from telegrad.client.peers import WorkerAddress
from telegrad.config import Config
from telegrad.current import thread_state
from telegrad.diagnosis.calls import CallInProgress
from telegrad.errors import UsageError
from telegrad.futures import Future
from telegrad.group.membership import WorkerInfo
from telegrad.group.rendezvous import next_group, open_store
from telegrad.group.signed_store import Store
from telegrad.runtime import DEFAULT, AgentRuntime, active_runtime
from telegrad.timeouts import time_limit

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="Agent")


class Agent:
    """A worker named `name`.

    It finds the others through `store`, any `torch.distributed` store. With `world_size`, entering
    the agent waits for that many workers; without it, workers may join and leave at any time.
    Without `store`, the rendezvous and all that is not given come from the engine that started this
    process, such as `telegrad launch`, torchrun or Slurm (see `telegrad.cluster`).

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> with Agent("a", store=store) as a, Agent("b", store=store):
    ...     a.call("b", max, 2, 3)
    ...     a.with_timeout(2).call("b", min, 2, 3)
    3
    2
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        config: Config | None = None,
    ) -> None:
        config = Config.from_environment() if config is None else config
        if store is None:
            place = cluster.detect(name, rank, world_size)
            store = next_group(open_store(place, config.join_timeout))
            name, rank, world_size = place.name, place.rank, place.world_size
        if name is None:
            raise UsageError("an agent needs a name: pass one, or set TELEGRAD_NAME")
        self._runtime = AgentRuntime(
            name, store=store, rank=rank, world_size=world_size, config=config
        )
        self._runtime.agent = self
        self._timeout: Any = DEFAULT

    def __repr__(self) -> str:
        return repr(self._runtime)

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self._runtime.name

    @property
    def config(self) -> Config:
        """The settings of this worker."""
        return self._runtime.config

    # Life cycle

    def open(self, *, wait: bool = True) -> None:
        """Join the group, and wait for the other workers of a group of fixed size.

        With `wait=False`, return as soon as others can call this worker.
        """
        self._runtime.open()
        if wait:
            self._runtime.wait_for_members()

    def shutdown(self, timeout: float | None = None) -> tuple[str, ...]:
        """Finish the calls in progress, wait until the other workers do the same, then close.

        A worker that is lost meanwhile no longer counts, unless it comes back before the others
        have left: they wait for it for `Config.restart_timeout`. Return the names of workers that
        were lost or did not report within `timeout` seconds.
        """
        return self._runtime.shutdown(timeout)

    def close(self, reason: str = "") -> None:
        """Leave at once: pending calls fail here, and peers get the `reason`. May be repeated."""
        self._runtime.close(reason)

    def __enter__(self: Self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        lines = [] if error is None else traceback.format_exception_only(kind, error)
        self.close("".join(lines).strip())

    async def __aenter__(self: Self) -> Self:
        await asyncio.get_running_loop().run_in_executor(None, self.open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.__exit__, kind, error, trace)

    # Calls

    def call(
        self, to: WorkerAddress, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function(*args, **kwargs)` on another worker and return its result."""
        result: T = self._runtime.invoke(to, function, args, kwargs, self._timeout)
        return result

    def submit(
        self, to: WorkerAddress, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Like `call`, but return a future at once."""
        return self._runtime.start(to, function, args, kwargs, self._timeout)

    def with_timeout(self: Self, timeout: float | None) -> Self:
        """Return this agent with another time limit for `call` and `submit`; None: no limit."""
        other = copy.copy(self)
        other._timeout = time_limit(timeout, positive=True)
        return other

    # The group

    def get_worker_info(self, to: WorkerAddress | None = None) -> WorkerInfo:
        """Return the worker with this name or rank; this one if none is given."""
        return self._runtime.get_worker_info(to)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers that have not left, by rank."""
        return self._runtime.get_worker_infos()

    def barrier(self, names: Sequence[str] | None = None, timeout: float | None = None) -> None:
        """Wait until every worker (or every one of `names`) has called `barrier`.

        Raise `GroupBroken`, which names the missing workers, if one is lost or `timeout` passes.
        """
        self._runtime.barrier(names, timeout)

    def all_gather(
        self, value: Any, names: Sequence[str] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return the values of all workers by name. Raise `GroupBroken` if one is missing."""
        return self._runtime.all_gather(value, names, timeout)

    def on_join(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener(name, incarnation)` when a worker joins, or comes back under its name.

        It is called once for each start of a worker (incarnation) after this call, but not for
        this worker and not for one that has ended before it was seen. Expect it about a second
        after the worker has joined, in a group of more than 100 workers one second per 100 of them,
        and at once if the worker calls this one. If a worker comes back, listeners of `on_loss`
        get its earlier incarnation first. The listener must not block.
        """
        self._runtime.on_join(listener)

    def on_loss(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener(name, incarnation)` when a worker is lost. It must not block."""
        self._runtime.on_loss(listener)

    def calls(self) -> list[CallInProgress]:
        """Return the calls in progress, made and served by this worker, oldest first."""
        return self._runtime.calls()

    def snapshot(self) -> dict[str, Any]:
        """Return what `telegrad status` shows of this worker, as values of JSON."""
        return self._runtime.snapshot()

    def report(self, step: int | None = None, *, samples: int = 0, **values: SupportsFloat) -> None:
        """Report values of a training; see `telegrad.report`."""
        self._runtime.scalars.report(step, samples, values)

    def statistics(self) -> dict[str, int]:
        """Return counters of calls, connections, shared memory, references and contexts."""
        return self._runtime.statistics()


def current_agent() -> Agent | None:
    """Return the agent that runs the current remote function, else the one that `init_rpc` made."""
    runtime = thread_state.runtime or active_runtime()
    agent: Agent | None = None if runtime is None else runtime.agent
    return agent


def runtime_of(agent: Agent | None) -> AgentRuntime | None:
    """Return the runtime of `agent`; without one, that of the current agent."""
    return active_runtime() if agent is None else agent._runtime
