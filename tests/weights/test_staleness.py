"""A batched policy follows the weights, and answers of old versions are dropped."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import telegrad
from telegrad.errors import UsageError
from telegrad.refs import remote
from telegrad.weights import Publisher, StalenessFilter, Subscriber
from tests.conftest import Clusters
from tests.weights.conftest import PATIENCE, Subscribe, fill


class Policy:
    def __init__(self) -> None:
        self.subscriber = Subscriber("policy")
        self.net = nn.Linear(1, 1, bias=False)
        self.version: int | None = None

    def update(self) -> int:
        self.version = self.subscriber.pull_into(self.net, have=self.version)
        return self.version

    @telegrad.batched(version=update)
    def act(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.net(x)

    act_versioned = act.versioned

    def wait_for(self, version: int) -> None:
        self.subscriber.newer_than(version - 1).result(PATIENCE)


def test_a_batched_policy_follows_a_publisher(cluster: Clusters) -> None:
    workers = cluster(3)
    net = nn.Linear(1, 1, bias=False)
    publisher = Publisher(net, "policy", agent=workers["w0"])
    policy = remote("w1", Policy, agent=workers["w2"]).rpc_sync()
    fresh = StalenessFilter(publisher, max_staleness=1)
    answers = []
    for version in (1, 2, 3):
        fill(net, version)
        publisher.publish(version)
        policy.wait_for(version)
        answers.append(policy.act_versioned(torch.ones(1)))
    assert [(answer.value.item(), answer.version) for answer in answers] == [(1, 1), (2, 2), (3, 3)]
    assert [answer.version for answer in fresh(answers)] == [2, 3]
    assert (fresh.passed, fresh.dropped) == (2, 1)


def test_nothing_is_copied_if_there_is_nothing_newer(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(2)
    net, copy = nn.Linear(1, 1), nn.Linear(1, 1)
    Publisher(net, "policy", agent=workers["w0"]).publish(4)
    subscriber = subscribe(workers, "w1")
    assert subscriber.pull_into(copy) == 4
    fill(copy, 7)
    assert subscriber.pull_into(copy, have=4) == 4
    assert copy.weight.item() == 7
    assert subscriber.pull_into(copy, have=3) == 4
    assert copy.weight.item() == net.weight.item()


class Trajectory(NamedTuple):
    version: int


class Newest:
    version: int | None = None


def test_without_a_newest_version_nothing_is_too_old() -> None:
    newest = Newest()
    fresh = StalenessFilter(newest, max_staleness=0)
    assert fresh.accepts(Trajectory(3))
    newest.version = 4
    assert not fresh.accepts(Trajectory(3))
    assert fresh.accepts(Trajectory(5))  # newer than what `newest` has heard of
    assert fresh.staleness(Trajectory(1)) == 3
    assert "2 passed, 1 dropped" in repr(fresh)


def test_the_newest_version_may_be_the_newest_that_was_seen() -> None:
    fresh = StalenessFilter(max_staleness=2)
    assert [each.version for each in fresh(map(Trajectory, (1, 5, 3, 2)))] == [1, 5, 3]


def test_a_staleness_is_not_negative() -> None:
    with pytest.raises(UsageError, match="max_staleness"):
        StalenessFilter(max_staleness=-1)
