"""Workers die, leave, fall silent or come late; the others hear of it at once and go on."""

from __future__ import annotations

import operator
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad import Agent, current_agent
from telegrad.errors import GroupBroken, PeerLost, UsageError
from telegrad.group import collectives, maintenance
from telegrad.group.collectives import _Gather
from telegrad.group.membership import Member
from telegrad.runtime import AgentRuntime
from telegrad.server import listener
from telegrad.testing import LocalCluster
from telegrad.wire.handshake import Incarnation
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, Log, hold_at, until

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.05,
    "heartbeat_timeout": 0.4,
    "resume_timeout": 0.3,
}


def here() -> Agent:
    agent = current_agent()
    assert agent is not None
    return agent


def close_here(last_words: str) -> None:
    here().close(last_words)


def abort_here() -> None:
    here()._runtime.abort()


def travel(stops: list[str], gate: Gate) -> list[str]:
    """Goes from worker to worker, the first stop held at the gate."""
    gate.hold()
    agent = here()
    return (
        [agent.name] if not stops else [agent.name, *agent.call(stops[0], travel, stops[1:], gate)]
    )


@pytest.fixture
def trio(cluster: Clusters) -> LocalCluster:
    return cluster(3)


def everywhere(
    in_background: Background, agents: list[Agent], act: Callable[[Agent], Any]
) -> list[Any]:
    """What `act` returned or raised on each agent, all at once."""

    def attempt(agent: Agent) -> Any:
        try:
            return act(agent)
        except Exception as error:
            return error

    return [done.result(PATIENCE) for done in [in_background(attempt, agent) for agent in agents]]


# Death


def test_a_death_fails_every_call_to_that_worker_at_once(
    cluster: Clusters, gate: Gate, in_background: Background
) -> None:
    workers = cluster(4)
    callers = [workers["w0"], workers["w2"], workers["w3"]]
    futures = [caller.submit("w1", hold_at, gate) for caller in callers for _ in range(20)]
    waiting = [in_background(caller.call, "w1", hold_at, gate) for caller in callers]
    spared = [caller.submit("w0", hold_at, gate, "spared") for caller in callers]
    gate.wait_for(66)
    dying = in_background(workers.kill, "w1")
    calls: list[Any] = [*futures, *waiting]
    errors = [future.exception(PATIENCE) for future in calls]
    for error in errors:
        assert isinstance(error, PeerLost)
        assert (error.peer, error.call) == ("w1", "hold_at")
        assert "worker 'w1' was lost" in str(error)
    assert len({id(error) for error in errors}) == 63  # each call has an error of its own
    assert [caller.call("w0", abs, -1) for caller in callers] == [1, 1, 1]
    assert not any(future.done() for future in spared)
    gate.open()
    dying.result(PATIENCE)
    assert [future.result(PATIENCE) for future in spared] == ["spared"] * 3


def test_calls_to_the_dead_fail_without_waiting(trio: LocalCluster) -> None:
    w0 = trio["w0"]
    w0.call("w1", abs, -1)
    trio.kill("w1")
    for target in ("w1", 1):
        with pytest.raises(PeerLost, match="'w1'"):
            w0._runtime.invoke(target, abs, (-1,), None, None)
        assert isinstance(
            w0._runtime.start(target, abs, (-1,), None, None).exception(PATIENCE), PeerLost
        )
    assert w0.call("w2", abs, -1) == 1


def test_who_never_called_the_dead_hears_it_too(trio: LocalCluster) -> None:
    trio.kill("w1")
    with pytest.raises(PeerLost, match="'w1'"):
        trio["w0"].call("w1", abs, -1)
    assert isinstance(trio["w0"].submit("w1", abs, -1).exception(PATIENCE), PeerLost)


def test_a_connection_error_catches_it(trio: LocalCluster) -> None:
    trio.kill("w1")
    with pytest.raises(ConnectionError):
        trio["w0"].call("w1", abs, -1)


def test_a_death_in_the_middle_of_many_calls(trio: LocalCluster) -> None:
    w0 = trio["w0"]
    futures = [w0.submit("w1", operator.add, i, 1) for i in range(200)]
    trio.kill("w1")
    for i, future in enumerate(futures):
        error = future.exception(PATIENCE)
        assert isinstance(error, PeerLost) or (error is None and future.wait() == i + 1)
    assert w0.statistics()["calls_pending"] == 0


def test_a_worker_that_aborts_inside_a_call(trio: LocalCluster) -> None:
    with pytest.raises(PeerLost, match="'w1'"):
        trio["w0"].call("w1", abort_here)
    assert isinstance(trio["w0"].submit("w2", abort_here).exception(PATIENCE), PeerLost)


# Leaving


def test_last_words_reach_those_who_wait(
    trio: LocalCluster, gate: Gate, in_background: Background
) -> None:
    future = trio["w0"].submit("w1", hold_at, gate)
    waiting = in_background(trio["w2"].call, "w1", hold_at, gate)
    gate.wait_for(2)
    leaving = in_background(trio["w1"].close, "out of memory")
    for error in (future.exception(PATIENCE), waiting.exception(PATIENCE)):
        assert isinstance(error, PeerLost)
        assert error.leave_reason == "out of memory"
        assert "out of memory" in str(error)
    gate.open()
    leaving.result(PATIENCE)
    with pytest.raises(PeerLost, match="out of memory"):
        trio["w0"].call("w1", abs, -1)


def test_last_words_reach_those_who_were_called_too(transport: str) -> None:
    """Both workers have called each other, so several connections end at once; whichever is first,
    the words count.
    """
    for _ in range(10):
        with LocalCluster(2, transports=(transport,)) as pair:
            pair["w0"].call("w1", abs, -1)
            pair["w1"].call("w0", abs, -1)
            held: Gate = Gate()
            future = pair["w0"].submit("w1", hold_at, held)
            held.wait_for()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(pair["w1"].close, "out of memory")
                error = future.exception(PATIENCE)
                held.open()
            assert isinstance(error, PeerLost)
            assert error.leave_reason == "out of memory"


def test_an_exception_that_ends_the_agents_block_is_its_last_words(cluster: Clusters) -> None:
    workers = cluster(1, fixed_size=False)
    w0 = workers["w0"]

    def live_shortly() -> None:
        with workers.agent("short-lived", rank=7):
            w0.call("short-lived", abs, -1)
            raise ZeroDivisionError("of the loss")

    with pytest.raises(ZeroDivisionError):
        live_shortly()
    with pytest.raises(PeerLost, match="ZeroDivisionError: of the loss"):
        w0.call("short-lived", abs, -1)


def test_closing_ends_the_workers_own_calls(
    trio: LocalCluster, gate: Gate, in_background: Background
) -> None:
    future = trio["w0"].submit("w1", hold_at, gate)
    waiting = in_background(trio["w0"].call, "w1", hold_at, gate)
    gate.wait_for(2)
    trio["w0"].close()
    for error in (future.exception(PATIENCE), waiting.exception(PATIENCE)):
        assert isinstance(error, PeerLost)
        assert "this worker has left the group" in str(error)


def test_closing_from_inside_a_call(trio: LocalCluster) -> None:
    for callee in ("w1", "w2"):
        trio["w0"].submit(callee, abs, -1).wait()
    with pytest.raises(PeerLost, match="enough of this"):
        trio["w0"].call("w1", close_here, "enough of this")
    error = trio["w0"].submit("w2", close_here, "me too").exception(PATIENCE)
    assert isinstance(error, PeerLost)
    assert error.leave_reason == "me too"
    assert trio["w1"]._runtime.closing
    assert trio["w0"].call("w0", abs, -1) == 1


def test_closing_in_a_callback(trio: LocalCluster) -> None:
    w0 = trio["w0"]
    closed = threading.Event()

    def close(_: object) -> None:
        w0.close()
        closed.set()

    w0.submit("w1", abs, -1).add_done_callback(close)
    assert closed.wait(PATIENCE)
    with pytest.raises(UsageError, match="closed"):
        w0.call("w1", abs, -1)


# Listeners


def test_listeners_hear_of_a_loss_once(trio: LocalCluster) -> None:
    log = Log()
    w0 = trio["w0"]
    w0.on_loss(lambda name, incarnation: log.note((name, incarnation)))
    lost = trio["w1"]._runtime.local_member.incarnation
    for _ in range(3):
        w0.call("w1", abs, -1)
        w0.submit("w1", abs, -1).wait()
    trio["w1"].call("w0", abs, -1)
    trio.kill("w1")
    assert log.wait_for(1) == [("w1", lost)]
    for _ in range(3):
        with pytest.raises(PeerLost):
            w0.call("w1", abs, -1)
    trio["w2"].call("w0", abs, -1)
    trio["w2"].close("bye")
    assert [name for name, _ in log.wait_for(2)] == ["w1", "w2"]


def test_who_was_only_called_hears_of_a_loss(trio: LocalCluster) -> None:
    log = Log()
    trio["w0"].on_loss(lambda name, _: log.note(name))
    trio["w1"].call("w0", abs, -1)
    trio.kill("w1")
    assert log.wait_for(1) == ["w1"]


def test_a_listener_that_raises_silences_no_other(trio: LocalCluster) -> None:
    log = Log()
    w0 = trio["w0"]
    w0.on_loss(lambda name, _: [].pop())
    w0.on_loss(lambda name, _: log.note(name))
    w0.call("w1", abs, -1)
    trio.kill("w1")
    assert log.wait_for(1) == ["w1"]
    assert w0.call("w2", abs, -1) == 1


def test_each_incarnation_is_lost_for_itself(cluster: Clusters) -> None:
    workers, log = cluster(2), Log()
    workers["w0"].on_loss(lambda name, incarnation: log.note(incarnation))
    incarnations = []
    for number in range(3):
        until(lambda: _answers(workers["w0"], "w1"))
        incarnations.append(workers["w1"]._runtime.local_member.incarnation)
        workers.kill("w1")
        assert log.wait_for(number + 1) == incarnations
        workers.join("w1", 1)


def _answers(agent: Agent, to: str) -> bool:
    try:
        return bool(agent.call(to, abs, -1))
    except PeerLost:
        return False


# Barriers and gathers


def until_missing(leader: Agent, *names: str) -> None:
    """Wait until a gather that an agent leads waits for these workers only."""
    until(lambda: f"{list(names)}" in repr(leader._runtime.collectives))


def test_everybody_meets(trio: LocalCluster, in_background: Background) -> None:
    for _ in range(3):
        assert (
            everywhere(in_background, trio.agents, lambda agent: agent.barrier(timeout=PATIENCE))
            == [None] * 3
        )


def test_everybody_gets_everything(trio: LocalCluster, in_background: Background) -> None:
    for _ in range(3):
        gathered = everywhere(
            in_background, trio.agents, lambda agent: agent.all_gather(agent.name * 2)
        )
        assert gathered == [{"w0": "w0w0", "w1": "w1w1", "w2": "w2w2"}] * 3


def test_some_meet_without_the_others(trio: LocalCluster, in_background: Background) -> None:
    gathered = everywhere(
        in_background,
        trio.agents[1:],
        lambda agent: agent.all_gather(agent._runtime.local_member.rank, ["w2", "w1"]),
    )
    assert gathered == [{"w1": 1, "w2": 2}] * 2


def test_a_barrier_does_not_open_early(trio: LocalCluster, in_background: Background) -> None:
    early = [in_background(agent.barrier) for agent in trio.agents[:2]]
    until(
        lambda: "leading" in repr(trio["w0"]) and "['w2']" in repr(trio["w0"]._runtime.collectives)
    )
    assert not any(each.done() for each in early)
    trio["w2"].barrier()
    assert [each.result(PATIENCE) for each in early] == [None, None]


@pytest.mark.parametrize(
    "act", [Agent.barrier, lambda agent: agent.all_gather(1)], ids=["barrier", "all_gather"]
)
@pytest.mark.parametrize("victim", ["w0", "w1", "w2"])
def test_the_dead_are_named(
    trio: LocalCluster, in_background: Background, act: Callable[[Agent], Any], victim: str
) -> None:
    everywhere(in_background, trio.agents, Agent.barrier)
    trio.kill(victim)
    alive = [agent for agent in trio if agent.name != victim]
    for error in everywhere(in_background, alive, act):
        assert isinstance(error, GroupBroken)
        assert error.missing == (victim,)
        assert f"lost: {victim}" in str(error)


@pytest.mark.parametrize("victim", ["w0", "w2"])
def test_a_death_during_the_barrier_is_named(
    trio: LocalCluster, in_background: Background, victim: str
) -> None:
    """w0 leads; whether it or another dies while the rest waits, the rest hears who is missing."""
    alive = [agent for agent in trio if agent.name != victim]
    leader = trio["w0"]
    waiting = [in_background(agent.barrier) for agent in alive]
    until(lambda: f"['{victim}']" in repr(leader._runtime.collectives))
    trio.kill(victim)
    for each in waiting:
        error = each.exception(PATIENCE)
        assert isinstance(error, GroupBroken)
        assert error.missing == (victim,)


def test_a_leader_visits_reports_under_its_lock(
    trio: LocalCluster, in_background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads add reports and losses meanwhile."""
    leader, make = trio["w0"]._runtime.collectives, _Gather.__init__
    visits: list[bool] = []

    class Guarded(dict[str, Any]):
        def __iter__(self) -> Any:
            visits.append(leader._lock.locked())
            return super().__iter__()

        def values(self) -> Any:
            visits.append(leader._lock.locked())
            return super().values()

    def make_guarded(self: _Gather, *args: Any) -> None:
        make(self, *args)
        self.reports, self.lost = Guarded(), Guarded()

    monkeypatch.setattr(_Gather, "__init__", make_guarded)
    waiting = [in_background(trio[name].barrier) for name in ("w0", "w1")]
    until(lambda: "['w2']" in repr(leader))
    trio.kill("w2")
    assert [type(each.exception(PATIENCE)) for each in waiting] == [GroupBroken] * 2
    assert visits
    assert all(visits)


def test_the_leader_dies_after_it_has_come_itself(
    trio: LocalCluster, in_background: Background
) -> None:
    leading = in_background(trio["w0"].all_gather, "from w0")
    follower = in_background(trio["w1"].all_gather, "from w1")
    until(lambda: "['w2']" in repr(trio["w0"]._runtime.collectives))
    trio.kill("w0")
    assert isinstance(leading.exception(PATIENCE), (PeerLost, UsageError))
    latecomer = in_background(trio["w2"].all_gather, "from w2")
    for error in (follower.exception(PATIENCE), latecomer.exception(PATIENCE)):
        assert isinstance(error, GroupBroken)
        assert error.missing == ("w0",)


def test_a_leader_that_comes_back_leads_again(
    trio: LocalCluster, in_background: Background
) -> None:
    """w1 leads without w0 when w2 reports to the next incarnation of w0."""
    w1, w2 = trio["w1"], trio["w2"]
    waiting = [in_background(w1.barrier)]
    until_missing(trio["w0"], "w0", "w2")
    trio.kill("w0")
    until_missing(w1, "w2")
    successor = trio.join("w0", 0)
    waiting.append(in_background(w2.barrier))
    until_missing(successor, "w0", "w1")
    waiting.append(in_background(successor.barrier))
    assert [each.exception(PATIENCE) for each in waiting] == [None] * 3


def test_the_lost_are_told_that_they_are_lost(
    trio: LocalCluster, in_background: Background
) -> None:
    """The others have counted w2 as lost, but it is alive."""
    w0, w1, w2 = trio.agents
    waiting = [in_background(agent.barrier) for agent in (w0, w1)]
    until_missing(w0, "w2")
    w0._runtime.collectives.worker_lost("w2", w2._runtime.local_member.incarnation)
    for each in (*waiting, in_background(w2.barrier)):
        error = each.exception(PATIENCE)
        assert isinstance(error, GroupBroken)
        assert error.missing == ("w2",)


@pytest.fixture
def pass_time_limit(trio: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the time limit of what w0 leads pass when only the given worker is missing, however long
    that takes.
    """
    leader = trio["w0"]
    limits: list[Callable[[], None]] = []
    at = leader._runtime.clock.call_at

    def keep_limits(moment: float, run: Callable[[], None]) -> None:
        if run.__qualname__.startswith("Collectives.add_report"):
            limits.append(run)
        else:
            at(moment, run)

    monkeypatch.setattr(leader._runtime.clock, "call_at", keep_limits)

    def pass_it(late: str) -> None:
        until(lambda: bool(limits) and f"['{late}']" in repr(leader._runtime.collectives))
        limits.pop()()

    return pass_it


@pytest.mark.parametrize("late", ["w0", "w2"])
def test_the_late_are_named(
    trio: LocalCluster, in_background: Background, pass_time_limit: Callable[[str], None], late: str
) -> None:
    waiting = [in_background(agent.barrier, None, 0.1) for agent in trio if agent.name != late]
    pass_time_limit(late)
    for each in waiting:
        error = each.exception(PATIENCE)
        assert isinstance(error, GroupBroken)
        assert error.missing == (late,)
        assert f"not there within 0.1 s: {late}" in str(error)


def test_who_was_late_does_not_get_the_outcome_of_the_failed_barrier_again(
    trio: LocalCluster, in_background: Background, pass_time_limit: Callable[[str], None]
) -> None:
    """Others still have that outcome, and do not know that it was told to the one who was late."""
    w0, w1, w2 = trio.agents
    failed = [in_background(agent.barrier, None, 0.1) for agent in (w0, w1)]
    pass_time_limit("w2")
    failed.append(in_background(w2.barrier, None, 0.1))
    assert all(isinstance(each.exception(PATIENCE), GroupBroken) for each in failed)
    served = w1._runtime.calls_served
    first = in_background(w2.barrier, None, PATIENCE)
    until(lambda: w1._runtime.calls_served > served)  # w0 has asked w1 about the report of w2
    others = [in_background(agent.barrier, None, PATIENCE) for agent in (w0, w1)]
    assert [each.exception(PATIENCE) for each in (first, *others)] == [None] * 3


def test_a_barrier_after_a_failed_one(trio: LocalCluster, in_background: Background) -> None:
    everywhere(
        in_background, trio.agents[:2], lambda agent: agent.barrier(["w0", "w1", "w2"], 0.05)
    )
    everywhere(
        in_background, trio.agents[2:], lambda agent: agent.barrier(["w0", "w1", "w2"], 0.05)
    )
    assert (
        everywhere(in_background, trio.agents, lambda agent: agent.barrier(timeout=PATIENCE))
        == [None] * 3
    )


# Shutdown


def test_everybody_leaves(trio: LocalCluster, in_background: Background) -> None:
    trio["w0"].call("w1", abs, -1)
    assert everywhere(in_background, trio.agents, Agent.shutdown) == [()] * 3
    assert all(agent._runtime.closing for agent in trio)


def test_shutdown_names_the_dead(trio: LocalCluster, in_background: Background) -> None:
    trio["w0"].call("w1", abs, -1)
    trio.kill("w1")
    assert everywhere(in_background, [trio["w0"], trio["w2"]], Agent.shutdown) == [("w1",)] * 2


def test_shutdown_without_the_leader(trio: LocalCluster, in_background: Background) -> None:
    trio.kill("w0")
    assert everywhere(in_background, [trio["w1"], trio["w2"]], Agent.shutdown) == [("w0",)] * 2


def test_shutdown_names_those_who_do_not_come(
    trio: LocalCluster, in_background: Background, pass_time_limit: Callable[[str], None]
) -> None:
    leaving = [in_background(trio[name].shutdown, 0.2) for name in ("w0", "w1")]
    pass_time_limit("w2")
    assert [each.result(PATIENCE) for each in leaving] == [("w2",)] * 2


def test_a_death_during_shutdown(trio: LocalCluster, in_background: Background) -> None:
    leaving = [in_background(agent.shutdown) for agent in trio.agents[:2]]
    until(lambda: "['w2']" in repr(trio["w0"]._runtime.collectives))
    trio.kill("w2")
    assert [each.result(PATIENCE) for each in leaving] == [("w2",)] * 2


def test_a_leader_waits_for_the_others_while_they_leave(
    trio: LocalCluster, in_background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its patience counts from the last one that left."""
    passed = [0.0]
    fake = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    for name in ("w1", "w2"):
        trio[name].call("w0", abs, -1)
    monkeypatch.setattr(listener, "time", fake)
    waiting = in_background(trio["w0"]._runtime.listener.wait_until_unused, PATIENCE)
    until(trio["w0"]._runtime.listener._changed._waiters.__len__)  # type: ignore[attr-defined]
    for name in ("w1", "w2"):
        passed[0] += PATIENCE * 0.7
        trio.kill(name)
    assert waiting.result(PATIENCE)


# Restarts during shutdown


def test_the_report_of_a_dead_worker_is_not_that_of_its_next_incarnation(
    trio: LocalCluster, in_background: Background
) -> None:
    """w1 dies in its shutdown and comes back before the others shut down."""
    w0, w1, w2 = trio.agents
    dying = in_background(w1.shutdown)
    until_missing(w0, "w0", "w2")
    lost: list[str] = []
    w0._runtime.on_loss(lambda name, _: lost.append(name))
    trio.kill("w1")
    assert isinstance(dying.exception(PATIENCE), (PeerLost, UsageError))
    until(lambda: lost == ["w1"])
    successor = trio.join("w1", 1)
    assert w0.call("w1", abs, -1) == 1
    leaving = [in_background(agent.shutdown) for agent in (w0, w2)]
    until_missing(w0, "w1")
    assert successor.call("w2", abs, -2) == 2  # the others are still there
    leaving.append(in_background(successor.shutdown))
    assert [each.result(PATIENCE) for each in leaving] == [()] * 3


@pytest.mark.parametrize("victim", ["w0", "w2"])
def test_shutdown_waits_for_a_restart(
    cluster: Clusters, in_background: Background, victim: str
) -> None:
    """w0 leads it, also in its second incarnation."""
    trio = cluster(3, restart_timeout=PATIENCE)
    others = [agent for agent in trio if agent.name != victim]
    leaving = [in_background(agent.shutdown) for agent in others]
    until_missing(trio["w0"], victim)
    trio.kill(victim)
    successor = trio.join(victim, int(victim[1]))
    for agent in others:
        assert successor.call(agent.name, abs, -2) == 2
    leaving.append(in_background(successor.shutdown))
    assert [each.result(PATIENCE) for each in leaving] == [()] * 3


def test_shutdown_waits_for_a_restart_for_a_limited_time(
    cluster: Clusters, in_background: Background
) -> None:
    trio = cluster(3, restart_timeout=0.1)
    leaving = [in_background(agent.shutdown) for agent in trio.agents[:2]]
    until_missing(trio["w0"], "w2")
    trio.kill("w2")
    assert [each.result(PATIENCE) for each in leaving] == [("w2",)] * 2


def test_shutdown_waits_for_calls_under_way(
    trio: LocalCluster, gate: Gate, in_background: Background
) -> None:
    future = trio["w0"].submit("w1", hold_at, gate, "done")
    waiting = in_background(trio["w2"].call, "w1", hold_at, gate, "done")
    gate.wait_for(2)
    leaving = [in_background(agent.shutdown) for agent in trio]
    assert not any(agent._runtime.closing for agent in trio)
    gate.open()
    assert [each.result(PATIENCE) for each in leaving] == [()] * 3
    assert future.wait() == waiting.result(PATIENCE) == "done"


def test_shutdown_waits_for_calls_that_make_calls(
    trio: LocalCluster, gate: Gate, in_background: Background
) -> None:
    stops = ["w2", "w0", "w1", "w2", "w1"]
    future = trio["w0"].submit("w1", travel, stops, gate)
    gate.wait_for()
    leaving = [in_background(agent.shutdown) for agent in trio]
    gate.open()
    assert future.result(PATIENCE) == ["w1", *stops]
    assert [each.result(PATIENCE) for each in leaving] == [()] * 3


def test_shutdown_gives_calls_up_when_its_time_is_over(
    trio: LocalCluster, gate: Gate, in_background: Background
) -> None:
    future = trio["w0"].submit("w1", hold_at, gate)
    gate.wait_for()
    leaving = [in_background(agent.shutdown, 0.2) for agent in trio]
    assert isinstance(future.exception(PATIENCE), PeerLost)
    gate.open()
    for each in leaving:
        each.result(PATIENCE)


# Silence


class Beats:
    """The heartbeats of all agents, in the hands of the test."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self._given = threading.Semaphore(0)
        self._beat = maintenance.send_heartbeats

    def beat(self, agent: AgentRuntime) -> None:
        if agent.name not in self.silent:
            self._beat(agent)
            self._given.release()

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._given.acquire(timeout=PATIENCE)


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Beats:
    beats = Beats()
    monkeypatch.setattr(maintenance, "send_heartbeats", beats.beat)
    return beats


def test_silence_is_a_loss(
    cluster: Clusters, beats: Beats, gate: Gate, in_background: Background
) -> None:
    beats.silent.add("w1")
    workers = cluster(3, **QUICK)
    w0 = workers["w0"]
    future = w0._runtime.start("w1", hold_at, (gate,), None, None)
    waiting = in_background(w0._runtime.invoke, "w1", hold_at, (gate,), None, None)
    other = w0.submit("w2", hold_at, gate, "alive")
    for error in (future.exception(PATIENCE), waiting.exception(PATIENCE)):
        assert isinstance(error, PeerLost)
        assert error.peer == "w1"
        assert "silent for 0.4 s" in str(error)
    assert not other.done()
    gate.open()
    assert other.wait() == "alive"


def test_the_silence_of_a_caller_is_a_loss(cluster: Clusters, beats: Beats) -> None:
    beats.silent.add("w1")
    workers, log = cluster(3, **QUICK), Log()
    workers["w0"].on_loss(lambda name, _: log.note(name))
    workers["w1"].call("w0", abs, -1)
    assert log.wait_for(1) == ["w1"]
    assert workers["w0"].call("w2", abs, -1) == 1


def test_who_computes_for_long_is_not_silent(cluster: Clusters, beats: Beats, gate: Gate) -> None:
    w0 = cluster(2, **QUICK)["w0"]
    future = w0._runtime.start("w1", hold_at, (gate, "done"), None, None)
    beats.wait_for(20)
    assert not future.done()
    gate.open()
    assert future.wait() == "done"


def test_a_peer_that_beats_more_slowly_is_not_silent(
    cluster: Clusters, beats: Beats, gate: Gate
) -> None:
    workers = cluster(1, fixed_size=False)  # beats every 5 seconds
    with Agent(
        "hasty", store=workers.store, rank=9, config=replace(workers.config, **QUICK)
    ) as hasty:
        future = hasty.submit("w0", hold_at, gate, "done")
        beats.wait_for(10)
        gate.open()
        assert future.result(PATIENCE) == "done"


def test_who_shuts_down_says_so_before_it_waits(cluster: Clusters) -> None:
    workers = cluster(2)
    said: list[bool] = []
    workers["w0"]._runtime.on_shutdown(lambda: said.append(workers["w0"].call("w1", abs, -1) == 1))
    assert workers["w0"].shutdown(timeout=0.2) == ("w1",)
    assert said == [True]


def test_a_lost_worker_is_known_as_lost(cluster: Clusters) -> None:
    workers = cluster(2)
    incarnation = workers["w1"]._runtime.local_member.incarnation
    lost = threading.Event()
    known: list[bool] = []

    def note_loss(_: str, which: str) -> None:
        known.append(workers["w0"]._runtime.is_lost(Incarnation(which)))
        lost.set()

    workers["w0"].on_loss(note_loss)
    assert workers["w0"].call("w1", abs, -1) == 1
    assert not workers["w0"]._runtime.is_lost(incarnation)
    workers.kill("w1")
    assert lost.wait(PATIENCE)
    assert known == [True]


def declare_lost(worker: Agent, by: Agent) -> None:
    """Let a worker declare another one lost that is alive, as if it had been frozen."""
    incarnation = worker._runtime.local_member.incarnation
    by._runtime.failures.declare_lost(worker.name, incarnation, reason="it was silent for 30 s")


def test_a_worker_that_was_declared_lost_is_told_and_may_only_join_again(
    cluster: Clusters, gate: Gate, in_background: Background
) -> None:
    workers = cluster(2, fixed_size=False)
    w0, w1 = workers.agents
    future = w1.submit("w0", hold_at, gate)
    waiting = in_background(w1.call, "w0", hold_at, gate)
    gate.wait_for(2)
    assert w0.call("w1", abs, -1) == 1  # so both have called each other
    declare_lost(w1, by=w0)
    errors = [future.exception(PATIENCE), waiting.exception(PATIENCE)]
    until(lambda: w1._runtime.failures.has_expelled(w0._runtime.local_member.incarnation))
    later = lambda: w1.call("w0", abs, -1), lambda: w1.submit("w0", abs, -1).wait()
    for call in later:
        with pytest.raises(PeerLost) as caught:
            call()
        errors.append(caught.value)
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.expelled
        assert error.peer == "w0"
        assert "it has declared this worker lost" in str(error)
        assert "to go on, this worker must join the group again" in str(error)
    with pytest.raises(PeerLost, match="it was silent for 30 s") as caught:
        w0.call("w1", abs, -1)
    assert not caught.value.expelled
    gate.open()
    w1.close()
    assert workers.join("w1").call("w0", abs, -2) == 2


def test_a_worker_that_was_declared_lost_and_has_no_connection_is_refused(
    cluster: Clusters,
) -> None:
    w0, w1, w2 = cluster(3).agents
    declare_lost(w1, by=w0)
    for _ in range(2):
        with pytest.raises(PeerLost, match="this worker must join the group again") as caught:
            w1.call("w0", abs, -1)
        assert caught.value.expelled
        assert not caught.value.sent
    assert w1.call("w2", abs, -3) == w2.call("w1", abs, -3) == 3  # these have not declared it lost


def test_who_connects_to_a_worker_that_is_given_up_does_not_wait(
    cluster: Clusters, in_background: Background
) -> None:
    w0 = cluster(1, connect_timeout=2 * PATIENCE)["w0"]
    with socket.socket(socket.AF_UNIX) as silent:  # it accepts connections and never answers
        name = f"telegrad-test-{secrets.token_hex(8)}"
        silent.bind("\0" + name)
        silent.listen()
        member = Member("gone", 1, Incarnation("its incarnation"), (f"unix:@{name}",))
        transports = replace(w0.config, transports=("unix",))
        w0._runtime.dialer._config = transports
        dialling = in_background(w0._runtime.dialer.dial, member, "exclusive")
        until(lambda: bool(w0._runtime.endpoint._connecting))
        w0._runtime.failures.declare_lost("gone", member.incarnation, reason="it was silent")
        assert isinstance(dialling.exception(PATIENCE), PeerLost)
        assert not w0._runtime.endpoint._connecting


def test_a_leader_does_not_connect_to_those_who_report_soon(
    cluster: Clusters, in_background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_ASK_AFTER", 1.0)
    group = cluster(6)
    everywhere(in_background, group.agents, lambda agent: agent.barrier())
    assert [peer.member.name for peer in group["w0"]._runtime.peers.all()] == ["w0"]


def test_a_leader_that_refuses_a_connection_stays_the_leader(
    cluster: Clusters, in_background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two leaders would wait for each other."""
    group = cluster(3)
    runtime = group["w2"]._runtime
    dial, refusals = runtime.dial, iter(range(2))

    def refuse_twice(member: Member, *args: Any) -> Any:
        if member.name == "w0" and next(refusals, None) is not None:
            raise PeerLost("the leader has too many connections", peer="w0", sent=False)
        return dial(member, *args)

    monkeypatch.setattr(runtime, "dial", refuse_twice)
    results = everywhere(
        in_background, group.agents, lambda agent: agent.all_gather(agent.name, timeout=PATIENCE)
    )
    assert results == [{"w0": "w0", "w1": "w1", "w2": "w2"}] * 3
    assert next(refusals, None) is None
    assert not runtime.is_lost(group["w0"]._runtime.local_member.incarnation)
