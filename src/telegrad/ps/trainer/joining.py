"""How a trainer finds its servers, joins all of them, and leaves them."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from telegrad.agent import Agent, runtime_of
from telegrad.errors import (
    ArgumentTypeError,
    CallTimeout,
    JoinError,
    StaleReference,
    UsageError,
)
from telegrad.futures import Future, collect
from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.consistency import Async, Stale, Sync
from telegrad.ps.trainer.server_calls import wait_briefly
from telegrad.ps.trainer.server_client import (
    LocalClients,
    ServerClient,
    retry_while_lost,
)

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class Closable(Protocol):
    def close(self) -> None: ...


def require_runtime(agent: Agent | None) -> AgentRuntime:
    """Return the runtime of `agent`, or of the current agent. Raise `UsageError` if none exists."""
    runtime = runtime_of(agent)
    if runtime is None:
        raise UsageError(
            "a trainer needs an agent: pass agent=, or call telegrad.rpc.init_rpc first"
        )
    return runtime


def check_rules(consistency: object, trainers: object, checkpoint: object) -> None:
    """Raise `UsageError` if one of these arguments of a trainer has another type or value."""
    if not isinstance(consistency, Sync | Async | Stale):
        raise ArgumentTypeError(
            "consistency is ps.Sync(), ps.Async() or ps.Stale(ahead), not "
            f"{getattr(consistency, '__name__', repr(consistency))}"
        )
    if not isinstance(trainers, int) or trainers < 1:
        raise UsageError(f"trainers is a number of at least 1, not {trainers!r}")
    if not isinstance(checkpoint, Checkpoint | None):
        raise ArgumentTypeError(
            f"checkpoint is a ps.Checkpoint, such as ps.Checkpoint('points'), not {checkpoint!r}"
        )


def find_servers(runtime: AgentRuntime, servers: str | Sequence[str]) -> list[str]:
    """Return the names of workers that match a pattern, or the given names."""
    if not isinstance(servers, str):
        if not isinstance(servers, Iterable) or not all(isinstance(each, str) for each in servers):
            raise ArgumentTypeError(
                f"servers is the name of a worker, a pattern or a list of names, not {servers!r}"
            )
        names = list(servers)
    else:
        workers = [info.name for info in runtime.get_worker_infos()]
        names = sorted(fnmatch.filter(workers, servers))
        if not names:
            raise UsageError(
                f"the name of no worker matches {servers!r}; the group has {', '.join(workers)}"
            )
    if not names:
        raise UsageError("the list of servers is empty: pass one or more names of workers")
    return names


def join(
    runtime: AgentRuntime,
    description: str,
    clients: Sequence[ServerClient[Any]],
    prepare: Callable[[], None],
    patience: float | None,
) -> None:
    """Join all servers. Wait `patience` seconds for one that is restarted; None: do not wait.

    The trainer is announced to all servers before it joins any of them, and starts in the latest
    round, or clock, that any of them returns, so that they agree on it. It stays a member of the
    others while it waits for one: they must not go on without it, because other trainers may wait
    for it elsewhere.

    `description` names the parameter server in errors. `prepare` is called before each attempt.
    """
    timeout = runtime.config.join_timeout

    def attempt(_: Callable[[], None]) -> None:
        prepare()
        first_round = max([client.announce() for client in clients])
        joins = [client.start_join(first_round, timeout) for client in clients]
        all_joined = collect(joins)
        # a server that was restarted after its reply keeps the others from replying
        while not wait_briefly(all_joined):
            for client, future in zip(clients, joins, strict=True):
                if future.done():
                    _check_member(client)
            runtime.service(LocalClients).rejoin_lost_servers()
        for client, future in zip(clients, joins, strict=True):
            client.finish_join(future.wait())

    try:
        if patience is None:
            attempt(lambda: None)
        else:
            retry_while_lost(attempt, patience)
    except BaseException as error:
        leave(runtime, clients)  # no server may wait for a trainer that did not start
        if not isinstance(error, CallTimeout):
            raise
        raise JoinError(
            f"{description} did not start within {timeout} s: fewer trainers joined than it waits "
            "for, trainers join several parameter servers in different orders, or a round takes "
            "longer. Start the missing trainers, let all of them join in the same order, or raise "
            "Config.join_timeout"
        ) from error


def _check_member(client: ServerClient[Any]) -> None:
    """Raise `StaleReference` if the server has lost this trainer."""
    try:
        known = client.is_member()
    except CallTimeout:
        return  # the server is alive and busy
    if not known:
        raise StaleReference("a server was restarted while the trainer joined")


def leave(runtime: AgentRuntime, clients: Sequence[ServerClient[Any]]) -> None:
    """Leave all servers and wait for their replies.

    A server that is down asks the trainer's worker when it is back (`still_trains`).
    """
    if not runtime.closing:
        for future in start_leaving(clients):
            future.exception()


def start_leaving(clients: Sequence[ServerClient[Any]]) -> list[Future[None]]:
    """Leave all servers without waiting for their replies."""
    return [client.leave() for client in clients]


def close_on_shutdown(runtime: AgentRuntime, trainer: Closable) -> None:
    """Close a trainer when its agent shuts down, if the trainer still exists then."""
    reference = weakref.ref(trainer)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    runtime.on_shutdown(close)
