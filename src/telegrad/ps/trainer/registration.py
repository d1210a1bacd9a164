"""`TrainerNames`: which parameter servers and tables the trainers of one worker use.

A worker is one trainer of a parameter server, not two: a second one under the same name would wait for the first. So
a name that is in use is an error, and trainers that say no name get one of their own: the n-th that a worker makes
trains with the n-th of every other worker.

A trainer that was dropped without `close` must leave all the same, or the others would wait for it. The finalizer of
its object may run anywhere, so it only puts a note into a queue; the clock and the next trainer look at the queue.

Trainers that step several models with a quorum one after the other can wait for each other: some in one model, some in
another, too few in each. So while a worker trains several of them, their steps have a time limit.

State: `_made`, how many trainers had no name, by what they would be called; `_used`, the names in use; both under
`_lock`. `_dropped`, the notes.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from telegrad.errors import CallTimeout, UsageError

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_INTERVAL = 1.0  # seconds until a trainer that was dropped leaves

Leave = Callable[[], object]  # tells the servers, without waiting for their answers


class TrainerNames:
    """One per agent."""

    def __init__(self, agent: AgentRuntime) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._made: Counter[str] = Counter()
        self._used: dict[str, RegisteredName] = {}
        self._dropped: deque[tuple[str, Leave]] = deque()
        agent.clock.every(_INTERVAL, self._look)
        agent.on_shutdown(self._leave_dropped)
        agent.on_close(self._dropped.clear)

    def __repr__(self) -> str:
        return f"<TrainerNames in use on {self._agent.name}: {sorted(self._used)}>"

    def take(self, kind: str, name: str | None, default: str, quorum: bool) -> RegisteredName:
        """Return a name that nobody here uses; `name` if it is not None. `quorum`: the trainer waits for one."""
        self._leave_dropped()
        with self._lock:
            if name is None:
                found = self._next(kind, default)
            else:
                found = RegisteredName(self, kind, name, None)
            if found.key in self._used:
                raise UsageError(
                    f"this worker is a trainer of {found.key} already, and would wait for itself: close "
                    "that one first, or give this one another name"
                )
            found.quorum = quorum
            self._used[found.key] = found
        return found

    def _next(self, kind: str, default: str) -> RegisteredName:
        while True:
            self._made[default] += 1
            count = self._made[default]
            found = RegisteredName(
                self, kind, default if count == 1 else f"{default}-{count}", default
            )
            if found.key not in self._used:
                return found

    def give_back(self, name: RegisteredName, unused: bool) -> None:
        with self._lock:
            self._used.pop(name.key, None)
            if unused and name.default is not None:
                self._made[name.default] -= 1

    def other_quorums(self, name: RegisteredName) -> list[str]:
        """Return the other names in use here whose trainers wait for a quorum."""
        with self._lock:
            return [key for key, other in self._used.items() if other.quorum and other is not name]

    @property
    def limit(self) -> float:
        """How many seconds a step may take if trainers may wait for each other."""
        return self._agent.config.join_timeout

    def drop(self, key: str, leave: Leave) -> None:
        """Have a trainer leave soon. This may be called from anywhere, and takes no lock."""
        if not self._agent.closing:
            self._dropped.append((key, leave))

    def _look(self) -> None:
        if self._dropped:
            self._agent.threads.start(self._leave_dropped)

    def _leave_dropped(self) -> None:
        while self._dropped:
            try:
                key, leave = self._dropped.popleft()
            except IndexError:  # somebody else took it
                return
            with self._lock:
                self._used.pop(key, None)
            if not self._agent.closing:
                leave()


class RegisteredName:
    """A name in use."""

    def __init__(self, names: TrainerNames, kind: str, name: str, default: str | None) -> None:
        self.name = name
        self.default = default
        self.key = f"{kind} {name!r}"
        self.quorum = False  # its steps wait for a quorum, and nothing else is stepped with them
        self._names = names
        self._finalizer: weakref.finalize[..., object] | None = None

    def give_back(self, unused: bool = False) -> None:
        """Let others use the name. If it is `unused`, the next trainer without a name gets it."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._names.give_back(self, unused)

    def step_limit(self) -> float | None:
        """Return how many seconds a step may take. None: as long as the other trainers need."""
        return self._names.limit if self.quorum and self._names.other_quorums(self) else None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say why a step that took longer than `step_limit` may not end."""
        try:
            yield
        except CallTimeout as error:
            others = ", ".join(self._names.other_quorums(self))
            if not self.quorum or not others:
                raise
            raise CallTimeout(
                f"a step of {self.key} has waited {self._names.limit} s for its quorum. This worker also trains "
                f"{others} with a quorum. Trainers that step such models one after the other can wait for each "
                "other, some in one model and some in another: train one such model on each worker, step them "
                "together (parameter groups of one optimizer), or use Sync(). If steps may take longer, raise "
                "Config.join_timeout"
            ) from error

    def belongs_to(self, trainer: object, leave: Leave) -> None:
        """Have this trainer leave when it is dropped. `leave` must not refer to it."""
        self._finalizer = weakref.finalize(trainer, self._names.drop, self.key, leave)
        self._finalizer.atexit = False
