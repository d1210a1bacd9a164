"""Weights on a GPU reach other processes of the host through the memory of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.testing import LocalCluster
from telegrad.weights import Publisher, Subscriber, held
from tests.gpu.group import join
from tests.local.gates import PATIENCE
from tests.process.fleet import Fleet

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64)


def weights(device: str = "cuda", value: int = 0) -> dict[str, Tensor]:
    tensors = {
        str(dtype): torch.full((301, 77), value, dtype=dtype, device=device) for dtype in DTYPES
    }
    tensors["empty"] = torch.empty(0, 3, device=device)
    tensors["transposed"] = torch.full((40, 50), value, device=device).t()
    tensors["tied"] = tensors["transposed"]
    return tensors


def values_of(tensors: dict[str, Tensor]) -> set[float]:
    """Return all different values, but those of flags: one if it is not a mix of versions."""
    reals = [each.real if each.is_complex() else each for each in tensors.values()]
    return {
        value
        for tensor in reals
        if tensor.dtype != torch.bool
        for value in tensor.double().unique().tolist()
    }


# In the processes


class State:
    publisher: Publisher
    subscriber: Subscriber
    tensors: dict[str, Tensor]


def open_publisher(device: str = "cuda") -> None:
    torch.cuda.init()
    State.tensors = weights(device)
    State.publisher = Publisher(State.tensors, "policy")


def publish(version: int) -> None:
    for tensor in State.tensors.values():
        tensor.fill_(version)
    State.publisher.publish(version)


def publish_many(first: int, last: int) -> None:
    for version in range(first, last + 1):
        publish(version)
        State.publisher.flush(PATIENCE)


def version_in_host_memory() -> int | None:
    return State.publisher._store.version


def open_subscriber(device: str | None = "cuda") -> None:
    State.subscriber = Subscriber("policy", device=device, patience=5.0)


def check(version: int, device: str = "cuda") -> int:
    """Wait for a version and copy it. Return the bytes that arrived over connections."""
    copy = weights(device, 99)
    State.subscriber.newer_than(version - 1).result(PATIENCE)
    found = State.subscriber.pull_into(copy, timeout=PATIENCE)
    assert found >= version
    assert values_of(copy) == {float(found)}
    number, tensors = State.subscriber.state_dict(timeout=PATIENCE)
    assert values_of(tensors) == {float(number)}
    return State.subscriber.received.nbytes


def check_until(version: int) -> None:
    found = -1
    while found < version:
        copy = weights(value=99)
        found = State.subscriber.pull_into(copy, timeout=PATIENCE)
        assert values_of(copy) == {float(found)}


@pytest.fixture(params=[True, False], ids=["device memory", "host memory"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """Four processes that share one GPU, with or without CUDA IPC."""
    config = {
        "cuda_ipc": request.param,
        "heartbeat_interval": 0.2,
        "heartbeat_timeout": 5.0,
        "resume_timeout": 2.0,
    }
    with Fleet(4, join, str(tmp_path / "store"), {"config": config}) as fleet:
        yield fleet


def test_processes_read_versions_on_the_gpu(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    fleet[0].do(open_publisher)
    for rank in (1, 2, 3):
        fleet[rank].do(open_subscriber)
    for version in range(5):
        fleet[0].do(publish, version)
        for rank in (1, 2, 3):
            assert fleet[rank].do(check, version) == 0
    on_device = request.node.callspec.params["fleet"]
    assert fleet[0].do(version_in_host_memory) == (None if on_device else 4)


def test_others_get_them_through_host_memory(fleet: Fleet) -> None:
    fleet[0].do(open_publisher)
    fleet[1].do(open_subscriber)
    fleet[0].do(publish, 1)
    fleet[1].do(check, 1)
    fleet[2].do(open_subscriber, None)
    fleet[2].do(check, 1, "cpu")
    fleet[0].do(publish, 2)
    fleet[2].do(check, 2, "cpu")
    fleet[2].do(check, 2, "cuda")
    fleet[1].do(check, 2, "cpu")


def test_weights_in_host_memory_are_copied_to_the_gpu(fleet: Fleet) -> None:
    fleet[0].do(open_publisher, "cpu")
    for rank in (1, 2, 3):
        fleet[rank].do(open_subscriber)
    for version in range(3):
        fleet[0].do(publish, version)
        for rank in (1, 2, 3):
            assert fleet[rank].do(check, version) == 0


def test_pulls_never_mix_two_versions(fleet: Fleet) -> None:
    fleet[0].do(open_publisher)
    fleet[0].do(publish, 0)
    for rank in (1, 2, 3):
        fleet[rank].do(open_subscriber)
        fleet[rank].begin(check_until, 100)
    fleet[0].do(publish_many, 1, 100)
    for rank in (1, 2, 3):
        fleet[rank].result()


def test_processes_that_are_killed(fleet: Fleet) -> None:
    fleet[0].do(open_publisher)
    for rank in (1, 2, 3):
        fleet[rank].do(open_subscriber)
    fleet[0].do(publish, 0)
    for rank in (1, 2, 3):
        fleet[rank].begin(check_until, 10)
    fleet[1].kill()
    fleet[0].do(publish_many, 1, 10)
    for rank in (2, 3):
        fleet[rank].result()
        fleet[rank].begin(check_until, 20)
    fleet[0].kill()
    fleet.restart(0)
    fleet[0].do(open_publisher)
    fleet[0].do(publish_many, 11, 20)
    for rank in (2, 3):
        fleet[rank].result()


# In one process


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_of_one_process(transport: str, device: str) -> None:
    with LocalCluster(3, transports=(transport,)) as cluster:
        tensors = weights(device)
        publisher = Publisher(tensors, "policy", agent=cluster["w0"])
        subscribers = [
            Subscriber("policy", agent=cluster[name], device="cuda") for name in ("w1", "w2")
        ]
        for version in range(4):
            for tensor in tensors.values():
                tensor.fill_(version)
            publisher.publish(version)
            for each in subscribers:
                assert each.newer_than(version - 1).result(PATIENCE) == version
                copy = weights(value=99)
                assert each.pull_into(copy) == version
                assert values_of(copy) == {float(version)}
        for each in subscribers:
            each.close()
        publisher.close()


def test_a_reader_that_was_taken_for_lost_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(2) as cluster:
        publisher = Publisher(weights(value=3), "policy", agent=cluster["w0"])
        store = publisher._device_store
        assert store is not None
        publisher.publish(3)
        copy_all = held._copy
        copied: list[int] = []

        def lose_reader(copies: list[tuple[Tensor, Tensor]]) -> None:
            if not copied:
                for ticket in list(store._tickets.values()):
                    store.reader_lost(ticket.reader)
            copied.append(len(copies))
            copy_all(copies)

        with Subscriber("policy", agent=cluster["w1"], device="cuda") as reader:
            reader.newer_than(None).result(PATIENCE)
            monkeypatch.setattr(held, "_copy", lose_reader)
            copy = weights(value=99)
            assert reader.pull_into(copy) == 3
            assert values_of(copy) == {3}
            assert len(copied) == 2
        publisher.close()


def test_memory_of_the_gpu_is_reused() -> None:
    with LocalCluster(2) as cluster:
        publisher = Publisher(weights(), "policy", agent=cluster["w0"])
        with Subscriber("policy", agent=cluster["w1"], device="cuda") as reader:
            addresses = set()
            for version in range(20):
                publisher.publish(version)
                reader.newer_than(version - 1).result(PATIENCE)
                reader.pull_into(weights())
                publisher.flush(PATIENCE)
                assert publisher._device_store is not None
                current = publisher._device_store.current()
                assert current is not None
                addresses.add(current.contents.data_ptr())
            assert len(addresses) <= 3
        publisher.close()


def test_devices_that_do_not_exist() -> None:
    with LocalCluster(2) as cluster:
        with pytest.raises(UsageError, match="not on 'cpu'"):
            Subscriber("policy", agent=cluster["w0"], device="cpu")
        with pytest.raises(UsageError, match="no device cuda:99"):
            Subscriber("policy", agent=cluster["w0"], device="cuda:99")
        with Subscriber("policy", agent=cluster["w0"], device="cuda"):
            with pytest.raises(UsageError, match="same `device`"):
                Subscriber("policy", agent=cluster["w0"])
