"""Join the group of a test, with its device maps and settings."""

from __future__ import annotations

import os
from typing import Any

import telegrad.rpc as rpc
from telegrad import Config


def join(rank: int, size: int, path: str, settings: dict[str, Any]) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}",
        config=Config(secret="for the tests on a GPU", **settings.get("config", {})),
    )
    for peer, devices in settings.get("maps", {}).get(rank, {}).items():
        options.set_device_map(peer, devices)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def join_without_gpu(rank: int, size: int, path: str, settings: dict[str, Any]) -> None:
    """Like `join`, but rank 1 sees no GPU."""
    if rank == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    join(rank, size, path, settings)
