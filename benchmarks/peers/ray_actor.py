"""Ray: the callee starts a local cluster with one named actor; callers join as drivers."""

from __future__ import annotations

import logging
import os
import secrets
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
            self._join(place.find())
        else:
            token.write_text(secrets.token_hex(32))
            place.publish(self._serve(Path(place.folder, "ray")))

    def _serve(self, folder: Path) -> str:
        context = ray.init(
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
        self.actor = ray.remote(Callee).options(name=CALLEE, num_cpus=0).remote()
        ray.get(self.actor.add.remote(1, 1))
        return str(context.address_info["address"])

    def _join(self, address: str) -> None:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
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
