"""While the system refuses threads, calls end all the same, and the workers go on when it no longer
does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from telegrad.errors import CallTimeout, PeerLost, ProtocolError, TelegradError
from telegrad.refs import remote
from telegrad.scheduling.executor import Job, ThreadPool
from telegrad.server.connection import ServerConnection
from telegrad.server.listener import Listener
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, until
from tests.local.test_event_loop import Rounds, meet
from tests.refs.objects import Thing, owned

SOON = 0.3  # seconds: the deadline of calls that cannot be served
NoThreads = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> NoThreads:
    """Within this, no thread of an agent is idle, and the system refuses new ones."""

    def refuse(threads: ThreadPool, job: Job) -> None:
        raise RuntimeError("can't start new thread")

    @contextmanager
    def without_threads() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPool, "start", refuse)
            yield

    return without_threads


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(2)


def test_calls_end_and_the_worker_stays(workers: LocalCluster, no_threads: NoThreads) -> None:
    """Whatever a call needs a thread for, it has a result or an error by its deadline."""
    w0 = workers["w0"]
    w0.call("w1", abs, -1)
    kinds: list[Callable[[], Any]] = [
        lambda: w0._runtime.invoke("w1", abs, (-1,), None, SOON),
        lambda: w0._runtime.start("w1", abs, (-1,), None, SOON).wait(),
        lambda: (
            remote("w1", Thing, (1,), agent=w0, timeout=SOON).rpc_async(SOON).get().result(SOON)
        ),
        # needs connections that are not there yet
        lambda: workers["w1"]._runtime.invoke("w0", abs, (-1,), None, SOON),
    ]
    errors = []
    with no_threads():
        for kind in kinds * 3:
            try:
                assert kind() == 1
            except (TelegradError, RuntimeError) as error:
                errors.append(str(error))
                # the deadline, and not the time limit of connecting
                is_late = isinstance(error, CallTimeout)
                if kind is kinds[-1] and not is_late:
                    raise
    assert errors
    assert not [error for error in errors if "was lost" in error]
    for name, other in (("w0", "w1"), ("w1", "w0")):
        assert workers[name]._runtime.invoke(other, abs, (-2,), None, PATIENCE) == 2
        assert workers[name]._runtime.start(other, abs, (-2,), None, PATIENCE).wait() == 2
    until(lambda: owned(workers["w1"]) == 0)


def test_a_connection_waits_for_a_thread(
    workers: LocalCluster, in_background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callee has proven itself and cannot start to serve: that is no reason to give it up."""
    w0, w1 = workers["w0"], workers["w1"]
    refused, here = Gate(), threading.local()
    accept, start = Listener.accept_channel, ThreadPool.start

    def start_unless_refused(threads: ThreadPool, job: Job) -> None:
        if getattr(here, "refuses", False):
            raise RuntimeError("can't start new thread")
        start(threads, job)

    def accept_without_threads(listener: Listener, *args: Any) -> None:
        here.refuses = listener is w1._runtime.listener
        try:
            accept(listener, *args)
        finally:
            here.refuses = False
        if listener is w1._runtime.listener:
            refused.hold()

    monkeypatch.setattr(ThreadPool, "start", start_unless_refused)
    monkeypatch.setattr(Listener, "accept_channel", accept_without_threads)
    calls = [
        in_background(w0._runtime.invoke, "w1", abs, (-number,), None, PATIENCE)
        for number in range(3)
    ]
    calls.append(in_background(lambda: w0._runtime.start("w1", abs, (-3,), None, PATIENCE).wait()))
    refused.wait_for(2)
    refused.open()
    assert [call.result(PATIENCE) for call in calls] == [0, 1, 2, 3]


def test_lanes_keep_their_threads_if_none_can_read_them_together(
    cluster: Clusters, no_threads: NoThreads, in_background: Background
) -> None:
    workers, rounds = cluster(4), Rounds(3)
    names = ("w1", "w2", "w3")
    for name in names:
        workers[name].call("w0", abs, -1)
    start, done = threading.Barrier(4), threading.Barrier(4)

    def play(name: str) -> list[int]:
        numbers = []
        for _ in range(4):
            start.wait(PATIENCE)
            numbers.append(workers[name]._runtime.invoke("w0", meet, (rounds,), None, PATIENCE))
            done.wait(PATIENCE)
        return numbers

    players = [in_background(play, name) for name in names]
    for number in range(4):
        if number < 2:
            with no_threads():
                start.wait(PATIENCE)
                done.wait(PATIENCE)
        else:
            start.wait(PATIENCE)
            done.wait(PATIENCE)
    results = [player.result(PATIENCE) for player in players]
    assert [sorted(numbers) for numbers in zip(*results, strict=True)] == [[0, 1, 2]] * 4


def test_a_connection_that_its_callee_ends_costs_the_call_alone(
    workers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    w0 = workers["w0"]
    kept = remote("w1", Thing, (5,), agent=w0)
    assert kept.rpc_sync().get() == 5

    def refuse(connection: ServerConnection, *args: Any) -> None:
        raise ProtocolError("this makes no sense")

    with monkeypatch.context() as patch:
        patch.setattr(ServerConnection, "_execute", refuse)
        with pytest.raises(PeerLost, match=r"this makes no sense.*Other calls to the worker go on"):
            w0.call("w1", abs, -1)
    assert w0.call("w1", abs, -1) == 1
    assert kept.rpc_sync().get() == 5
