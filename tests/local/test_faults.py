"""`telegrad.testing.faults`: each fault happens at its point, and nothing else does."""

from __future__ import annotations

import pytest

from telegrad import Agent
from telegrad.errors import CallTimeout, PeerLost, UsageError
from telegrad.server.connection import ServerConnection
from telegrad.testing import LocalCluster, faults
from telegrad.testing.faults import Fault, FaultPlan
from tests.conftest import Clusters
from tests.local.gates import Log, note_in, until

SHORT = 0.1


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(3)


@pytest.fixture
def w0(workers: LocalCluster) -> Agent:
    agent = workers["w0"]
    assert agent.call("w1", abs, -1) == 1  # connected
    return agent


def test_without_faults_nothing_is_replaced(w0: Agent) -> None:
    handle = ServerConnection.handle
    with faults.inject() as plan:
        assert w0.call("w1", abs, -1) == 1
    assert ServerConnection.handle is handle
    assert plan.fired == []


def test_a_call_that_is_dropped_never_runs(w0: Agent, log: Log) -> None:
    with faults.inject(faults.drop(function="note_in", at=2)) as plan:
        w0.call("w1", note_in, log, 1)
        with pytest.raises(CallTimeout):
            w0.with_timeout(SHORT).call("w1", note_in, log, 2)
        w0.call("w1", note_in, log, 3)
    assert log.entries == [1, 3]
    (fired,) = plan.fired
    assert (fired.worker, fired.caller, fired.function, fired.number) == ("w1", "w0", "note_in", 2)


def test_a_call_whose_reply_is_dropped_has_run(w0: Agent, log: Log) -> None:
    with faults.inject(faults.drop("reply", function="note_in")):
        with pytest.raises(CallTimeout):
            w0.with_timeout(SHORT).call("w1", note_in, log, 1)
    assert log.entries == [1]


@pytest.mark.parametrize("point", ["call", "reply"])
def test_a_delay_lets_others_overtake(w0: Agent, log: Log, point: str) -> None:
    with faults.inject(faults.delay(0.05, point, function="note_in", at=1)):
        first = w0.submit("w1", note_in, log, "first")
        w0.submit("w1", note_in, log, "second").wait()
        assert not first.done()
        first.wait()
    order = ["second", "first"] if point == "call" else ["first", "second"]
    assert log.entries == order


def test_a_duplicate_runs_twice_and_is_answered_once(w0: Agent, log: Log) -> None:
    with faults.inject(faults.duplicate(function="note_in", at=1)):
        w0.call("w1", note_in, log, 1)
        w0.submit("w1", note_in, log, 2).wait()
    until(lambda: sorted(log.entries) == [1, 1, 2])
    assert w0.call("w1", abs, -2) == 2


def test_a_duplicate_reply_is_ignored(w0: Agent) -> None:
    with faults.inject(faults.duplicate("reply", every=1)):
        assert [w0.call("w1", abs, -number) for number in range(3)] == [0, 1, 2]
        assert w0.submit("w1", abs, -7).wait() == 7


def test_a_cut_fails_the_call_of_its_connection(w0: Agent) -> None:
    with faults.inject(faults.cut(function="abs", at=1)):
        with pytest.raises(PeerLost, match="Other calls to the worker go on"):
            w0.call("w1", abs, -1)
        assert w0.call("w1", abs, -1) == 1


@pytest.mark.parametrize("point", ["call", "reply"])
def test_a_worker_is_killed_at_its_call(
    workers: LocalCluster, w0: Agent, log: Log, point: str
) -> None:
    with faults.inject(faults.kill(point, worker="w1", function="note_in", at=2)) as plan:
        w0.submit("w1", note_in, log, 1).wait()
        with pytest.raises(PeerLost):
            w0.submit("w1", note_in, log, 2).wait()
        plan.wait_for()
    assert log.entries == ([1] if point == "call" else [1, 2])
    until(lambda: workers["w1"]._runtime.closing)
    assert w0.call("w2", abs, -1) == 1


# Plans


def choices(plan: FaultPlan, count: int) -> list[int]:
    return [number for number in range(1, count + 1) if plan.choose("call", "w1", "w0", "a.f")]


def test_faults_are_counted_and_seeded() -> None:
    assert choices(FaultPlan((Fault("drop", every=3),)), 10) == [3, 6, 9]
    assert choices(FaultPlan((Fault("drop", at=4, function="f"),)), 10) == [4]
    assert choices(FaultPlan((Fault("drop", function="g"),)), 3) == []
    assert choices(FaultPlan((Fault("drop", caller="w2"),)), 3) == []
    unlikely = (Fault("drop", probability=0.3),)
    first = choices(FaultPlan(unlikely, seed=1), 50)
    assert 5 < len(first) < 30
    assert choices(FaultPlan(unlikely, seed=1), 50) == first
    assert choices(FaultPlan(unlikely, seed=2), 50) != first


def test_a_plan_from_the_environment() -> None:
    text = "kill worker=ps0 function=push at=7; delay seconds=0.5 point=reply; seed=3;"
    plan = FaultPlan.parse(text)
    assert plan.kills_process
    assert plan._faults == (
        Fault("kill", worker="ps0", function="push", at=7),
        Fault("delay", "reply", seconds=0.5),
    )


@pytest.mark.parametrize("text", ["explode", "drop point=middle", "drop when=3", "drop at"])
def test_a_plan_that_is_not_valid_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        FaultPlan.parse(text)


def test_a_plan_says_what_did_not_happen() -> None:
    with pytest.raises(TimeoutError, match="only 0 of 1 faults"):
        FaultPlan(()).wait_for(timeout=0.01)
