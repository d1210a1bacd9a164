"""Open the store through which the workers of a group find each other.

State: the number of groups that this process has joined (`current.process_state`). It is a prefix
in the store, so that a process may leave a group and join another one through the same store. All
workers must join their groups in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from telegrad.cluster import Placement, slurm
from telegrad.current import process_state
from telegrad.errors import JoinError, UsageError
from telegrad.group.signed_store import Store
from telegrad.group.store_connection import open_within

T = TypeVar("T")

# "environment variable RANK expected" are torch's words.
_NO_RENDEZVOUS = (
    "this worker cannot find its group: no engine started it, and MASTER_ADDR and MASTER_PORT are "
    "not set (environment variable RANK expected, but not set, either). Start the workers with "
    "`telegrad launch`, torchrun, srun or mpirun"
)


def open_store(place: Placement, timeout: float) -> Store:
    """Return the store of the group of this worker, which rank 0 hosts unless a launcher does.

    The store could wait for all workers, but could not say which are missing. Therefore it waits
    for none of them, and the agent waits.
    """
    rendezvous = place.rendezvous
    if rendezvous is None:
        raise UsageError(_NO_RENDEZVOUS + slurm.advice_outside_step())
    if place.rank is None and not rendezvous.hosted:
        raise UsageError("the rank of this worker is unknown: pass rank=, or set RANK")
    store = connect_store(
        rendezvous.host,
        rendezvous.port,
        timeout,
        is_master=place.rank == 0 and not rendezvous.hosted,
        multi_tenant=True,  # a process group may use the same address
    )
    return dist.PrefixStore(rendezvous.prefix, store) if rendezvous.prefix else store


def connect_store(host: str, port: int, timeout: float, **options: bool) -> dist.TCPStore:
    """Return a TCP store. Raise `JoinError` if it does not answer in time."""
    limit = timedelta(seconds=timeout)
    return ask_store(
        timeout,
        lambda: dist.TCPStore(host, port, wait_for_workers=False, timeout=limit, **options),
    )


def ask_store(timeout: float, connect: Callable[[], T]) -> T:
    """Return what `connect` returns. Raise `JoinError` if its store does not answer in time."""
    try:
        return open_within(timeout, connect)
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as error:
        raise JoinError(
            f"the store of the group did not answer within {timeout} s ({error}). The worker with "
            "rank 0 hosts it: start that one, check MASTER_ADDR and MASTER_PORT, or raise "
            "Config.join_timeout"
        ) from error


def next_group(store: Store) -> Store:
    """Return the part of the store for the next group that this process joins."""
    store = dist.PrefixStore(f"telegrad_{process_state.groups_joined}", store)
    process_state.groups_joined += 1
    return store
