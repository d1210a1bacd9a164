"""moolib: an RPC library in C++ with TensorPipe's transports; functions are served by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moolib

from benchmarks import remote
from benchmarks.peers.base import CALLEE, Place

TIMEOUT_S = 60.0


class Moolib:
    def __init__(self) -> None:
        self.rpc: Any = moolib.Rpc()

    def start(self, place: Place) -> None:
        self.rpc.set_name(place.name)
        self.rpc.set_timeout(TIMEOUT_S)
        if place.rank:
            self.rpc.connect(place.find())
            self.rpc.sync(CALLEE, "add", 1, 1)
        else:
            for fn in remote.FUNCTIONS:
                self.rpc.define(fn.__name__, fn)
            address = f"127.0.0.1:{place.port}"
            self.rpc.listen(address)
            place.publish(address)

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        sync, name = self.rpc.sync, fn.__name__
        return lambda *args: sync(CALLEE, name, *args)

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        async_, name = self.rpc.async_, fn.__name__
        return lambda *args: async_(CALLEE, name, *args)

    def result(self, pending: Any) -> Any:
        return pending.result()

    def stop(self) -> None:
        del self.rpc
