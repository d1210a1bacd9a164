"""The options classes of torch's API. Settings that torch does not have are in `config`."""

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
from telegrad.timeouts import torch_limit

Device = int | str | torch.device
DeviceMap = dict[Device, Device]

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]


class RpcBackendOptions:
    """The rendezvous URL and the default timeout of calls; 0 means no limit.

    Settings that torch does not have are in `config`, or in ``TELEGRAD_*`` variables. These count
    for every option that has its default value.
    """

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        config: Config | None = None,
    ) -> None:
        self.rpc_timeout: float = torch_limit(rpc_timeout, "rpc_timeout") or 0.0
        self.init_method = init_method
        self.config = config

    def __repr__(self) -> str:
        values = f"rpc_timeout={self.rpc_timeout}, init_method={self.init_method!r}"
        return f"{type(self).__name__}({values})"

    def to_config(self) -> Config:
        """Return the settings of the agent: `config`, or the environment, with these options."""
        base = self.config if self.config is not None else Config.from_environment()
        if self.rpc_timeout == DEFAULT_RPC_TIMEOUT_SEC:
            return base
        return replace(base, timeout=self.rpc_timeout or None)


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Torch's options. `num_worker_threads` is the initial size of the pool, not the maximum.

    `_transports` and `_channels` name parts of TensorPipe and are ignored.
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
        """Return the settings of the agent."""
        config = super().to_config()
        maps = {
            worker: {str(source): str(target) for source, target in device_map.items()}
            for worker, device_map in self.device_maps.items()
        }
        threads = config.threads
        if self.num_worker_threads != DEFAULT_NUM_WORKER_THREADS:
            threads = min(self.num_worker_threads, config.max_threads)
        return replace(config, threads=threads, device_maps={**config.device_maps, **maps})

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Map devices of this worker to those of worker `to`, for the tensors of calls.

        Results come back the same way. `init_rpc` checks that the devices exist and that no two are
        mapped to the same one.
        """
        new_map = dict(self.device_maps.get(to, {}))
        for key, value in device_map.items():
            source, target = torch.device(key), torch.device(value)
            if new_map.get(source, target) != target:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, "
                    f"trying to map {source} to {target} too"
                )
            new_map[source] = target
        self.device_maps[to] = new_map

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the devices of this worker that calls may use."""
        new_devices = [torch.device(device) for device in devices]
        for device in new_devices:
            if device.type == "cpu":
                raise ValueError("`set_devices` expects CUDA devices, but got the device cpu")
        self.devices = new_devices
