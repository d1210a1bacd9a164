"""Every call is answered, whatever is raised wherever our code calls out.

`Injector` counts the calls that threads of agents make to functions that are not Telegrad's: those
of the user (pickling, `str()`, callbacks) and those of Python, numpy and the system (sockets,
locks, memory, threads). A scenario runs once to count them, then once for each, with an exception
raised in place of that call. Each time its call must end within a few seconds, the workers must
serve the next call, and all counters must return to zero.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from telegrad.agent import Agent
from telegrad.errors import PeerLost
from telegrad.refs import remote
from telegrad.testing import LocalCluster
from tests.refs.objects import Thing, until

PATIENCE = 20.0
COUNTERS = (
    "calls_pending",
    "owned_objects",
    "objects_not_created",
    "held_objects",
    "unconfirmed_creations",
    "shared_blocks_in_use",
)
RAISED = [SystemExit, MemoryError, OSError]
# Calls that start nothing, allocate nothing of note and run no code of the user: nothing can be
# raised there.
HARMLESS = {
    "len", "append", "pop", "popleft", "get", "discard", "add", "isinstance", "monotonic", "perf_counter", "time",
    "items", "values", "setdefault", "getattr", "hasattr", "next", "extend", "clear", "remove", "keys", "update",
    "release", "__exit__", "__enter__", "acquire", "notify", "min", "max", "sum", "getpid", "set", "reset", "tuple",
    "list", "any", "all", "issubclass", "from_bytes", "to_bytes", "startswith", "locked", "_is_owned", "id",
    "get_ident", "iter", "copy_context", "run", "unregister", "heappush", "heappop", "bool", "_release_save",
    "_acquire_restore", "close", "daemon", "join", "encode", "decode", "format", "range", "sorted", "repr",
}  # fmt: skip


# Python 3.12 and 3.13 release `x` twice if a profile function raises in place of `f(*x)` and `x` is
# a named tuple.
UNSAFE = {"telegrad.wire.frames.encode_header -> pack"}


class Injector:
    """Raises `error` in place of the n-th call out of Telegrad that a thread of an agent makes."""

    def __init__(self) -> None:
        self.count = 0
        self.fails_at = 0
        self.error: type[BaseException] = SystemExit
        self.hit = ""
        self.active = False

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.active or not threading.current_thread().name.startswith("telegrad-"):
            return
        if "clock" in threading.current_thread().name:
            return
        if event == "c_call":
            caller = frame.f_globals.get("__name__", "")
            name = getattr(argument, "__name__", "")
            if not caller.startswith("telegrad.") or name in HARMLESS:
                return
            where = f"{caller}.{frame.f_code.co_name} -> {name}"
        else:
            return
        if where in UNSAFE:
            return
        self.count += 1
        if self.count == self.fails_at:
            self.active = False
            self.hit = where
            raise self.error(f"injected at {where}")


@pytest.fixture
def injector() -> Iterator[Injector]:
    injector = Injector()
    logging.disable(logging.CRITICAL)  # pytest would keep the frames of the exceptions
    gc.collect()
    gc.freeze()  # what is there already is not looked at again
    threading.setprofile(injector.profile)
    try:
        yield injector
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        gc.collect()


class Picky:
    """Runs code of its class when it is pickled and unpickled."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[Picky], tuple[int]]:
        return Picky, (self.value,)


def echo(value: Any) -> Any:
    return value


def fail(value: Any) -> Any:
    raise ValueError(value)


def synchronous(caller: Agent) -> None:
    assert caller._runtime.invoke("w1", echo, (Picky(3),), None, PATIENCE).value == 3


def asynchronous(caller: Agent) -> None:
    assert caller._runtime.start("w1", echo, (Picky(3),), None, PATIENCE).wait().value == 3


def large(caller: Agent) -> None:
    tensor = torch.arange(200_000)
    assert torch.equal(caller._runtime.start("w1", echo, (tensor,), None, PATIENCE).wait(), tensor)


def failing(caller: Agent) -> None:
    with pytest.raises(ValueError, match="no"):
        caller._runtime.start("w1", fail, ("no",), None, PATIENCE).wait()


def reference(caller: Agent) -> None:
    assert remote("w1", Thing, (3,), agent=caller).rpc_async(PATIENCE).get().wait() == 3


def callback(caller: Agent) -> None:
    assert (
        caller._runtime.start("w1", echo, (3,), None, PATIENCE)
        .then(lambda done: done.value() + 1)
        .wait()
        == 4
    )


SCENARIOS = [synchronous, asynchronous, large, failing, reference, callback]


def nothing_left(agent: Agent) -> bool:
    figures = agent.statistics()
    if not any(figures.get(name, 0) for name in COUNTERS):
        return True
    gc.collect()  # an exception and the frames that it passed refer to each other
    return False


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("transport", ["unix"])
def test_a_call_ends_whatever_is_raised_where_our_code_calls_out(
    injector: Injector,
    scenario: Callable[[Agent], None],
    error: type[BaseException],
    transport: str,
) -> None:
    injector.error = error
    total = run_with(injector, scenario, 0)
    for point in range(1, total + 1):
        run_with(injector, scenario, point)


def run_with(injector: Injector, scenario: Callable[[Agent], None], fails_at: int) -> int:
    """Run a scenario between two new workers; how many points there were."""
    outcome: list[BaseException | None] = []
    with LocalCluster(
        2, transports=("unix",), heartbeat_interval=0.5, heartbeat_timeout=5.0
    ) as cluster:
        w0, w1 = cluster["w0"], cluster["w1"]
        w0.call("w1", abs, -1)
        w1.call("w0", abs, -1)
        injector.count, injector.fails_at, injector.hit, injector.active = 0, fails_at, "", True

        def attempt() -> None:
            try:
                scenario(w0)
            except BaseException as error:
                outcome.append(error)
            else:
                outcome.append(None)

        caller = threading.Thread(target=attempt, daemon=True)
        caller.start()
        caller.join(PATIENCE + 10)
        injector.active = False
        assert outcome, f"the call never ended: {injector.hit}"
        assert outcome[0] is None or fails_at, f"{outcome[0]!r}"
        if isinstance(outcome[0], AssertionError):
            raise AssertionError(f"a wrong result: {injector.hit}") from outcome[0]
        outcome.clear()
        try:
            again = w0._runtime.invoke("w1", abs, (-7,), None, PATIENCE)
        except PeerLost:  # the connection had to end, and with it the worker's membership
            return injector.count
        assert again == 7, injector.hit
        until(
            lambda: nothing_left(w0) and nothing_left(w1),
            lambda: f"{injector.hit}: {w0.statistics()} {w1.statistics()}",
        )
    return injector.count


def test_the_sweep_reaches_the_places_that_matter(injector: Injector) -> None:
    """A sweep that injects nothing would pass, too."""
    hits = set()
    for point in (1, 2, 3, 4, 5, 6):
        run_with(injector, asynchronous, point)
        hits.add(injector.hit)
    assert any("send" in hit or "recv" in hit or "loads" in hit or "dump" in hit for hit in hits), (
        hits
    )
    assert sys.getprofile() is None
