"""gRPC: a generic method for each function, over a unix socket; messages are bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from benchmarks import remote
from benchmarks.peers.base import Place
from benchmarks.peers.packing import packed, unpacked

SERVICE = "benchmarks"
THREADS = 10  # as in the guide of gRPC
# the default is 4 MB
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
TIMEOUT_S = 60.0


class Grpc:
    def __init__(self) -> None:
        self.channel: Any = None
        self.server: Any = None

    def start(self, place: Place) -> None:
        if place.rank:
            self.channel = grpc.insecure_channel(place.find(), options=OPTIONS)
            grpc.channel_ready_future(self.channel).result(TIMEOUT_S)
            return
        self.server = grpc.server(ThreadPoolExecutor(THREADS), options=OPTIONS)
        handlers = {fn.__name__: handler(fn) for fn in remote.FUNCTIONS}
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        address = f"unix:{place.folder}/grpc"
        self.server.add_insecure_port(address)
        self.server.start()
        place.publish(address)

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        method = self._method(fn)
        return lambda *args: method(args, timeout=TIMEOUT_S)

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        future = self._method(fn).future
        return lambda *args: future(args, timeout=TIMEOUT_S)

    def result(self, pending: Any) -> Any:
        return pending.result()

    def stop(self) -> None:
        if self.channel is not None:
            self.channel.close()
        if self.server is not None:
            self.server.stop(grace=None)

    def _method(self, fn: Callable[..., Any]) -> Any:
        return self.channel.unary_unary(f"/{SERVICE}/{fn.__name__}", packed, unpacked)


def handler(fn: Callable[..., Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(lambda args, _: fn(*args), unpacked, packed)
