"""`detect`: the place of this worker in its job, from arguments and the environment."""

from __future__ import annotations

import os
from dataclasses import replace

from telegrad.cluster.engine import Engine, Environment
from telegrad.cluster.kubeflow import KUBEFLOW
from telegrad.cluster.kubernetes import KUBERNETES
from telegrad.cluster.openmpi import OPEN_MPI, PMIX
from telegrad.cluster.placement import Placement, Rendezvous
from telegrad.cluster.roles import role_of_rank
from telegrad.cluster.slurm import SLURM
from telegrad.cluster.torchrun import TORCHRUN
from telegrad.errors import UsageError

ENGINES = (TORCHRUN, OPEN_MPI, SLURM, PMIX, KUBEFLOW, KUBERNETES)
_NO_ROLES = ("", "default", "default_role")  # torchrun without --role


def detect(
    name: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    environment: Environment | None = None,
) -> Placement:
    """Return the place of this worker in its job. Arguments count before the environment.

    >>> environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    >>> place = detect(environment=environment)
    >>> place.name, place.rank, place.world_size, place.rendezvous
    ('worker1', 1, 2, Rendezvous(host='a', port=29500, hosted=False, prefix=''))
    """
    environment = os.environ if environment is None else environment
    engine = next((each for each in ENGINES if environment.get(each.marker)), None)
    if rank is None:
        rank = _number(environment, "TELEGRAD_RANK", "RANK", engine and engine.rank)
        _require(rank, engine, engine and engine.rank)
    if world_size is None:
        size_names = ("TELEGRAD_WORLD_SIZE", "WORLD_SIZE", engine and engine.world_size)
        world_size = _number(environment, *size_names)
        _require(world_size, engine, engine and engine.world_size)
    role, role_rank = _role(environment, rank)
    default_name = None if role_rank is None else f"{role}{role_rank}"
    local_names = ("TELEGRAD_LOCAL_RANK", "LOCAL_RANK", engine and engine.local_rank)
    return Placement(
        engine=engine.name if engine else "",
        name=name or environment.get("TELEGRAD_NAME") or default_name,
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, *local_names),
        role=role,
        role_rank=role_rank,
        restart=_number(environment, "TELEGRAD_RESTART", engine and engine.restart) or 0,
        rendezvous=_rendezvous(environment, engine),
    )


def _role(environment: Environment, rank: int | None) -> tuple[str, int | None]:
    roles = environment.get("TELEGRAD_ROLES")
    if roles and rank is not None:
        return role_of_rank(roles, rank)
    role, role_rank = environment.get("ROLE_NAME", ""), _number(environment, "ROLE_RANK")
    return ("worker", rank) if role in _NO_ROLES or role_rank is None else (role, role_rank)


def _rendezvous(environment: Environment, engine: Engine | None) -> Rendezvous | None:
    store = environment.get("TELEGRAD_STORE")
    if store:
        return _hosted_store(store)
    host, port = environment.get("MASTER_ADDR"), _number(environment, "MASTER_PORT")
    if engine is not None:
        try:
            found = engine.rendezvous(environment)
            return replace(found, host=host or found.host, port=port or found.port)
        except KeyError as missing:
            if not (host and port):
                _require(None, engine, missing.args[0])
    if host and port:
        return Rendezvous(host, port)
    if host or port:
        absent = "MASTER_PORT" if host else "MASTER_ADDR"
        raise UsageError(f"{absent} is missing: set it, too, to the same value in all workers")
    return None


def _hosted_store(address: str) -> Rendezvous:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"TELEGRAD_STORE must be HOST:PORT, not {address!r}")
    return Rendezvous(host.strip("[]"), int(port), hosted=True)


def _number(environment: Environment, *names: object) -> int | None:
    """Return the number in the first of these variables that is set; None if none of them is."""
    for name in names:
        text = environment.get(str(name))
        if text:
            try:
                return int(text)
            except ValueError:
                raise UsageError(
                    f"the environment variable {name} must be a number, not {text!r}"
                ) from None
    return None


def _require(value: int | None, engine: Engine | None, variable: object) -> None:
    """Raise an error that names the variable if an engine has not set it."""
    if value is None and engine is not None:
        raise UsageError(
            f"{engine.name} started this process ({engine.marker} is set), but {variable} is "
            f"missing: {engine.advice}, or set TELEGRAD_RANK, TELEGRAD_WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT"
        )
