"""Connections between live workers that break: nobody notices, whatever was under way."""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Iterator

import pytest
import torch

import telegrad
from telegrad import Agent
from telegrad.errors import PeerLost
from telegrad.testing import LocalCluster
from telegrad.transport.tcp import TcpChannel
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, hold_at, until

runs: collections.Counter[int] = collections.Counter()
_lock = threading.Lock()


class Box:
    """An object to refer to."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value


def count(number: int, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    with _lock:
        runs[number] += 1
    return number, tensor + 1


def channels(cluster: LocalCluster) -> Iterator[TcpChannel]:
    """All channels that the workers have opened to each other, and their other ends."""
    for agent in cluster:
        for peer in agent._runtime.peers.all():
            connections = [*peer._idle, *peer._busy]
            if peer.multiplexed.attached:
                connections.append(peer.multiplexed)  # type: ignore[arg-type]
            for connection in connections:
                if isinstance(connection.channel, TcpChannel):
                    yield connection.channel
        for served in agent._runtime.listener.connections:
            if isinstance(served.channel, TcpChannel):
                yield served.channel


@pytest.fixture
def transport() -> str:
    return "tcp"


@pytest.fixture(params=["on", "off"], ids=["tls", "mac"])
def workers(request: pytest.FixtureRequest, cluster: Clusters) -> LocalCluster:
    return cluster(3, tls=request.param)


def test_calls_under_way_run_once_and_are_answered_once(workers: LocalCluster) -> None:
    """Synchronous and asynchronous calls of three workers and references, while their connections
    are interrupted all the time.
    """
    runs.clear()
    generator = random.Random(3)
    stop = threading.Event()
    failures: list[BaseException] = []
    numbers = iter(range(1_000_000))
    made: list[int] = []

    def use(agent: Agent, others: list[str], seed: int) -> None:
        choices = random.Random(seed)
        try:
            for _ in range(40):
                batch = []
                for _ in range(8):
                    number = next(numbers)
                    made.append(number)
                    tensor = torch.full((choices.choice([1, 1000, 100_000]),), float(number))
                    to = choices.choice(others)
                    if choices.random() < 0.3:
                        answer = agent.call(to, count, number, tensor)
                        assert answer[0] == number
                        assert torch.equal(answer[1], tensor + 1)
                    else:
                        batch.append((number, tensor, agent.submit(to, count, number, tensor)))
                box = telegrad.remote(choices.choice(others), Box, args=(number,), agent=agent)
                owned = number
                for number, tensor, future in batch:
                    answer = future.result(PATIENCE)
                    assert answer[0] == number
                    assert torch.equal(answer[1], tensor + 1)
                assert box.rpc_sync().get() == owned
                assert box.to_here().value == owned
        except BaseException as error:
            failures.append(error)

    def interrupt() -> None:
        while not stop.wait(generator.random() * 0.01):
            found = list(channels(workers))
            if found:
                generator.choice(found).interrupt(ConnectionResetError("cut"))

    names = [agent.name for agent in workers]
    threads = [
        threading.Thread(
            target=use, args=(agent, [name for name in names if name != agent.name], seed)
        )
        for seed, agent in enumerate([*workers, *workers])
    ]
    cutting = threading.Thread(target=interrupt)
    for thread in threads:
        thread.start()
    cutting.start()
    for thread in threads:
        thread.join()
    stop.set()
    cutting.join()
    assert not failures, failures
    assert runs == collections.Counter(dict.fromkeys(made, 1))
    for agent in workers:
        for counter in ("owned_objects", "calls_pending"):
            until(lambda agent=agent, name=counter: not agent.statistics().get(name))  # type: ignore[misc]


def test_a_call_outlives_the_interruption_during_which_it_runs(
    workers: LocalCluster, gate: Gate
) -> None:
    w0 = workers["w0"]
    waiting = [w0.submit("w1", hold_at, gate, number) for number in range(3)]
    results: list[object] = []
    calling = threading.Thread(target=lambda: results.append(w0.call("w1", hold_at, gate, "sync")))
    calling.start()
    gate.wait_for(4)
    for _ in range(3):
        for channel in list(channels(workers)):
            channel.interrupt(ConnectionResetError("cut"))
        until(lambda: not any(channel.is_interrupted for channel in channels(workers)))
    gate.open()
    assert [future.result(PATIENCE) for future in waiting] == [0, 1, 2]
    calling.join(PATIENCE)
    assert results == ["sync"]


def test_a_worker_that_ended_is_lost_at_once(workers: LocalCluster, gate: Gate) -> None:
    future = workers["w0"].submit("w1", hold_at, gate)
    gate.wait_for(1)
    workers.kill("w1")
    with pytest.raises(PeerLost):
        future.result(PATIENCE)
    gate.open()
