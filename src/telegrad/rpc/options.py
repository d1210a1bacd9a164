"""The options objects of the torch-shaped API. `config` carries everything that torch has no word for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from telegrad.config import Config
from telegrad.errors import UsageError
from telegrad.rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)

Device = int | str | torch.device
DeviceMap = dict[Device, Device]

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]


class RpcBackendOptions:
    """How workers find each other and how long a call may take (0: no limit)."""

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        config: Config | None = None,
    ) -> None:
        if rpc_timeout < 0:
            raise UsageError(
                f"rpc_timeout must be 0 (no limit) or positive seconds, not {rpc_timeout}"
            )
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method
        self.config = config

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rpc_timeout={self.rpc_timeout}, init_method={self.init_method!r})"

    def to_config(self) -> Config:
        """The agent's settings: those of `config`, or the environment's, with what is said here on top."""
        base = self.config if self.config is not None else Config.from_environment()
        return replace(base, timeout=self.rpc_timeout or None)


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Torch's options, all accepted. `num_worker_threads` is where the pool starts, not where it ends.

    `_transports` and `_channels` name parts of torch's engine; Telegrad chooses its own and ignores them.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: dict[str, DeviceMap] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Any = None,
        _channels: Any = None,
        config: Config | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method, config=config)
        if num_worker_threads < 1:
            raise UsageError(f"num_worker_threads must be positive, not {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)
        self.set_devices(devices or ())

    def to_config(self) -> Config:
        config = super().to_config()
        maps = {
            worker: {str(near): str(far) for near, far in devices.items()}
            for worker, devices in self.device_maps.items()
        }
        return replace(
            config,
            threads=min(self.num_worker_threads, config.max_threads),
            device_maps={**config.device_maps, **maps},
        )

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Tensors on a device of this worker arrive on the mapped device of worker `to`.

        Results come back the same way. `init_rpc` checks that the devices exist and that no two go to the same one.
        """
        known = dict(self.device_maps.get(to, {}))
        for source, target in device_map.items():
            near, far = torch.device(source), torch.device(target)
            if known.get(near, far) != far:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {near} to {far} too"
                )
            known[near] = far
        self.device_maps[to] = known

    def set_devices(self, devices: Sequence[Device]) -> None:
        """The devices of this worker that calls may use."""
        wanted = [torch.device(device) for device in devices]
        for device in wanted:
            if device.type == "cpu":
                raise ValueError("`set_devices` expects CUDA devices, but got the device cpu")
        self.devices = wanted
