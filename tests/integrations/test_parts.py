"""What the plug-ins for other packages share, without these packages."""

from __future__ import annotations

import importlib
import pickle
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from telegrad import errors
from telegrad.integrations.membership import Membership
from telegrad.integrations.progress import ProgressRegistry, VersionProgress, wait_for_workers
from telegrad.integrations.request_queue import Request, RequestQueues, enqueue
from telegrad.integrations.stream_publisher import StreamPublisher
from telegrad.testing import LocalCluster
from telegrad.weights import Subscriber

PATIENCE = 40.0


@pytest.fixture
def workers() -> Iterator[LocalCluster]:
    with LocalCluster(3, fixed_size=False) as cluster:
        yield cluster


@pytest.mark.parametrize("package", ["torchrl", "vllm", "verl"])
def test_a_missing_package_is_named(package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=rf"telegrad\[{package}\]"):
        importlib.import_module(f"telegrad.integrations.{package}")


def test_a_process_makes_a_group_that_a_copy_joins() -> None:
    first = Membership()
    host = first.agent_of_host("host")
    try:
        assert host is first.agent()
        assert first.store is not None
        second = pickle.loads(pickle.dumps(first))
        joined = second.agent(prefix="copy")
        try:
            assert joined.name.startswith("copy-")
            assert joined.call("host", abs, -2) == 2
        finally:
            second.close()
    finally:
        first.close()
    first.close()


def test_a_given_agent_is_not_closed(workers: LocalCluster) -> None:
    membership = Membership(workers["w0"])
    assert membership.agent_of_host("other") is workers["w0"]
    assert membership.store is None
    membership.close()
    assert workers["w0"].call("w1", abs, -2) == 2


def test_a_process_without_a_group_is_told_what_is_missing() -> None:
    with pytest.raises(errors.UsageError, match="pass `agent`, or the address"):
        Membership().agent()
    for address in ("nowhere", ":29500", "host:port"):
        with pytest.raises(errors.UsageError, match="HOST:PORT"):
            Membership(store=address)


def test_a_sender_waits_for_the_workers_that_live(workers: LocalCluster) -> None:
    receivers = {}
    for name in ("w1", "w2"):
        receivers[name] = VersionProgress()
        ProgressRegistry.of(workers[name]).add("policy", receivers[name])
        receivers[name].set(0)

    def versions(wait_for: int | None = None) -> dict[str, int]:
        return wait_for_workers(workers["w0"], "policy", wait_for, PATIENCE)

    assert versions(0) == {"w1": 0, "w2": 0}
    receivers["w2"].set(1)
    later = threading.Thread(target=receivers["w1"].set, args=(1,))
    later.start()
    assert versions(1) == {"w1": 1, "w2": 1}
    later.join()
    workers.kill("w1")
    receivers["w2"].set(2)
    assert versions(2) == {"w2": 2}
    ProgressRegistry.of(workers["w2"]).remove("policy", receivers["w2"])
    assert versions(3) == {}


def test_a_sender_gets_the_error_of_a_worker(workers: LocalCluster) -> None:
    progress = VersionProgress()
    ProgressRegistry.of(workers["w1"]).add("policy", progress)
    progress.set(1)
    progress.fail(2, ValueError("another shape"))
    with pytest.raises(ValueError, match="another shape"):
        wait_for_workers(workers["w0"], "policy", 2, PATIENCE)
    assert wait_for_workers(workers["w0"], "policy", 1, PATIENCE) == {"w1": 1}


def test_a_sender_gives_up_after_its_time_limit(workers: LocalCluster) -> None:
    progress = VersionProgress()
    ProgressRegistry.of(workers["w1"]).add("policy", progress)
    with pytest.raises(errors.CallTimeout):
        wait_for_workers(workers["w0"], "policy", 1, 0.2)
    progress.close()


def test_requests_are_taken_in_order_and_answered(workers: LocalCluster) -> None:
    queue = RequestQueues.of(workers["w1"]).queue("policy")
    replies = [workers["w0"].submit("w1", enqueue, "policy", number) for number in range(3)]
    taken: list[Request] = []
    while len(taken) < 3:
        queue.wait(PATIENCE)
        taken += queue.take(2)
    for request in taken:
        if request.value == 1:
            request.reply.set_exception(KeyError("one"))
        else:
            request.reply.set_result(-request.value)
    assert [replies[0].result(PATIENCE), replies[2].result(PATIENCE)] == [0, -2]
    with pytest.raises(KeyError):
        replies[1].result(PATIENCE)
    assert queue.take(1) == []
    queue.wait(0.0)


def test_a_request_whose_caller_is_lost_is_removed(workers: LocalCluster) -> None:
    queue = RequestQueues.of(workers["w1"]).queue("policy")
    lost = workers["w2"].submit("w1", enqueue, "policy", "lost")
    queue.wait(PATIENCE)
    workers.kill("w2")
    with pytest.raises(errors.TelegradError):
        lost.result(PATIENCE)
    kept = workers["w0"].submit("w1", enqueue, "policy", "kept")
    values: list[object] = []
    while "kept" not in values:
        queue.wait(PATIENCE)
        taken = queue.take(5)
        values += [request.value for request in taken]
        for request in taken:
            if not request.reply.done():
                request.reply.set_result(None)
    kept.result(PATIENCE)


def pairs(value: float) -> Iterator[tuple[str, Tensor]]:
    yield "a", torch.full((3,), value)
    yield "b", torch.full((2, 2), value, dtype=torch.bfloat16)


def test_a_stream_of_tensors_is_a_version(workers: LocalCluster) -> None:
    publisher = StreamPublisher("policy", workers["w0"])
    assert publisher.version == 0
    assert publisher.name.startswith("policy-")
    assert publisher.name != StreamPublisher("policy", workers["w0"]).name
    with Subscriber(publisher.name, agent=workers["w1"]) as subscriber:
        for version in (1, 2):
            assert publisher.publish(pairs(version)) == version == publisher.version
            assert subscriber.newer_than(version - 1).result(PATIENCE) == version
            received_version, received = subscriber.state_dict(timeout=PATIENCE)
            assert received_version == version
            for name, tensor in pairs(version):
                assert torch.equal(received[name], tensor)
        with pytest.raises(errors.UsageError, match="shapes"):
            publisher.publish([("a", torch.zeros(4))])
    publisher.close()
    publisher.close()
