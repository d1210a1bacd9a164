"""gRPC: a generic method for each function; messages are bytes.

On one host over a unix socket, between hosts over TCP with TLS.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
            self.channel = self._connect(place)
            grpc.channel_ready_future(self.channel).result(TIMEOUT_S)
            return
        self.server = grpc.server(ThreadPoolExecutor(THREADS), options=OPTIONS)
        handlers = {fn.__name__: handler(fn) for fn in remote.FUNCTIONS}
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        address = self._listen(place)
        self.server.start()
        place.publish(address)

    def _connect(self, place: Place) -> Any:
        return grpc.insecure_channel(place.find(), options=OPTIONS)

    def _listen(self, place: Place) -> str:
        address = f"unix:{place.folder}/grpc"
        self.server.add_insecure_port(address)
        return address

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


class GrpcTls(Grpc):
    """gRPC over TCP, encrypted with a certificate made for this run."""

    def _connect(self, place: Place) -> Any:
        address = place.find()
        trusted = grpc.ssl_channel_credentials(Path(place.folder, "certificate").read_bytes())
        return grpc.secure_channel(address, trusted, options=OPTIONS)

    def _listen(self, place: Place) -> str:
        key, certificate = Path(place.folder, "key"), Path(place.folder, "certificate")
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
        name = f"-subj /CN=benchmark -addext subjectAltName=IP:{place.address}"
        files = ("-keyout", str(key), "-out", str(certificate))
        subprocess.run([*command.split(), *name.split(), *files], check=True, capture_output=True)
        own = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        address = f"{place.address}:{place.port}"
        self.server.add_secure_port(address, own)
        return address


def handler(fn: Callable[..., Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(lambda args, _: fn(*args), unpacked, packed)
