"""How trainers find their servers, insist on answers of those that may come back, and leave when their agent ends."""

from __future__ import annotations

import fnmatch
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from telegrad.agent.current import active_agent
from telegrad.agent.targets import trusted
from telegrad.errors import CallTimeout, JoinError, PeerLost, StaleReference, UsageError
from telegrad.futures import Future, wait_all

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


T = TypeVar("T")

GONE = (PeerLost, StaleReference)  # what calls raise if a server is not there, or has lost what it held

_PAUSES = (0.005, 0.5)
_CHECK_AFTER = 1.0  # seconds after which a trainer that waits makes sure that all servers are there


class Closable(Protocol):
    def close(self) -> None: ...


def agent_of(agent: Agent | None) -> Agent:
    """This agent, or the one in use here."""
    agent = agent or active_agent()
    if agent is None:
        raise UsageError("a trainer needs an agent: pass agent=, or call telegrad.rpc.init_rpc first")
    return agent


def matching(agent: Agent, servers: str | Sequence[str]) -> list[str]:
    """The names of workers that a pattern stands for, or these names."""
    if not isinstance(servers, str):
        names = list(servers)
    else:
        names = sorted(fnmatch.filter([info.name for info in agent.get_worker_infos()], servers))
    if not names:
        raise UsageError(f"no worker of the group is named {servers!r}")
    return names


def closing(trainer: Closable) -> Callable[[], None]:
    """What closes a trainer if there still is one."""
    reference = weakref.ref(trainer)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return close


def pauses() -> Iterator[None]:
    """Turns, each a little later than the one before."""
    pause, longest = _PAUSES
    while True:
        yield
        time.sleep(pause)
        pause = min(pause * 1.5, longest)


def insist(attempt: Callable[[Callable[[], None]], T], patience: float) -> T:
    """Try again while a server is not there, for so many seconds.

    `attempt` calls its argument whenever it has reached the server; the time starts anew then.
    """
    until = time.monotonic() + patience

    def reached() -> None:
        nonlocal until
        until = time.monotonic() + patience

    turns = pauses()
    while True:
        next(turns)
        try:
            return attempt(reached)
        except GONE:
            if time.monotonic() > until:
                raise


def settled(future: Future[T]) -> Future[T]:
    """This future when it is done; raises what the call raised."""
    error = future.exception()
    if error is not None:
        raise error
    return future


class Call(NamedTuple, Generic[T]):
    """A call to one of several servers that may wait for each other.

    `again` waits for a server that is gone and makes the call again. `stay` makes sure that a server that has answered
    still has this trainer: the others may need it to answer.
    """

    future: Future[T]
    again: Callable[[Exception], Future[T]]
    stay: Callable[[T], None]


def answers(agent: Agent, calls: Sequence[Call[T]]) -> list[T]:
    """Return the results of calls to several servers.

    A server that is lost is tried again while the others are waited for. A server that was restarted after it had
    answered is brought back, too, as long as one of the others has not answered.
    """
    futures = [call.future for call in calls]
    if not futures:
        return []
    if _wait(_all(futures), GONE):
        return [future.wait() for future in futures]
    insistent = [_insistent(agent, call) for call in calls]
    together = _all(insistent)
    while not _wait(together):
        for call, good in zip(calls, insistent, strict=True):
            if good.done():
                call.stay(good.wait().wait())
    return [good.wait().wait() for good in insistent]


def _wait(future: Future[Any], ignored: tuple[type[Exception], ...] = ()) -> bool:
    """Wait a while. Return False if it is not done then, or failed in a way that is to be ignored."""
    try:
        future.result(_CHECK_AFTER)
    except CallTimeout:
        if future.done():
            raise
        return False
    except ignored:
        return False
    return True


def _all(futures: Sequence[Future[Any]]) -> Future[None]:
    """Return a future that is done when all are, or one has failed."""
    together: Future[None] = Future()
    arrivals = itertools.count(1)  # whose `next` is atomic
    lock = threading.Lock()

    def arrived(future: Any) -> None:
        error = future.exception()
        with lock:
            if together.done():
                return
            if isinstance(error, Exception):
                together.set_exception(error)
            elif error is None and next(arrivals) == len(futures):
                together.set_result(None)

    for future in futures:
        future.add_done_callback(arrived)
    return together


def _insistent(agent: Agent, call: Call[T]) -> Future[Future[T]]:
    """Return a future for one that has a result."""
    good: Future[Future[T]] = Future()

    def try_again(error: Exception) -> None:
        try:
            good.set_result(call.again(error))
        except Exception as another:
            good.set_exception(another)

    def done(_: Any) -> None:
        error = call.future.exception()
        if isinstance(error, GONE):
            agent.threads.start(partial(try_again, error))
        elif isinstance(error, Exception):
            good.set_exception(error)
        else:
            good.set_result(call.future)

    call.future.add_done_callback(done)
    return good


class Joining(Protocol):
    """A trainer's side of one server, while it joins."""

    def announce(self) -> int: ...
    def enter(self, first: int, timeout: float) -> Future[Any]: ...
    def entered(self, answer: Any) -> None: ...
    def leave(self) -> Future[None]: ...


def join(
    agent: Agent, what: str, servers: Sequence[Joining], prepare: Callable[[], None], patience: float | None
) -> None:
    """Let a trainer join all servers. With `patience`, one that is restarted meanwhile is waited for.

    The trainer is announced to all servers before it enters any of them, and starts with the latest round, or clock,
    that any of them names, so that they agree on it.
    """
    limit = agent.config.join_timeout

    def attempt(_: Callable[[], None]) -> None:
        try:
            prepare()
            first = max([each.announce() for each in servers])
            answered = wait_all([each.enter(first, limit) for each in servers])
            for each, answer in zip(servers, answered, strict=True):
                each.entered(answer)
        except BaseException:
            leave(agent, servers)  # nobody is to wait for a trainer that did not start
            raise

    try:
        if patience is None:
            attempt(lambda: None)
        else:
            insist(attempt, patience)
    except CallTimeout as error:
        raise JoinError(
            f"{what} did not start within {limit} s: fewer trainers came than it waits for, or a round takes longer. "
            "Start them, or raise Config.join_timeout"
        ) from error


def leave(agent: Agent, servers: Sequence[Joining]) -> None:
    """Tell all servers that a trainer leaves. One that is gone learns it when it comes back (`still_trains`)."""
    if not agent.closing:
        for leaving in [each.leave() for each in servers]:
            leaving.exception()


class LocalTrainers:
    """The trainers of one agent that take part in something."""

    def __init__(self, agent: Agent) -> None:
        self.names: set[str] = set()

    def __repr__(self) -> str:
        return f"<LocalTrainers {sorted(self.names)}>"


@trusted
def still_trains(trainer: str) -> bool:
    """Return whether a trainer of this worker still takes part. A server that was restarted asks."""
    agent = active_agent()
    return agent is not None and trainer in agent.service(LocalTrainers).names
