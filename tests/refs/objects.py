"""Objects and functions that the tests of references use on the other side."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

import telegrad.rpc as rpc
from telegrad import current_agent
from telegrad.agent import Agent
from telegrad.refs import RRef, remote
from telegrad.refs.manager import ReferenceManager

PATIENCE = 20.0

kept: dict[tuple[str, Any], RRef[Any]] = {}
alive: weakref.WeakSet[Thing] = weakref.WeakSet()


class Thing:
    """An object that `count_alive` counts."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value
        alive.add(self)

    def get(self) -> Any:
        return self.value

    def add(self, amount: Any) -> Any:
        self.value = self.value + amount
        return self.value

    def fail(self) -> None:
        raise KeyError("no such thing")

    def count_to(self, end: int) -> Iterator[int]:
        for number in range(end):
            self.value = number
            yield number

    def where(self) -> str:
        agent = current_agent()
        assert agent is not None
        return agent.name

    @rpc.functions.async_execution
    def later(self, amount: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        threading.Thread(target=lambda: future.set_result(self.value + amount)).start()
        return future

    def late_get(self) -> Any:
        """Like `get`, under a name that tests can hold back at the owner."""
        return self.value

    def __reduce__(self) -> tuple[type[Thing], tuple[Any]]:
        return Thing, (self.value,)


class LateThing(Thing):
    """A thing whose creation tests can hold back at the owner."""


def late_local(rref: RRef[Any]) -> Any:
    return rref.local_value().value


def late_use(rref: RRef[Thing]) -> Any:
    return rref.rpc_sync().get()


def late_copy(rref: RRef[Any]) -> Any:
    return rref.to_here()


def me() -> str:
    agent = current_agent()
    assert agent is not None
    return agent.name


def keep(slot: Any, rref: RRef[Any]) -> None:
    kept[me(), slot] = rref


def release(slot: Any) -> None:
    kept.pop((me(), slot), None)


def use(rref: RRef[Thing]) -> Any:
    return rref.rpc_sync().get()


def give_back(rref: Any) -> Any:
    return rref


def local(rref: RRef[Any]) -> Any:
    return rref.local_value().value


def pass_on(rref: RRef[Thing], path: list[str]) -> Any:
    """Send the reference through all workers of `path`; the last one uses it."""
    if not path:
        return use(rref)
    agent = current_agent()
    assert agent is not None
    return agent.call(path[0], pass_on, rref, path[1:])


def make_thing(value: Any) -> RRef[Thing]:
    return RRef(Thing(value))


def make_elsewhere(name: str, value: Any) -> RRef[Thing]:
    return remote(name, Thing, (value,))


def raise_error() -> None:
    raise ValueError("it cannot be made", 7)


def until(condition: Callable[[], bool], state: Callable[[], str] = str) -> None:
    """Wait until a condition that other threads bring about is true; else fail with `state()`."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"the condition did not become true: {state()}"
        pause.wait(0.002)


def reference_statistics(agent: Agent) -> dict[str, int]:
    return ReferenceManager.of(agent._runtime).statistics()


def owned(agent: Agent) -> int:
    return reference_statistics(agent)["owned_objects"]


gates: dict[str, threading.Event] = {}


def make_when_open(gate: str, value: Any) -> Thing:
    gates[gate].wait(PATIENCE)
    return Thing(value)


def keep_when_open(gate: str, slot: Any, rref: RRef[Any]) -> None:
    gates[gate].wait(PATIENCE)
    keep(slot, rref)


def count_alive(value: Any) -> int:
    return sum(thing.value == value for thing in list(alive))
