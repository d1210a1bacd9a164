"""How trainers find their servers, insist on answers of those that may come back, and leave when their agent ends."""

from __future__ import annotations

import fnmatch
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from telegrad.agent import Agent, runtime_of
from telegrad.errors import CallTimeout, JoinError, PeerLost, StaleReference, UsageError
from telegrad.futures import Future
from telegrad.runtime import active_runtime
from telegrad.server.functions import trusted

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


T = TypeVar("T")

# what calls raise if a server is not there, or has lost what it held
LOSS_ERRORS = (PeerLost, StaleReference)

_PAUSES = (0.005, 0.5)
_CHECK_AFTER = 1.0  # seconds after which a trainer that waits makes sure that all servers are there


class Closable(Protocol):
    def close(self) -> None: ...


def require_runtime(agent: Agent | None) -> AgentRuntime:
    """Return the runtime of `agent`, or of the current agent. Raise `UsageError` if there is none."""
    runtime = runtime_of(agent)
    if runtime is None:
        raise UsageError(
            "a trainer needs an agent: pass agent=, or call telegrad.rpc.init_rpc first"
        )
    return runtime


def find_servers(agent: AgentRuntime, servers: str | Sequence[str]) -> list[str]:
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


def retry_until_answered(attempt: Callable[[Callable[[], None]], T], patience: float) -> T:
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
        except LOSS_ERRORS:
            if time.monotonic() > until:
                raise


def settled(future: Future[T]) -> Future[T]:
    """This future when it is done; raises what the call raised."""
    error = future.exception()
    if error is not None:
        raise error
    return future


@dataclass(frozen=True)
class ServerCall(Generic[T]):
    """A call to one of several servers that may wait for each other.

    `again` waits for a server that is gone and makes the call again. `stay` makes sure that a server that has answered
    still has this trainer: the others may need it to answer.
    """

    future: Future[T]
    again: Callable[[Exception], Future[T]]
    stay: Callable[[T], None]


def answers(agent: AgentRuntime, calls: Sequence[ServerCall[T]]) -> list[T]:
    """Return the results of calls to several servers.

    A server that is lost is tried again while the others are waited for. A server that was restarted after it had
    answered is brought back, too, as long as one of the others has not answered.
    """
    futures = [call.future for call in calls]
    if not futures:
        return []
    if _wait(_all(futures), LOSS_ERRORS):
        return [future.wait() for future in futures]
    insistent = [_retrying(agent, call) for call in calls]
    together = _all(insistent)
    while not _wait(together):
        _watch_idle(agent)
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


def _retrying(agent: AgentRuntime, call: ServerCall[T]) -> Future[Future[T]]:
    """Return a future for one that has a result."""
    good: Future[Future[T]] = Future()

    def try_again(error: Exception) -> None:
        try:
            good.set_result(call.again(error))
        except Exception as another:
            good.set_exception(another)

    def done(_: Any) -> None:
        error = call.future.exception()
        if isinstance(error, LOSS_ERRORS):
            agent.threads.start(partial(try_again, error))
        elif isinstance(error, Exception):
            good.set_exception(error)
        else:
            good.set_result(call.future)

    call.future.add_done_callback(done)
    return good


class JoiningClient(Protocol):
    """A trainer's side of one server, while it joins."""

    def announce(self) -> int: ...
    def enter(self, first: int, timeout: float) -> Future[Any]: ...
    def entered(self, answer: Any) -> None: ...
    def leave(self) -> Future[None]: ...
    def is_member(self) -> bool: ...


def _watch_idle(agent: AgentRuntime) -> None:
    """Come back to servers that were restarted between steps of other trainers of this worker.

    A trainer that waits may keep another from making its next step, which is when it would notice.
    """
    for side in list(agent.service(LocalTrainers).sides.values()):
        try:
            if not side.is_member():
                side.come_back_if_idle()
        except StaleReference:
            side.come_back_if_idle()
        except (CallTimeout, PeerLost):
            continue  # it is not there, or busy


def _check_member(server: JoiningClient) -> None:
    """Raise an error if a server has forgotten this trainer."""
    try:
        known = server.is_member()
    except CallTimeout:
        return  # it is there, and busy
    if not known:
        raise StaleReference("a server was restarted while the trainer joined")


def join(
    agent: AgentRuntime,
    what: str,
    servers: Sequence[JoiningClient],
    prepare: Callable[[], None],
    patience: float | None,
) -> None:
    """Let a trainer join all servers. With `patience`, one that is restarted meanwhile is waited for.

    The trainer is announced to all servers before it enters any of them, and starts with the latest round, or clock,
    that any of them names, so that they agree on it. It keeps its place on the others while it waits for one: they must
    not go on without it, because it may be waited for elsewhere.
    """
    limit = agent.config.join_timeout

    def attempt(_: Callable[[], None]) -> None:
        prepare()
        first = max([each.announce() for each in servers])
        entering = [each.enter(first, limit) for each in servers]
        together = _all(entering)
        # one that was restarted after its answer keeps the others from answering
        while not _wait(together):
            for each, future in zip(servers, entering, strict=True):
                if future.done():
                    _check_member(each)
            _watch_idle(agent)
        for each, future in zip(servers, entering, strict=True):
            each.entered(future.wait())

    try:
        if patience is None:
            attempt(lambda: None)
        else:
            retry_until_answered(attempt, patience)
    except BaseException as error:
        leave(agent, servers)  # nobody is to wait for a trainer that did not start
        if not isinstance(error, CallTimeout):
            raise
        raise JoinError(
            f"{what} did not start within {limit} s: fewer trainers came than it waits for, they join several in "
            "different orders, or a round takes longer. Start them, let all of them join in the same order, or raise "
            "Config.join_timeout"
        ) from error


def leave(agent: AgentRuntime, servers: Sequence[JoiningClient]) -> None:
    """Tell all servers that a trainer leaves. One that is gone learns it when it comes back (`still_trains`)."""
    if not agent.closing:
        for leaving in leave_all(servers):
            leaving.exception()


def leave_all(servers: Sequence[JoiningClient]) -> list[Future[None]]:
    """Tell all servers that a trainer leaves, without waiting for them."""
    return [each.leave() for each in servers]


class IdleClient(Protocol):
    """A trainer's side of one server, between steps."""

    def is_member(self) -> bool: ...
    def come_back_if_idle(self) -> None: ...


class LocalTrainers:
    """The trainers of one agent: their sides of servers, by trainer and server."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.sides: weakref.WeakValueDictionary[tuple[str, str], IdleClient] = (
            weakref.WeakValueDictionary()
        )

    def __repr__(self) -> str:
        return f"<LocalTrainers {sorted(self.sides)}>"


@trusted
def still_trains(trainer: str, server: str) -> bool:
    """Return whether a trainer of this worker still takes part. A server that was restarted asks.

    The trainer comes back to it, unless it is in the middle of a step, in which it does so by itself: it may wait for
    another server, and that one for trainers that wait for this one.
    """
    agent = active_runtime()
    side = None if agent is None else agent.service(LocalTrainers).sides.get((trainer, server))
    if side is None:
        return False
    side.come_back_if_idle()
    return True
