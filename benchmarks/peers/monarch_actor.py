"""Monarch: the callee spawns one actor on this host; callers are clients with a reference to it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import cloudpickle
from monarch.actor import Actor, endpoint, shutdown_context, this_host

from benchmarks import remote
from benchmarks.peers.base import CALLEE, Place

Callee = type(
    "Callee",
    (Actor,),
    {fn.__name__: endpoint(lambda self, *args, fn=fn: fn(*args)) for fn in remote.FUNCTIONS},
)


class Monarch:
    def __init__(self) -> None:
        self.actor: Any = None

    def start(self, place: Place) -> None:
        host = this_host()  # makes this process a client
        if place.rank:
            self.actor = cloudpickle.loads(base64.b64decode(place.find()))
            return
        self.actor = host.spawn_procs({"callees": 1}).spawn(CALLEE, Callee)
        self.actor.add.call_one(1, 1).get()
        place.publish(base64.b64encode(cloudpickle.dumps(self.actor)).decode())

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        method = getattr(self.actor, fn.__name__).call_one
        return lambda *args: method(*args).get()

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        submitted: Callable[..., Any] = getattr(self.actor, fn.__name__).call_one
        return submitted

    def result(self, pending: Any) -> Any:
        return pending.get()

    def stop(self) -> None:
        shutdown_context().get()
