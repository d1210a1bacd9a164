"""Ray: the callee starts a cluster with one named actor; callers join as drivers.

Between hosts, the caller adds a node to the cluster first.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from benchmarks import remote
from benchmarks.peers.base import CALLEE, Place

NAMESPACE = "benchmarks"
OBJECT_STORE_BYTES = 4_000_000_000  # two messages of 1000 MB, there and back
Callee = type("Callee", (), {fn.__name__: staticmethod(fn) for fn in remote.FUNCTIONS})


class Ray:
    def __init__(self) -> None:
        self.actor: Any = None

    def start(self, place: Place) -> None:
        token = Path(place.folder, "token")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        if place.rank:
            self._join(place, place.find())
        else:
            token.write_text(secrets.token_hex(32))
            place.publish(self._serve(place))

    def _serve(self, place: Place) -> str:
        context = ray.init(
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(Path(place.folder, "ray")),
            **self._node(place),
        )
        self.actor = ray.remote(Callee).options(name=CALLEE, num_cpus=0).remote()
        ray.get(self.actor.add.remote(1, 1))
        return str(context.address_info["address"])

    def _node(self, place: Place) -> dict[str, Any]:
        """Return further options of `ray.init`."""
        return {}

    def _join(self, place: Place, address: str) -> None:
        ray.init(
            address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **self._node(place),
        )
        self.actor = ray.get_actor(CALLEE)

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        method, get = getattr(self.actor, fn.__name__), ray.get
        return lambda *args: get(method.remote(*args))

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        submitted: Callable[..., Any] = getattr(self.actor, fn.__name__).remote
        return submitted

    def result(self, pending: Any) -> Any:
        return ray.get(pending)

    def stop(self) -> None:
        ray.shutdown()


class RayNodes(Ray):
    """Ray with a node on the host of each process."""

    def __init__(self) -> None:
        super().__init__()
        self.node: subprocess.Popen[bytes] | None = None

    def _node(self, place: Place) -> dict[str, Any]:
        return {"_node_ip_address": place.address}

    def _join(self, place: Place, address: str) -> None:
        program = "from ray.scripts.scripts import main; main()"
        options = f"start --block --address {address} --node-ip-address {place.address}"
        memory = ("--object-store-memory", str(OBJECT_STORE_BYTES))
        command = [sys.executable, "-c", program, *options.split(), *memory]
        self.node = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.node.stdout is not None
        while b"--block" not in (line := self.node.stdout.readline()):
            if not line:
                raise RuntimeError("the node did not start")
        super()._join(place, address)

    def stop(self) -> None:
        super().stop()
        if self.node is not None:
            self.node.terminate()
            self.node.wait()
