"""Shards of every worker of a mesh, in one process and without communication.

Operations on such a `DTensor` may return one of another worker: torch takes meshes of equal shapes
for equal. Tests use only the local tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

Weights = dict[str, Tensor]


def shards(weights: Weights, mesh: tuple[int, ...], *placements: Any) -> list[Weights]:
    """Return the `DTensor` weights of each worker of a mesh."""
    return shards_by_name(weights, mesh, dict.fromkeys(weights, placements))


def shards_by_name(
    weights: Weights, mesh: tuple[int, ...], placements: dict[str, Sequence[Any]]
) -> list[Weights]:
    """The same with placements for each tensor. Those without are plain tensors."""
    size = math.prod(mesh)
    return [_of_rank(rank, size, weights, mesh, placements) for rank in range(size)]


def _of_rank(
    rank: int,
    size: int,
    weights: Weights,
    shape: tuple[int, ...],
    placements: dict[str, Sequence[Any]],
) -> Weights:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mesh = DeviceMesh("cpu", torch.arange(size).view(shape))
        return {
            name: distribute_tensor(tensor, mesh, placements[name], src_data_rank=None)
            if name in placements
            else tensor.clone()
            for name, tensor in weights.items()
        }
    finally:
        dist.destroy_process_group()
