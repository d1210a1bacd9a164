"""Open MPI: each process that `mpirun` started is a worker.

The host of `mpirun` also runs rank 0, unless a host file says otherwise; then set ``MASTER_ADDR``.
Open MPI 4 has its address in a URI of the launcher, Open MPI 5 its name in the PMIx namespace.
"""

from __future__ import annotations

import re

from telegrad.cluster.engine import Engine, Environment, port_of_job, require
from telegrad.cluster.placement import Rendezvous

_URI = re.compile(r"tcp6?://\[?([^,\]]+?)(?:[,\]]|:\d+(?:;|$))")
_NAMESPACE = re.compile(r"prte(?:run)?-(.+)-\d+@\d+")


def _rendezvous(environment: Environment) -> Rendezvous:
    job = require(environment, "PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri")
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    if size is not None and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        return Rendezvous("127.0.0.1", port_of_job(job))
    found = _URI.search(environment.get("OMPI_MCA_orte_hnp_uri", "")) or _NAMESPACE.match(job)
    host = found[1] if found is not None else require(environment, "MASTER_ADDR")
    return Rendezvous(host, port_of_job(job))


OPEN_MPI = Engine(
    name="Open MPI",
    marker="OMPI_COMM_WORLD_RANK",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    restart=None,
    rendezvous=_rendezvous,
    advice="start the workers with mpirun",
)

PMIX = Engine(
    name="PMIx",
    marker="PMIX_RANK",
    rank="PMIX_RANK",
    world_size="WORLD_SIZE",
    local_rank=None,
    restart=None,
    rendezvous=_rendezvous,
    advice="PMIx has no variable for the number of processes, so set WORLD_SIZE",
)
