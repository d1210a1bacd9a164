"""One value that answers several calls is packed once and copied once, and each caller owns what it
gets.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import batched
from telegrad.autograd import api as autograd
from telegrad.futures import Future
from telegrad.refs import RRef
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from telegrad.transport.segments import MappedSegment
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Shared, until
from tests.local.models import Model

LARGE = 1 << 18  # elements; a megabyte
CALLERS = ("w1", "w2", "w3")


class Meeting(Shared):
    """All callers get the same future."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Any = Future()
        self.here = 0
        self._lock = threading.Lock()

    def arrive(self) -> Any:
        with self._lock:
            self.here += 1
            return self.future


@async_execution
def meet(meeting: Meeting) -> Any:
    return meeting.arrive()


@pytest.fixture
def workers(cluster: Clusters) -> Iterator[LocalCluster]:
    Model.packed = 0
    workers = cluster(len(CALLERS) + 1)
    yield workers
    gc.collect()


def waiting(
    workers: LocalCluster, meeting: Meeting, callers: tuple[str, ...] = CALLERS
) -> list[Any]:
    futures = [workers[name].submit("w0", meet, meeting) for name in callers]
    until(lambda: meeting.here == len(callers))
    return futures


def test_it_is_packed_once_and_each_caller_owns_what_it_gets(workers: LocalCluster) -> None:
    meeting = Meeting()
    futures = waiting(workers, meeting)
    weights = torch.arange(LARGE, dtype=torch.float32)
    meeting.future.set_result(Model(weights))
    weights.zero_()  # what is sent is what it was when the future was completed
    models = [future.result(PATIENCE) for future in futures]
    assert Model.packed == 1
    for number, model in enumerate(models):
        assert torch.equal(model.weights, torch.arange(LARGE, dtype=torch.float32))
        model.weights.fill_(number + 1)
    assert [model.weights.unique().tolist() for model in models] == [[1.0], [2.0], [3.0]]


def test_memory_that_was_written_to_does_not_hide_what_comes_next(workers: LocalCluster) -> None:
    for step in range(5):
        meeting = Meeting()
        futures = waiting(workers, meeting)
        meeting.future.set_result(torch.full((LARGE,), float(step)))
        for future in futures:
            tensor = future.result(PATIENCE)
            assert tensor.unique().tolist() == [float(step)]
            tensor.fill_(-1.0)
            del tensor
        del future, futures
        gc.collect()


def test_one_worker_that_waits_twice_gets_two(workers: LocalCluster) -> None:
    meeting = Meeting()
    futures = waiting(workers, meeting, ("w1", "w1", "w2"))
    meeting.future.set_result(torch.ones(LARGE))
    one, two, three = (future.result(PATIENCE) for future in futures)
    one.fill_(2.0)
    assert two.unique().tolist() == [1.0]
    assert three.unique().tolist() == [1.0]


def test_the_memory_is_free_when_all_receivers_are_done(workers: LocalCluster) -> None:
    meeting = Meeting()
    futures = waiting(workers, meeting)
    meeting.future.set_result(torch.ones(LARGE))
    values = [future.result(PATIENCE) for future in futures]
    del futures, meeting
    gc.collect()
    allocator = workers["w0"]._runtime.endpoint.allocator
    blocks = sum(len(segment.blocks) for segment in allocator._segments)
    assert blocks in (0, len(CALLERS))  # none where memory is not shared
    values.pop()
    del values
    gc.collect()

    def swept() -> bool:
        for segment in allocator._segments:
            segment.reclaim()
        return not any(segment.blocks for segment in allocator._segments)

    until(swept)
    for segment in allocator._segments:
        assert not segment._shared_slots
        assert len(segment._free_ranges) == 1


def test_a_caller_that_gave_up_costs_nothing(workers: LocalCluster) -> None:
    meeting = Meeting()
    futures = waiting(workers, meeting)
    futures[0].cancel()
    until(
        lambda: (
            sum(
                connection.deferred_calls
                for connection in workers["w0"]._runtime.listener.connections
            )
            == 2
        )
    )
    meeting.future.set_result(torch.ones(LARGE))
    assert [future.result(PATIENCE).sum().item() for future in futures[1:]] == [LARGE] * 2


def test_all_hear_of_an_error(workers: LocalCluster) -> None:
    meeting = Meeting()
    futures = waiting(workers, meeting)
    meeting.future.set_exception(ValueError("no model today"))
    for future in futures:
        with pytest.raises(ValueError, match="no model today"):
            future.result(PATIENCE)


def test_who_comes_after_it_is_complete_gets_what_it_is_then(workers: LocalCluster) -> None:
    meeting = Meeting()
    value = torch.zeros(4)
    futures = waiting(workers, meeting)
    meeting.future.set_result(value)
    assert [future.result(PATIENCE).sum().item() for future in futures] == [0.0] * 3
    value.fill_(1.0)
    assert workers["w1"].call("w0", meet, meeting).sum().item() == 4.0


def test_references_are_counted_for_each_receiver(workers: LocalCluster) -> None:
    meeting = Meeting()
    futures = waiting(workers, meeting)
    meeting.future.set_result(RRef(torch.ones(3), agent=workers["w0"]))
    for future in futures:
        assert future.result(PATIENCE).to_here().sum().item() == 3.0


def test_gradients_travel_to_each_caller_that_wants_them(
    workers: LocalCluster, in_background: Any
) -> None:
    meeting = Meeting()
    weights = torch.ones(3, requires_grad=True)
    plain = waiting(workers, meeting, ("w2", "w3"))

    def train() -> Any:
        with autograd.context(agent=workers["w1"]) as context:
            loss = workers["w1"].call("w0", meet, meeting).sum()
            autograd.backward(context, [loss])
            return workers["w1"].call("w0", gradient_of, context, Holder(weights))

    training = in_background(train)
    until(lambda: meeting.here == 3)
    meeting.future.set_result(weights * 2)
    assert [future.result(PATIENCE).sum().item() for future in plain] == [6.0] * 2
    assert training.result(PATIENCE).tolist() == [2.0] * 3


class Holder(Shared):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def gradient_of(context: int, holder: Holder) -> Tensor:
    return autograd.get_gradients(context)[holder.value]


@batched(max_size=3, min_size=3)
def same_for_all(_: list[int]) -> list[Any]:
    model = Model(torch.ones(LARGE))
    return [model, model, model]


def test_a_batch_that_has_one_answer_packs_it_once(workers: LocalCluster) -> None:
    futures = [workers[name].submit("w0", same_for_all, 1) for name in CALLERS]
    models = [future.result(PATIENCE) for future in futures]
    assert [model.weights.sum().item() for model in models] == [LARGE] * 3
    assert Model.packed <= 2  # the thread that ran the batch answers its own call by itself


def test_only_those_who_share_map_privately(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[bool] = []
    view = MappedSegment.private_view

    def counted_view(self: MappedSegment, place: Any) -> Any:
        views.append(True)
        return view(self, place)

    monkeypatch.setattr(MappedSegment, "private_view", counted_view)
    with LocalCluster(3, transports=("unix",)) as workers:
        assert workers["w1"].call("w0", torch.ones, LARGE).sum().item() == LARGE
        assert not views
        meeting = Meeting()
        futures = waiting(workers, meeting, ("w1", "w2"))
        meeting.future.set_result(torch.ones(LARGE))
        assert [future.result(PATIENCE).sum().item() for future in futures] == [LARGE] * 2
        assert views == [True] * 2
        del futures


def test_a_receiver_that_takes_nothing_holds_up_no_other(
    workers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting()
    futures = waiting(workers, meeting)
    stuck, go = threading.Event(), threading.Event()
    for connection in workers["w0"]._runtime.listener.connections:
        if connection.peer_name == "w1":
            send = connection.channel.send

            def send_late(*args: Any, send: Any = send, **kwargs: Any) -> None:
                stuck.set()
                assert go.wait(PATIENCE)
                send(*args, **kwargs)

            monkeypatch.setattr(connection.channel, "send", send_late)
    value = torch.ones(LARGE)
    meeting.future.set_result(value)  # returns although w1 takes nothing
    assert stuck.wait(PATIENCE)
    assert [future.result(PATIENCE).sum().item() for future in futures[1:]] == [LARGE] * 2
    value.zero_()
    go.set()
    assert futures[0].result(PATIENCE).sum().item() == LARGE
