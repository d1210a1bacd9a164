"""torchrun (TorchElastic), which `telegrad launch` is built on.

All workers restart together, and the store of the agent outlives the restart. On one node, the
count of restarts separates the groups. On several nodes, each has its own count; there, a worker
that joins waits until all entries of workers that have ended are replaced (`restarts_together`).
"""

from __future__ import annotations

import os

from telegrad.cluster.engine import Engine, Environment, require
from telegrad.cluster.placement import Rendezvous


def _rendezvous(environment: Environment) -> Rendezvous:
    one_node = environment.get("GROUP_WORLD_SIZE") == "1"
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Rendezvous(
        require(environment, "MASTER_ADDR"),
        int(require(environment, "MASTER_PORT")),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        prefix=f"restart_{restarts}" if one_node else "",
    )


def restarts_together(environment: Environment = os.environ) -> bool:
    """Return whether the store may have entries of workers that ended before a restart."""
    return (
        bool(environment.get(TORCHRUN.marker)) and environment.get("GROUP_WORLD_SIZE", "1") != "1"
    )


TORCHRUN = Engine(
    name="torchrun",
    marker="TORCHELASTIC_RUN_ID",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    restart="TORCHELASTIC_RESTART_COUNT",
    rendezvous=_rendezvous,
    advice="start the workers with torchrun",
)
