"""Kubeflow Trainer: each pod of a TrainJob is a worker, unless its command is torchrun.

torchrun reads these variables, too, and starts workers of its own, which have its variables
(`cluster.torchrun`).
"""

from __future__ import annotations

from telegrad.cluster.engine import Engine, Environment, require
from telegrad.cluster.placement import Rendezvous


def _rendezvous(environment: Environment) -> Rendezvous:
    host = require(environment, "PET_MASTER_ADDR")
    return Rendezvous(host, int(require(environment, "PET_MASTER_PORT")))


KUBEFLOW = Engine(
    name="Kubeflow Trainer",
    marker="PET_NNODES",
    rank="PET_NODE_RANK",
    world_size="PET_NNODES",
    local_rank=None,
    restart=None,
    rendezvous=_rendezvous,
    advice="use a runtime whose ML policy is torch",
)
