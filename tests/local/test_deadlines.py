"""Every call ends by its deadline, whatever the callee does, and what comes after it is
unharmed.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import Deadline, Future, current_agent, current_deadline
from telegrad.agent import Agent
from telegrad.client.multiplexed import PendingCall
from telegrad.errors import CallTimeout, UsageError
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from telegrad.wire.frames import Frame, Kind
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Log, hold_at, until

SHORT = 0.05

Invoke = Callable[..., Any]


class Promises(Log):
    """The futures that a remote function handed out."""


@async_execution
def promise(promises: Promises) -> Future[Any]:
    future: Future[Any] = Future()
    promises.note(future)
    return future


@async_execution
def promise_at_last(promises: Promises, gate: Gate) -> Future[Any]:
    gate.hold()
    future: Future[Any] = Future()
    promises.note(future)
    return future


@async_execution
def hold_elsewhere(promises: Promises, gate: Gate) -> Future[Any]:
    agent = current_agent()
    assert agent is not None
    future = agent.submit(agent.name, hold_at, gate)
    promises.note(future)
    return future


def hold_then_return_tensor(gate: Gate, elements: int) -> torch.Tensor:
    gate.hold()
    return torch.zeros(elements)


def hold_then_note(gate: Gate, log: Log, entry: str) -> None:
    gate.hold()
    log.note(entry)


def seconds_left() -> float | None:
    deadline = current_deadline()
    return None if deadline is None else deadline.left()


@pytest.fixture(params=["synchronous", "asynchronous"])
def invoke(request: pytest.FixtureRequest, w0: Agent) -> Invoke:
    """Call and wait, by either way."""
    if request.param == "synchronous":
        return w0._runtime.invoke
    return lambda *args: w0._runtime.start(*args).wait()


def test_a_callee_that_blocks_is_given_up(w0: Agent, invoke: Invoke, gate: Gate) -> None:
    with pytest.raises(CallTimeout, match=r"hold_at on worker 'w1'.*50 ms") as caught:
        invoke("w1", hold_at, (gate,), None, SHORT)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.peer, caught.value.call) == ("w1", "hold_at")


def test_a_callee_that_never_completes_its_future_is_given_up(w0: Agent, invoke: Invoke) -> None:
    promises = Promises()
    with pytest.raises(CallTimeout):
        invoke("w1", promise, (promises,), None, SHORT)


def test_a_call_that_a_given_up_call_waits_for_is_given_up_too(
    w0: Agent, invoke: Invoke, gate: Gate
) -> None:
    promises = Promises()
    invoke("w1", abs, (-1,))  # connecting may take longer than the deadline
    with pytest.raises(CallTimeout):
        invoke("w1", hold_elsewhere, (promises, gate), None, SHORT)
    (passed_on,) = promises.wait_for(1)
    until(passed_on.cancelled)


def test_calls_after_a_timeout_get_their_own_answers(w0: Agent, invoke: Invoke, gate: Gate) -> None:
    for _ in range(3):
        with pytest.raises(CallTimeout):
            invoke("w1", hold_at, (gate, "late"), None, SHORT)
    gate.open()
    assert [invoke("w1", operator.add, (1, i)) for i in range(20)] == list(range(1, 21))


def test_a_late_reply_with_a_big_tensor_harms_nobody(w0: Agent, invoke: Invoke, gate: Gate) -> None:
    with pytest.raises(CallTimeout):
        invoke("w1", hold_then_return_tensor, (gate, 500_000), None, SHORT)
    gate.open()
    for _ in range(3):
        assert invoke("w1", torch.ones, (500_000,)).sum() == 500_000


def test_none_means_no_limit(w0: Agent, invoke: Invoke) -> None:
    assert invoke("w1", seconds_left, (), None, None) is None


def test_the_default_is_the_configs_and_can_be_changed(cluster: Clusters, gate: Gate) -> None:
    w0 = cluster(2, timeout=SHORT)["w0"]
    for attempt in (w0.call, lambda *args: w0.submit(*args).wait()):
        with pytest.raises(CallTimeout, match="50 ms"):
            attempt("w1", hold_at, gate)
    w0._runtime.timeout = None
    assert w0.call("w1", seconds_left) is None
    assert w0.submit("w1", seconds_left).wait() is None


def test_the_callee_sees_the_time_that_is_left(w0: Agent, invoke: Invoke) -> None:
    left = invoke("w1", seconds_left, (), None, 10)
    assert 9 < left <= 10


def test_a_timeout_that_is_not_positive_has_passed_already(
    w0: Agent, invoke: Invoke, gate: Gate
) -> None:
    with pytest.raises((CallTimeout, UsageError)):
        invoke("w1", hold_at, (gate,), None, 0)


def test_an_expired_call_in_the_queue_never_runs(cluster: Clusters, gate: Gate, log: Log) -> None:
    workers = cluster(2, threads=2, max_threads=2)
    w0 = workers["w0"]
    running = []
    while workers["w1"]._runtime.executor.active < 2:  # a reader or two are the first to be stuck
        running.append(w0.submit("w1", hold_then_note, gate, log, "running"))
        gate.wait_for(1)
    expired = w0._runtime.start("w1", hold_then_note, (gate, log, "expired"), None, SHORT)
    wanted = w0.submit("w1", hold_then_note, gate, log, "wanted")
    with pytest.raises(CallTimeout):
        expired.wait()
    assert w0.submit("w1", abs, -1).wait() == 1  # what was sent before it has been read
    gate.open()
    for future in (*running, wanted):
        future.result(PATIENCE)
    assert sorted(log.entries) == [*["running"] * len(running), "wanted"]


def test_thousands_of_deadlines_pass(w0: Agent, pair: LocalCluster) -> None:
    promises = Promises()
    futures = [
        w0._runtime.start("w1", promise, (promises,), None, 0.01 + i % 100 / 500)
        for i in range(2000)
    ]
    assert all(isinstance(future.exception(PATIENCE), CallTimeout) for future in futures)
    assert w0.statistics()["calls_pending"] == 0
    connections = pair["w1"]._runtime.listener.connections
    until(
        lambda: (
            not any(
                connection._deferred or connection.calls_in_progress for connection in connections
            )
        )
    )


def test_a_deadline_that_passes_before_the_call_is_sent_leaves_nothing_at_the_callee(
    w0: Agent, pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert w0.submit("w1", abs, -1).wait() == 1
    (peer,) = w0._runtime.peers.all()
    send, offer, expired = (
        peer.multiplexed.channel.send,
        peer.multiplexed.channel.send_nowait,
        threading.Event(),
    )

    def send_late(kind: int, *args: Any, **kwargs: Any) -> None:
        if kind == Kind.CALL:
            assert expired.wait(PATIENCE)
        send(kind, *args, **kwargs)

    def offered(kind: int, *args: Any) -> bool:
        complete = offer(kind, *args)
        if kind == Kind.CANCEL:
            expired.set()
        return complete

    monkeypatch.setattr(peer.multiplexed.channel, "send", send_late)
    monkeypatch.setattr(peer.multiplexed.channel, "send_nowait", offered)
    promises = Promises()
    future = w0._runtime.start("w1", promise, (promises,), None, SHORT)
    assert isinstance(future.exception(PATIENCE), CallTimeout)
    promises.wait_for(1)
    connections = pair["w1"]._runtime.listener.connections
    until(
        lambda: (
            not any(
                connection._deferred or connection.calls_in_progress for connection in connections
            )
        )
    )


def test_a_call_that_outlives_its_deadline_leaves_nothing_at_the_callee(
    w0: Agent, pair: LocalCluster, gate: Gate
) -> None:
    futures = [w0._runtime.start("w1", hold_at, (gate,), None, SHORT) for _ in range(5)]
    gate.wait_for(1)  # the others run too, or have expired before they could
    assert all(isinstance(future.exception(PATIENCE), CallTimeout) for future in futures)
    assert w0.submit("w1", abs, -1).wait() == 1  # the cancellations have been read
    gate.open()
    connections = pair["w1"]._runtime.listener.connections
    until(lambda: not any(connection.calls_in_progress for connection in connections))
    assert [connection._cancelled for connection in connections] == [set() for _ in connections]


def test_a_promise_that_comes_after_its_deadline_is_not_kept(
    w0: Agent, pair: LocalCluster, gate: Gate
) -> None:
    promises = Promises()
    late = w0._runtime.start("w1", promise_at_last, (promises, gate), None, SHORT)
    gate.wait_for(1)
    assert isinstance(late.exception(PATIENCE), CallTimeout)
    connections = pair["w1"]._runtime.listener.connections
    until(lambda: any(connection._cancelled for connection in connections))
    gate.open()
    until(lambda: not any(connection.calls_in_progress for connection in connections))
    assert [(connection._deferred, connection._cancelled) for connection in connections] == [
        ({}, set()) for _ in connections
    ]


def test_early_replies_win_over_later_deadlines(w0: Agent) -> None:
    futures = [
        w0._runtime.start("w1", operator.add, (i, 1), None, PATIENCE - i / 100) for i in range(500)
    ]
    assert [future.wait() for future in futures] == list(range(1, 501))


def test_a_short_deadline_behind_a_long_one_is_kept(w0: Agent, gate: Gate) -> None:
    patient = w0._runtime.start("w1", hold_at, (gate, "done"), None, PATIENCE)
    hasty = w0._runtime.start("w1", hold_at, (gate,), None, SHORT)
    assert isinstance(hasty.exception(PATIENCE / 2), CallTimeout)
    assert not patient.done()
    gate.open()
    assert patient.wait() == "done"


@pytest.mark.parametrize("transport", ["unix"])
def test_callbacks_of_expired_calls_may_block(w0: Agent, gate: Gate, transport: str) -> None:
    promises, blocking = Promises(), Gate()
    # time enough to put the callback in place
    first = w0._runtime.start("w1", promise, (promises,), None, 6 * SHORT)
    first.add_done_callback(lambda _: blocking.hold())
    blocking.wait_for()
    second = w0._runtime.start("w1", promise, (promises,), None, SHORT)
    assert isinstance(second.exception(PATIENCE / 2), CallTimeout)
    blocking.open()


def test_deadlines_compare_and_tell_what_is_left() -> None:
    soon, late = Deadline.after(1), Deadline.after(100)
    assert soon is not None
    assert late is not None
    assert soon < late
    assert 0 < soon.left() <= 1
    assert not soon.passed()
    assert Deadline(0.0).passed()
    assert Deadline.after(None) is None


def test_a_callee_that_finds_the_deadline_passed_a_moment_before_its_caller(
    cluster: Clusters,
) -> None:
    """It answers a call that it did not begin with an empty reply."""
    multiplexed = cluster(2)["w0"]._runtime.peers.reach("w1").multiplexed
    future: Future[int] = Future()
    multiplexed._settle(
        PendingCall(future, math.inf, 1.0, "slow", False, None, []),
        Frame.of(Kind.REPLY, 0, 1, 0, 0, b"", ()),
    )
    with pytest.raises(CallTimeout, match="slow on worker 'w1'"):
        future.wait()
