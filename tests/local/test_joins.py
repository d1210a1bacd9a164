"""Workers join or come back, and listeners on the others hear of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad import Agent
from telegrad.group import joins
from telegrad.testing import LocalCluster
from tests.local.counting_store import CountingStore
from tests.local.gates import Log


@pytest.fixture
def open_cluster() -> Iterator[LocalCluster]:
    """Four workers of a group that others may join."""
    with LocalCluster(4, fixed_size=False) as cluster:
        yield cluster


def incarnation(agent: Agent) -> str:
    return agent._runtime.local_member.incarnation


def watched(agent: Agent, log: Log) -> Log:
    """Note joins and losses of other workers in the log."""
    agent.on_join(lambda name, life: log.note(("join", name, life)))
    agent.on_loss(lambda name, life: log.note(("loss", name, life)))
    return log


def test_a_join_is_noticed_without_any_call(open_cluster: LocalCluster, log: Log) -> None:
    watched(open_cluster["w0"], log)
    newcomer = open_cluster.join("late")
    assert log.wait_for(1) == [("join", "late", incarnation(newcomer))]


def test_a_worker_that_calls_is_noticed_at_once(
    open_cluster: LocalCluster, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joins, "_MIN_PAUSE", 3600.0)
    watched(open_cluster["w0"], log)
    newcomer = open_cluster.join("late")
    newcomer.call("w0", abs, -1)
    assert log.wait_for(1) == [("join", "late", incarnation(newcomer))]


def test_members_and_the_worker_itself_are_no_joins(open_cluster: LocalCluster, log: Log) -> None:
    watched(open_cluster["w0"], log)
    for name in ("w0", "w1", "w2", "w3"):
        open_cluster[name].call("w0", abs, -1)
    newcomer = open_cluster.join("late")
    assert log.wait_for(1) == [("join", "late", incarnation(newcomer))]


@pytest.mark.parametrize("fixed_size", [True, False])
def test_the_loss_of_an_earlier_life_is_reported_first(fixed_size: bool, log: Log) -> None:
    with LocalCluster(3, fixed_size=fixed_size) as cluster:
        watched(cluster["w0"], log)  # which is not connected to w1
        first = cluster["w1"]
        cluster.kill("w1")
        second = cluster.join("w1", 1)
        assert log.wait_for(2) == [
            ("loss", "w1", incarnation(first)),
            ("join", "w1", incarnation(second)),
        ]


def test_a_listener_of_an_agent_that_is_not_open_hears_of_later_workers(log: Log) -> None:
    with LocalCluster(1, fixed_size=False) as cluster:
        agent = cluster.agent("listening")
        agent.on_join(lambda name, _: log.note(name))
        with agent:
            cluster.join("late")
            assert log.wait_for(1) == ["late"]


def test_a_listener_that_raises_does_not_stop_the_others(
    open_cluster: LocalCluster, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, life: str) -> None:
        raise ValueError(name)

    open_cluster["w0"].on_join(fail)
    watched(open_cluster["w0"], log)
    open_cluster.join("late")
    open_cluster.join("later")
    assert [name for _, name, _ in log.wait_for(2)] == ["late", "later"]
    assert "a listener failed when worker 'late' joined" in caplog.text


def test_a_look_at_an_unchanged_directory_is_one_request() -> None:
    with LocalCluster(20, fixed_size=False) as cluster:
        store = CountingStore(cluster.store)
        with Agent("watching", store=store, config=cluster.config) as agent:
            agent.on_join(lambda name, life: None)
            directory = agent._runtime.directory
            before = store.count
            assert directory.arrivals() == []
            assert store.count - before == 1


def test_the_requests_of_a_join_do_not_grow_with_the_group() -> None:
    counts = []
    for size in (4, 64):
        cluster = LocalCluster(size)
        for agent in cluster.agents[:-1]:
            agent.open(wait=False)
        store = CountingStore(cluster.store)
        last = Agent(
            f"w{size - 1}", store=store, rank=size - 1, world_size=size, config=cluster.config
        )
        try:
            last.open()
            assert len(last.get_worker_infos()) == size
        finally:
            last.close()
            cluster.close()
        counts.append(store.count)
    # the search for a free slot takes a few more
    assert counts[1] - counts[0] < 12


def test_the_requests_for_all_members_do_not_grow_with_the_group() -> None:
    with LocalCluster(40, fixed_size=False) as cluster:
        store = CountingStore(cluster.store)
        with Agent("late", store=store, config=cluster.config) as agent:
            agent.get_worker_infos()
            before = store.count
            assert len(agent.get_worker_infos()) == 41
            assert store.count - before < 4
