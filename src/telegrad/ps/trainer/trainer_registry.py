"""`TrainerRegistry`: the names of the parameter servers and tables that a worker trains.

A worker is at most one trainer of each parameter server: a second one of the same name would wait
for the first. So a name that is in use is an error. Trainers without a name get a default name:
the n-th of them on a worker trains with the n-th on every other worker.

A trainer that is garbage-collected without `close` must leave its servers, or other trainers would
wait for it. A finalizer may run on any thread and under any lock, so it only adds the trainer to a
queue. The clock and the next registration process the queue.

Trainers that step several models with a quorum one after the other can deadlock: some wait in one
model, some in another, and no quorum is complete. So steps have a time limit while a worker trains
several such models.

State: `_default_counts`, how many trainers got each default name, and `_registered`, the names in
use, both under `_lock`; `_collected`, the queue of trainers that were garbage-collected. The
`step_timeout` of every registration is set, under `_lock`, when one of them changes.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.errors import CallTimeout, UsageError

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_INTERVAL = 1.0  # seconds until a trainer that was garbage-collected leaves

Leave = Callable[[], object]  # leaves the servers without waiting for their replies


class TrainerRegistry:
    """One per agent."""

    def __init__(self, agent: AgentRuntime) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._default_counts: Counter[str] = Counter()
        self._registered: dict[str, TrainerRegistration] = {}
        self._collected: deque[tuple[str, Leave]] = deque()
        agent.clock.call_every(_INTERVAL, self._check_collected)
        agent.on_shutdown(self._leave_collected)
        agent.on_close(self._collected.clear)

    def __repr__(self) -> str:
        return f"<TrainerRegistry of {self._agent.name}: {sorted(self._registered)}>"

    def register(
        self, kind: str, name: str | None, default_name: str, quorum: bool
    ) -> TrainerRegistration:
        """Register a trainer under `name`; None: under the next free default name.

        `quorum`: its steps wait for a quorum.
        """
        self._leave_collected()
        with self._lock:
            if name is None:
                registration = self._next_default(kind, default_name)
            else:
                registration = TrainerRegistration(self, kind, name, None)
            if registration.key in self._registered:
                raise UsageError(
                    f"this worker is already a trainer of {registration.key}, and a second "
                    "trainer would wait for the first: close the first one, or pass another name"
                )
            registration.quorum = quorum
            self._registered[registration.key] = registration
            self._set_step_timeouts()
        return registration

    def _next_default(self, kind: str, default_name: str) -> TrainerRegistration:
        while True:
            self._default_counts[default_name] += 1
            count = self._default_counts[default_name]
            name = default_name if count == 1 else f"{default_name}-{count}"
            registration = TrainerRegistration(self, kind, name, default_name)
            if registration.key not in self._registered:
                return registration

    def release(self, registration: TrainerRegistration, unused: bool) -> None:
        with self._lock:
            self._registered.pop(registration.key, None)
            self._set_step_timeouts()
            if unused and registration.default_name is not None:
                self._default_counts[registration.default_name] -= 1

    def set_quorum(self, registration: TrainerRegistration, quorum: bool) -> None:
        with self._lock:
            registration.quorum = quorum
            self._set_step_timeouts()

    def _set_step_timeouts(self) -> None:
        """Limit the steps of trainers that can wait for each other. The caller holds the lock."""
        quorums = sum(each.quorum for each in self._registered.values())
        for each in self._registered.values():
            each.step_timeout = self.step_timeout if each.quorum and quorums > 1 else None

    def other_quorums(self, registration: TrainerRegistration) -> list[str]:
        """Return the keys of the other trainers here whose steps wait for a quorum."""
        with self._lock:
            return [
                key
                for key, other in self._registered.items()
                if other.quorum and other is not registration
            ]

    @property
    def step_timeout(self) -> float:
        """The time limit of a step, in seconds, for trainers that can wait for each other."""
        return self._agent.config.join_timeout

    def on_collected(self, key: str, leave: Leave) -> None:
        """Let a trainer leave soon. Take no lock: finalizers call this on any thread."""
        if not self._agent.closing:
            self._collected.append((key, leave))

    def _check_collected(self) -> None:
        if self._collected:
            self._agent.threads.start(self._leave_collected)

    def _leave_collected(self) -> None:
        while self._collected:
            try:
                key, leave = self._collected.popleft()
            except IndexError:  # another thread took the last one
                return
            with self._lock:
                self._registered.pop(key, None)
                self._set_step_timeouts()
            if not self._agent.closing:
                leave()


class TrainerRegistration:
    """A name in use. `key` names the trainer in errors: "parameter server 'default'"."""

    def __init__(
        self, registry: TrainerRegistry, kind: str, name: str, default_name: str | None
    ) -> None:
        self.name = name
        self.default_name = default_name
        self.key = f"{kind} {name!r}"
        # its steps wait for a quorum, and are not part of the steps of another trainer
        self.quorum = False
        # the time limit of a step, in seconds; None: wait as long as others need
        self.step_timeout: float | None = None
        self._registry = registry
        self._finalizer: weakref.finalize[..., object] | None = None

    def release(self, unused: bool = False) -> None:
        """Free the name. `unused`: the next trainer without a name gets it."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._registry.release(self, unused)

    def leave_when_collected(self, trainer: object, leave: Leave) -> None:
        """Call `leave` when `trainer` is garbage-collected. `leave` must not refer to it."""
        self._finalizer = weakref.finalize(trainer, self._registry.on_collected, self.key, leave)
        self._finalizer.atexit = False

    def set_quorum(self, quorum: bool) -> None:
        """Set whether steps wait for a quorum that is not that of another trainer here."""
        self._registry.set_quorum(self, quorum)

    def explain_timeout(self, error: CallTimeout) -> None:
        """Raise an error that explains the deadlock if one can be why a step has timed out."""
        others = ", ".join(self._registry.other_quorums(self))
        if not self.quorum or not others:
            return
        raise CallTimeout(
            f"a step of {self.key} has waited {self._registry.step_timeout} s for its quorum. This "
            f"worker also trains {others} with a quorum. Trainers that step such models one after "
            "the other can wait for each other, some in one model and some in another: train one "
            "such model on each worker, step them together (parameter groups of one optimizer), "
            "or use Sync(). If steps may take longer, raise Config.join_timeout"
        ) from error
