"""Flat memory of a GPU that processes of one host share: one writes what the others read.

It is the counterpart of `transport/flat_memory`. The owner sends a `DeviceHandle`; another process
maps the memory by CUDA IPC. Only the owner writes. It must not write or free the memory while
another process may read it, so readers need a lease of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.cuda import driver, ipc, staging


class DeviceHandle(NamedTuple):
    """What another process needs to map device memory."""

    uuid: str
    memory: ipc.MemoryLocation
    nbytes: int


class _DeviceArray:
    """Device memory at an address, in the form that `torch.as_tensor` takes without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def find_device(uuid: str) -> int | None:
    """Return the index of a GPU in this process; None if this process does not see it."""
    uuids = driver.device_uuids()
    return uuids.index(uuid) if uuid in uuids else None


def can_share(index: int) -> bool:
    """Return whether memory of a GPU can be exported to other processes."""
    try:
        ipc.exports(index)
    except driver.CudaError:
        # Memory cannot be exported with the allocator setting `expandable_segments`.
        return False
    return True


def allocate(index: int, nbytes: int) -> tuple[Tensor, DeviceHandle]:
    """Return bytes on a GPU, and their handle."""
    whole = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=f"cuda:{index}")
    location = ipc.exports(index).export(whole)
    return whole[:nbytes], DeviceHandle(driver.device_uuids()[index], location, nbytes)


@contextmanager
def mapped(handle: DeviceHandle) -> Iterator[Tensor]:
    """Map the memory of a handle. What was enqueued with it is complete at the end."""
    index = find_device(handle.uuid)
    if index is None:
        raise driver.CudaError(f"this process does not see the GPU {handle.uuid}")
    base = ipc.mappings.acquire(handle.memory.handle, index)
    try:
        if handle.nbytes:
            array = _DeviceArray(base + handle.memory.offset, handle.nbytes)
            contents = torch.as_tensor(array, device=f"cuda:{index}")
        else:
            contents = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")
        try:
            yield contents
        finally:
            torch.cuda.current_stream(index).synchronize()
    finally:
        ipc.mappings.release([handle.memory.handle])


def copy(source: Tensor, target: Tensor) -> None:
    """Copy bytes from or to a GPU, beside the work of other streams. Return when it is done."""
    device = target.device if target.is_cuda else source.device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        if source.is_cuda and target.is_cuda:
            target.copy_(source)
        elif source.numel():
            staging.copy_bytes(source, target, device)
        torch.cuda.current_stream(device).synchronize()
