"""Where tensors arrive: device maps, with torch's meta device in place of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import telegrad.cuda.transfers  # noqa: F401  # sets the reducer of tensors on devices
from telegrad.errors import UsageError
from telegrad.messages.device_routes import (
    DeviceRoute,
    is_device_map,
    parse_device,
    reply_route,
    request_route,
)
from telegrad.wire import tensors
from tests.conftest import Clusters

CPU, META = torch.device("cpu"), torch.device("meta", 0)
CUDA = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture
def transport() -> str:
    return "unix"


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo that the process checks all CPU tensors as soon as one device map moves them."""
    monkeypatch.setattr(tensors._Hooks, "maps_cpu", False)


def kind(x: Tensor) -> tuple[str, bool]:
    return x.device.type, x.requires_grad


def test_cpu_tensors_arrive_on_the_device_of_the_map(cluster: Clusters) -> None:
    workers = cluster(3, device_maps={"w1": {"cpu": "meta"}})
    w0, w2 = workers["w0"], workers["w2"]
    assert w0.call("w1", kind, torch.ones(3)) == ("meta", False)
    assert w0.call("w1", kind, torch.ones(3, requires_grad=True)) == ("meta", True)
    assert w0.call("w1", kind, torch.ones(3, requires_grad=True)[1:]) == ("meta", True)
    marked = torch.ones(3)
    marked.__dict__["note"] = "kept"
    assert w0.call("w1", note_of, marked) == ("meta", "kept")
    assert w0.call("w1", kinds, [torch.ones(1)] * 40) == {"meta"}
    assert w0.call("w2", kind, torch.ones(3)) == ("cpu", False)
    assert w2.call("w0", kind, torch.ones(3)) == ("cpu", False)


def note_of(x: Tensor) -> tuple[str, str]:
    return x.device.type, x.__dict__["note"]


def kinds(values: list[Tensor]) -> set[str]:
    return {x.device.type for x in values}


def test_a_map_that_sends_two_devices_to_one_is_refused(cluster: Clusters) -> None:
    maps = {"w1": {"cuda:0": "cuda:1", "cuda:2": "cuda:1"}}
    with pytest.raises(UsageError, match="sends two devices to one"):
        request_route(maps, "w1", "same")
    w0 = cluster(2, device_maps=maps)["w0"]
    with pytest.raises(UsageError, match="the device map for 'w1' sends two devices to one"):
        w0.call("w1", abs, -1)
    assert w0.call("w0", abs, -1) == 1


def test_replies_go_the_way_back() -> None:
    devices = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    there = request_route({"w1": devices}, "w1", "same")
    back = reply_route(devices, "same")
    assert (there.is_reply, back.is_reply) == (False, True)
    for device in (*CUDA, CPU):
        target = there.target(device)
        assert target is not None
        assert back.target(target) == device


@pytest.mark.parametrize(
    ("unmapped", "target", "falls_back"),
    [("same", CUDA[2], False), ("cpu", CUDA[2], True), ("refuse", None, False)],
)
def test_devices_that_are_not_in_the_map(
    unmapped: str, target: torch.device | None, falls_back: bool
) -> None:
    route = DeviceRoute({CUDA[0]: CUDA[1]}, unmapped)
    assert route.target(CUDA[0]) == CUDA[1]
    assert route.target(CUDA[2]) == target
    assert route.target(CPU) == CPU
    assert route.falls_back_to_cpu(CUDA[2]) is falls_back
    assert route.falls_back_to_cpu(CUDA[0]) is False


def test_a_device_without_an_index_is_the_first() -> None:
    assert parse_device("cuda") == CUDA[0] == parse_device(CUDA[0])
    assert parse_device("cpu") == CPU
    assert parse_device("meta") == META


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({}, True),
        ({"cuda:0": "cuda:1"}, True),
        ({"cuda:0": "no device"}, False),
        ({"cuda:0": None}, False),
        ({("a",): "cpu"}, False),
        (["cuda:0"], False),
        (None, False),
    ],
)
def test_what_a_peer_may_send_as_a_device_map(value: object, valid: bool) -> None:
    assert is_device_map(value) is valid
