"""Arguments of calls to a whole group are packed once and copied once, and each worker owns what it
gets.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import WorkerGroup, current_agent, remote
from telegrad.autograd import api as autograd
from telegrad.errors import PeerLost, SerializationError
from telegrad.refs import RRef
from telegrad.testing import LocalCluster
from telegrad.transport.segments import MappedSegment
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, until
from tests.local.models import Model

LARGE = 1 << 18  # elements; a megabyte
MEMBERS = ("w1", "w2", "w3")


_received: dict[str, Tensor] = {}


def my_name() -> str:
    agent = current_agent()
    assert agent is not None
    return agent.name


def keep(model: Model, scale: float = 1.0) -> float:
    """Keep the weights, write the number of this worker to them, and return what they were."""
    total = float(model.weights.sum()) * scale
    _received[my_name()] = model.weights.fill_(int(my_name()[1:]))
    return total


def total(*tensors: Tensor) -> float:
    return float(sum(tensor.sum() for tensor in tensors))


@pytest.fixture(autouse=True)
def nothing_received() -> Iterator[None]:
    Model.packed = 0
    yield
    _received.clear()
    gc.collect()


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    workers = cluster(len(MEMBERS) + 1)
    WorkerGroup(workers["w0"]).gather(my_name)  # a call that waits for its connection is copied
    return workers


def test_they_are_packed_once_and_each_worker_owns_what_it_gets(workers: LocalCluster) -> None:
    weights = torch.ones(LARGE)
    futures = WorkerGroup(workers["w0"]).submit_all(keep, Model(weights), scale=2.0)
    weights.zero_()  # what is sent is what it was when the calls were made
    assert {name: future.result(PATIENCE) for name, future in futures.items()} == dict.fromkeys(
        MEMBERS, 2.0 * LARGE
    )
    assert Model.packed == 1
    for name in MEMBERS:
        assert _received[name].unique().tolist() == [int(name[1:])]
    assert weights.unique().tolist() == [0.0]


@pytest.mark.parametrize("include_self", [False, True])
def test_the_buffer_is_copied_once_for_one_host(
    monkeypatch: pytest.MonkeyPatch, include_self: bool
) -> None:
    views: list[bool] = []
    view = MappedSegment.private_view

    def counted_view(self: MappedSegment, place: Any) -> Any:
        views.append(True)
        return view(self, place)

    with LocalCluster(4, transports=("unix",)) as workers:
        group = WorkerGroup(workers["w0"], include_self=include_self)
        group.gather(my_name)
        monkeypatch.setattr(MappedSegment, "private_view", counted_view)
        assert set(group.gather(total, torch.ones(LARGE)).values()) == {float(LARGE)}
        assert len(views) == len(group)
        allocator = workers["w0"]._runtime.endpoint.allocator
        gc.collect()

        def is_free() -> bool:
            for segment in allocator._segments:
                segment.reclaim()
            return not any(segment.blocks for segment in allocator._segments)

        until(is_free)


@pytest.mark.parametrize("use", [lambda model: float(model.weights.sum()), keep])
def test_functions_by_value_and_by_name(workers: LocalCluster, use: Callable[..., float]) -> None:
    for _ in range(2):
        result = WorkerGroup(workers["w0"]).gather(use, Model(torch.ones(LARGE)))
        assert result == dict.fromkeys(MEMBERS, float(LARGE))
        result.clear()
    assert Model.packed == 2


def test_members_that_are_not_connected_yet(cluster: Clusters) -> None:
    workers = cluster(4)
    weights = torch.ones(LARGE)
    futures = WorkerGroup(workers["w0"]).submit_all(keep, Model(weights))
    weights.zero_()
    assert [future.result(PATIENCE) for future in futures.values()] == [float(LARGE)] * 3
    for name in MEMBERS:
        assert _received[name].unique().tolist() == [int(name[1:])]


def test_references_are_counted_for_each_worker(workers: LocalCluster) -> None:
    own = RRef(torch.ones(3), agent=workers["w0"])
    other = remote("w1", torch.full, ((3,), 2.0), agent=workers["w0"])

    def fetch(*references: Any) -> float:
        return float(sum(reference.to_here().sum() for reference in references))

    group = WorkerGroup(workers["w0"])
    assert group.gather(fetch, own, other) == dict.fromkeys(MEMBERS, 9.0)


def test_gradients_come_back_from_each_worker(workers: LocalCluster) -> None:
    weights = torch.ones(LARGE, requires_grad=True)
    with autograd.context(agent=workers["w0"]) as context:
        losses = WorkerGroup(workers["w0"]).gather(torch.sum, weights)
        autograd.backward(context, list(losses.values()))
        gradients = autograd.get_gradients(context)
    assert gradients[weights].unique().tolist() == [3.0]


def test_parameters_outside_of_a_context_arrive_as_parameters(workers: LocalCluster) -> None:
    layer = nn.Linear(512, 512)
    with torch.no_grad():  # sums of whole numbers do not depend on the alignment of the memory
        layer.weight.copy_(torch.arange(512 * 512).view(512, 512) % 16)

    def describe(other: nn.Linear) -> tuple[bool, float]:
        return isinstance(other.weight, nn.Parameter), float(other.weight.detach().sum())

    expected = True, float(layer.weight.detach().sum())
    assert WorkerGroup(workers["w0"]).gather(describe, layer) == dict.fromkeys(MEMBERS, expected)


def test_a_member_that_is_lost_does_not_keep_them_from_the_others() -> None:
    with LocalCluster(4, fixed_size=False) as workers:
        group = WorkerGroup(workers["w0"])
        group.gather(my_name)
        result = group.submit_all(total, torch.ones(LARGE))
        workers.kill("w2")
        assert result["w1"].result(PATIENCE) == result["w3"].result(PATIENCE) == LARGE
        # w2 replied before it was killed, or is lost
        assert isinstance(result["w2"].exception(), PeerLost | None)


def test_arguments_that_cannot_be_sent_fail_the_call_as_for_one_worker(
    workers: LocalCluster,
) -> None:
    numbers = (number for number in range(3))
    with pytest.raises(SerializationError, match="generator"):
        workers["w0"].submit("w1", list, numbers)
    with pytest.raises(SerializationError, match="generator"):
        WorkerGroup(workers["w0"]).submit_all(list, numbers)
    assert WorkerGroup(workers["w0"]).gather(total, torch.ones(3)) == dict.fromkeys(MEMBERS, 3.0)
