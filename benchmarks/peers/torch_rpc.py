"""One adapter for `torch.distributed.rpc` and packages with the same interface."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from benchmarks.peers.base import CALLEE, Place

TIMEOUT_S = 60.0


class TorchShaped:
    """A module with the names of `torch.distributed.rpc`, in its default configuration."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.rpc: Any = importlib.import_module(module)
        package = module.removesuffix(".rpc")
        self.autograd: Any = importlib.import_module(f"{package}.autograd")
        self.optimizer: Any = importlib.import_module(f"{package}.optim").DistributedOptimizer

    def options(self) -> Any:
        return self.rpc.TensorPipeRpcBackendOptions(init_method="env://", rpc_timeout=TIMEOUT_S)

    def start(self, place: Place) -> None:
        os.environ.update(MASTER_ADDR=place.callee_address, MASTER_PORT=str(place.port))
        # torch derives an interface from the host name; if that fails, it does not start.
        os.environ.setdefault("TP_SOCKET_IFNAME", place.interface)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", place.interface)
        os.environ.setdefault("TELEGRAD_LISTEN", place.address)
        self.rpc.init_rpc(
            place.name,
            rank=place.rank,
            world_size=place.world_size,
            rpc_backend_options=self.options(),
        )

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        rpc_sync = self.rpc.rpc_sync
        return lambda *args: rpc_sync(CALLEE, fn, args)

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        rpc_async = self.rpc.rpc_async
        return lambda *args: rpc_async(CALLEE, fn, args)

    def result(self, pending: Any) -> Any:
        return pending.wait()

    def stop(self) -> None:
        self.rpc.shutdown()


class TorchOverTcp(TorchShaped):
    """torch RPC without its shared-memory transport.

    It answers more slowly, but its threads sleep when idle.
    """

    channels: tuple[str, ...] = ("basic",)

    def __init__(self) -> None:
        super().__init__("torch.distributed.rpc")

    def options(self) -> Any:
        return self.rpc.TensorPipeRpcBackendOptions(
            init_method="env://",
            rpc_timeout=TIMEOUT_S,
            _transports=["uv"],
            _channels=list(self.channels),
        )


class TorchBetweenHosts(TorchOverTcp):
    """torch RPC as it runs between two machines: tensors travel over several TCP connections.

    By default it would find out that two network namespaces are on one machine and read tensors
    from the memory of the other process (`process_vm_readv`).
    """

    channels = ("mpt_uv", "basic")
