"""Who is in the group: workers come, leave, come back, and are refused."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import Agent, Config, WorkerInfo, current_agent
from telegrad.errors import AuthenticationError, JoinError, PeerLost, UsageError
from telegrad.group import membership
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, hold_at, until

SECRET = "sixteen characters or more"


@pytest.fixture
def transport() -> str:
    return "unix"


def incarnation() -> str:
    agent = current_agent()
    assert agent is not None
    return agent._runtime.local_member.incarnation


def config(**settings: Any) -> Config:
    return Config(**{"secret": SECRET, "join_timeout": PATIENCE, **settings})


# Fixed groups


def test_a_fixed_group_knows_its_members(cluster: Clusters) -> None:
    workers = cluster(3)
    infos = [WorkerInfo("w0", 0), WorkerInfo("w1", 1), WorkerInfo("w2", 2)]
    for rank, agent in enumerate(workers):
        assert agent.get_worker_infos() == infos
        assert agent.get_worker_info() == infos[rank]
        assert (
            agent.get_worker_info("w2")
            == agent.get_worker_info(2)
            == agent.get_worker_info(infos[2])
            == infos[2]
        )


def test_entering_waits_for_everybody() -> None:
    store, entered = dist.HashStore(), threading.Event()

    def enter() -> None:
        with Agent("w0", store=store, rank=0, world_size=2, config=config()) as agent:
            entered.set()
            assert agent.call("w1", abs, -1) == 1

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(enter)
        with Agent("w1", store=store, rank=1, world_size=2, config=config()):
            assert entered.wait(PATIENCE)
            first.result(PATIENCE)


def test_missing_ranks_are_named() -> None:
    lonely = Agent(
        "w1", store=dist.HashStore(), rank=1, world_size=4, config=config(join_timeout=0.05)
    )
    with pytest.raises(JoinError, match=r"only 1 of 4 workers.*missing ranks: \[0, 2, 3\]"):
        lonely.__enter__()
    assert lonely._runtime.closing


@pytest.mark.parametrize(("rank", "world_size"), [(None, 2), (2, 2), (-1, 2)])
def test_a_fixed_group_needs_a_rank_within_it(rank: int | None, world_size: int) -> None:
    with pytest.raises(UsageError, match="needs a rank from 0 to 1"):
        Agent("w", store=dist.HashStore(), rank=rank, world_size=world_size)


def test_two_workers_of_a_fixed_group_with_one_name_are_both_told() -> None:
    store = dist.HashStore()
    agents = [
        Agent("twin", store=store, rank=rank, world_size=2, config=config()) for rank in range(2)
    ]
    for agent in agents:
        agent.open(wait=False)
    for agent in agents:
        with pytest.raises(JoinError, match="twin is not unique"):
            agent._runtime.wait_for_members()


def test_two_workers_of_a_fixed_group_with_one_rank_are_not_taken_for_each_other() -> None:
    store = dist.HashStore()
    with ExitStack() as stack:
        first = Agent("first", store=store, rank=0, world_size=1, config=config())
        stack.enter_context(first)
        with pytest.raises(JoinError, match="rank 0"):
            stack.enter_context(Agent("second", store=store, rank=0, world_size=1, config=config()))


def test_an_entry_that_was_read_earlier_does_not_replace_a_later_one(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads the entry of a worker, which is started again before the thread stores it."""
    workers = cluster(2, fixed_size=False)
    directory, parse = workers["w0"]._runtime.directory, membership._from_json
    restarted: list[Agent] = []

    def parse_late(entry: Any) -> Any:
        if not restarted:
            restarted.append(Agent("w1", store=workers.store, config=workers.config))
            workers.kill("w1")
            restarted[0].open()
            assert directory.find("w1", refresh=True).incarnation == now()
        return parse(entry)

    def now() -> str:
        return restarted[0]._runtime.local_member.incarnation

    monkeypatch.setattr(membership, "_from_json", parse_late)
    directory.find("w1", refresh=True)
    assert directory.find("w1").incarnation == now()
    restarted[0].close()


def test_fixed_and_open_do_not_mix(cluster: Clusters) -> None:
    workers = cluster(1)
    with pytest.raises(JoinError, match="mixes statically and dynamically"):
        Agent("guest", store=workers.store, config=workers.config).open()
    others = cluster(1, fixed_size=False)
    with pytest.raises(JoinError, match="mixes statically and dynamically"):
        Agent("guest", store=others.store, rank=0, world_size=1, config=others.config).open()


# Open groups


def test_workers_of_an_open_group_come_at_any_time(cluster: Clusters) -> None:
    workers = cluster(2, fixed_size=False)
    assert workers["w0"].call("w1", abs, -1) == 1
    late = workers.join("late")
    assert workers["w0"].call("late", abs, -2) == 2
    assert late.call("w0", abs, -3) == 3
    assert [info.name for info in workers["w1"].get_worker_infos()] == ["w0", "w1", "late"]


def test_ranks_of_an_open_group_differ(cluster: Clusters) -> None:
    workers = cluster(0, fixed_size=False)
    ranks = [workers.join(name).get_worker_info().id for name in "abc"]
    assert ranks == [0, 1, 2]


def test_a_rank_that_was_asked_for_is_not_given_to_the_next(cluster: Clusters) -> None:
    workers = cluster(0, fixed_size=False)
    chosen, given = workers.join("chosen", rank=0), workers.join("given")
    assert chosen.get_worker_info().id != given.get_worker_info().id
    assert [info.name for info in chosen.get_worker_infos()] == ["chosen", "given"]
    assert given.call("chosen", incarnation) == chosen._runtime.local_member.incarnation


def test_a_rank_that_is_taken_is_refused(cluster: Clusters) -> None:
    workers = cluster(0, fixed_size=False)
    first = workers.join("first", rank=3)
    with pytest.raises(JoinError, match="rank 3"):
        workers.join("second", rank=3)
    assert first.call("first", incarnation) == first._runtime.local_member.incarnation


def test_who_left_is_gone_for_the_others(cluster: Clusters) -> None:
    workers = cluster(3, fixed_size=False)
    assert workers["w0"].call("w2", abs, -1) == 1
    assert workers["w2"].shutdown() == ()
    assert [info.name for info in workers["w0"].get_worker_infos()] == ["w0", "w1"]
    for caller in ("w0", "w1"):
        with pytest.raises(PeerLost, match="'w2'") as caught:
            workers[caller].call("w2", abs, -1)
        assert caught.value.peer == "w2"


def test_who_left_may_come_back(cluster: Clusters) -> None:
    workers = cluster(2, fixed_size=False)
    workers["w0"].call("w1", abs, -1)
    workers["w1"].shutdown()
    back = workers.join("w1")
    assert workers["w0"].call("w1", incarnation) == back._runtime.local_member.incarnation


def test_a_name_that_is_alive_is_refused(cluster: Clusters) -> None:
    workers = cluster(2, fixed_size=False)
    with pytest.raises(JoinError, match="'w1' is already in the group and alive"):
        workers.agent("w1").open()
    assert workers["w0"].call("w1", abs, -1) == 1


def test_many_join_at_once(cluster: Clusters) -> None:
    workers = cluster(1, fixed_size=False)
    with ThreadPoolExecutor(8) as pool:
        joined = list(pool.map(workers.join, [f"late{i}" for i in range(8)]))
    assert sorted(agent.get_worker_info().id for agent in joined) == list(range(1, 9))
    assert [workers["w0"].call(agent.name, abs, -i) for i, agent in enumerate(joined)] == list(
        range(8)
    )
    assert len(workers["w0"].get_worker_infos()) == 9


def test_shutdown_of_an_open_group_waits_for_its_own_calls_only(
    cluster: Clusters, gate: Gate
) -> None:
    workers = cluster(3, fixed_size=False)
    mine = workers["w0"].submit("w1", hold_at, gate, "done")
    others = workers["w1"].submit("w2", hold_at, gate, "done")
    gate.wait_for(2)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(workers["w0"].shutdown)
        assert not leaving.done()
        gate.open()
        leaving.result(PATIENCE)
    assert mine.wait() == others.wait() == "done"


# Coming back


@pytest.mark.parametrize("fixed_size", [True, False])
def test_a_worker_comes_back_under_its_name(cluster: Clusters, fixed_size: bool) -> None:
    workers = cluster(2, fixed_size=fixed_size)
    first = workers["w0"].call("w1", incarnation)
    workers.kill("w1")
    with pytest.raises(PeerLost):
        workers["w0"].call("w1", incarnation)
    back = workers.join("w1", 1 if fixed_size else None)
    assert back.get_worker_info() == WorkerInfo("w1", 1)
    for target in ("w1", 1, WorkerInfo("w1", 1)):
        assert (
            workers["w0"].call(target, incarnation)
            == back._runtime.local_member.incarnation
            != first
        )
        assert (
            workers["w0"].submit(target, incarnation).wait()
            == back._runtime.local_member.incarnation
        )


@pytest.mark.parametrize("fixed_size", [True, False])
def test_who_never_met_the_first_incarnation_reaches_the_second(
    cluster: Clusters, fixed_size: bool
) -> None:
    workers = cluster(2, fixed_size=fixed_size)
    workers.kill("w1")
    back = workers.join("w1", 1 if fixed_size else None)
    assert workers["w0"].call("w1", incarnation) == back._runtime.local_member.incarnation


def test_who_comes_back_calls_the_others(cluster: Clusters) -> None:
    workers = cluster(2)
    workers["w1"].call("w0", abs, -1)
    workers.kill("w1")
    assert workers.join("w1", 1).call("w0", abs, -1) == 1
    assert workers["w0"].call("w1", abs, -1) == 1


def test_a_worker_comes_back_again_and_again(cluster: Clusters) -> None:
    workers = cluster(2)
    seen = {workers["w0"].call("w1", incarnation)}
    for _ in range(5):
        workers.kill("w1")
        workers.join("w1", 1)
        until(lambda: _reached_again(workers["w0"]))
        seen.add(workers["w0"].call("w1", incarnation))
    assert len(seen) == 6


def _reached_again(agent: Agent) -> bool:
    """The first call may still find the old connection."""
    try:
        return bool(agent.call("w1", abs, -1))
    except PeerLost:
        return False


def test_calls_to_a_returned_worker_from_many_threads(cluster: Clusters) -> None:
    workers = cluster(2)
    workers["w0"].call("w1", abs, -1)
    workers.kill("w1")
    back = workers.join("w1", 1)
    until(lambda: _reached_again(workers["w0"]))
    with ThreadPoolExecutor(8) as pool:
        reached = set(pool.map(lambda _: workers["w0"].call("w1", incarnation), range(32)))
    assert reached == {back._runtime.local_member.incarnation}


def test_a_peer_has_one_link_however_it_is_named(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(2)
    w0 = workers["w0"]
    both = threading.Barrier(2)
    dial = w0._runtime.dial

    def dial_together(member: Any, purpose: str, timeout: float | None = None) -> Any:
        try:
            both.wait(0.2)  # gives a second dialler, if there is one, the time to come
        except threading.BrokenBarrierError:
            pass
        return dial(member, purpose, timeout)

    monkeypatch.setattr(w0._runtime, "dial", dial_together)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda to: w0.submit(to, abs, -1).wait(), ["w1", 1])) == [1, 1]
    assert len(workers["w1"]._runtime.listener.connections) == 1


# Refused


def test_names_have_rules() -> None:
    for name in ("", "with space", "a/b", "ä", "x" * 128):
        with pytest.raises(UsageError, match="Worker name"):
            Agent(name, store=dist.HashStore())
    with pytest.raises(UsageError, match="Worker name"):
        WorkerInfo("no spaces", 0)
    assert WorkerInfo("a-b_c:d.9", 3).id == 3


@pytest.mark.parametrize("transport", ["memory", "unix", "tcp"])
def test_another_group_is_refused(cluster: Clusters, transport: str) -> None:
    workers, strangers = cluster(1), cluster(1)
    _smuggle(strangers["w0"], into=workers, rank=5)
    with pytest.raises(PeerLost, match="another group"):
        workers["w0"].call(5, abs, -1)
    assert strangers["w0"]._runtime.calls_served == 0


@pytest.mark.parametrize("transport", ["memory", "unix", "tcp"])
def test_another_secret_is_refused(cluster: Clusters, transport: str) -> None:
    workers = cluster(1, fixed_size=False)
    spies = LocalCluster(1, fixed_size=False, secret=SECRET, transports=(transport,))
    with spies:
        spies["w0"]._runtime.group = workers["w0"]._runtime.group
        for caller, callee in ((spies, workers), (workers, spies)):
            _smuggle(callee["w0"], into=caller, rank=9)
            with pytest.raises(AuthenticationError, match="secret"):
                caller["w0"].call(9, abs, -1)
            with pytest.raises(AuthenticationError, match="secret"):
                caller["w0"].submit(9, abs, -1).wait()
    assert workers["w0"].call("w0", abs, -1) == 1


def test_no_common_transport_is_said_so(cluster: Clusters) -> None:
    workers = cluster(1, fixed_size=False)
    with _other(workers, transports=("tcp",)) as other:
        with pytest.raises(PeerLost, match="offers no transport that this worker uses"):
            other.call("w0", abs, -1)


def test_the_first_transport_that_both_have_is_used(cluster: Clusters) -> None:
    workers = cluster(1, fixed_size=False, transports=("unix", "tcp"))
    with _other(workers, transports=("tcp",)) as other:
        assert other.call("w0", abs, -1) == 1
        assert "tcp" in repr(other)


def _other(workers: LocalCluster, **settings: Any) -> Agent:
    """A worker of the same group with other settings."""
    return Agent("other", store=workers.store, rank=9, config=replace(workers.config, **settings))


def _smuggle(agent: Agent, into: LocalCluster, rank: int) -> None:
    """Write a worker of one group into the directory of another, as its worker w0 could."""
    directory = into["w0"]._runtime.directory
    smuggled = replace(agent._runtime.local_member, name="smuggled", rank=rank)
    assert directory._store.write(f"rank/{rank}", json.dumps(asdict(smuggled)), None)
    assert directory._store.write("name/smuggled", str(rank), None)


# Stores


def test_groups_in_prefixes_of_one_store_are_separate() -> None:
    store = dist.HashStore()
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                Agent("same", store=dist.PrefixStore(prefix, store), config=config())
            )
            for prefix in ("a", "b")
        ]
        assert [len(agent.get_worker_infos()) for agent in agents] == [1, 1]
        assert agents[0]._runtime.group != agents[1]._runtime.group


def test_a_new_group_in_a_fresh_store_after_the_old_one_ended() -> None:
    for _ in range(3):
        with LocalCluster(2, transports=("unix",)) as workers:
            assert workers["w0"].call("w1", abs, -1) == 1


def test_file_and_tcp_stores_work_too(tmp_path: Any) -> None:
    stores = [dist.FileStore(str(tmp_path / "store"), 2), dist.TCPStore("127.0.0.1", 0, 1, True)]
    for store in stores:
        with LocalCluster(2, store=store, transports=("unix",)) as workers:
            assert workers["w0"].call("w1", abs, -1) == 1


def test_workers_that_their_engine_restarts_together_wait_for_each_other(
    cluster: Clusters, in_background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store still has the entries of the workers that have ended."""
    pair = cluster(2)
    for name in ("w0", "w1"):
        pair.kill(name)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    first = pair.agent("w0", 0)
    pair.agents.append(first)

    def join() -> str:
        first.open()
        return first._runtime.member("w1").incarnation

    joining = in_background(join)
    until(lambda: first._runtime.local_member.addresses != ())
    second = pair.join("w1", 1)
    assert joining.result(PATIENCE) == second._runtime.local_member.incarnation
