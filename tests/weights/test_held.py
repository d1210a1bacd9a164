"""A pull with `have` writes only what changed, and only if the model holds what it should."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.weights import Publisher, Subscriber, changes, held
from tests.conftest import Clusters
from tests.weights.conftest import PATIENCE, Model, Subscribe

SIZE = 200_000


def weights() -> dict[str, Tensor]:
    return {
        "a": torch.randn(SIZE).bfloat16(),
        "b": torch.randn(500, 100),
        "c": torch.zeros(7, dtype=torch.int64),
        "none": torch.empty(0, 3),
        "d": torch.randn(300),
    }


def change(tensors: dict[str, Tensor], share: int = 100) -> None:
    for tensor in tensors.values():
        bits = tensor.view(-1).view(torch.uint8)
        if tensor.numel():
            bits[torch.randint(bits.numel(), (max(1, tensor.numel() // share),))] += 1


class Followed:
    """A publisher, a subscriber and a model that holds what was published."""

    def __init__(self, publisher: Publisher, tensors: dict[str, Tensor], subscriber: Subscriber):
        self.publisher = publisher
        self.tensors = tensors
        self.subscriber = subscriber
        self.model = {name: torch.zeros_like(each) for name, each in tensors.items()}
        self.version: int | None = None
        self.applied: list[bool] = []  # of pulls that had a log

    def step(self, **options: Any) -> None:
        """Publish a version, pull it and compare it."""
        self.publish()
        self.pull(**options)

    def publish(self) -> None:
        change(self.tensors)
        self.publisher.publish()

    def pull(self, **options: Any) -> None:
        assert self.publisher.version is not None
        self.subscriber.newer_than(self.publisher.version - 1).result(PATIENCE)
        self.version = self.subscriber.pull_into(self.model, have=self.version, **options)
        assert self.version == self.publisher.version
        self.check()

    def check(self) -> None:
        for name, tensor in self.tensors.items():
            ours, theirs = (each.view(-1).view(torch.uint8) for each in (self.model[name], tensor))
            assert torch.equal(ours, theirs), name

    def used_changes(self, action: Callable[[], None]) -> bool | None:
        """Return whether a pull wrote only changes; None if it did not try."""
        self.applied.clear()
        action()
        return self.applied[-1] if self.applied else None


@pytest.fixture
def followed(
    cluster: Clusters, subscribe: Subscribe, transport: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Followed]:
    workers = cluster(2, transports=(transport,))
    tensors = weights()
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    found = Followed(publisher, tensors, subscribe(workers, "w1"))
    write = held.HeldWeights._write_changes

    def spy(*arguments: Any) -> bool:
        found.applied.append(write(*arguments))
        return found.applied[-1]

    monkeypatch.setattr(held.HeldWeights, "_write_changes", spy)
    for _ in range(3):  # the second pull is the first one that asks for changes
        found.step()
    yield found
    vars(found).clear()  # its memory is freed with it


def test_only_changes_are_written(followed: Followed) -> None:
    for _ in range(40):
        assert followed.used_changes(followed.step) is True


def test_versions_may_be_skipped(followed: Followed) -> None:
    for count in (2, 3):
        for _ in range(count):
            followed.publish()
            followed.publisher.flush(PATIENCE)
        assert followed.used_changes(followed.pull) is True


def test_many_changes_are_copied_whole(followed: Followed) -> None:
    followed.tensors["a"].copy_(torch.randn(SIZE))
    assert followed.used_changes(followed.step) is None
    assert followed.used_changes(followed.step) is True


def test_without_have_everything_is_copied(followed: Followed) -> None:
    followed.version = None
    assert followed.used_changes(followed.step) is None
    assert followed.used_changes(followed.step) is True


def test_writes_that_pytorch_counts_are_undone(followed: Followed) -> None:
    writes: list[Callable[[], object]] = [
        followed.model["b"][3:4].zero_,
        lambda: followed.model["b"].detach()[0, 0].add_(1),
        lambda: followed.model["a"][:1].fill_(3),
        lambda: torch._foreach_add_(list(followed.model.values()), 1),
        lambda: followed.model.update(b=torch.zeros(500, 100)),
        lambda: followed.model.update(b=followed.tensors["b"].clone()),
    ]
    for write in writes:
        write()
        assert followed.used_changes(followed.step) is None
        assert followed.used_changes(followed.step) is True


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_writes_is_noticed(followed: Followed, fused: bool) -> None:
    model = nn.Linear(100, 500, bias=False)
    followed.model["b"] = model.weight
    followed.step()
    followed.step()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    model(torch.randn(2, 100)).sum().backward()
    before = model.weight._version
    optimizer.step()
    if model.weight._version == before:  # PyTorch does not count all fused operations
        with pytest.warns(RuntimeWarning, match="does not count"):
            followed.step()
    else:
        assert followed.used_changes(followed.step) is None


def test_writes_that_pytorch_does_not_count_are_found(followed: Followed) -> None:
    writes: list[Callable[[], object]] = [
        lambda: followed.model["b"].data.add_(0.1),
        lambda: followed.model["d"].numpy().fill(3),
        lambda: followed.model["a"].data.mul_(-1),
        lambda: followed.model["c"].data.add_(1),
    ]
    for write in writes:
        write()
        with pytest.warns(RuntimeWarning, match="does not count"):
            assert followed.used_changes(followed.step) is False
        assert followed.used_changes(followed.step) is True


def test_a_single_uncounted_write_is_found_in_time(followed: Followed) -> None:
    followed.model["a"].data[77_777] += 5
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(held._TURNS):
            change(followed.tensors)
            followed.publisher.publish()
            followed.subscriber.newer_than(followed.version).result(PATIENCE)
            followed.version = followed.subscriber.pull_into(followed.model, have=followed.version)
    assert len(found) == 1
    followed.check()


def test_another_model_with_the_same_version_is_copied_whole(followed: Followed) -> None:
    followed.model = {name: each.clone() for name, each in followed.model.items()}
    followed.model["b"].zero_()
    assert followed.used_changes(followed.step) is None
    assert followed.used_changes(followed.step) is True


def test_other_names_are_copied_whole(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    tensors = {"a": torch.zeros(100_000), "b": torch.ones(100_000)}
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    copy = {"x": torch.empty(100_000)}
    for version, name in enumerate("aaabbab"):
        tensors["a"][version] += 1
        tensors["b"][version] += 1
        publisher.publish(version)
        subscriber.newer_than(version - 1).result(PATIENCE)
        subscriber.pull_into(copy, names={"x": name}, have=version - 1)
        assert torch.equal(copy["x"], tensors[name])


def test_tied_and_converted_tensors_and_views(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    tied = torch.randn(300, 200)
    tensors = {"a": tied, "b": tied, "c": torch.randn(300, 200), "d": torch.randn(300, 200)}
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    shared = torch.zeros(300, 200)
    columns = torch.zeros(300, 400)
    copies: list[dict[str, Tensor]] = [
        {"a": shared, "b": shared},
        {"a": torch.zeros(300, 200), "b": torch.zeros(300, 200)},
        {"a": torch.zeros(300, 200).half(), "c": torch.zeros(300, 200)},
        {"c": torch.zeros(200, 300).t(), "d": torch.zeros(300, 200)},
        {"c": columns[:, ::2], "d": columns[:, 1::2]},
    ]
    for version in range(5):
        for tensor in tensors.values():
            tensor.view(-1)[version * 50 : version * 50 + 100] += 1
        publisher.publish(version)
        subscriber.newer_than(version - 1).result(PATIENCE)
        for copy in copies:
            assert subscriber.pull_into(copy, have=version - 1 if version else None) == version
            for name, tensor in copy.items():
                assert torch.equal(tensor, tensors[name].to(tensor.dtype))


def test_a_module_that_requires_gradients(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    model, copy = Model(), Model()
    publisher = Publisher(model, "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    for version in range(5):
        with torch.no_grad():
            model.layer.weight[version] += 1
            model.embedding.weight[version] += 1
        publisher.publish(version)
        subscriber.newer_than(version - 1).result(PATIENCE)
        loss = (copy.layer.weight**2).sum()
        subscriber.pull_into(copy, have=version - 1 if version else None)
        assert torch.equal(copy.layer.weight, model.layer.weight)
        assert torch.equal(copy.head.weight, model.head.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_threads_that_pull_into_one_model(followed: Followed) -> None:
    errors: list[BaseException] = []

    def pull() -> None:
        version: int | None = None
        try:
            while version is None or version < 40:
                version = followed.subscriber.pull_into(followed.model, have=version)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4, 45):
        followed.publish()
        followed.publisher.flush(PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []
    followed.version = None
    followed.pull()
    followed.step()


def test_no_memory_for_a_log(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that makes it fails: the publisher, or the subscriber that receives."""

    def fail(*_: object) -> None:
        raise MemoryError("none is left")

    is_publisher = followed.subscriber._receiver._store is None  # type: ignore[union-attr]
    with monkeypatch.context() as context:
        context.setattr(changes.ChangeLog, "add", fail)
        if is_publisher:
            assert followed.used_changes(followed.step) is None
        else:
            with pytest.raises(MemoryError, match="none is left"):
                followed.step()
    if is_publisher:
        with pytest.raises(MemoryError, match="none is left"):
            followed.publisher.flush(PATIENCE)
        with pytest.raises(MemoryError, match="none is left"):
            followed.publish()
    else:
        followed.step()


def test_a_single_element_with_a_stride(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    tensors = {"scale": torch.zeros(1), "other": torch.zeros(5000)}
    publisher = Publisher(tensors, "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    model = {"scale": torch.zeros(1, 4)[:, 0], "other": torch.zeros(5000)}
    for version in range(5):
        tensors["scale"] += 1
        publisher.publish(version)
        subscriber.newer_than(version - 1).result(PATIENCE)
        have = version - 1 if version else None
        assert subscriber.pull_into(model, have=have) == version
        assert model["scale"].item() == version + 1


def test_a_closed_subscriber_has_no_newest_version(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(2)
    model = {"a": torch.zeros(3)}
    publisher = Publisher(model, "policy", agent=workers["w0"])
    subscriber = subscribe(workers, "w1")
    publisher.publish(0)
    subscriber.newer_than(None).result(PATIENCE)
    wrong: list[Any] = [0.5, "0", float("nan")]
    for version in wrong:
        with pytest.raises(UsageError, match="a version is an integer"):
            subscriber.pull_into(model, have=version)
    subscriber.close()
    with pytest.raises(UsageError, match="is closed"):
        subscriber.pull_into(model, have=0)
