"""Find out which engine started this process, and the place of this worker in its job.

`detect` returns a `Placement`: name, rank, size of the group, rendezvous, local rank, and how often
the engine has restarted this worker. Each value comes from the first of these that has it:

1. an argument, of `init_rpc`, `Agent` or `detect`
2. ``TELEGRAD_NAME``, ``TELEGRAD_RANK``, ``TELEGRAD_WORLD_SIZE``, ``TELEGRAD_LOCAL_RANK``,
   ``TELEGRAD_RESTART``, ``TELEGRAD_STORE``, the ``host:port`` of a store that a launcher hosts, and
   ``TELEGRAD_ROLES``, the roles by rank, such as ``ps=1,trainer=4``
3. torch's variables: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``
4. the variables of the engine, the first of these that started this process: torchrun (and
   `telegrad launch`), Open MPI, Slurm, PMIx, Kubeflow Trainer, Kubernetes

An engine that starts other engines comes after those: torchrun often runs inside a Slurm step, and
mpirun inside a Slurm job. Each engine is described by a module of this package. If an engine
started this process but one of its values is missing, `detect` raises an error that names the
variable.
"""

from telegrad.cluster.detection import detect
from telegrad.cluster.placement import Placement, Rendezvous

__all__ = ["Placement", "Rendezvous", "detect"]
