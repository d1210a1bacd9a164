"""What every test has: a key file of its own, and a check that it leaves nothing behind.

A test may leave no thread, child process, socket or shared memory of Telegrad. What is about to end
gets a moment to do so: threads are joined, the rest is looked at again. When a test fails or runs
out of time, its report shows every live agent and the stack of every thread.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from telegrad.config import TRANSPORTS
from telegrad.runtime import _runtimes
from telegrad.testing import LocalCluster

_MOMENT = 5.0  # seconds that what a test started may take to end
_BEFORE_TIMEOUT = 2.0

Clusters = Callable[..., LocalCluster]

# A shell starts its background jobs with SIGINT ignored, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_key_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's key file is neither read nor made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("TELEGRAD_SECRET", raising=False)
        # one module of tests imports OpenTelemetry; the agents of others do not use it
        patch.setenv("OTEL_SDK_DISABLED", "true")
        yield


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport in turn.

    A file that needs only one has a fixture of this name that returns it.
    """
    return str(request.param)


@pytest.fixture
def cluster(transport: str) -> Iterator[Clusters]:
    """Makes open clusters whose agents talk by `transport`: `cluster(3, threads=2)`.

    They end with the test.
    """
    with ExitStack() as stack:

        def make(size: int = 2, **settings: Any) -> LocalCluster:
            return stack.enter_context(
                LocalCluster(size, **{"transports": (transport,), **settings})
            )

        yield make


# Leaks


class _Belongings(NamedTuple):
    """What this process has that a test could leave behind."""

    threads: Counter[str]
    children: Counter[str]
    descriptors: Counter[str]
    mappings: Counter[str]

    def beyond(self, before: _Belongings) -> dict[str, list[str]]:
        new = {
            kind: sorted((mine - theirs).elements())
            for kind, mine, theirs in zip(self._fields, self, before, strict=True)
        }
        return {kind: names for kind, names in new.items() if names}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _belongings()
    yield
    if request.node.stash.get(_failed, False):
        return  # its traceback holds on to whatever the test had
    left = _belongings().beyond(before)
    until = time.monotonic() + _MOMENT
    while left and time.monotonic() < until:
        for thread in _our_threads():
            if thread.ident is not None:  # else it is about to start
                thread.join(0.05)
        if "threads" not in left:
            gc.collect()  # costs more than most tests, so only where something seems to be left
        left = _belongings().beyond(before)
    if left:
        pytest.fail(f"the test left behind: {left}\n{_state()}", pytrace=False)


def _belongings() -> _Belongings:
    return _Belongings(
        Counter(thread.name for thread in _our_threads()),
        Counter(_children()),
        Counter(target for target in _descriptors() if target.startswith(("socket:", "/memfd:"))),
        Counter(_shared_mappings()),
    )


def _our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("telegrad-")]


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                yield from file.read().split()
        except OSError:
            continue  # that thread has just ended, or the kernel does not tell


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of the listing itself


def _shared_mappings() -> Iterator[str]:
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:telegrad" in line:
                yield line.split(maxsplit=5)[-1].strip() + " " + line.split(maxsplit=1)[0]


# Reports


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        item.stash[_failed] = True
        report.sections.append(("live agents and stacks", _state()))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    """The time limit of a test ends with its failure; what hangs after that is ended here."""
    timer = threading.Timer(float(item.config.getini("timeout") or 120), _give_up, (item.nodeid,))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def _give_up(test: str) -> None:
    print(f"\n{test} does not end\n{_state()}", file=sys.__stderr__, flush=True)
    os._exit(1)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Shortly before the time is up, say in which state the agents are; the stacks follow from the
    plugin.
    """
    timer = threading.Timer(
        max(settings.timeout - _BEFORE_TIMEOUT, 0.1), lambda: print(_agent_lines(), file=sys.stderr)
    )
    timer.daemon = True
    timer.start()
    item.stash[_timer] = timer
    return (yield)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Any:
    timer = item.stash.get(_timer, None)
    if timer is not None:
        timer.cancel()
    return (yield)


_timer = pytest.StashKey[threading.Timer]()
_failed = pytest.StashKey[bool]()


def _state() -> str:
    return f"{_agent_lines()}\n\n{_stacks()}"


def _agent_lines() -> str:
    return "live agents:\n" + "\n".join(repr(runtime) for runtime in list(_runtimes))


def _stacks() -> str:
    threads = {thread.ident: thread for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        if (
            thread is None
            or thread is threading.current_thread()
            or isinstance(thread, threading.Timer)
        ):
            continue  # busy with this report, or a watchdog of the test runner
        stack = [
            line
            for line in traceback.extract_stack(frame)
            if not line.name.startswith("_bootstrap")
        ]
        parts.append(f"{thread.name}:\n{''.join(traceback.format_list(stack))}")
    return "\n".join(parts)
