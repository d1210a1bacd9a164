"""Kubernetes: each pod of an Indexed Job, also one of a JobSet, is a worker.

The pods need a headless service: with one, the name of a pod in the network is
``<job>-<index>.<service>.<namespace>...``, and that of index 0 follows from the own name.
"""

from __future__ import annotations

import socket

from telegrad.cluster.engine import Engine, Environment, require
from telegrad.cluster.placement import Rendezvous

_PORT = 29500  # pods have addresses of their own, so that ports of two jobs cannot collide


def _rendezvous(environment: Environment) -> Rendezvous:
    index = require(environment, "JOB_COMPLETION_INDEX")
    host, dot, domain = socket.getfqdn().partition(".")
    if dot and host.endswith(f"-{index}"):
        return Rendezvous(f"{host.removesuffix(index)}0.{domain}", _PORT)
    return Rendezvous(require(environment, "MASTER_ADDR"), _PORT)


KUBERNETES = Engine(
    name="Kubernetes",
    marker="JOB_COMPLETION_INDEX",
    rank="JOB_COMPLETION_INDEX",
    world_size="WORLD_SIZE",
    local_rank=None,
    restart=None,
    rendezvous=_rendezvous,
    advice="set WORLD_SIZE in the pod template to the completions of the Job, and its subdomain "
    "to a headless service; `telegrad launch --on k8s` prints a manifest that does both",
)
