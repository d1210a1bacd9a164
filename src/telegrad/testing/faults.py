"""Planned faults: lose, delay or repeat a call or its reply, cut a connection, kill a worker.

A fault happens at a counted point, not after a time, so a test that uses it always fails or passes
in the same way:

>>> from telegrad.errors import CallTimeout
>>> from telegrad.testing import LocalCluster, faults
>>> with LocalCluster(2) as cluster, faults.inject(faults.drop("reply", function="pow", at=2)):
...     cluster["w0"].call("w1", pow, 2, 3)
...     try:
...         cluster["w0"].with_timeout(0.1).call("w1", pow, 2, 4)
...     except CallTimeout:
...         print("lost")
8
lost

In real processes, ``TELEGRAD_FAULTS`` holds the plan, with faults separated by semicolons, and a
fault ``kill`` kills the process:

    TELEGRAD_FAULTS="kill worker=ps0 function=push at=7; delay seconds=0.1 probability=0.01; seed=3"

All faults happen at the callee: when a call arrives there (``call``), or when its function has
returned and the reply is due (``reply``; an exception is no such reply). `cut` ends the connection
that carries the call. That fails a synchronous call alone. Asynchronous calls share a connection
whose end means that the peer is lost.

State: `_Injection` replaces two methods of `ServerConnection` while it is active, so nothing is
slower without faults. A plan counts the points and records what happened under its `_lock`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.server.connection import ServerConnection, prepare_replies
from telegrad.timeouts import duration
from telegrad.transport.channel import ChannelClosed
from telegrad.wire.frames import Kind

__all__ = [
    "Fault",
    "FaultPlan",
    "FiredFault",
    "cut",
    "delay",
    "drop",
    "duplicate",
    "inject",
    "install",
    "kill",
]

_ACTIONS = ("drop", "delay", "duplicate", "cut", "kill")
_POINTS = ("call", "reply")
_VARIABLE = "TELEGRAD_FAULTS"


@dataclass(frozen=True)
class Fault:
    """What happens at some of the points that match. Without a choice, it happens at all of them.

    `worker` is the callee and `caller` the caller; `function` is the name of the function, without
    the names of its module and class.
    """

    action: str
    point: str = "call"
    worker: str | None = None
    caller: str | None = None
    function: str | None = None
    at: int | None = None
    """Only at the n-th point that matches, counted from 1."""
    every: int | None = None
    """Only at every n-th point that matches."""
    probability: float | None = None
    """Only with this probability, by the random numbers of the plan."""
    seconds: float = 0.0
    """Of a delay."""

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise UsageError(f"a fault is one of {', '.join(_ACTIONS)}, not {self.action!r}")
        if self.point not in _POINTS:
            raise UsageError(f"a point is one of {', '.join(_POINTS)}, not {self.point!r}")
        object.__setattr__(self, "seconds", duration(self.seconds, "the delay of a fault"))


def drop(point: str = "call", **choice: Any) -> Fault:
    """Lose a call, which then never runs, or a reply. The caller waits until its deadline."""
    return Fault("drop", point, **choice)


def delay(seconds: float, point: str = "call", **choice: Any) -> Fault:
    """Let a call begin, or a reply be sent, `seconds` later. Others overtake it."""
    return Fault("delay", point, seconds=seconds, **choice)


def duplicate(point: str = "call", **choice: Any) -> Fault:
    """Run a call twice, or send its reply twice. The caller gets the first reply."""
    return Fault("duplicate", point, **choice)


def cut(point: str = "call", **choice: Any) -> Fault:
    """End the connection that carries the call, before it runs or after."""
    return Fault("cut", point, **choice)


def kill(point: str = "call", **choice: Any) -> Fault:
    """End the callee like a killed process, before it runs the call or after."""
    return Fault("kill", point, **choice)


class FiredFault(NamedTuple):
    """A fault that has happened, at the point with this `number` among those that matched it."""

    action: str
    point: str
    worker: str
    caller: str
    function: str
    number: int


class FaultPlan:
    """The faults to happen, and those that have happened (`fired`)."""

    def __init__(
        self, faults: tuple[Fault, ...], seed: int = 0, kills_process: bool = False
    ) -> None:
        self.fired: list[FiredFault] = []
        self.kills_process = kills_process
        self._faults = faults
        self._counts = [0] * len(faults)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def __repr__(self) -> str:
        return f"<FaultPlan of {len(self._faults)} faults, {len(self.fired)} have happened>"

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Return the plan that ``TELEGRAD_FAULTS`` describes. Its kills are those of processes."""
        faults, seed = [], 0
        for part in filter(None, map(str.strip, text.split(";"))):
            action, *settings = part.split()
            if action.startswith("seed="):
                seed = int(action.removeprefix("seed="))
            else:
                faults.append(_parse_fault(action, settings))
        return cls(tuple(faults), seed, kills_process=True)

    def wait_for(self, count: int = 1, timeout: float = 20.0) -> None:
        """Wait until `count` faults have happened."""
        limit = duration(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.fired) >= count, limit):
                raise TimeoutError(f"only {len(self.fired)} of {count} faults have happened")

    def choose(self, point: str, worker: str, caller: str, function: str) -> Fault | None:
        """Return the fault that happens at a point: the first that matches, is due and may."""
        name = function.rpartition(".")[2]
        chosen: Fault | None = None
        with self._changed:
            for index, fault in enumerate(self._faults):
                wanted = (fault.worker, worker), (fault.caller, caller), (fault.function, name)
                if fault.point != point or any(each not in (None, is_) for each, is_ in wanted):
                    continue
                self._counts[index] += 1
                if chosen is None and self._is_due(fault, self._counts[index]):
                    chosen = fault
                    count = self._counts[index]
                    happened = FiredFault(fault.action, point, worker, caller, name, count)
                    self.fired.append(happened)
                    self._changed.notify_all()
        return chosen

    def _is_due(self, fault: Fault, count: int) -> bool:
        if fault.at is not None and count != fault.at:
            return False
        if fault.every is not None and count % fault.every:
            return False
        return fault.probability is None or self._random.random() < fault.probability


def _parse_fault(action: str, settings: list[str]) -> Fault:
    types = {field.name: str(field.type) for field in fields(Fault)}
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in types or not text:
            raise UsageError(f"{_VARIABLE}: {setting!r} is not one of {', '.join(types)} = value")
        convert: Callable[[str], Any] = str
        if types[name].startswith(("int", "float")):
            convert = int if types[name].startswith("int") else float
        values[name] = convert(text)
    return replace(Fault(action), **values)


@contextmanager
def inject(*faults: Fault, seed: int = 0) -> Iterator[FaultPlan]:
    """Let faults happen to all agents of this process inside the block.

    `seed` is that of the random numbers for `Fault.probability`.
    """
    plan = FaultPlan(faults, seed)
    injection = _Injection(plan)
    injection.start()
    try:
        yield plan
    finally:
        injection.stop()


def install() -> None:
    """Let the faults of ``TELEGRAD_FAULTS`` happen in this process, from now on. Agents call it."""
    with _installed.lock:
        if _installed.injection is None:
            _installed.injection = _Injection(FaultPlan.parse(os.environ[_VARIABLE]))
            _installed.injection.start()


class _Installed:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.injection: _Injection | None = None


_installed = _Installed()


class _Injection:
    """Replaces the methods of `ServerConnection` that receive calls and send replies."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._handle: Any = ServerConnection.handle
        self._send_reply: Any = ServerConnection._send_reply

    def start(self) -> None:
        injection = self

        def handle(connection: ServerConnection, frame: Any) -> None:
            injection._on_frame(connection, frame)

        def send_reply(
            connection: ServerConnection,
            call: Any,
            function: Any,
            value: Any,
            *rest: Any,
            **more: Any,
        ) -> None:
            injection._on_reply(connection, call, function, value, *rest, **more)

        _replace(handle, send_reply)

    def stop(self) -> None:
        _replace(self._handle, self._send_reply)

    def _on_frame(self, connection: ServerConnection, frame: Any) -> None:
        if frame.kind != Kind.CALL:
            self._handle(connection, frame)
            return
        function = connection._find_function(frame)
        name = "" if function is None else function.name
        fault = self._choose("call", connection, name)
        if fault is None:
            self._handle(connection, frame)
        elif fault.action == "duplicate":
            self._handle(connection, frame)
            self._handle(connection, frame)
        elif fault.action == "delay":
            call = connection._begin(frame)
            call.function = name or call.function
            _later(connection, fault.seconds, lambda: connection._execute(frame, function, call))
        elif fault.action != "drop":
            self._end(connection, fault)

    def _on_reply(
        self,
        connection: ServerConnection,
        call: Any,
        function: Any,
        value: Any,
        loop: Any = None,
        epoch: int = 0,
        exclusive: bool = False,
        received: Any = (),
        shared: Any = None,
    ) -> None:
        fault = self._choose("reply", connection, call.function)
        if fault is None or fault.action == "duplicate":
            self._send_reply(
                connection, call, function, value, loop, epoch, exclusive, received, shared
            )
            if fault is not None:
                self._send_reply(connection, call, function, value)
            return
        prepare_replies(received)
        if fault.action == "delay":
            _later(
                connection,
                fault.seconds,
                lambda: self._send_reply(connection, call, function, value),
            )
            return
        connection._mark_answered(call, fault.action)
        if fault.action != "drop":
            self._end(connection, fault)

    def _choose(self, point: str, connection: ServerConnection, function: str) -> Fault | None:
        return self._plan.choose(point, connection._runtime.name, connection.peer_name, function)

    def _end(self, connection: ServerConnection, fault: Fault) -> None:
        """Cut the connection, or kill the worker."""
        if fault.action == "kill" and self._plan.kills_process:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "kill":
            runtime: Any = connection._runtime
            threading.Thread(target=runtime.abort, name="planned kill", daemon=True).start()
        connection.channel.shutdown()
        raise ChannelClosed(f"{fault.action} by a planned fault")


def _replace(handle: Any, send_reply: Any) -> None:
    setattr(ServerConnection, "handle", handle)  # noqa: B010 - mypy refuses the assignment
    setattr(ServerConnection, "_send_reply", send_reply)  # noqa: B010


def _later(connection: ServerConnection, seconds: float, job: Callable[[], None]) -> None:
    runtime = connection._runtime
    runtime.clock.call_at(time.monotonic() + seconds, lambda: runtime.threads.start(job))
