"""`JoinWatcher`: tell listeners of the workers that join, or come back under their name.

The directory has a list of all registrations in their order. A worker with listeners looks whether
it has grown

- about once a second. In a group of more than `_LOOKS_PER_SECOND` workers the pause grows with the
  number of workers, so that all of them together make at most so many looks per second. A look at a
  list that has not grown is one small request to the store.
- at once, when a worker connects that it does not know.

So a worker that joins notifies nobody: it would have to connect to every member. A worker without
listeners never looks.

Each incarnation is reported at most once. If a worker came back, its earlier incarnation is
declared lost first, so listeners of losses know of it before listeners of joins are called. An
incarnation that has ended before it was seen is not reported.

State: `_known` (incarnations that were reported, or were members before the first listener) and
`_is_looking` are changed under `_lock`; only one thread looks at a time. `_listeners` grows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from telegrad.errors import TelegradError
from telegrad.group.failure_detector import FailureDetector
from telegrad.group.membership import Directory, Member
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import ThreadPool
from telegrad.wire.handshake import Incarnation

JoinListener = Callable[[str, Incarnation], None]

_MIN_PAUSE = 1.0  # seconds between two looks
_LOOKS_PER_SECOND = 100  # of all workers of the group together

_log = logging.getLogger(__name__)


class JoinRuntime(Protocol):
    """What watching for joins needs from its agent."""

    clock: Clock
    threads: ThreadPool
    directory: Directory
    failures: FailureDetector
    local_member: Member
    closing: bool


class JoinWatcher:
    """The listeners of one agent for workers that join."""

    def __init__(self, runtime: JoinRuntime) -> None:
        self._runtime = runtime
        self._listeners: list[JoinListener] = []
        self._known: dict[str, Incarnation] = {}  # the last incarnation of each name
        self._is_open = False
        self._is_watching = False
        self._is_looking = False
        self._look_again = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<JoinWatcher, {len(self._listeners)} listeners, {len(self._known)} known>"

    def add_listener(self, listener: JoinListener) -> None:
        """Call `listener(name, incarnation)` for each worker that registers from now on.

        Before the agent is open: for each that registers after it.
        """
        with self._lock:
            if not self._is_open:
                self._listeners.append(listener)
                return
        self._watch()
        self._listeners.append(listener)

    def start(self) -> None:
        """Begin to watch if there are listeners. The agent has registered."""
        with self._lock:
            self._is_open = True
        if self._listeners:
            self._watch()

    def peer_connected(self, name: str, incarnation: Incarnation) -> None:
        """Look at once if a worker has connected that is not known."""
        if self._is_watching and self._known.get(name) != incarnation:
            self._look_soon()

    def _watch(self) -> None:
        """Remember the present members, and look for others from now on."""
        with self._lock:
            if self._is_watching:
                return
            for member in self._runtime.directory.arrivals():
                self._known[member.name] = member.incarnation
            self._is_watching = True
        self._schedule()

    def _schedule(self) -> None:
        pause = max(_MIN_PAUSE, len(self._known) / _LOOKS_PER_SECOND)

        def look_and_repeat() -> None:
            self._look_soon()
            self._schedule()

        self._runtime.clock.call_at(time.monotonic() + pause, look_and_repeat)

    def _look_soon(self) -> None:
        """Look on a thread: the store may be slow. If one looks already, it looks once more."""
        with self._lock:
            self._look_again = True
            if self._is_looking:
                return
            self._is_looking = True
        self._runtime.threads.start_with_retry(self._look, self._runtime.clock)

    def _look(self) -> None:
        while True:
            with self._lock:
                if not self._look_again or self._runtime.closing:
                    self._is_looking = False
                    return
                self._look_again = False
            try:
                arrived = self._runtime.directory.arrivals()
            except TelegradError as error:  # the store is gone, or this worker has left
                _log.debug("the directory could not be read: %s", error)
                continue
            for member in arrived:
                self._report(member)

    def _report(self, member: Member) -> None:
        """Call the listeners, unless this incarnation is known, has left or was lost."""
        name, incarnation = member.name, member.incarnation
        with self._lock:
            earlier = self._known.get(name)
            self._known[name] = incarnation
        failures = self._runtime.failures
        if earlier == incarnation:
            return
        if earlier is not None:
            failures.declare_lost(name, earlier, reason="it was started again")
        if member.left or failures.is_lost(incarnation):
            return
        for listener in self._listeners:
            try:
                listener(name, incarnation)
            except Exception:
                _log.exception("a listener failed when worker %r joined", name)
