"""Callers that ask get the version that their reply was computed with; others get the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import telegrad
from telegrad import Future, batched
from telegrad.batching import Versioned
from telegrad.errors import UsageError
from telegrad.refs import RRef, remote
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from tests.batching.models import tensor, waiting
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Log, hold_at


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(3)


class Policy:
    """Its version is 1 in the first batch, 2 in the second, and so on."""

    def __init__(self, log: Log, gate: Gate | None = None) -> None:
        self.log = log
        self.gate = gate
        self.version = 0

    def update(self) -> int:
        self.version += 1
        return self.version

    @batched(version=update)
    def act(self, x: torch.Tensor) -> torch.Tensor:
        self.log.note(x.tolist())
        if self.gate is not None:
            gate, self.gate = self.gate, None
            gate.hold()
        if (x < 0).any():
            raise ValueError(x.tolist())
        return x * 10

    act_versioned = act.versioned


def plain(answer: Any) -> tuple[list[float], int]:
    assert type(answer) is Versioned
    return answer.value.tolist(), answer.version


def test_only_those_who_ask_get_the_version(workers: LocalCluster, log: Log) -> None:
    policy = remote("w1", Policy, (log,), agent=workers["w0"])
    assert policy.rpc_sync().act(tensor(1)).tolist() == [10]
    assert plain(policy.rpc_sync().act_versioned(tensor(2))) == ([20], 2)
    assert plain(policy.rpc_async().act_versioned(tensor(3)).result(PATIENCE)) == ([30], 3)
    assert plain(policy.remote().act_versioned(tensor(4)).to_here()) == ([40], 4)


def test_calls_of_both_kinds_share_a_batch(workers: LocalCluster, log: Log, gate: Gate) -> None:
    policy: RRef[Policy] = remote("w1", Policy, (log, gate), agent=workers["w0"])
    calls = policy.rpc_async()
    first = calls.act_versioned(tensor(1))
    gate.wait_for()
    asked = calls.act_versioned(tensor(2))
    waiting(Policy.act, 1)
    not_asked = calls.act(tensor(3))
    waiting(Policy.act, 2)
    gate.open()
    assert plain(first.result(PATIENCE)) == ([10], 1)
    assert plain(asked.result(PATIENCE)) == ([20], 2)
    assert not_asked.result(PATIENCE).tolist() == [30]
    assert log.entries == [[[1]], [[2], [3]]]


def test_a_call_that_runs_again_alone_has_the_version_of_that_run(
    workers: LocalCluster, log: Log, gate: Gate
) -> None:
    calls = remote("w1", Policy, (log, gate), agent=workers["w0"]).rpc_async()
    futures = [calls.act_versioned(tensor(1))]
    gate.wait_for()
    for number, value in enumerate((2, -3), 1):
        futures.append(calls.act_versioned(tensor(value)))
        waiting(Policy.act, number)
    gate.open()
    assert plain(futures[1].result(PATIENCE)) == ([20], 3)  # the second is that of the failed batch
    assert isinstance(futures[2].exception(PATIENCE), ValueError)


def test_a_local_object_and_its_method(log: Log) -> None:
    policy = Policy(log)
    assert plain(policy.act_versioned(tensor(1))) == ([10], 1)
    assert policy.act(tensor(1)).tolist() == [10]


# Functions


@batched(version=lambda: 7)
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@batched(version=lambda: 8)
def lengths(names: list[str]) -> list[int]:
    return [len(name) for name in names]


@batched(version=lambda: 9)
@async_execution
def elsewhere(x: torch.Tensor) -> Future[torch.Tensor]:
    agent = telegrad.current_agent()
    assert agent is not None
    return agent.submit("w2", torch.mul, x, 2)


class OnlyVersioned:
    @batched(version=lambda self: 4)
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    act = act.versioned  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("function", "version"),
    [
        (double.versioned, 7),
        (elsewhere.versioned, 9),
        (OnlyVersioned().act, 4),
        (batched(version=lambda: 5)(lambda x: x * 2).versioned, 5),
    ],
)
def test_functions_of_every_kind(workers: LocalCluster, function: Any, version: int) -> None:
    for _ in range(2):
        future = workers["w0"].submit("w1", function, tensor(3))
        assert plain(future.result(PATIENCE)) == ([6], version)


def test_a_function_that_returns_a_list() -> None:
    assert lengths.versioned("abc") == Versioned(3, 8)
    assert lengths("abc") == 3


def test_a_worker_with_registered_functions_serves_the_versions_of_those(
    cluster: Clusters,
) -> None:
    workers = cluster(2, only_registered=True)
    with pytest.raises(UsageError, match=r"double\.versioned"):
        workers["w0"].call("w1", double.versioned, tensor(1))
    assert workers["w0"].call("w1", exposed, tensor(1)).version == 6


@batched(version=lambda: 6)
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x


exposed = telegrad.expose(hidden.versioned)


# Weights that change


class Waiting:
    """Its `version` waits for a remote call, in which the weights are half written."""

    def __init__(self, agent: telegrad.Agent, gate: Gate) -> None:
        self.agent = agent
        self.gate = gate
        self.version = 0

    def update(self) -> int:
        self.version = -1
        self.version = self.agent.call("w2", hold_at, self.gate, 5)
        return self.version

    @batched(version=update)
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.version

    act_versioned = act.versioned


def test_no_batch_runs_while_the_version_changes(
    workers: LocalCluster, gate: Gate, in_background: Any
) -> None:
    policy = RRef(Waiting(workers["w1"], gate), agent=workers["w1"])
    calls = [in_background(policy.rpc_sync().act, tensor(1))]
    gate.wait_for()
    calls.append(in_background(policy.rpc_sync().act, tensor(2)))
    waiting(Waiting.act, 1)
    gate.open()
    assert [call.result(PATIENCE).tolist() for call in calls] == [[5], [10]]
    assert Waiting.act.batching.statistics(policy.local_value()).sizes == {1: 2}


# Mistakes


def test_without_a_version_asking_for_it_is_an_error(workers: LocalCluster) -> None:
    @batched
    def act(x: torch.Tensor) -> torch.Tensor:
        return x

    for call in (act.versioned, lambda x: workers["w0"].call("w1", act.versioned, x)):
        with pytest.raises(UsageError, match="has no version: pass `version`"):
            call(tensor(1))


def test_a_version_is_a_function_that_returns_a_number() -> None:
    with pytest.raises(UsageError, match="version must be a function"):
        batched(version=3)(lambda x: x)  # type: ignore[call-overload]

    @batched(version=lambda: None)  # type: ignore[arg-type, return-value]
    def act(x: torch.Tensor) -> torch.Tensor:
        return x

    for call in (act, act.versioned):
        with pytest.raises(UsageError, match="must be a number, not NoneType"):
            call(tensor(1))
