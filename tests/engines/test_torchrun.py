"""torchrun with two nodes, each in a network namespace of its own; a worker is killed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from benchmarks.namespaces import Network
from tests.engines.conftest import LIMIT, PROGRAM, Start
from tests.engines.waiting import wait_for


def test_a_killed_worker_restarts_the_group_on_two_hosts(
    network: Network, start: Start, tmp_path: Path
) -> None:
    """torchrun restarts all workers. The store and the count of restarts of the other node stay."""
    first = network.hosts[0]
    nodes = [
        start(
            *host.prefix,
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29400", "--rdzv-id=test"),
            f"--rdzv-conf=is_host={int(host is first)},last_call_timeout=1",
            f"--local-addr={host.address}",
            *(PROGRAM, "restart_all", tmp_path),
            TELEGRAD_LISTEN=host.address,
            TELEGRAD_ADVERTISE=host.address,
            TELEGRAD_SECRET="for the tests of engines",
            TELEGRAD_TLS="on",
        )
        for host in network.hosts
    ]
    victim = tmp_path / "victim"
    wait_for(lambda: victim.exists() and bool(victim.read_text()), "worker1")
    os.kill(int(victim.read_text()), signal.SIGKILL)
    outputs = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert re.findall("worker .*", outputs[0]) == [
        "worker worker0 torchrun 0 2 0 0",
        "worker worker1 torchrun 1 2 0 1",
    ]
