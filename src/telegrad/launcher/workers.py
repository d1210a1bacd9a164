"""The workers of a job: names and ranks by role, and the environment of each."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from telegrad import openmp
from telegrad.errors import ArgumentTypeError, UsageError
from telegrad.group.membership import check_name
from telegrad.group.secret import own_secret


@dataclass(frozen=True)
class Worker:
    """One worker. Its name is that of its role with its index in it, such as ``trainer1``."""

    role: str
    role_rank: int
    role_size: int
    rank: int
    world_size: int

    @property
    def name(self) -> str:
        """The name under which other workers call this one."""
        return f"{self.role}{self.role_rank}"

    def environment(self, local_rank: int, local_size: int) -> dict[str, str]:
        """Return the variables that say this to the worker: torch's names, and Telegrad's."""
        own = {
            "NAME": self.name,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
        }
        return {
            **{name: text for name, text in own.items() if name != "NAME"},
            **{f"TELEGRAD_{name}": text for name, text in own.items()},
            "LOCAL_WORLD_SIZE": str(local_size),
            "ROLE_NAME": self.role,
            "ROLE_RANK": str(self.role_rank),
            "ROLE_WORLD_SIZE": str(self.role_size),
        }


def workers_of(roles: int | Mapping[str, int]) -> list[Worker]:
    """Return the workers of these roles, by rank; a number means that many of role ``worker``.

    >>> [worker.name for worker in workers_of({"ps": 1, "trainer": 2})]
    ['ps0', 'trainer0', 'trainer1']
    """
    roles = {"worker": roles} if isinstance(roles, int) else roles
    if not isinstance(roles, Mapping) or not all(isinstance(n, int) for n in roles.values()):
        raise ArgumentTypeError(
            f"roles is a number of workers, or a dict with one for each role, not {roles!r}"
        )
    for role, size in roles.items():
        check_name(role)
        if size < 1:
            raise UsageError(f"role {role!r} needs at least one worker, not {size}")
    places = [(role, index) for role, size in roles.items() for index in range(size)]
    if not places:
        raise UsageError("a job needs at least one worker")
    workers = [
        Worker(role, index, roles[role], rank, len(places))
        for rank, (role, index) in enumerate(places)
    ]
    names = [worker.name for worker in workers]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(f"the roles give the name {min(twice)!r} to two workers; rename a role")
    return workers


RESTART_TIMEOUT = "60"
"""`Config.restart_timeout` of workers that their launcher restarts."""


def job_environment(environment: Mapping[str, str], size: int, restarts: int) -> dict[str, str]:
    """Return the variables that all workers of a job get, where `environment` does not set them.

    The secret of their group, how long they wait for a restart, and settings of OpenMP for workers
    that share a host. The secret is that of this user, so that `telegrad status` knows it.
    """
    names = (
        "TELEGRAD_SECRET",
        "TELEGRAD_RESTART_TIMEOUT",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "GOMP_SPINCOUNT",
    )
    variables = {name: environment[name] for name in names if environment.get(name)}
    if "TELEGRAD_SECRET" not in variables:
        try:
            variables["TELEGRAD_SECRET"] = own_secret()
        except UsageError:  # the home directory cannot be written, as in some containers
            variables["TELEGRAD_SECRET"] = secrets.token_hex(32)
    if restarts:
        variables.setdefault("TELEGRAD_RESTART_TIMEOUT", RESTART_TIMEOUT)
    openmp.limit_spinning(variables)
    if size > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    return variables
