"""NIXL as the bulk engine: which workers use it, and what happens if it fails.

The last tests need the package `nixl`. Without an RDMA device, it uses TCP and shared memory.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad.config import Config
from telegrad.errors import SerializationError, UsageError
from telegrad.testing import LocalCluster
from telegrad.transport import nixl_engine
from telegrad.transport.nixl_engine import NixlEngine, is_wanted
from tests.local.gates import PATIENCE, until

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="needs the package nixl"
)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bool, bool], None]:
    def pretend(is_installed: bool, has_device: bool) -> None:
        found = object() if is_installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setattr(nixl_engine, "_DEVICES", tmp_path)
        if has_device:
            (tmp_path / "mlx5_0").touch()

    return pretend


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("has_device", [True, False])
@pytest.mark.parametrize("tls", ["on", "off"])
def test_it_is_used_only_where_it_gains_something(
    host: Callable[[bool, bool], None], is_installed: bool, has_device: bool, tls: str
) -> None:
    host(is_installed, has_device)
    wanted = is_installed and has_device and tls == "off"
    assert is_wanted(Config(tls=tls)) is wanted
    assert not is_wanted(Config(tls=tls, bulk_engine="tcp"))
    assert not is_wanted(Config(tls=tls, bulk_streams=0))


def test_it_can_be_forced(host: Callable[[bool, bool], None]) -> None:
    host(True, False)
    assert is_wanted(Config(tls="off", bulk_engine="nixl"))
    with pytest.raises(UsageError, match="does not encrypt"):
        is_wanted(Config(bulk_engine="nixl"))
    host(False, False)
    with pytest.raises(UsageError, match=r"pip install telegrad\[nixl\]"):
        is_wanted(Config(tls="off", bulk_engine="nixl"))


def test_another_name_is_refused() -> None:
    with pytest.raises(UsageError, match="bulk_engine must be"):
        Config(bulk_engine="rdma")


# With NIXL


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def wait_for(event: threading.Event, value: torch.Tensor) -> float:
    event.wait(PATIENCE)
    return float(value[0])


@pytest.fixture
def pair() -> Iterator[LocalCluster]:
    with LocalCluster(2, transports=("tcp",), tls="off", bulk_engine="nixl") as cluster:
        yield cluster


def engine(cluster: LocalCluster, name: str) -> NixlEngine:
    found = cluster[name]._runtime.endpoint._nixl
    assert found is not None
    return found


@needs_nixl
def test_large_tensors_travel_by_nixl(pair: LocalCluster) -> None:
    value = torch.randn(1 << 20)
    for call in (pair["w0"].call, lambda *args: pair["w0"].submit(*args).wait()):
        assert torch.equal(call("w1", double, value), value * 2)
    assert engine(pair, "w1").pulled == 2
    until(lambda: engine(pair, "w0").pulled == 2)
    several = [torch.full((200_000 + index,), index) for index in range(8)]
    assert [int(each[-1]) for each in pair["w0"].call("w1", list, several)] == list(range(8))
    until(lambda: not engine(pair, "w0")._described)
    until(lambda: not engine(pair, "w1")._described)


@needs_nixl
def test_descriptions_are_not_unpickled(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL's own format of descriptors is a pickle."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("NIXL unpickles what a peer has sent")

    monkeypatch.setattr(type(engine(pair, "w0")._agent), "deserialize_descs", refuse)
    value = torch.randn(1 << 20)
    assert torch.equal(pair["w0"].submit("w1", double, value).wait(), value * 2)
    assert engine(pair, "w1").pulled == 1


@needs_nixl
def test_what_fails_is_pulled_over_stripes(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no RDMA today")

    monkeypatch.setattr(NixlEngine, "_read", fail)
    value = torch.randn(1 << 20)
    assert torch.equal(pair["w0"].call("w1", double, value), value * 2)
    assert engine(pair, "w1").pulled == 0


@needs_nixl
def test_a_sender_that_gave_up_meanwhile_is_found(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = NixlEngine._read

    def slow(self: NixlEngine, *args: Any) -> None:
        read(self, *args)
        server = engine(pair, "w0")._stripes._server
        for registration in list(server._registrations.values()):
            server._registrations.pop(registration.registration_id)
            registration.end(SerializationError("the sender gave up"))

    monkeypatch.setattr(NixlEngine, "_read", slow)
    with pytest.raises(SerializationError, match="gave up"):
        pair["w0"].call("w1", double, torch.randn(1 << 20))
    monkeypatch.setattr(NixlEngine, "_read", read)
    assert pair["w0"].call("w1", double, torch.ones(1 << 20)).sum() == 2 << 20


@needs_nixl
def test_a_worker_without_nixl_uses_stripes() -> None:
    with LocalCluster(2, transports=("tcp",), tls="off") as cluster:
        assert cluster["w0"]._runtime.endpoint._nixl is None
        assert cluster["w0"].call("w1", double, torch.ones(1 << 20)).sum() == 2 << 20


@needs_nixl
def test_pulls_end_with_the_worker(pair: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    read = NixlEngine._read

    def held(self: NixlEngine, *args: Any) -> None:
        reached.set()
        go_on.wait(PATIENCE)
        read(self, *args)

    monkeypatch.setattr(NixlEngine, "_read", held)
    pending = pair["w0"].submit("w1", double, torch.ones(1 << 20))
    assert reached.wait(PATIENCE)
    pair["w1"]._runtime.abort()
    go_on.set()
    with pytest.raises(Exception, match="w1"):
        pending.wait()
