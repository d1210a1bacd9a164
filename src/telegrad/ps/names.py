"""`Names`: which parameter servers and tables the trainers of one worker use.

A worker is one trainer of a parameter server, not two: a second one under the same name would wait for the first. So
a name that is in use is an error, and trainers that say no name get one of their own: the n-th that a worker makes
trains with the n-th of every other worker.

A trainer that was dropped without `close` must leave all the same, or the others would wait for it. The finalizer of
its object may run anywhere, so it only puts a note into a queue; the clock and the next trainer look at the queue.

State: `_made`, how many trainers had no name, by what they would be called; `_used`, the names in use; both under
`_lock`. `_dropped`, the notes.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.errors import UsageError

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

_INTERVAL = 1.0  # seconds until a trainer that was dropped leaves

Leave = Callable[[], object]  # tells the servers, without waiting for their answers


class Names:
    """One per agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._made: Counter[str] = Counter()
        self._used: set[str] = set()
        self._dropped: deque[tuple[str, Leave]] = deque()
        agent.clock.every(_INTERVAL, self._look)
        agent.on_parting(self._leave_dropped)
        agent.on_close(self._dropped.clear)

    def __repr__(self) -> str:
        return f"<Names in use on {self._agent.name}: {sorted(self._used)}>"

    def take(self, kind: str, name: str | None, default: str) -> Name:
        """Return a name that nobody here uses; `name` if it is not None."""
        self._leave_dropped()
        with self._lock:
            if name is None:
                found = self._next(kind, default)
            else:
                found = Name(self, kind, name, None)
            if found.key in self._used:
                raise UsageError(
                    f"this worker is a trainer of {found.key} already, and would wait for itself: close "
                    "that one first, or give this one another name"
                )
            self._used.add(found.key)
        return found

    def _next(self, kind: str, default: str) -> Name:
        while True:
            self._made[default] += 1
            count = self._made[default]
            found = Name(self, kind, default if count == 1 else f"{default}-{count}", default)
            if found.key not in self._used:
                return found

    def give_back(self, name: Name, unused: bool) -> None:
        with self._lock:
            self._used.discard(name.key)
            if unused and name.default is not None:
                self._made[name.default] -= 1

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
                self._used.discard(key)
            if not self._agent.closing:
                leave()


class Name:
    """A name in use."""

    def __init__(self, names: Names, kind: str, name: str, default: str | None) -> None:
        self.name = name
        self.default = default
        self.key = f"{kind} {name!r}"
        self._names = names
        self._finalizer: weakref.finalize[..., object] | None = None

    def give_back(self, unused: bool = False) -> None:
        """Let others use the name. If it is `unused`, the next trainer without a name gets it."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._names.give_back(self, unused)

    def belongs_to(self, trainer: object, leave: Leave) -> None:
        """Have this trainer leave when it is dropped. `leave` must not refer to it."""
        self._finalizer = weakref.finalize(trainer, self._names.drop, self.key, leave)
        self._finalizer.atexit = False
