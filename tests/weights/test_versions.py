"""Versions arrive whole, in order, and equal to the bit, as long as nothing fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import telegrad
from telegrad.errors import CallCancelled, CallTimeout, UsageError
from telegrad.transport import flat_memory
from telegrad.weights import Publisher, Subscriber
from tests.conftest import Clusters
from tests.local.gates import until
from tests.weights.conftest import PATIENCE, Model, Subscribe, fill, values_of


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
        if not tensor.is_meta and tensor.dim()
    }


def test_all_subscribers_get_each_version(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(5)
    model = Model()
    publisher = Publisher(model, "policy", agent=workers["w0"])
    subscribers = [subscribe(workers, f"w{number}") for number in range(1, 5)]
    copies = [Model() for _ in subscribers]
    for version in (3, 4, 10):
        with torch.no_grad():
            model.layer.weight[version] = float("nan")
            model.embedding.weight[0] *= -0.0
            model.norm.weight.fill_(version)
        assert publisher.publish(version) == version
        for subscriber, copy in zip(subscribers, copies, strict=True):
            assert subscriber.newer_than(version - 1).result(PATIENCE) == version
            assert subscriber.pull_into(copy) == version
            assert bits(copy) == bits(model)
            assert copy.norm.num_batches_tracked == 0
            assert copy.head.weight is copy.embedding.weight
            assert copy.layer.weight.requires_grad
    publisher.flush(PATIENCE)
    first, _, last = publisher.reports
    assert first.delta_bytes == first.full_bytes
    assert last.version == 10
    assert 0 < last.changed < last.elements
    assert last.delta_bytes < last.full_bytes / 5
    assert last.changed_share == last.changed / last.elements
    assert publisher.version == 10


def test_a_chain_of_hosts_receives_deltas(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(5, transports=("tcp",))
    model = nn.Linear(300, 300)
    publisher = Publisher(model, "policy", agent=workers["w0"], fan_out=1)
    subscribers = [subscribe(workers, f"w{number}") for number in range(1, 5)]
    for version in range(5):
        with torch.no_grad():
            model.weight[version] += 1
        publisher.publish()
        for subscriber in subscribers:
            subscriber.newer_than(version - 1).result(PATIENCE)
            copy = nn.Linear(300, 300)
            assert subscriber.pull_into(copy) == version
            assert torch.equal(copy.weight, model.weight)
    size = 301 * 300 * 4
    for subscriber in subscribers:
        assert subscriber.received.snapshots == 1
        assert subscriber.received.versions == 5
        assert size < subscriber.received.nbytes < 1.1 * size


def test_large_weights_arrive_in_many_parts(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(3)
    weights = {"w": torch.randn(3 << 20), "h": torch.randn(1 << 20).half()}
    publisher = Publisher(weights, "policy", agent=workers["w0"], fan_out=1, bandwidth=1e9)
    subscribers = [subscribe(workers, f"w{number}") for number in (1, 2)]
    for version in range(3):
        weights["w"] += torch.randn(3 << 20)
        weights["h"][:1000] += version
        publisher.publish(version)
        for subscriber in subscribers:
            subscriber.newer_than(version - 1).result(PATIENCE)
            found, tensors = subscriber.state_dict()
            assert found == version
            assert torch.equal(tensors["w"], weights["w"])
            assert torch.equal(tensors["h"], weights["h"])


def test_names_can_be_mapped_and_left_out(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    model = Model()
    publisher = Publisher(model, "policy", agent=workers["w0"])
    publisher.publish()
    subscriber = subscribe(workers, "w1")
    layer = nn.Linear(40, 30, bias=False)
    subscriber.pull_into(layer, names={"weight": "layer.weight"})
    assert torch.equal(layer.weight, model.layer.weight)
    half = nn.Linear(40, 30, dtype=torch.float16)
    subscriber.pull_into(half, names=lambda name: f"layer.{name}" if name == "weight" else None)
    assert torch.equal(half.weight, model.layer.weight.half())
    before = layer.weight.clone()
    with pytest.raises(UsageError, match="no tensor 'weight'"):
        subscriber.pull_into(layer)
    with pytest.raises(UsageError, match=r"shape \(30, 40\)"):
        subscriber.pull_into(layer, names={"weight": "layer.bias"})
    assert torch.equal(layer.weight, before)


class Stateful(nn.Linear):
    """A module whose `state_dict` has a value that is not a tensor."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        raise AssertionError


def test_nothing_is_left_out_silently(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    model = Stateful(3, 2)
    with pytest.raises(UsageError, match="'_extra_state' is of the type int, and only tensors can"):
        Publisher(model, "policy", agent=workers["w0"])
    Publisher(nn.Linear(3, 2), "policy", agent=workers["w0"]).publish()
    subscriber = subscribe(workers, "w1")
    before = model.weight.clone()
    with pytest.raises(UsageError, match=r"'_extra_state' is of the type int.* leave it out with"):
        subscriber.pull_into(model)
    with pytest.raises(UsageError, match="`names` has 'wieght', which the weights to write"):
        subscriber.pull_into(model, names={"wieght": "weight", "bias": "bias"})
    with pytest.raises(UsageError, match="`names` has 'wieght'"):
        subscribe(workers, "w1", weights=model, names={"wieght": "weight"})
    assert torch.equal(model.weight, before)
    subscriber.pull_into(model, names=lambda name: None if name == "_extra_state" else name)
    assert not torch.equal(model.weight, before)


class Exported(nn.Module):
    """A module whose `state_dict` has a copy of a parameter, as a conversion makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(3))
        self.converted = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_state_dict_post_hook(self._convert)

    @staticmethod
    def _convert(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
        state[prefix + "converted"] = state[prefix + "converted"].float()


def test_a_tensor_that_cannot_be_written_is_an_error_before_any_is_written(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(2)
    weights = {"kept": torch.ones(3), "converted": torch.ones(3)}
    publisher = Publisher(weights, "policy", agent=workers["w0"])
    publisher.publish()
    subscriber = subscribe(workers, "w1")
    module = Exported()
    with pytest.raises(UsageError, match="a copy of 'converted'"):
        subscriber.pull_into(module)
    assert not module.kept.any()
    subscriber.pull_into(module, names={"kept": "kept"})
    assert module.kept.eq(1).all()
    for unwritable, message in (
        (torch.zeros(1).expand(3), "share memory"),
        (torch.zeros(3).to_sparse(), "a torch.sparse_coo tensor"),
    ):
        target = {"kept": torch.zeros(3), "converted": unwritable}
        with pytest.raises(UsageError, match=message):
            subscriber.pull_into(target)
        assert not target["kept"].any()
    with pytest.raises(UsageError, match="`names` is a dict or a function"):
        subscriber.pull_into(weights, names=["kept"])  # type: ignore[arg-type]


def test_tensors_of_the_inference_mode_are_written(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    model = nn.Linear(3, 2)
    publisher = Publisher(model, "policy", agent=workers["w0"])
    publisher.publish()
    with torch.inference_mode():
        copy = nn.Linear(3, 2)
    subscribe(workers, "w1").pull_into(copy)
    assert copy.weight.is_inference()
    assert torch.equal(copy.weight, model.weight)


def test_a_late_subscriber_gets_a_snapshot(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(3)
    model = Model()
    publisher = Publisher(model, "policy", agent=workers["w0"], history=0)
    early = subscribe(workers, "w1")
    for version in range(6):
        fill(model, version)
        publisher.publish()
        early.newer_than(version - 1).result(PATIENCE)
    late = subscribe(workers, "w2")
    copy = Model()
    assert late.pull_into(copy) == 5
    assert values_of(copy.state_dict()) == {5.0}


def test_subscribers_may_come_first(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    subscriber = subscribe(workers, "w1")
    assert subscriber.version is None
    with pytest.raises(CallTimeout, match="no version of the weights 'policy'"):
        subscriber.pull_into(Model(), timeout=0.1)
    future = subscriber.newer_than(None)
    publisher = Publisher(Model(), "policy", agent=workers["w0"])
    publisher.publish(7)
    assert future.result(PATIENCE) == 7


def test_iteration_ends_with_the_subscriber(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(3)
    publisher = Publisher(Model(), "policy", agent=workers["w0"])
    publisher.publish(0)
    subscriber, other = subscribe(workers, "w1"), subscribe(workers, "w2")
    seen = []
    for version in subscriber:
        seen.append(version)
        if version == 3:
            subscriber.close()
        else:
            publisher.publish()
    assert seen == [0, 1, 2, 3]
    with pytest.raises(UsageError):
        subscriber.pull_into(Model())
    with pytest.raises(CallCancelled):
        subscriber.newer_than(99).wait()

    async def follow() -> list[int]:
        versions = []
        async for version in other:
            versions.append(version)
            if version >= 5:
                break
            publisher.publish()
        return versions

    versions = asyncio.run(asyncio.wait_for(follow(), PATIENCE))
    assert versions == sorted(set(versions))
    assert versions[-1] >= 5


def test_pulls_never_mix_two_versions(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(4)
    weights = {f"t{number}": torch.zeros(50_000) for number in range(10)}
    publisher = Publisher(weights, "policy", agent=workers["w0"])
    publisher.publish(0)
    subscribers = [subscribe(workers, f"w{number}") for number in (1, 2, 3)]
    errors: list[Any] = []

    def pull(subscriber: Subscriber) -> None:
        copy = {name: torch.empty(50_000) for name in weights}
        version = -1
        while version < 30 and not errors:
            found = subscriber.pull_into(copy)
            if found < version or values_of(copy) != {float(found)}:
                errors.append((version, found, values_of(copy)))
            version = found

    threads = [threading.Thread(target=pull, args=(each,)) for each in subscribers]
    for thread in threads:
        thread.start()
    for version in range(1, 31):
        for tensor in weights.values():
            tensor.fill_(version)
        publisher.publish(version)
        publisher.flush(PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert errors == []


def test_memory_is_reused(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    model = Model()
    publisher = Publisher(model, "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    images = set()
    for version in range(20):
        publisher.publish()
        publisher.flush(PATIENCE)
        subscriber.newer_than(version - 1).result(PATIENCE)
        subscriber.pull_into(Model())
        current = publisher._store.current()
        assert current is not None
        images.add(id(current))
    assert len(images) <= 4


def test_memory_that_cannot_be_mapped_is_received(
    cluster: Clusters, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(2, transports=("unix",))
    monkeypatch.setattr(flat_memory, "open_shared", lambda handle: None)
    model, copy = Model(), Model()
    publisher = Publisher(model, "policy", agent=workers["w0"])
    publisher.publish()
    subscriber = subscribe(workers, "w1")
    subscriber.pull_into(copy)
    assert bits(copy) == bits(model)
    assert subscriber.received.snapshots == 1


def test_wrong_use_is_explained(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    model = Model()
    publisher = Publisher(model, "policy", agent=workers["w0"])
    with pytest.raises(UsageError, match="already publishes"):
        Publisher(model, "policy", agent=workers["w0"])
    with pytest.raises(UsageError, match="itself"):
        Subscriber("policy", agent=workers["w0"])
    publisher.publish(4)
    with pytest.raises(UsageError, match="version 4 does not follow version 4"):
        publisher.publish(4)
    with pytest.raises(UsageError, match="not negative"):
        publisher.publish(-5)
    for version in (5.0, float("nan"), "5", torch.tensor(5.5)):
        with pytest.raises(UsageError, match="is an integer"):
            publisher.publish(version)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="is an integer"):
            subscribe(workers, "w1").newer_than(version)  # type: ignore[arg-type]
    model.head.weight = nn.Parameter(model.head.weight.clone())
    with pytest.raises(UsageError, match="have changed"):
        publisher.publish()
    with pytest.raises(UsageError, match="needs an agent"):
        Publisher(model)
    with pytest.raises(UsageError, match="needs an agent"):
        Subscriber()
    with pytest.raises(UsageError, match="not NoneType"):
        subscribe(workers, "w1").pull_into(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a timeout is"):
        subscribe(workers, "w1").pull_into(model, timeout=float("nan"))
    with pytest.raises(UsageError, match="bandwidth"):
        Publisher(model, "other", agent=workers["w0"], bandwidth=0)
    with pytest.raises(UsageError, match="fan_out"):
        Publisher(model, "other", agent=workers["w0"], fan_out=0)
    with pytest.raises(UsageError, match="patience"):
        Subscriber("policy", agent=workers["w1"], patience=0)
    assert "version 4" in repr(publisher)
    publisher.close()
    with pytest.raises(UsageError, match="is closed"):
        publisher.publish()


def test_a_publisher_is_closed_once(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    weights = {"a": torch.zeros(3)}
    step = torch.tensor(1)
    with Publisher(weights, "policy", agent=workers["w0"]) as first:
        assert first.publish(step) == 1  # type: ignore[arg-type]
        step += 1
        assert type(first.version) is int
        assert first.version == 1
        first.close()
        second = Publisher(weights, "policy", agent=workers["w0"])
    second.publish(2)
    assert subscribe(workers, "w1").newer_than(1).result(PATIENCE) == 2
    second.close()


def test_the_names_are_part_of_the_package() -> None:
    assert telegrad.weights.Publisher is Publisher


def test_a_view_is_not_written_while_it_is_used(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    weights = {"a": torch.zeros(1000)}
    publisher = Publisher(weights, "policy", agent=workers["w0"])
    publisher.publish(0)
    subscriber = subscribe(workers, "w1")
    with subscriber.view(timeout=PATIENCE) as (version, tensors):
        for value in range(1, 6):
            weights["a"].fill_(value)
            publisher.publish(value)
            assert subscriber.newer_than(value - 1).result(PATIENCE) == value
        assert version == 0
        assert not tensors["a"].any()
    with subscriber.view(timeout=PATIENCE) as (version, tensors):
        assert version == 5
        assert tensors["a"].eq(5).all()


def test_subscribers_that_wait_do_not_delay_a_shutdown(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(2)
    Publisher(nn.Linear(2, 2), "policy", agent=workers["w0"]).publish(1)
    assert subscribe(workers, "w1").newer_than(0).result(PATIENCE) == 1
    waits = ("next_version", "next_update")
    until(lambda: any(call.function in waits for call in workers["w0"].calls()))
    assert not workers["w0"]._runtime.has_calls_in_progress()
