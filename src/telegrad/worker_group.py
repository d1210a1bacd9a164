"""`WorkerGroup`: call many workers at once, while workers join and are lost.

A group is a view of the live members that have certain names. It changes with them: a worker that
joins or comes back is in it, a worker that is lost or has left is not. Views are cheap; all of one
agent share the list of live members (`_LiveMembers`).

A group connects to its members when they are first listed or called, so that their losses are
noticed. See `Agent.on_join` for how soon a new worker is noticed.

State of `_LiveMembers`: `_incarnations` (by name), `_watched` and `_queues` (those of the calls
that wait for changes) are changed under `_lock`.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import itertools
import queue
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

from telegrad import thread_roles
from telegrad.agent import Agent, current_agent, runtime_of
from telegrad.errors import (
    CallTimeout,
    JoinError,
    PeerLost,
    RemoteTraceback,
    UsageError,
    WorkersFailed,
    as_exception,
)
from telegrad.futures import Future
from telegrad.messages.packing import SharedArguments
from telegrad.runtime import AgentRuntime
from telegrad.timeouts import time_limit
from telegrad.wire.handshake import Incarnation

__all__ = ["GroupResult", "WorkerGroup"]

K = TypeVar("K", str, int)
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_NUMBER = re.compile(r"[-_:.]?[0-9]+$")
_SOON = 0.001  # seconds that are left for a call when the deadline has passed


@dataclass(frozen=True)
class GroupResult(Generic[K, T]):
    """What the workers returned (`results`) and raised (`failures`).

    The keys are names of workers, or for `WorkerGroup.map` the positions of the items.

    >>> GroupResult({"w0": 1, "w1": 2}).values()
    [1, 2]
    """

    results: dict[K, T] = field(default_factory=dict)
    failures: dict[K, Exception] = field(default_factory=dict)

    def values(self) -> list[T]:
        """Return all results in order. Raise `WorkersFailed` if there is a failure."""
        if self.failures:
            raise WorkersFailed.of(
                {
                    key if isinstance(key, str) else f"item {key}": error
                    for key, error in self.failures.items()
                }
            )
        return list(self.results.values())


class WorkerGroup:
    """The other workers of `agent` that are alive: the elastic counterpart of a list of names.

    Without an agent, it is that of `init_rpc` or of the current remote function. The worker itself
    is a member only with `include_self`.

    >>> from telegrad.testing import LocalCluster
    >>> with LocalCluster(4, fixed_size=False) as cluster:
    ...     group = WorkerGroup(cluster["w0"])
    ...     group.names
    ...     group.call_all(max, 2, 3).results
    ...     group.map(abs, [-1, -2, -3, -4, -5]).values()
    ...     group.match("w1", "w3").gather(str, "hello")
    ['w1', 'w2', 'w3']
    {'w1': 3, 'w2': 3, 'w3': 3}
    [1, 2, 3, 4, 5]
    {'w1': 'hello', 'w3': 'hello'}

    Every method is called with the members of that moment. `with_timeout` limits the whole of it;
    otherwise each call has the limit of the agent (`Config.timeout`).
    """

    def __init__(self, agent: Agent | None = None, *, include_self: bool = False) -> None:
        agent = agent or current_agent()
        runtime = runtime_of(agent)
        if agent is None or runtime is None:
            raise UsageError("a WorkerGroup needs an agent: give it one, or call init_rpc first")
        runtime.require_open()
        self._agent = agent
        self._timeout: float | None = None
        self._has_timeout = False
        self._filters: tuple[Callable[[str], bool], ...] = ()
        if not include_self:
            self._filters = (lambda name: name != runtime.name,)
        self._live = runtime.service(_LiveMembers)
        self._turns = itertools.count()

    def __repr__(self) -> str:
        return f"<WorkerGroup of {self._agent.name!r}: {', '.join(self.names) or 'nobody'}>"

    # Members

    @property
    def names(self) -> list[str]:
        """The names of the members, by rank."""
        return list(self._members())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._members())

    def __contains__(self, name: object) -> bool:
        return name in self._members()

    def role(self, *roles: str) -> WorkerGroup:
        """Return the group of the members with one of these roles.

        The role of a worker is its name without the number at the end: that of ``ps0`` and
        ``ps-1`` is ``ps``.
        """
        return self._filtered(lambda name: _role_of(name) in roles)

    def match(self, *patterns: str) -> WorkerGroup:
        """Return the group of the members whose names are, or match, one of these.

        A pattern is one of the shell's, as in ``"trainer*"``.
        """
        return self._filtered(
            lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )

    def wait_for(self, count: int, timeout: float | None = None) -> list[str]:
        """Wait until the group has at least `count` members. Return their names.

        Raise `CallTimeout` after `timeout` seconds.
        """
        limit = time_limit(timeout)
        until = None if limit is None else time.monotonic() + limit
        with self._live.changes() as changes:
            while len(names := self.names) < count:
                self._agent._runtime.require_open()
                try:
                    _take(changes, until)
                except queue.Empty:
                    raise CallTimeout(
                        f"the group has {len(names)} of {count} members after {timeout} s"
                    ) from None
        return names

    def with_timeout(self, timeout: float | None) -> WorkerGroup:
        """Return this group with a limit of `timeout` seconds for each method; None: no limit."""
        other = copy.copy(self)
        other._timeout, other._has_timeout = time_limit(timeout, positive=True), True
        return other

    def _filtered(self, condition: Callable[[str], bool]) -> WorkerGroup:
        other = copy.copy(self)
        other._filters = (*self._filters, condition)
        return other

    def _members(self) -> dict[str, Incarnation]:
        return self._live.members(lambda name: all(accepts(name) for accepts in self._filters))

    # Calls

    def submit_all(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, Future[T]]:
        """Call `function(*args, **kwargs)` on every member. Return the futures by name.

        The arguments are packed once, and large tensors are copied once for all members on one
        host. Each member may write to what it gets.
        """
        until = self._deadline()
        members = self._members()
        if len(members) < 2:
            return {name: self._submit(name, until, function, args, kwargs) for name in members}
        shared = SharedArguments()
        try:
            return {
                name: self._submit(name, until, function, args, kwargs, shared) for name in members
            }
        finally:
            shared.close()

    def call_all(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> GroupResult[str, T]:
        """Call `function(*args, **kwargs)` on every member and wait for all.

        A worker that is lost or raises is among the `failures`; no call is repeated.
        """
        result: GroupResult[str, T] = GroupResult()
        for name, future in self.submit_all(function, *args, **kwargs).items():
            _store(result, name, future)
        return result

    def gather(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T]:
        """Return the results of `call_all` by name. Raise `WorkersFailed` if a member failed."""
        result = self.call_all(function, *args, **kwargs)
        result.values()
        return result.results

    def call_some(
        self, count: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> GroupResult[str, T]:
        """Call `function(*args, **kwargs)` on `count` members, other ones each time, and wait.

        If one of them is lost, another member is called in its place, so the function may have run
        on more than `count`. A worker that raises is not replaced.
        """
        names = self.names
        if not isinstance(count, int) or not 0 < count <= len(names):
            raise UsageError(f"cannot call {count!r} workers: the group has {len(names)}")
        turn = next(self._turns) * count % len(names)
        waiting = deque([*names[turn:], *names[:turn]])
        until = self._deadline()
        result: GroupResult[str, T] = GroupResult()
        finished: queue.SimpleQueue[tuple[str, Future[T]]] = queue.SimpleQueue()

        def call_next() -> None:
            name = waiting.popleft()
            future = self._submit(name, until, function, args, kwargs)
            future.add_done_callback(lambda _: finished.put((name, future)))

        for _ in range(count):
            call_next()
        while len(result.results) + len(result.failures) < count:
            name, future = _take(finished, None)
            if waiting and _was_lost(future.exception(), name):
                call_next()
            else:
                _store(result, name, future)
        return result

    def map(
        self,
        function: Callable[[S], T],
        items: Iterable[S],
        /,
        *,
        delivery: Literal["at-least-once", "at-most-once"] = "at-least-once",
        per_worker: int = 1,
    ) -> GroupResult[int, T]:
        """Call `function(item)` for every item on some member, and wait for all.

        Each member has `per_worker` calls at a time and gets the next item when one has ended. A
        worker that joins meanwhile takes part. The keys of the result are positions of the items.

        If a worker is lost, its items go to others: with ``at-least-once`` all of them, so a
        function may run twice for an item. With ``at-most-once`` only those that were never sent;
        the others, which may or may not have run, are `failures`. An item whose function raises is
        a failure and is not repeated. If there is no member, the items wait for one to join until
        the timeout.
        """
        if delivery not in ("at-least-once", "at-most-once"):
            raise UsageError(f"delivery is 'at-least-once' or 'at-most-once', not {delivery!r}")
        if not isinstance(per_worker, int) or per_worker < 1:
            raise UsageError(f"per_worker is at least 1 call at once, not {per_worker!r}")
        return _Map(self, function, list(items), delivery == "at-least-once", per_worker).run()

    def _submit(
        self,
        name: str,
        until: float | None,
        function: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shared: SharedArguments | None = None,
    ) -> Future[T]:
        """Call one member, with the time that is left until the deadline."""
        timeout = self._agent._timeout
        if self._has_timeout:
            timeout = None if until is None else max(until - time.monotonic(), _SOON)
        try:
            return self._agent._runtime.start(name, function, args, kwargs, timeout, shared=shared)
        except JoinError as error:  # the store does not answer, so the worker cannot be found
            failed: Future[T] = Future()
            failed.set_exception(
                PeerLost(f"worker {name!r} was not called: {error}", peer=name, sent=False)
            )
            return failed

    def _deadline(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout


class _Map(Generic[S, T]):
    """One run of `WorkerGroup.map`. Only the calling thread uses it, except for `_events`."""

    def __init__(
        self,
        group: WorkerGroup,
        function: Callable[[S], T],
        items: list[S],
        at_least_once: bool,
        per_worker: int,
    ) -> None:
        self._group = group
        self._function = function
        self._items = items
        self._at_least_once = at_least_once
        self._per_worker = per_worker
        self._until = group._deadline()
        # without a deadline, how long items wait for a member
        self._patience = None if group._has_timeout else group._agent.config.timeout
        self._waiting = deque(range(len(items)))
        self._running: dict[int, _Running] = {}
        self._calls: Counter[str] = Counter()  # that run now, by worker
        self._lost: set[Incarnation] = set()  # workers that get no more items
        self._result: GroupResult[int, T] = GroupResult()

    def run(self) -> GroupResult[int, T]:
        with self._group._live.changes() as events:
            try:
                while self._waiting or self._running:
                    self._call_idle_members(events)
                    finished = self._next_event(events)
                    if finished is not None:
                        self._finish(finished)
            except queue.Empty:
                self._give_up()
        return GroupResult(
            dict(sorted(self._result.results.items())), dict(sorted(self._result.failures.items()))
        )

    def _call_idle_members(self, events: queue.SimpleQueue[int | None]) -> None:
        """Give the next items to the members that have the fewest."""
        members = self._group._members() if self._waiting else {}
        for _ in range(self._per_worker):
            for name, incarnation in members.items():
                if not self._waiting:
                    return
                if self._calls[name] < self._per_worker and incarnation not in self._lost:
                    self._call(name, incarnation, events)

    def _call(
        self, name: str, incarnation: Incarnation, events: queue.SimpleQueue[int | None]
    ) -> None:
        position = self._waiting.popleft()
        future = self._group._submit(
            name, self._until, self._function, (self._items[position],), {}
        )
        self._calls[name] += 1
        self._running[position] = _Running(name, incarnation, future)
        future.add_done_callback(lambda _: events.put(position))

    def _next_event(self, events: queue.SimpleQueue[int | None]) -> int | None:
        """Wait for a call to end or for a change of the members. Raise `queue.Empty` too late."""
        until = self._until
        if not self._running and not self._group._has_timeout and self._patience is not None:
            until = time.monotonic() + self._patience
        if not self._running:
            self._group._agent._runtime.require_open()
        return _take(events, until)

    def _finish(self, position: int) -> None:
        """Store how a call has ended, or let another worker take the item."""
        name, incarnation, future = self._running.pop(position)
        self._calls[name] -= 1
        error = future.exception()
        if isinstance(error, PeerLost) and _was_lost(error, name):
            self._lost.add(incarnation)
            if self._at_least_once or not error.sent:
                self._waiting.appendleft(position)
                return
        _store(self._result, position, future)

    def _give_up(self) -> None:
        """Fail what has not ended in time."""
        for position, running in self._running.items():
            running.future.cancel()
            self._result.failures[position] = CallTimeout(
                f"item {position} was not finished in time by worker {running.name!r}",
                peer=running.name,
            )
        for position in self._waiting:
            self._result.failures[position] = CallTimeout(
                f"no worker began with item {position} in time", sent=False
            )


class _Running(NamedTuple):
    """An item that a worker has been given."""

    name: str
    incarnation: Incarnation
    future: Future[Any]


class _LiveMembers:
    """The workers of the group of one agent that are alive, as far as it knows."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self._runtime = runtime
        self._incarnations: dict[str, Incarnation] = {}
        self._watched: set[Incarnation] = {runtime.local_member.incarnation}
        self._queues: set[queue.SimpleQueue[int | None]] = set()
        self._lock = threading.Lock()
        # first the listeners, so that no worker is missed
        runtime.on_loss(self._remove)
        runtime.on_join(self._add)
        runtime.on_end(self._notify)
        for member in runtime.directory.members(refresh=True):
            self._add(member.name, member.incarnation)

    def members(self, accepts: Callable[[str], bool]) -> dict[str, Incarnation]:
        """Return the accepted members by rank, and make sure that their losses are noticed."""
        with self._lock:
            found = [item for item in self._incarnations.items() if accepts(item[0])]
            new = [incarnation for _, incarnation in found if incarnation not in self._watched]
            self._watched.update(new)
        for incarnation in new:
            self._runtime.watch(incarnation)
        directory = self._runtime.directory
        return dict(sorted(found, key=lambda item: directory.find(item[0]).rank))

    @contextlib.contextmanager
    def changes(self) -> Iterator[queue.SimpleQueue[int | None]]:
        """Return a queue that gets None whenever a worker joins or is lost."""
        changes: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        with self._lock:
            self._queues.add(changes)
        try:
            yield changes
        finally:
            with self._lock:
                self._queues.discard(changes)

    def _add(self, name: str, incarnation: Incarnation) -> None:
        with self._lock:
            self._incarnations[name] = incarnation
        if self._runtime.is_lost(incarnation):  # it may have been lost before it was added
            self._remove(name, incarnation)
        self._notify()

    def _remove(self, name: str, incarnation: Incarnation) -> None:
        with self._lock:
            self._watched.discard(incarnation)
            if self._incarnations.get(name) == incarnation:
                del self._incarnations[name]
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            for changes in self._queues:
                changes.put(None)


def _role_of(name: str) -> str:
    """Return the role of a worker: its name without the number at the end."""
    return _NUMBER.sub("", name)


def _store(result: GroupResult[K, T], key: K, future: Future[T]) -> None:
    """Wait for a call and add how it has ended."""
    error = future.exception()
    if error is None:
        result.results[key] = future.wait()
    else:
        result.failures[key] = as_exception(error)


def _was_lost(error: BaseException | None, name: str) -> bool:
    """Return whether a call failed because its worker was lost, not because the function raised."""
    return (
        isinstance(error, PeerLost)
        and error.peer == name
        and not isinstance(error.__cause__, RemoteTraceback)
    )


def _take(items: queue.SimpleQueue[T], until: float | None) -> T:
    """Wait for the next item. Raise `queue.Empty` at the deadline."""
    role = thread_roles.pause()
    try:
        return items.get(timeout=None if until is None else max(until - time.monotonic(), 0.0))
    finally:
        thread_roles.resume(role)
