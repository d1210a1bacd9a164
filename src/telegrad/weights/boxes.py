"""Boxes: which part of a tensor a worker holds.

A `DTensor` has a global shape, and each worker of its mesh holds a box of it: a range of indices in
every dimension. A plain tensor is a box that is the whole tensor, unless slices say otherwise.

`torch.distributed.tensor` takes a second to import, so it is not imported here: before a program
has imported it, no tensor is a `DTensor`. There is no state here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import UsageError

Shape = tuple[int, ...]
Slices = Mapping[str, slice | tuple[slice, ...]]


class Box(NamedTuple):
    """A range of indices in every dimension."""

    starts: Shape
    sizes: Shape

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box:
        """Return the elements that are in both boxes."""
        starts = tuple(map(max, self.starts, other.starts))
        sizes = tuple(
            max(0, min(a + size_a, b + size_b) - start)
            for a, size_a, b, size_b, start in zip(*self, *other, starts, strict=True)
        )
        return Box(starts, sizes)

    def of(self, tensor: Tensor, outer: Box) -> Tensor:
        """Return this box as a view of a tensor with the values of a box around it."""
        index = tuple(
            slice(start - begin, start - begin + size)
            for start, size, begin in zip(self.starts, self.sizes, outer.starts, strict=True)
        )
        return tensor[index]


class Piece(NamedTuple):
    """The box of a tensor of the global shape `shape`."""

    shape: Shape
    dtype: torch.dtype
    box: Box


def whole(shape: Iterable[int]) -> Box:
    """Return the box that is all of a tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def as_slices(name: str, slices: object) -> tuple[slice, ...]:
    """Return the slices of a tensor as a tuple."""
    given = (slices,) if isinstance(slices, slice) else slices
    if not isinstance(given, tuple | list) or not all(map(_is_slice, given)):
        raise UsageError(f"{slices!r} are not slices of {name!r}: pass a slice or a tuple of them")
    return tuple(given)


def _is_slice(value: object) -> bool:
    return isinstance(value, slice) and all(
        bound is None or hasattr(bound, "__index__")
        for bound in (value.start, value.stop, value.step)
    )


def sliced(name: str, slices: slice | tuple[slice, ...], shape: Shape) -> Box:
    """Return the box of slices of a tensor. Dimensions without a slice are whole."""
    given = as_slices(name, slices)
    if len(given) > len(shape):
        raise UsageError(f"{given!r} are not slices of {name!r}, which has the shape {shape}")
    given += (slice(None),) * (len(shape) - len(given))
    ranges = [range(size)[each] for each, size in zip(given, shape, strict=True)]
    if any(each.step != 1 for each in ranges):
        raise UsageError(f"the slices of {name!r} must have the step 1")
    return Box(tuple(each.start for each in ranges), tuple(len(each) for each in ranges))


def piece_of(name: str, tensor: Tensor) -> Piece | None:
    """Return the piece of a tensor that this worker holds; None if it holds none."""
    shape = tuple(tensor.shape)
    shards = _as_dtensor(tensor)
    if shards is None:
        return Piece(shape, tensor.dtype, whole(shape))
    mesh, placements = shards.device_mesh, shards.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    held = [torch.arange(size) for size in shape]
    for placement, index, count in zip(placements, coordinate, mesh.shape, strict=True):
        if not placement.is_replicate():
            dim = _shard_dim(name, placement)
            held[dim] = _split(held[dim], count, getattr(placement, "split_factor", 1))[index]
    box = Box(
        tuple(int(each[0]) if len(each) else 0 for each in held),
        tuple(len(each) for each in held),
    )
    for each, start, size in zip(held, *box, strict=True):
        if size and int(each[-1]) != start + size - 1:
            raise UsageError(f"the shard of {name!r} with {placements} is not one contiguous box")
    if tuple(local_of(tensor).shape) != box.sizes:
        raise UsageError(
            f"the local tensor of {name!r} has the shape {tuple(local_of(tensor).shape)}, and "
            f"{placements} on a mesh of {tuple(mesh.shape)} means {box.sizes}"
        )
    return Piece(shape, tensor.dtype, box)


def local_of(tensor: Tensor) -> Tensor:
    """Return the values that this worker holds, in the same memory."""
    shards = _as_dtensor(tensor)
    local: Tensor = tensor if shards is None else shards.to_local()
    return local.detach()


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether no worker before this one in its mesh holds the same shard."""
    shards = _as_dtensor(tensor)
    if shards is None:
        return True
    coordinate = shards.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        index
        for index, placement in zip(coordinate, shards.placements, strict=True)
        if placement.is_replicate()
    )


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether some tensors are of the class `DTensor`."""
    return any(_as_dtensor(tensor) is not None for tensor in tensors.values())


def _as_dtensor(tensor: Tensor) -> Any:
    """Return the tensor if it is a `DTensor`, otherwise None."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return tensor if isinstance(tensor, kind) else None


def _shard_dim(name: str, placement: Any) -> int:
    # the shards of FSDP with tensor parallelism are another class, which has a `split_factor`
    if placement.is_shard() or hasattr(placement, "split_factor"):
        dim: int = placement.dim
        return dim
    raise UsageError(
        f"{name!r} has the placement {placement}; weights can be Shard or Replicate. "
        "Call `redistribute` first."
    )


def _split(indices: Tensor, count: int, factor: int) -> Sequence[Tensor]:
    """Split indices as `DTensor` does: each of `factor` chunks is split among all workers."""
    parts = [_chunk(each, count) for each in _chunk(indices, factor)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _chunk(indices: Tensor, count: int) -> list[Tensor]:
    size = -(-len(indices) // count)
    return [indices[number * size : (number + 1) * size] for number in range(count)]
