"""Open the store through which the workers of a group find each other.

State: the number of groups that this process has joined (`current.process_state`). It is a prefix
in the store, so that a process may leave a group and join another one through the same store. All
workers must join their groups in the same order.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from telegrad.cluster import Placement, slurm
from telegrad.current import process_state
from telegrad.errors import JoinError, UsageError
from telegrad.group.signed_store import Store

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
    try:
        store = dist.TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=place.rank == 0 and not rendezvous.hosted,
            wait_for_workers=False,
            multi_tenant=True,  # a process group may use the same address
            timeout=timedelta(seconds=timeout),
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise no_answer(timeout, error) from error
    return dist.PrefixStore(rendezvous.prefix, store) if rendezvous.prefix else store


def no_answer(timeout: float, error: Exception) -> JoinError:
    """Return the error of a store that cannot be reached."""
    return JoinError(
        f"the store of the group did not answer within {timeout} s ({error}). The worker with "
        "rank 0 hosts it: start that one, check MASTER_ADDR and MASTER_PORT, or raise "
        "Config.join_timeout"
    )


def next_group(store: Store) -> Store:
    """Return the part of the store for the next group that this process joins."""
    store = dist.PrefixStore(f"telegrad_{process_state.groups_joined}", store)
    process_state.groups_joined += 1
    return store
