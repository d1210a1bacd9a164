"""An agent opens, works, closes, and leaves nothing: states, forks, figures."""

from __future__ import annotations

import asyncio
import gc
import os
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from telegrad import Agent, Config
from telegrad.errors import TelegradError, UsageError
from telegrad.group.secret import group_key, key_file
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, hold_at, until
from tests.local.raw_sockets import unauthenticated_socket

BIG = 500_000  # elements; travels through shared memory


@pytest.fixture
def transport() -> str:
    return "unix"


@pytest.fixture
def solo() -> Agent:
    return Agent("solo", store=dist.HashStore(), config=Config(secret="sixteen characters or more"))


# Opening and closing


def test_with(solo: Agent) -> None:
    with solo as entered:
        assert entered is solo
        assert solo.call("solo", abs, -1) == 1
    assert solo._runtime.closing


def test_async_with(solo: Agent) -> None:
    async def main() -> int:
        async with solo as entered:
            assert entered is solo
            return await entered.submit("solo", abs, -1)

    assert asyncio.run(main()) == 1
    assert solo._runtime.closing


def test_async_with_does_not_block_the_loop_while_it_waits_for_others() -> None:
    async def enter(store: Any, rank: int) -> int:
        config = Config(secret="sixteen characters or more", join_timeout=PATIENCE)
        async with Agent(f"w{rank}", store=store, rank=rank, world_size=3, config=config) as agent:
            return await agent.submit(f"w{(rank + 1) % 3}", abs, -rank)

    async def main() -> list[int]:
        store = dist.HashStore()
        return await asyncio.gather(*(enter(store, rank) for rank in range(3)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("telegrad.agent.Agent.__exit__", _leave_gracefully)
        assert asyncio.run(main()) == [0, 1, 2]


def _leave_gracefully(agent: Agent, *_: object) -> None:
    agent.shutdown(PATIENCE)


def test_an_error_inside_the_block_closes_the_agent(solo: Agent) -> None:
    with pytest.raises(KeyError):
        with solo:
            raise KeyError("mine")
    assert solo._runtime.closing


def test_closing_twice_is_harmless(solo: Agent) -> None:
    with solo:
        solo.close()
        solo.close("again")
        solo._runtime.abort()


def test_closing_from_many_threads_at_once(cluster: Clusters, in_background: Background) -> None:
    agent = cluster(2)["w0"]
    agent.call("w1", abs, -1)
    for closing in [in_background(agent.close) for _ in range(8)]:
        closing.result(PATIENCE)


def test_closing_while_a_connection_is_being_made(
    cluster: Clusters, in_background: Background, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(2)
    w0, w1 = workers["w0"], workers["w1"]
    dial = w0._runtime.dialer.dial

    def dial_slowly(member: Any, purpose: str, timeout: float | None) -> Any:
        dialled = dial(member, purpose, timeout)
        gate.hold()
        return dialled

    monkeypatch.setattr(w0._runtime.dialer, "dial", dial_slowly)
    calling = in_background(w0.call, "w1", abs, -1)
    gate.wait_for()
    w0.close()
    gate.open()
    assert isinstance(calling.exception(PATIENCE), TelegradError)
    until(lambda: w1._runtime.listener.connections == [])


def test_closing_what_was_never_opened_is_harmless(solo: Agent) -> None:
    solo.close()
    with solo:
        assert solo.call("solo", abs, -1) == 1


def test_an_agent_is_opened_once(solo: Agent) -> None:
    with solo:
        with pytest.raises(UsageError, match="opened before"):
            solo.open()
    with pytest.raises(UsageError, match="opened before"):
        solo.open()


def test_a_closed_agent_is_forgotten(cluster: Clusters) -> None:
    workers = LocalCluster(2, transports=("unix",))
    with workers:
        workers["w0"].call("w1", torch.ones, BIG)
        workers["w0"].submit("w1", abs, -1).wait()
    traces = [weakref.ref(agent) for agent in workers]
    del workers
    gc.collect()
    assert [trace() for trace in traces] == [None, None]


@pytest.mark.parametrize("transport", ["memory", "unix", "tcp"])
def test_a_cluster_comes_and_goes_quickly_and_often(cluster: Clusters, transport: str) -> None:
    for _ in range(20):
        with LocalCluster(3, transports=(transport,)) as workers:
            assert workers["w0"].call("w1", abs, -1) == 1


def test_an_agent_that_cannot_open_is_closed_and_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    group_key(None)
    key_file().chmod(0o644)
    agent = Agent("unlucky", store=dist.HashStore(), config=Config())
    with pytest.raises(UsageError, match="readable by you alone"):
        agent.open()
    assert "unlucky" in repr(agent)
    agent.close()


def test_an_address_that_cannot_be_listened_on_is_said_so() -> None:
    config = Config(
        secret="sixteen characters or more", listen="203.0.113.7", transports=("unix", "tcp")
    )
    agent = Agent("w", store=dist.HashStore(), config=config)
    with pytest.raises(UsageError, match="TELEGRAD_LISTEN"):
        agent.open()
    assert repr(agent) == "<Agent 'w' closed>"


# States


def test_repr_in_every_state(cluster: Clusters, gate: Gate, in_background: Background) -> None:
    workers = cluster(2)
    assert repr(Agent("fresh", store=workers.store)) == "<Agent 'fresh' not open>"
    w0 = workers["w0"]
    assert repr(w0).startswith("<Agent 'w0' rank 0: 0 calls made, 0 served")
    future = w0.submit("w1", hold_at, gate)
    gate.wait_for()
    assert "1 pending" in repr(w0)
    assert "<ServerConnection from 'w0'" in repr(workers["w1"]._runtime.listener.connections)
    leaving = in_background(workers["w1"].close)
    assert future.exception(PATIENCE) is not None
    gate.open()
    leaving.result(PATIENCE)
    assert "lost: worker 'w1' was lost" in repr(w0)
    w0.close()
    assert repr(w0) == "<Agent 'w0' closed>"


USES: dict[str, Callable[[Agent], Any]] = {
    "call": lambda agent: agent.call("w1", abs, -1),
    "submit": lambda agent: agent.submit("w1", abs, -1).wait(),
    "call itself": lambda agent: agent.call("w0", abs, -1),
    "barrier": lambda agent: agent.barrier(timeout=1),
    "all_gather": lambda agent: agent.all_gather(1, timeout=1),
    "get_worker_info": lambda agent: agent.get_worker_info("nobody"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("fixed_size", [True, False], ids=["fixed", "open"])
def test_a_closed_agent_says_so(
    cluster: Clusters, use: Callable[[Agent], Any], fixed_size: bool
) -> None:
    w0 = cluster(2, fixed_size=fixed_size)["w0"]
    w0.call("w1", abs, -1)
    w0.close()
    with pytest.raises(TelegradError):
        use(w0)


def test_a_closed_agent_still_knows_who_it_was(cluster: Clusters) -> None:
    for fixed_size in (True, False):
        w0 = cluster(2, fixed_size=fixed_size)["w0"]
        w0.close()
        assert w0.get_worker_info().name == "w0"
        assert "w0" in [info.name for info in w0.get_worker_infos()]
        assert w0.statistics()["calls_made"] == 0


@pytest.mark.parametrize("use", [*USES.values(), Agent.shutdown], ids=[*USES, "shutdown"])
def test_an_agent_that_is_not_open_says_so(use: Callable[[Agent], Any], solo: Agent) -> None:
    with pytest.raises(UsageError, match="not open"):
        use(solo)


# Figures


def test_statistics_count_calls(cluster: Clusters, gate: Gate) -> None:
    workers = cluster(2)
    w0, w1 = workers["w0"], workers["w1"]
    for _ in range(3):
        w0.call("w1", abs, -1)
    futures = [w0.submit("w1", hold_at, gate) for _ in range(4)]
    gate.wait_for(4)
    assert w0.statistics()["calls_made"] == 7
    assert w0.statistics()["calls_pending"] == 4
    assert w1.statistics()["calls_served"] == 7
    gate.open()
    for future in futures:
        future.result(PATIENCE)
    assert w0.statistics()["calls_pending"] == 0


def test_statistics_count_shared_memory(cluster: Clusters) -> None:
    w0 = cluster(2)["w0"]
    kept = [w0.call("w1", torch.ones, BIG) for _ in range(3)]
    assert w0.statistics()["shared_blocks_in_use"] == 3
    kept.pop()
    assert w0.statistics()["shared_blocks_in_use"] == 2
    kept.clear()
    assert w0.statistics()["shared_blocks_in_use"] == 0


def test_idle_threads_keep_no_message(cluster: Clusters) -> None:
    """A thread lives on after the call that it was started for; the memory of that call does
    not.
    """
    workers = cluster(2)
    w0, w1 = workers["w0"], workers["w1"]
    for _ in range(3):  # once a call has blocked, the next ones run on threads of the executor
        gate = Gate()
        futures = [w0.submit("w1", hold_at, gate, torch.ones(BIG)) for _ in range(4)]
        gate.wait_for(4)
        assert w1.statistics()["shared_blocks_in_use"] == 4
        gate.open()
        for future in futures:
            future.result(PATIENCE)
        del futures, future
        until(lambda: w1.statistics()["shared_blocks_in_use"] == 0)


# Forks


def in_child(work: Callable[[], Any]) -> str:
    """Fork, run `work` in the child, and return the repr of its result or error.

    The child never comes back here.
    """
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks with threads are what is tested
        child = os.fork()
    if child == 0:
        try:
            text = repr(work())
        except BaseException as error:
            text = "".join(traceback.format_exception_only(type(error), error))
        os.write(writable, text.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def open_sockets() -> set[str]:
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {
        os.readlink(path)
        for path in paths
        if os.path.lexists(path) and "socket:" in os.readlink(path)
    }


def test_an_agent_cannot_be_used_in_a_fork(cluster: Clusters) -> None:
    w0 = cluster(2)["w0"]
    w0.call("w1", abs, -1)
    w0.submit("w1", abs, -1).wait()
    assert "errors." in in_child(lambda: w0._runtime.invoke("w1", abs, (-1,), None, PATIENCE))
    assert "errors." in in_child(lambda: w0._runtime.start("w1", abs, (-1,), None, PATIENCE).wait())
    assert "errors." in in_child(lambda: w0._runtime.invoke("w0", abs, (-1,), None, PATIENCE))
    assert in_child(lambda: w0) == "<Agent 'w0' closed>"
    assert w0.call("w1", abs, -1) == 1
    assert w0.submit("w1", abs, -1).wait() == 1


def test_closing_in_a_fork_is_no_business_of_the_parent(cluster: Clusters) -> None:
    workers = cluster(2)
    w0 = workers["w0"]
    w0.call("w1", abs, -1)
    assert in_child(workers.close) == "None"
    assert w0.call("w1", abs, -1) == 1
    assert w0.submit("w1", abs, -1).wait() == 1


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_fork_lets_go_of_every_socket(cluster: Clusters, transport: str, gate: Gate) -> None:
    """Or nobody would notice the death of a worker while one of its forks lives."""
    before = open_sockets()
    workers = cluster(2)
    workers["w0"].call("w1", abs, -1)
    busy = workers["w0"].submit("w1", hold_at, gate)
    gate.wait_for()
    with unauthenticated_socket(workers["w1"], transport):
        until(lambda: len(workers["w1"]._runtime.listener._admissions[0].strangers) == 1)
        outside = 1  # the stranger's own end
        assert len(open_sockets() - before) > 4
        assert in_child(lambda: len(open_sockets() - before)) == str(outside)
    gate.open()
    assert busy.result(PATIENCE) is None


def test_a_fork_may_drop_what_the_parent_received(cluster: Clusters) -> None:
    """The memory of a received tensor goes back to its sender when the parent drops it, not when a
    fork does.
    """
    w0 = cluster(2)["w0"]
    kept = [w0.call("w1", torch.ones, BIG)]
    assert w0.statistics()["shared_blocks_in_use"] == 1

    def drop() -> None:
        kept.clear()
        gc.collect()

    assert in_child(drop) == "None"
    others = [w0.call("w1", torch.zeros, BIG) for _ in range(3)]
    assert bool((kept[0] == 1).all())
    assert all(bool((other == 0).all()) for other in others)


def test_a_fork_may_have_agents_of_its_own(cluster: Clusters) -> None:
    cluster(2)["w0"].call("w1", abs, -1)

    def work() -> int:
        with LocalCluster(2, transports=("unix",)) as workers:
            return workers["w0"].call("w1", abs, -5)

    assert in_child(work) == "5"
