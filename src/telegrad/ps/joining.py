"""How trainers find their servers, insist on answers of those that may come back, and leave when their agent ends."""

from __future__ import annotations

import fnmatch
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from telegrad.agent.current import active_agent
from telegrad.errors import PeerLost, StaleReference, UsageError
from telegrad.futures import Future, wait_all

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


T = TypeVar("T")
Again = Callable[[Exception], Future[T]]  # what to do after an error; returns a future that is done

_PAUSES = (0.005, 0.5)


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


def insist(attempt: Callable[[], T], patience: float, errors: tuple[type[Exception], ...]) -> T:
    """Try again while it raises these, for so many seconds."""
    until = time.monotonic() + patience
    turns = pauses()
    while True:
        next(turns)
        try:
            return attempt()
        except errors:
            if time.monotonic() > until:
                raise


def settled(future: Future[T]) -> Future[T]:
    """This future when it is done; raises what the call raised."""
    error = future.exception()
    if error is not None:
        raise error
    return future


def answers(agent: Agent, calls: Sequence[tuple[Future[T], Again[T]]]) -> list[T]:
    """The results of calls to several servers. While one that is lost is tried again, the others are waited for:

    they may wait for each other.
    """
    try:
        return wait_all([future for future, _ in calls])
    except (PeerLost, StaleReference):
        insistent = [_insistent(agent, future, again) for future, again in calls]
        return [future.wait() for future in wait_all(insistent)]


def _insistent(agent: Agent, future: Future[T], again: Again[T]) -> Future[Future[T]]:
    """A future for one that has a result."""
    good: Future[Future[T]] = Future()

    def try_again(error: Exception) -> None:
        try:
            good.set_result(again(error))
        except Exception as another:
            good.set_exception(another)

    def done(_: Any) -> None:
        error = future.exception()
        if isinstance(error, PeerLost | StaleReference):
            agent.threads.start(partial(try_again, error))
        elif isinstance(error, Exception):
            good.set_exception(error)
        else:
            good.set_result(future)

    future.add_done_callback(done)
    return good
