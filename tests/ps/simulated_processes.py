"""What simulated servers and trainers have in common: promises, tasks, processes and models."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad import ps
from telegrad.errors import PeerLost
from telegrad.ps.consistency import Consistency

if TYPE_CHECKING:
    from tests.ps.simulation import Simulation

History = tuple[frozenset[tuple[str, int]], ...]  # for each version: the reports of its step
Event = Callable[[], None]
Task = Generator["Promise", Any, Any]


class Promise:
    """A result that a task waits for."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._listeners: list[Event] = []

    def complete(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self.done:
            self.done, self.value, self.error = True, value, error
            for listener in self._listeners:
                listener()

    def then(self, listener: Event) -> None:
        if self.done:
            listener()
        else:
            self._listeners.append(listener)


def together(promises: list[Promise]) -> Promise:
    """Return a promise that completes when all have completed, or one has failed."""
    result = Promise()

    def check() -> None:
        failed = [promise.error for promise in promises if promise.error is not None]
        if failed:
            result.complete(error=failed[0])
        elif all(promise.done for promise in promises):
            result.complete()

    for promise in promises:
        promise.then(check)
    return result


@dataclass(frozen=True)
class Model:
    """A model, or a group of tables, that trainers train together."""

    name: str
    rule: Consistency
    servers: tuple[str, ...]
    trainers: int
    checkpoint: ps.Checkpoint
    restorable: bool = True  # trainers can restore lost versions; not true for tables


class Process:
    """One incarnation of a worker."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.incarnation = f"{name}.{next(simulation.incarnation_numbers)}"
        self.alive = True
        # calls without reply; a dict keeps their order, so that a seed repeats a simulation
        self.calls: dict[Promise, None] = {}

    def __repr__(self) -> str:
        return self.incarnation

    def kill(self) -> None:
        self.alive = False
        for promise in list(self.calls):
            self.simulation.schedule(partial(promise.complete, error=PeerLost(f"{self} died")))
        self.calls.clear()
