"""The checks of `telegrad doctor` that visit a running group. Only they need torch."""

from __future__ import annotations

import time

import torch.distributed as dist

from telegrad.config import Config
from telegrad.errors import ProtocolError
from telegrad.group.endpoint import PROBE, LocalEndpoint
from telegrad.group.membership import Member, read_members
from telegrad.group.network_check import describe_failure, tcp_addresses, version_problems
from telegrad.group.rendezvous import connect_store
from telegrad.wire.handshake import Incarnation

_PREFIX = "telegrad_0"  # of the first group that a process makes with `init_rpc`


class _Visitor:
    """What a connection needs to know of a worker that does not join."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.local_member = Member("telegrad doctor", -1, Incarnation("doctor"), ())


def check_group(
    host: str, port: int, config: Config, key: bytes, timeout: float
) -> tuple[int, list[str]]:
    """Return the number of workers in a store, and the problems with them. Write nothing."""
    store = connect_store(host, port, timeout)
    group, members = read_members(dist.PrefixStore(_PREFIX, store), key)
    problems = version_problems(members)
    endpoint = LocalEndpoint(visitor := _Visitor(group), config, key)
    try:
        for member in members:
            for address in tcp_addresses(member):
                try:
                    until = time.monotonic() + config.connect_timeout
                    endpoint.connect(address, member, PROBE, until).sock.close()
                except (OSError, ProtocolError) as error:
                    problems.append(describe_failure(error, visitor.local_member, member, address))
    finally:
        endpoint.close()
    return len(members), problems
