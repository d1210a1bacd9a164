"""Workers on several hosts: each process runs in a network namespace of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import telegrad.rpc as rpc
from benchmarks.namespaces import Host, Network, enter
from telegrad import Config
from tests.local.proxy import Proxy
from tests.process.fleet import Fleet, Worker

SECRET = "for the tests of several hosts"
STORE_PORT = 29500  # a namespace has its own ports
PORTS = 16  # that a worker behind a proxy may listen on

_here: dict[str, Any] = {}


def fleet_on(network: Network, **settings: Any) -> Fleet:
    """Return workers w0, w1, ... of one group, one on each host."""
    return Fleet(len(network.hosts), join, network.hosts, settings)


def join(rank: int, size: int, hosts: list[Host], settings: dict[str, Any]) -> None:
    enter(hosts[rank])
    torch.set_num_threads(1)
    if settings.get("advertise"):
        use_proxied_ports(rank)
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


# A proxy at the address of the switch. The ports of each worker behind it are limited, so the proxy
# knows them before the worker does.


def proxied_ports(rank: int) -> range:
    first = 40000 + 100 * rank
    return range(first, first + PORTS)


def use_proxied_ports(rank: int) -> None:
    ports = proxied_ports(rank)
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{ports[0]} {ports[-1]}")


def proxy_of(network: Network) -> Worker:
    """Return a process with a proxy for all workers, which have to advertise the switch."""
    worker = Worker(_start_proxy, network.switch, network.hosts)
    worker.result()
    return worker


def _start_proxy(switch: Host, hosts: list[Host]) -> None:
    enter(switch)
    routes = {
        (switch.address, port): (host.address, port)
        for rank, host in enumerate(hosts)
        for port in proxied_ports(rank)
    }
    _here["proxy"] = Proxy(routes)


def reset_proxy() -> int:
    """Reset every connection and refuse others. Return how many there were."""
    return int(_here["proxy"].reset())


def resume_proxy() -> None:
    _here["proxy"].listen()
