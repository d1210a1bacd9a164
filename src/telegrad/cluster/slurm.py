"""Slurm: each task of a step that `srun` started is a worker.

The marker is set in steps only: the batch script itself also has a ``SLURM_PROCID``.
"""

from __future__ import annotations

import os

from telegrad.cluster.engine import Engine, Environment, port_of_job, require
from telegrad.cluster.placement import Rendezvous
from telegrad.cluster.slurm_hosts import first_host


def _rendezvous(environment: Environment) -> Rendezvous:
    hosts = require(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    step = f"{require(environment, 'SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID', '0')}"
    return Rendezvous(first_host(hosts), port_of_job(step))


SLURM = Engine(
    name="Slurm",
    marker="SLURM_STEP_NUM_TASKS",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    restart="SLURM_RESTART_COUNT",
    rendezvous=_rendezvous,
    advice="start the workers with srun",
)


def advice_outside_step(environment: Environment = os.environ) -> str:
    """Return what to do if this process is in a job of Slurm, but `srun` did not start it."""
    if not environment.get("SLURM_JOB_ID") or environment.get(SLURM.marker):
        return ""
    return (
        f". This process is in a job of Slurm, but {SLURM.marker} is missing, because it is not "
        f"in a step: {SLURM.advice}"
    )
