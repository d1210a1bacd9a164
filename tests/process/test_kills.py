"""Workers that are really killed, frozen or cut off."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import Config, current_agent
from telegrad.errors import GroupBroken, PeerLost
from telegrad.futures import Future
from tests.local.gates import until
from tests.process.fleet import Fleet, Worker

pytestmark = pytest.mark.process

_pending: list[Future[Any]] = []
_forever = threading.Event()


def join(rank: int, size: int, path: str, settings: dict[str, Any]) -> None:
    config = Config(secret="for the tests of kills", **settings)
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", config=config)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def block() -> None:
    _forever.wait()


def start_blocked_calls(to: str, count: int) -> None:
    _pending[:] = [rpc.rpc_async(to, block) for _ in range(count)]
    assert rpc.rpc_sync(to, os.getpid) != os.getpid()  # they are all on their way


def how_they_failed() -> set[tuple[str, str | None]]:
    errors = [future.exception(timeout=30) for future in _pending]
    return {(type(error).__name__, getattr(error, "peer", None)) for error in errors}


def call(to: str) -> int:
    return rpc.rpc_sync(to, abs, args=(-7,))


def call_error(to: str) -> tuple[str, str]:
    try:
        call(to)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def barrier_error() -> tuple[str, ...]:
    with pytest.raises(GroupBroken) as caught:
        rpc._barrier(set())
    return caught.value.missing


def shut_down() -> tuple[str, ...]:
    return rpc._get_current_rpc_agent().shutdown(timeout=30)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_killed_worker_fails_every_call_at_once_and_can_come_back(
    tmp_path: Path, transport: str
) -> None:
    with Fleet(3, join, str(tmp_path / "store"), {"transports": (transport,)}) as fleet:
        fleet[0].do(start_blocked_calls, "w1", 100)
        fleet[1].kill()
        assert fleet[0].do(how_they_failed) == {("PeerLost", "w1")}
        assert fleet[0].do(call, "w2") == 7
        kind, text = fleet[0].do(call_error, "w1")
        assert kind == "PeerLost"
        assert "'w1'" in text
        for worker in (fleet[0], fleet[2]):
            worker.begin(barrier_error)
        assert [fleet[0].result(), fleet[2].result()] == [("w1",), ("w1",)]
        fleet.restart(1)
        assert fleet[0].do(call, "w1") == 7
        assert fleet[1].do(call, "w0") == 7


def test_shutdown_returns_with_the_names_of_the_dead(tmp_path: Path) -> None:
    with Fleet(4, join, str(tmp_path / "store"), {}) as fleet:
        assert fleet[2].do(call, "w0") == 7
        fleet[1].kill()
        fleet[3].kill()
        for rank in (0, 2):
            fleet[rank].begin(shut_down)
        assert [fleet[rank].result() for rank in (0, 2)] == [("w1", "w3")] * 2


def test_the_death_of_rank_0_is_survived(tmp_path: Path) -> None:
    with Fleet(3, join, str(tmp_path / "store"), {}) as fleet:
        fleet[0].kill()
        assert fleet[1].do(call, "w2") == 7
        for rank in (1, 2):
            fleet[rank].begin(shut_down)
        assert [fleet[rank].result() for rank in (1, 2)] == [("w0",)] * 2


def wait_until_missing(*names: str) -> None:
    """Wait until a gather that this worker leads waits for these workers only."""
    agent = current_agent()
    assert agent is not None
    collectives = agent._runtime.collectives
    until(lambda: [each["missing"] for each in collectives.waiting()] == [list(names)])


def meet() -> None:
    agent = current_agent()
    assert agent is not None
    agent.barrier()


def test_a_barrier_survives_a_restart_of_its_leader(tmp_path: Path) -> None:
    with Fleet(3, join, str(tmp_path / "store"), {}) as fleet:
        fleet[1].begin(meet)
        fleet[0].do(wait_until_missing, "w0", "w2")
        fleet[0].kill()
        fleet.restart(0)
        for rank in (2, 0):
            fleet[rank].begin(meet)
        assert [fleet[rank].result() for rank in range(3)] == [None] * 3


def test_a_frozen_worker_is_found_by_its_silence(tmp_path: Path) -> None:
    settings = {"heartbeat_interval": 0.1, "heartbeat_timeout": 1.0}
    with Fleet(2, join, str(tmp_path / "store"), settings) as fleet:
        fleet[0].do(start_blocked_calls, "w1", 10)
        fleet[1].signal(signal.SIGSTOP)
        try:
            assert fleet[0].do(how_they_failed) == {("PeerLost", "w1")}
        finally:
            fleet[1].signal(signal.SIGKILL)


def start_call(to: str) -> None:
    _pending[:] = [rpc.rpc_async(to, abs, args=(-7,), timeout=50)]


def result_of_call() -> Any:
    return _pending[0].result(timeout=50)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_first_asynchronous_call_does_not_wait_for_a_frozen_worker(
    tmp_path: Path, transport: str
) -> None:
    with Fleet(
        2, join, str(tmp_path / "store"), {"transports": (transport,), "connect_timeout": 50}
    ) as fleet:
        fleet[1].signal(signal.SIGSTOP)
        try:
            fleet[0].do(start_call, "w1")
        finally:
            fleet[1].signal(signal.SIGCONT)
        assert fleet[0].do(result_of_call) == 7


def send_tensor_and_drop(to: str, count: int) -> int:
    for _ in range(count):
        rpc.rpc_sync(to, torch.sum, args=(torch.ones(1 << 20),))
    return rpc._get_current_rpc_agent().statistics()["calls_made"]


def test_a_killed_receiver_of_shared_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    with Fleet(2, join, str(tmp_path / "store"), {"transports": ("unix",)}) as fleet:
        fleet[0].do(send_tensor_and_drop, "w1", 20)
        fleet[1].kill()
        fleet.restart(1)
        fleet[0].do(send_tensor_and_drop, "w1", 20)


def test_workers_do_not_inherit_each_other(tmp_path: Path) -> None:
    """A worker process is its own: what a test leaves in one is not seen in the next."""
    worker = Worker(len, "abc")
    try:
        assert worker.result() == 3
        assert worker.do(dist.is_available) is True
        with pytest.raises(AssertionError, match="PeerLost"):
            worker.do(raise_lost)
    finally:
        worker.close()


def raise_lost() -> None:
    raise PeerLost("for the test")
