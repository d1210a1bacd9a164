"""`RpcAgent`: the agent that `init_rpc` makes, with the methods of torch's agents."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from telegrad.agent import Agent
from telegrad.errors import GroupBroken
from telegrad.group import shutdown as group_shutdown
from telegrad.group.membership import WorkerInfo
from telegrad.messages.device_routes import request_route
from telegrad.rpc.options import RpcBackendOptions
from telegrad.timeouts import torch_limit

__all__ = ["RpcAgent"]


class RpcAgent(Agent):
    """An `Agent` with the methods of torch's `RpcAgent` and `TensorPipeAgent`.

    `shutdown` is that of `Agent`: it waits for the other workers, as `rpc.shutdown` does. `close`
    leaves at once.
    """

    def __init__(self, name: str, *, options: RpcBackendOptions, **kwargs: Any) -> None:
        super().__init__(name, config=options.to_config(), **kwargs)
        self._options = options
        self._runtime.failure_log_level = logging.WARNING  # as torch does

    @property
    def store(self) -> Any:
        """The store of the group; None after the agent has left."""
        return self._runtime._store

    @property
    def is_static_group(self) -> bool:
        """Return True if the group has a fixed size."""
        return self._runtime.world_size is not None

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until all workers have called this and no calls are under way; 0 means no limit.

        With `shutdown`, leave the group after that. Raise `GroupBroken` if a worker is missing.
        """
        self._runtime.require_open()
        limit = torch_limit(timeout)
        missing: set[str] = set()
        if shutdown:
            missing = set(self.shutdown(limit))
        else:
            deadline = None if limit is None else time.monotonic() + limit
            if self.is_static_group:
                missing = group_shutdown.wait_for_group(
                    self._runtime, self._runtime._participants(None), deadline
                )
            else:
                group_shutdown.drain(self._runtime, deadline)
        if missing:
            raise GroupBroken(
                f"join ended without {', '.join(sorted(missing))}", missing=sorted(missing)
            )

    def sync(self) -> None:
        """Wait until all workers have called this.

        Raise `GroupBroken` if one has not after the default timeout.
        """
        self.barrier(timeout=self._runtime.timeout)

    def get_metrics(self) -> dict[str, str]:
        """Return counters of the agent, under torch's names."""
        executor = self._runtime.executor
        connections = self._runtime.listener.connections
        peers = self._runtime.peers.all()
        metrics = {
            "agent.thread_pool_size": executor.limit,
            "agent.num_idle_threads": max(executor.limit - executor.active, 0),
            "agent.client_active_calls": sum(peer.calls_in_progress for peer in peers),
            "agent.server_active_calls": sum(each.calls_in_progress for each in connections),
            "agent.server_active_async_calls": sum(each.deferred_calls for each in connections),
        }
        return {name: str(value) for name, value in metrics.items()}

    def get_debug_info(self) -> dict[str, str]:
        """Return `get_metrics`, as torch does."""
        return self.get_metrics()

    def _get_device_map(self, dst: WorkerInfo | str) -> dict[torch.device, torch.device]:
        """Return the device map of calls to a worker."""
        name = dst if isinstance(dst, str) else dst.name
        route = request_route(self.config.device_maps, name, self.config.unmapped_devices)
        return dict(route.device_map)

    def _get_backend_options(self) -> RpcBackendOptions:
        """Return the options that `init_rpc` was called with."""
        return self._options
