"""Subscribers, relays and publishers are killed at any time: no version is mixed, nothing hangs."""

from __future__ import annotations

import random

import pytest
import torch

from telegrad.errors import ProtocolError, TelegradError
from telegrad.testing import LocalCluster, faults
from telegrad.weights import Publisher, Subscriber, deltas
from tests.conftest import Clusters
from tests.weights.conftest import PATIENCE, Subscribe, values_of

SIZE = 30_000
FAST = {"heartbeat_interval": 0.2, "heartbeat_timeout": 2.0, "resume_timeout": 2.0}


def weights(value: int = 0) -> dict[str, torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    return {f"t{i}": torch.full((SIZE,), value, dtype=dtype) for i, dtype in enumerate(dtypes)}


def publish(publisher: Publisher, tensors: dict[str, torch.Tensor], version: int) -> None:
    for tensor in tensors.values():
        tensor.fill_(version % 200)
    publisher.publish(version)


def check(subscriber: Subscriber, version: int) -> None:
    """Wait for a version, and check that a pull is not a mix."""
    found = subscriber.newer_than(version - 1).result(PATIENCE)
    copy = weights(-1)
    pulled = subscriber.pull_into(copy, timeout=PATIENCE)
    assert pulled >= found >= version
    assert values_of(copy) == {float(pulled % 200)}


def test_relays_that_die_are_routed_around(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(6, fixed_size=False, transports=("tcp",), **FAST)
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"], fan_out=1)
    names = [f"w{number}" for number in range(1, 6)]
    subscribers = {name: subscribe(workers, name, patience=5.0) for name in names}
    publish(publisher, tensors, 1)
    for subscriber in subscribers.values():
        check(subscriber, 1)
    first = next(name for name, parent in publisher._topology._parents.items() if parent == "w0")
    workers.kill(first)
    del subscribers[first]
    publish(publisher, tensors, 2)
    for subscriber in subscribers.values():
        check(subscriber, 2)
    assert first not in publisher._topology._parents.values()


def test_the_receiver_of_a_host_is_replaced(cluster: Clusters, subscribe: Subscribe) -> None:
    """Workers on one host that the publisher is not on."""
    workers = cluster(4, fixed_size=False, transports=("unix",), **FAST)
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    publisher._topology._receivers.clear()  # as if it were on another host
    subscribers = {name: subscribe(workers, name, patience=5.0) for name in ("w1", "w2", "w3")}
    publish(publisher, tensors, 1)
    for subscriber in subscribers.values():
        check(subscriber, 1)
    (receiver,) = publisher._topology._parents
    assert subscribers[receiver].received.versions == 1
    workers.kill(receiver)
    del subscribers[receiver]
    publish(publisher, tensors, 2)
    for subscriber in subscribers.values():
        check(subscriber, 2)
    assert [each.received.versions > 0 for each in subscribers.values()].count(True) == 1


def test_a_publisher_that_returns_goes_on(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(4, fixed_size=False, **FAST)
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    names = ("w1", "w2", "w3")
    subscribers = [subscribe(workers, name, patience=5.0) for name in names]
    publish(publisher, tensors, 1)
    for subscriber in subscribers:
        check(subscriber, 1)
    workers.kill("w0")
    workers.join("w0")
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    publish(publisher, tensors, 2)
    for subscriber in subscribers:
        check(subscriber, 2)


def test_a_worker_that_leaves_is_no_longer_a_source(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(4, transports=("tcp",))
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"], fan_out=1)
    subscribers = {name: subscribe(workers, name) for name in ("w1", "w2", "w3")}
    publish(publisher, tensors, 1)
    for subscriber in subscribers.values():
        check(subscriber, 1)
    first = next(name for name, parent in publisher._topology._parents.items() if parent == "w0")
    subscribers.pop(first).close()
    publish(publisher, tensors, 2)
    for subscriber in subscribers.values():
        check(subscriber, 2)


def test_lost_and_late_replies(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(4)
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    with faults.inject(
        faults.drop("reply", function="part", every=5),
        faults.drop("call", function="next_update", every=7),
        faults.drop("reply", function="next_version", every=3),
        faults.duplicate("call", function="acquire", every=2),
        faults.drop("reply", function="join", at=2),
    ):
        subscribers = [subscribe(workers, f"w{i}", patience=0.3) for i in (1, 2, 3)]
        for version in range(3):
            publish(publisher, tensors, version)
            for subscriber in subscribers:
                check(subscriber, version)


def test_a_part_may_take_longer_than_the_patience(cluster: Clusters, subscribe: Subscribe) -> None:
    """The bandwidth is limited so much that requests are repeated."""
    workers = cluster(2, transports=("tcp",))
    tensors = weights()
    size = sum(tensor.nbytes for tensor in tensors.values())
    publisher = Publisher(tensors, "policy", agent=workers["w0"], bandwidth=size)
    subscriber = subscribe(workers, "w1", patience=0.2)
    for version in range(1, 4):
        for tensor in tensors.values():
            tensor.view(torch.uint8).random_()
        publisher.publish(version)
        assert subscriber.newer_than(version - 1).result(PATIENCE) == version


def test_a_damaged_delta_is_followed_by_a_snapshot(
    cluster: Clusters, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(2, transports=("tcp",))
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    publish(publisher, tensors, 1)
    check(subscriber, 1)
    apply = deltas.apply
    damaged: list[deltas.Part] = []

    def damage(
        part: deltas.Part, old: torch.Tensor, out: torch.Tensor, log: deltas.Log | None
    ) -> None:
        if not damaged:
            damaged.append(part)
            out.fill_(99)
            raise ProtocolError("damaged")
        apply(part, old, out, log)

    monkeypatch.setattr(deltas, "apply", damage)
    publish(publisher, tensors, 2)
    check(subscriber, 2)
    assert len(damaged) == 1
    assert subscriber.received.snapshots == 2


def random_kills(transport: str, seed: int, events: int) -> None:
    """Kill and restart random workers, the publisher among them, while versions are published."""
    rng = random.Random(seed)
    names = [f"w{number}" for number in range(6)]
    settings = {**FAST, "transports": (transport,)}
    with LocalCluster(6, fixed_size=False, **settings) as workers:
        tensors, version = weights(), 0
        fan_out = rng.choice([1, 2])
        publisher = Publisher(tensors, "policy", agent=workers["w0"], fan_out=fan_out)
        if transport == "unix":
            publisher._topology._receivers.clear()  # as if the others were on another host
        subscribers = {
            name: Subscriber("policy", agent=workers[name], patience=5.0) for name in names[1:]
        }
        for _ in range(events):
            for _ in range(rng.randrange(1, 4)):
                version += 1
                publish(publisher, tensors, version)
            if rng.random() < 0.5:  # else the kill happens while versions are on their way
                for subscriber in subscribers.values():
                    check(subscriber, version)
            victim = rng.choice(names)
            workers.kill(victim)
            workers.join(victim)
            if victim == "w0":
                publisher = Publisher(tensors, "policy", agent=workers["w0"], fan_out=fan_out)
            else:
                subscribers[victim] = Subscriber("policy", agent=workers[victim], patience=5.0)
        version += 1
        publish(publisher, tensors, version)
        for subscriber in subscribers.values():
            check(subscriber, version)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_random_kills(kind: str) -> None:
    random_kills(kind, 1, 10)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("seed", range(2, 6))
def test_hundreds_of_kills(kind: str, seed: int) -> None:
    random_kills(kind, seed, 40)


def test_a_lost_reader_does_not_get_its_memory_overwritten(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(2, transports=("unix",), fixed_size=False, **FAST)
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    publish(publisher, tensors, 1)
    subscriber = subscribe(workers, "w1")
    check(subscriber, 1)
    with subscriber._receiver.read(PATIENCE) as found:
        workers.kill("w1")  # in the middle of a copy
        for version in range(2, 12):
            publish(publisher, tensors, version)
            publisher.flush(PATIENCE)
        assert values_of(found.layout.tensors(found.image)) == {1.0}
    with pytest.raises(TelegradError):
        subscriber.pull_into(weights())
