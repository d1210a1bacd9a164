"""`Placement`: the place of a worker in its job."""

from __future__ import annotations

from dataclasses import dataclass

VARIABLES = (
    "TELEGRAD_NAME",
    "TELEGRAD_RANK",
    "TELEGRAD_WORLD_SIZE",
    "TELEGRAD_LOCAL_RANK",
    "TELEGRAD_RESTART",
    "TELEGRAD_ROLES",
    "TELEGRAD_STORE",
    "TELEGRAD_DASHBOARD",  # for the launcher
)


@dataclass(frozen=True)
class Rendezvous:
    """The address of the TCP store through which the workers of a group find each other."""

    host: str
    port: int
    hosted: bool = False
    """The launcher hosts the store. Otherwise the worker with rank 0 does."""
    prefix: str = ""
    """Of the keys in the store. It differs between two groups that use one store in turn."""


@dataclass(frozen=True)
class Placement:
    """The place of a worker in its job. A value that nothing defines is None."""

    engine: str
    """What started this process, such as ``Slurm``; empty if no engine is known."""
    name: str | None
    rank: int | None
    world_size: int | None
    """Number of workers; None: they may join and leave at any time."""
    local_rank: int | None
    """Index among the workers on this host."""
    role: str
    """``worker``, or the role that torchrun, `telegrad launch` or ``TELEGRAD_ROLES`` gave it."""
    role_rank: int | None
    """Index among the workers of this role."""
    restart: int
    """How often the engine has restarted this worker: 0 for its first life."""
    rendezvous: Rendezvous | None
