"""`telegrad launch --on ray`: one Ray actor for each worker, in a placement group.

Ray places the actors and restarts those that die; the calls between workers are Telegrad's. An
actor runs the script in its own process, so that the worker ends with the actor. This process, the
driver, hosts the store of the group, which outlives every actor.
"""

from __future__ import annotations

import os
import runpy
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from telegrad.errors import UsageError
from telegrad.launcher.workers import Worker, job_environment, workers_of

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    ray = None

_PATIENCE = 10.0  # seconds between two messages that resources are missing


class ScriptActor:
    """The process of a worker. Ray shows its output with this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def run(self, command: Sequence[str], store: str, secret: str) -> None:
        """Run a script or module as `__main__`. A failure ends the process, so Ray restarts it.

        Ray shows the environment of actors to all its users, so the secret is an argument.
        """
        host, _, port = store.rpartition(":")
        os.environ["TELEGRAD_STORE"] = store
        os.environ["TELEGRAD_SECRET"] = secret
        lives = dist.TCPStore(host, int(port), wait_for_workers=False)
        os.environ["TELEGRAD_RESTART"] = str(lives.add(f"lives/{self._name}", 1) - 1)
        os.environ["TELEGRAD_ADVERTISE"] = ray.util.get_node_ip_address()
        module = command[0] == "-m"
        program, *arguments = command[1:] if module else command
        sys.argv = [program, *arguments]
        try:
            if module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
                runpy.run_path(program, run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                self._fail(ended)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def run_on_ray(
    command: Sequence[str],
    roles: int | Mapping[str, int],
    *,
    restarts: int = 0,
    gpus: int = 0,
    address: str | None = None,
) -> int:
    """Run ``python <command>`` in each worker. Return the exit code."""
    if ray is None:
        raise UsageError("Ray is not installed: pip install 'telegrad[ray]'")
    workers = workers_of(roles)
    if not ray.is_initialized():
        ray.init(address=address)
    host = ray.util.get_node_ip_address()
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    store_address = f"{host}:{store.port}"
    bundle = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    group = placement_group([bundle] * len(workers), strategy="PACK")
    try:
        while not group.wait(_PATIENCE):
            sys.stderr.write(f"waiting until Ray has room for {len(workers)} times {bundle}\n")
        shared = job_environment(os.environ, len(workers), restarts)
        shared.pop("TELEGRAD_SECRET")
        # Ray stores it, so it is not the one of this user
        secret = os.environ.get("TELEGRAD_SECRET") or secrets.token_hex(32)
        shared["TELEGRAD_LISTEN"] = os.environ.get("TELEGRAD_LISTEN", "0.0.0.0")
        actors = [_actor(worker, shared, group, restarts, gpus) for worker in workers]
        running = {
            actor.run.remote(list(command), store_address, secret): worker.name
            for actor, worker in zip(actors, workers, strict=True)
        }
        return _wait(running)
    finally:
        remove_placement_group(group)  # ends the actors


def _actor(worker: Worker, shared: Mapping[str, str], group: Any, restarts: int, gpus: int) -> Any:
    options = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": restarts,
        "max_task_retries": restarts,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=worker.rank
        ),
        "runtime_env": {"env_vars": {**shared, **worker.environment(0, 1)}},
    }
    return ray.remote(ScriptActor).options(**options).remote(worker.name)


def _wait(running: dict[Any, str]) -> int:
    """Wait until all workers have ended, or one has failed for good."""
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        name = running.pop(done)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            sys.stderr.write(f"{name} failed: {error}\n")
            return 1
    return 0
