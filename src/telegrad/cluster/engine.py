"""`Engine`: how an engine describes a worker in its environment."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from telegrad.cluster.placement import Rendezvous

Environment = Mapping[str, str]

_FIRST_PORT, _PORTS = 61440, 4096  # above the ports that Linux gives to clients


@dataclass(frozen=True)
class Engine:
    """The variables that an engine sets in each worker."""

    name: str
    marker: str
    """It is set in all processes that the engine started as workers, and in no others."""
    rank: str
    world_size: str
    local_rank: str | None
    restart: str | None
    rendezvous: Callable[[Environment], Rendezvous]
    """Return the rendezvous. Raise `KeyError` with the name of a variable that is missing."""
    advice: str
    """What to do if a variable is missing."""


def port_of_job(job: str) -> int:
    """Return a port for the store of a job: the same in all its workers, often another per job."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def require(environment: Environment, *names: str) -> str:
    """Return the first of these variables that is set. Raise `KeyError` with all their names."""
    for name in names:
        if environment.get(name):
            return environment[name]
    raise KeyError(" or ".join(names))
