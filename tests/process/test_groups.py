"""Groups of real processes: rendezvous, many workers, last words, different programs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import telegrad.rpc as rpc
from telegrad.errors import PeerLost
from tests.process.fleet import Fleet

pytestmark = pytest.mark.process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, size: int, method: str) -> None:
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=method),
    )


def join_by_environment(rank: int, size: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size)
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)


def add_up(size: int) -> float:
    futures = [rpc.rpc_async(rank, torch.add, args=(torch.ones(3), rank)) for rank in range(size)]
    return sum(future.wait().sum().item() for future in futures)


def transport_used() -> str:
    return rpc._get_current_rpc_agent()._runtime.peers.all()[0].multiplexed.channel.kind


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_a_group_comes_up_works_and_leaves_three_times(tmp_path: Path, method: str) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path / 'store'}"
    with Fleet(3, join, url) as fleet:
        for repetition in range(3):
            for worker in fleet.workers:
                worker.begin(add_up, 3)
            assert [worker.result() for worker in fleet.workers] == [18.0, 18.0, 18.0]
            for worker in fleet.workers:
                worker.begin(rpc.shutdown)
            for worker in fleet.workers:
                worker.result()
            if repetition < 2:
                again = (
                    f"tcp://127.0.0.1:{free_port()}"
                    if method == "tcp"
                    else f"file://{tmp_path}/again{repetition}"
                )
                for rank, worker in enumerate(fleet.workers):
                    worker.begin(join, rank, 3, again)
                for worker in fleet.workers:
                    worker.result()


def test_rank_and_size_may_come_from_the_environment() -> None:
    with Fleet(2, join_by_environment, free_port()) as fleet:
        assert fleet[1].do(add_up, 2) == 9.0


def call_rank_0() -> int:
    return rpc.rpc_sync("w0", os.getpid)


def test_32_workers_come_up_and_call_one(tmp_path: Path) -> None:
    with Fleet(32, join, f"file://{tmp_path / 'store'}") as fleet:
        for worker in fleet.workers:
            worker.begin(call_rank_0)
        assert {worker.result() for worker in fleet.workers} == {fleet[0].process.pid}
        assert fleet[5].do(transport_used) == "unix"
        for worker in fleet.workers:
            worker.begin(rpc.shutdown)
        for worker in fleet.workers:
            worker.result()


def leave_with_last_words() -> None:
    rpc._get_current_rpc_agent().close("the disk is full")


def last_words_of(name: str) -> str:
    with pytest.raises(PeerLost) as caught:
        rpc.rpc_sync(name, abs, args=(-1,))
    return caught.value.leave_reason


def test_the_last_words_of_a_worker_reach_its_callers(tmp_path: Path) -> None:
    with Fleet(2, join, f"file://{tmp_path / 'store'}") as fleet:
        assert fleet[0].do(add_up, 2) == 9.0
        fleet[1].do(leave_with_last_words)
        assert fleet[0].do(last_words_of, "w1") == "the disk is full"


SERVER = """
    import sys, telegrad.rpc as rpc
    count = 10
    rpc.init_rpc("server", rank=0, world_size=2,
                 rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
    rpc.shutdown()
"""

CLIENT = """
    import sys, telegrad.rpc as rpc
    offset = 40

    class Point:
        def __init__(self, x): self.x = x
        def __eq__(self, other): return self.x == other.x

    def shift(point):
        return Point(point.x + offset)

    rpc.init_rpc("client", rank=1, world_size=2,
                 rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
    assert rpc.rpc_sync("server", shift, args=(Point(2),)).x == 42
    assert rpc.rpc_sync("server", lambda x: x + offset, args=(1,)) == 41
    print("the client is content")
    rpc.shutdown()
"""


def test_functions_of_main_travel_to_a_worker_that_runs_another_program(tmp_path: Path) -> None:
    processes = []
    for name, text in (("server", SERVER), ("client", CLIENT)):
        script = tmp_path / f"{name}.py"
        script.write_text(textwrap.dedent(text))
        command = [sys.executable, str(script), str(tmp_path / "store")]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert "the client is content" in outputs[1]
