"""Workers on several hosts: each process runs in a network namespace of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import telegrad.rpc as rpc
from benchmarks.namespaces import Host, Network, enter
from telegrad import Config
from tests.process.fleet import Fleet

SECRET = "for the tests of several hosts"
STORE_PORT = 29500  # a namespace has its own ports


def fleet_on(network: Network, **settings: Any) -> Fleet:
    """Return workers w0, w1, ... of one group, one on each host."""
    return Fleet(len(network.hosts), join, network.hosts, settings)


def join(rank: int, size: int, hosts: list[Host], settings: dict[str, Any]) -> None:
    enter(hosts[rank])
    torch.set_num_threads(1)
    config = Config(secret=SECRET, listen=hosts[rank].address, **settings)
    options = rpc.RpcBackendOptions(
        init_method=f"tcp://{hosts[0].address}:{STORE_PORT}", config=config
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def everywhere(fleet: Fleet, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on all workers at the same time."""
    for worker in fleet.workers:
        worker.begin(function, *args)
    return [worker.result() for worker in fleet.workers]
