"""A group of workers follows joins and losses; its calls have partial results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad import GroupResult, WorkerGroup, current_agent
from telegrad.errors import CallTimeout, PeerLost, UsageError, WorkersFailed
from telegrad.testing import LocalCluster
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, Log, hold_at, until


@pytest.fixture
def open_cluster() -> Iterator[LocalCluster]:
    """Four workers of a group that others may join. w0 calls the others."""
    with LocalCluster(4, fixed_size=False) as cluster:
        yield cluster


def here() -> str:
    agent = current_agent()
    assert agent is not None
    return agent.name


# Members of a group


def test_members_follow_joins_and_losses(open_cluster: LocalCluster) -> None:
    group = WorkerGroup(open_cluster["w0"])
    assert group.names == ["w1", "w2", "w3"]
    open_cluster.join("w4")
    assert group.wait_for(4, PATIENCE) == ["w1", "w2", "w3", "w4"]
    gone = threading.Event()
    open_cluster["w0"].on_loss(lambda name, _: gone.set())
    open_cluster.kill("w2")
    assert gone.wait(PATIENCE)
    assert group.names == ["w1", "w3", "w4"]
    assert "w2" not in group
    open_cluster.join("w2")
    assert group.wait_for(4, PATIENCE) == ["w1", "w2", "w3", "w4"]


def test_a_worker_that_died_before_the_group_was_made_is_no_member(
    open_cluster: LocalCluster,
) -> None:
    gone = threading.Event()
    open_cluster["w0"].on_loss(lambda name, _: gone.set())
    open_cluster.kill("w2")
    group = WorkerGroup(open_cluster["w0"])
    assert "w1" in group.names  # which connects to all members
    assert gone.wait(PATIENCE)
    assert group.names == ["w1", "w3"]


def test_slices_by_role_and_by_pattern() -> None:
    with LocalCluster(1, fixed_size=False) as cluster:
        for name in ("ps0", "ps1", "trainer-0", "trainer-1", "trainer-12", "eval"):
            cluster.join(name)
        group = WorkerGroup(cluster["w0"])
        assert group.role("ps").names == ["ps0", "ps1"]
        assert group.role("trainer").names == ["trainer-0", "trainer-1", "trainer-12"]
        assert group.role("ps", "eval").names == ["ps0", "ps1", "eval"]
        assert group.role("trainer").match("*-1*").names == ["trainer-1", "trainer-12"]
        assert group.match("eval", "ps1").names == ["ps1", "eval"]
        assert len(group) == 6
        assert WorkerGroup(cluster["w0"], include_self=True).names[0] == "w0"
        cluster.join("ps2")
        assert group.role("ps").wait_for(3, PATIENCE) == ["ps0", "ps1", "ps2"]


def test_waiting_for_members_ends(open_cluster: LocalCluster) -> None:
    with pytest.raises(CallTimeout, match="3 of 4 members"):
        WorkerGroup(open_cluster["w0"]).wait_for(4, 0.01)


def test_a_group_needs_an_agent() -> None:
    with pytest.raises(UsageError, match="needs an agent"):
        WorkerGroup()


def group_here() -> list[str]:
    return list(WorkerGroup().gather(here).values())


def test_a_remote_function_uses_the_group_of_its_worker(open_cluster: LocalCluster) -> None:
    assert open_cluster["w0"].call("w1", group_here) == ["w0", "w2", "w3"]


# Calls


def fail_at(bad: str) -> str:
    if here() == bad:
        raise KeyError(bad)
    return here()


def test_call_all_has_partial_results(open_cluster: LocalCluster) -> None:
    group = WorkerGroup(open_cluster["w0"])
    assert group.call_all(here).values() == ["w1", "w2", "w3"]
    result = group.call_all(fail_at, "w2")
    assert result.results == {"w1": "w1", "w3": "w3"}
    assert isinstance(result.failures["w2"], KeyError)
    with pytest.raises(WorkersFailed, match="w2: KeyError") as raised:
        result.values()
    assert list(raised.value.failures) == ["w2"]
    with pytest.raises(WorkersFailed):
        group.gather(fail_at, "w2")
    assert group.gather(max, 1, 2) == {"w1": 2, "w2": 2, "w3": 2}


def hold_on(name: str, gate: Gate) -> str:
    if here() == name:
        gate.hold()
    return here()


def test_a_worker_that_dies_is_a_failure(
    open_cluster: LocalCluster, gate: Gate, in_background: Background
) -> None:
    group = WorkerGroup(open_cluster["w0"])
    done = in_background(group.call_all, hold_on, "w3", gate)
    gate.wait_for()
    in_background(open_cluster.kill, "w3")  # which waits for the held call
    result: GroupResult[str, str] = done.result(PATIENCE)
    gate.open()
    assert result.results == {"w1": "w1", "w2": "w2"}
    assert isinstance(result.failures["w3"], PeerLost)


def test_a_deadline_keeps_what_was_finished(open_cluster: LocalCluster, gate: Gate) -> None:
    group = WorkerGroup(open_cluster["w0"])
    group.call_all(abs, 1)
    result = group.with_timeout(0.3).call_all(hold_on, "w1", gate)
    assert result.results == {"w2": "w2", "w3": "w3"}
    assert isinstance(result.failures["w1"], CallTimeout)
    mapped = group.match("w1", "w2").with_timeout(0.3).map(hold_on_item, [("w1", gate)] * 3)
    assert mapped.results == {1: "w2", 2: "w2"}
    assert isinstance(mapped.failures[0], CallTimeout)
    with pytest.raises(UsageError):
        group.with_timeout(-1)


def hold_on_item(item: tuple[str, Gate]) -> str:
    return hold_on(*item)


def test_call_some_takes_turns_and_replaces_the_lost(
    open_cluster: LocalCluster, gate: Gate, in_background: Background
) -> None:
    group = WorkerGroup(open_cluster["w0"])
    called = [set(group.call_some(2, here).values()) for _ in range(3)]
    assert called == [{"w1", "w2"}, {"w3", "w1"}, {"w2", "w3"}]
    done = in_background(group.call_some, 2, hold_on, "w1", gate)  # w1 and w2
    gate.wait_for()
    in_background(open_cluster.kill, "w1")
    assert done.result(PATIENCE).results == {"w2": "w2", "w3": "w3"}
    gate.open()
    with pytest.raises(UsageError, match="cannot call 3 workers: the group has 2"):
        group.call_some(3, here)


def test_call_some_does_not_repeat_what_raised(open_cluster: LocalCluster) -> None:
    result = WorkerGroup(open_cluster["w0"]).call_some(2, fail_at, "w1")
    assert result.results == {"w2": "w2"}
    assert isinstance(result.failures["w1"], KeyError)


# Map


def work(item: tuple[int, Log, Gate]) -> tuple[int, str]:
    """Item 0 is held at the gate when it is done first."""
    number, log, gate = item
    first = number not in log.entries
    log.note(number)
    if number == 0 and first:
        gate.hold()
    return number, here()


def test_map_keeps_the_order_and_uses_all(open_cluster: LocalCluster) -> None:
    group = WorkerGroup(open_cluster["w0"])
    assert group.map(abs, range(-20, 0)).values() == list(range(20, 0, -1))
    assert group.map(abs, []).values() == []
    assert group.map(int, ["1", "x", "3"]).results == {0: 1, 2: 3}
    with pytest.raises(WorkersFailed, match="item 1: ValueError"):
        group.map(int, ["1", "x", "3"], per_worker=2).values()
    with pytest.raises(UsageError):
        group.map(abs, [1], per_worker=0)


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_items_of_a_lost_worker(
    open_cluster: LocalCluster, gate: Gate, log: Log, in_background: Background, delivery: Any
) -> None:
    group = WorkerGroup(open_cluster["w0"])
    items = [(number, log, gate) for number in range(30)]
    done = in_background(lambda: group.map(work, items, delivery=delivery))
    gate.wait_for()
    in_background(open_cluster.kill, "w1")  # it has item 0
    result: GroupResult[int, tuple[int, str]] = done.result(PATIENCE)
    gate.open()
    if delivery == "at-least-once":
        assert [number for number, _ in result.values()] == list(range(30))
        assert result.results[0][1] != "w1"
        assert log.entries.count(0) == 2
    else:
        assert list(result.results) == list(range(1, 30))
        assert isinstance(result.failures[0], PeerLost)
        assert log.entries.count(0) == 1


def lose_another(_: int) -> None:
    agent = current_agent()
    assert agent is not None
    agent.call("w3", abort_here)


def abort_here() -> None:
    agent = current_agent()
    assert agent is not None
    agent._runtime.abort()


def test_the_loss_of_a_third_worker_is_a_failure_of_the_function(
    open_cluster: LocalCluster,
) -> None:
    result = WorkerGroup(open_cluster["w0"]).match("w1").map(lose_another, [1])
    assert isinstance(result.failures[0], PeerLost)
    assert result.failures[0].peer == "w3"


def test_a_worker_that_joins_takes_part(gate: Gate, log: Log, in_background: Background) -> None:
    with LocalCluster(2, fixed_size=False) as cluster:
        group = WorkerGroup(cluster["w0"])
        items = [(number, log, gate) for number in range(10)]
        done = in_background(group.map, work, items)
        gate.wait_for()  # w1 has item 0, and nobody works
        cluster.join("w2")
        assert log.wait_for(10) == list(range(10))
        gate.open()
        assert [name for _, name in done.result(PATIENCE).values()] == ["w1", *["w2"] * 9]


def test_items_wait_for_a_worker_that_comes_back(
    gate: Gate, log: Log, in_background: Background
) -> None:
    with LocalCluster(2, fixed_size=False) as cluster:
        group = WorkerGroup(cluster["w0"])
        done = in_background(group.map, work, [(number, log, gate) for number in range(3)])
        gate.wait_for()
        in_background(cluster.kill, "w1")
        until(lambda: group.names == [])
        cluster.join("w1")
        assert [name for _, name in done.result(PATIENCE).values()] == ["w1"] * 3
        gate.open()


def test_a_map_without_workers_ends(in_background: Background) -> None:
    with LocalCluster(1, fixed_size=False) as cluster:
        group = WorkerGroup(cluster["w0"])
        result = group.with_timeout(0.01).map(abs, [1, 2])
        assert [error.sent for error in result.failures.values()] == [False, False]  # type: ignore[attr-defined]
        done = in_background(group.map, abs, [1])
        cluster.close()
        with pytest.raises(UsageError, match="closed"):
            done.result(PATIENCE)


def test_a_map_ends_when_its_agent_closes(
    open_cluster: LocalCluster, gate: Gate, in_background: Background
) -> None:
    group = WorkerGroup(open_cluster["w0"])
    done = in_background(group.map, hold_at, [gate] * 3)
    gate.wait_for(3)
    in_background(open_cluster["w0"].close)
    with pytest.raises(UsageError, match="closed"):
        done.result(PATIENCE)
    gate.open()
