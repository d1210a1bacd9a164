"""RPyC over TCP. It passes objects by reference, so arguments and results are sent as bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import rpyc
from rpyc.utils.server import ThreadedServer

from benchmarks import remote
from benchmarks.peers.base import Place
from benchmarks.peers.packing import packed, unpacked

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
FUNCTIONS: dict[str, Callable[..., Any]] = {fn.__name__: fn for fn in remote.FUNCTIONS}


class Service(rpyc.Service):
    def exposed_run(self, name: str, args: bytes) -> bytes:
        return packed(FUNCTIONS[name](*unpacked(args)))


class Rpyc:
    def __init__(self) -> None:
        self.connection: Any = None
        self.server: Any = None

    def start(self, place: Place) -> None:
        config = {"sync_request_timeout": TIMEOUT_S}
        if place.rank:
            host, _, port = place.find().partition(":")
            self.connection = rpyc.connect(host, int(port), config=config)
        else:
            self.server = ThreadedServer(
                Service, hostname=HOST, port=place.port, protocol_config=config
            )
            threading.Thread(target=self.server.start, daemon=True).start()
            while not self.server.active:  # bound, but not listening yet
                time.sleep(0.01)
            place.publish(f"{HOST}:{place.port}")

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        run, name = self.connection.root.run, fn.__name__
        return lambda *args: unpacked(run(name, packed(args)))

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        run, name = rpyc.async_(self.connection.root.run), fn.__name__
        return lambda *args: run(name, packed(args))

    def result(self, pending: Any) -> Any:
        return unpacked(pending.value)

    def stop(self) -> None:
        if self.connection is not None:
            self.connection.close()
        if self.server is not None:
            self.server.close()
