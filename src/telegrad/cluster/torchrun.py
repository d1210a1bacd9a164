"""torchrun (TorchElastic), which `telegrad launch` is built on.

The store of the agent may outlive a restart. On one node, all workers restart together, and the
count of restarts separates the groups. On several nodes the counts differ; there, torch makes a new
store for each rendezvous.
"""

from __future__ import annotations

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
