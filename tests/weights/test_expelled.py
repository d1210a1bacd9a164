"""Workers that were declared lost while they were frozen, and several publishers of one name."""

from __future__ import annotations

import logging

import pytest
import torch

from telegrad.errors import PeerLost, UsageError
from telegrad.testing import LocalCluster
from telegrad.weights import Publisher
from telegrad.wire.handshake import Incarnation
from tests.conftest import Clusters
from tests.local.gates import until
from tests.weights.conftest import PATIENCE, Subscribe


def expel(workers: LocalCluster, worker: str, by: str) -> None:
    """Let a worker declare another one lost, as if it had been frozen."""
    failures = workers[by]._runtime.failures
    failures.declare_lost(
        worker, workers[worker]._runtime.local_member.incarnation, reason="it was silent for 30 s"
    )


def weights(value: int = 0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((100,), value)}


def test_a_subscriber_that_its_publisher_declared_lost_is_told(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(2)
    publisher = Publisher(weights(1), "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    publisher.publish(1)
    assert subscriber.pull_into(weights()) == 1
    newer = subscriber.newer_than(1)
    expel(workers, "w1", by="w0")
    assert isinstance(newer.exception(PATIENCE), PeerLost)
    for have in (None, 1):  # and not the old version for ever
        with pytest.raises(PeerLost, match="this worker must join the group again") as caught:
            subscriber.pull_into(weights(), have=have)
        assert caught.value.expelled
        assert caught.value.peer == "w0"
    with pytest.raises(PeerLost):
        next(iter(subscriber))


def test_a_subscriber_that_was_declared_lost_follows_another_publisher(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(3)
    publisher = Publisher(weights(1), "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    publisher.publish(1)
    assert subscriber.pull_into(weights()) == 1
    expel(workers, "w1", by="w0")
    until(lambda: isinstance(subscriber.newer_than(1).exception(PATIENCE), PeerLost))
    publisher.close()
    other = Publisher(weights(2), "policy", agent=workers["w2"])
    other.publish(2)
    until(lambda: subscriber.version == 2)
    copy = weights()
    assert subscriber.pull_into(copy) == 2
    assert torch.equal(copy["weight"], weights(2)["weight"])


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_relay_that_declared_its_reader_lost_is_routed_around(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(3)
    publisher = Publisher(weights(1), "policy", agent=workers["w0"], fan_out=1)
    subscribers = {name: subscribe(workers, name) for name in ("w1", "w2")}
    publisher.publish(1)
    for subscriber in subscribers.values():
        assert subscriber.pull_into(weights(), timeout=PATIENCE) == 1
    relay, reader = ("w1", "w2") if publisher._topology._parents["w2"] == "w1" else ("w2", "w1")
    expel(workers, reader, by=relay)
    publisher.publish(2)
    assert subscribers[reader].newer_than(1).result(PATIENCE) == 2


def test_a_publisher_that_all_subscribers_declared_lost_is_told(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(4)
    publisher = Publisher(weights(), "policy", agent=workers["w0"])
    subscribers = [subscribe(workers, name) for name in ("w1", "w2")]
    publisher.publish(1)
    for subscriber in subscribers:
        subscriber.pull_into(weights(), timeout=PATIENCE)
    expel(workers, "w0", by="w1")
    until(lambda: workers["w0"]._runtime.failures.is_lost(incarnation_of(workers, "w1")))
    publisher.publish(2)  # the other one still gets it
    assert subscribers[1].newer_than(1).result(PATIENCE) == 2
    expel(workers, "w0", by="w2")
    until(lambda: workers["w0"]._runtime.failures.is_lost(incarnation_of(workers, "w2")))
    with pytest.raises(PeerLost, match="worker 'w2', like the other subscribers") as caught:
        publisher.publish(3)
    assert caught.value.expelled
    late = subscribe(workers, "w3")
    assert late.newer_than(1).result(PATIENCE) == 2
    publisher.publish(3)
    assert late.newer_than(2).result(PATIENCE) == 3


def incarnation_of(workers: LocalCluster, name: str) -> Incarnation:
    return workers[name]._runtime.local_member.incarnation


def test_subscribers_that_are_lost_or_leave_are_no_error_of_the_publisher(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(3)
    publisher = Publisher(weights(), "policy", agent=workers["w0"])
    first, second = subscribe(workers, "w1"), subscribe(workers, "w2")
    publisher.publish(1)
    for subscriber in (first, second):
        subscriber.pull_into(weights(), timeout=PATIENCE)
    first.close()
    workers.kill("w2")
    until(lambda: workers["w0"]._runtime.failures.is_lost(incarnation_of(workers, "w2")))
    until(lambda: not publisher._registry._subscribers["policy"])
    publisher.publish(2)


def test_of_two_publishers_subscribers_follow_the_one_that_was_started_last(
    cluster: Clusters, subscribe: Subscribe, caplog: pytest.LogCaptureFixture
) -> None:
    workers = cluster(4)
    first = Publisher(weights(1), "policy", agent=workers["w0"])
    searching = subscribe(workers, "w1")
    naming = subscribe(workers, "w2", publisher="w0")
    first.publish(1)
    for subscriber in (searching, naming):
        assert subscriber.pull_into(weights(), timeout=PATIENCE) == 1
    second = Publisher(weights(2), "policy", agent=workers["w3"])
    second.publish(7)
    assert searching.newer_than(1).result(PATIENCE) == 7
    assert "workers 'w0' and 'w3' publish them, and 'w3' was started later" in caplog.text
    first.publish(2)
    assert naming.newer_than(1).result(PATIENCE) == 2
    assert searching.version == 7
    naming.close()
    first.publish(3)  # closing is no reason to complain


def test_a_publisher_whose_subscribers_follow_another_one_is_told(
    cluster: Clusters, subscribe: Subscribe, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    workers = cluster(3)
    first = Publisher(weights(1), "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    first.publish(1)
    assert subscriber.pull_into(weights(), timeout=PATIENCE) == 1
    with Publisher(weights(2), "policy", agent=workers["w2"]) as second:
        second.publish(2)
        assert subscriber.newer_than(1).result(PATIENCE) == 2
        until(lambda: not first._registry._subscribers["policy"])
        with pytest.raises(UsageError, match="worker 'w2' publishes them, too"):
            first.publish(3)
    # the second one is closed, so the subscriber comes back
    until(lambda: bool(first._registry._subscribers["policy"]))
    first.publish(3)
    until(lambda: subscriber.version == 3)


def test_trainers_of_shards_that_were_started_again_beside_the_old_ones(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(5)
    old = [
        Publisher({f"half{i}": torch.full((4,), 1)}, "policy", agent=workers[f"w{i}"], shard=(i, 2))
        for i in range(2)
    ]
    subscriber = subscribe(workers, "w4", slices={"half0": (slice(0, 2),), "half1": (slice(2, 4),)})
    for publisher in old:
        publisher.publish(1)
    copy = {"half0": torch.zeros(2).long(), "half1": torch.zeros(2).long()}
    assert subscriber.pull_into(copy, timeout=PATIENCE) == 1
    new = [
        Publisher(
            {f"half{i}": torch.full((4,), 5)}, "policy", agent=workers[f"w{i + 2}"], shard=(i, 2)
        )
        for i in range(2)
    ]
    for publisher in new:
        publisher.publish(2)
    assert subscriber.newer_than(1).result(PATIENCE) == 2
    subscriber.pull_into(copy)
    assert copy["half0"].tolist() == copy["half1"].tolist() == [5, 5]
