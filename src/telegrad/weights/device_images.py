"""Versions on a GPU, which workers of one host share by CUDA IPC.

A `DeviceVersionStore` has images in the memory of one GPU. A publisher whose weights are on a GPU
writes them there. Any other worker that has versions in host memory, or on another GPU, mirrors
them: it copies each version to the GPU once, for all subscribers of the host on that GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telegrad.cuda import driver, flat_memory
from telegrad.errors import StaleReference, UsageError
from telegrad.transport.flat_memory import may_share
from telegrad.weights.layout import Layout
from telegrad.weights.leases import Leases
from telegrad.weights.streams import Image
from telegrad.weights.versions import VersionStore

if TYPE_CHECKING:
    from telegrad.config import Config

_HERE = ""  # the reader of this process, which is never lost


class DeviceVersionStore(VersionStore):
    """Versions in the memory of a GPU. They have no streams."""

    _spare_images = 1

    def __init__(self, epoch: str, layout: Layout, index: int) -> None:
        super().__init__(epoch, layout, shared=False, history=0, bandwidth=None)
        self.index = index
        self.uuid = driver.device_uuids()[index]

    def _allocate(self) -> Image:
        contents, handle = flat_memory.allocate(self.index, self.layout.nbytes)
        return Image(contents, handle, None)


def device_key(name: str, uuid: str) -> str:
    """Return the name under which the versions on a GPU are stored."""
    return f"{name}\0{uuid}"


def uuid_of(device: torch.device | str | int) -> str:
    """Return the UUID of a CUDA device of this process."""
    device = torch.device(device)
    if device.type != "cuda":
        raise UsageError(f"weights can be kept on a CUDA device, not on {str(device)!r}")
    uuids = driver.device_uuids()
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if uuids else 0
    if index >= len(uuids):
        raise UsageError(f"there is no device cuda:{index}: this process sees {len(uuids)} GPUs")
    return uuids[index]


def device_of(tensors: Mapping[str, Tensor], config: Config) -> int | None:
    """Return the index of the GPU on which an image of these tensors is written.

    None: they are not on one GPU, or its memory cannot be shared.
    """
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda and tensor.numel()}
    if len(devices) != 1 or not config.cuda_ipc or not may_share(config):
        return None
    index: int = devices.pop().index
    return index if flat_memory.can_share(index) else None


def open_mirror(source: VersionStore, uuid: str, config: Config) -> DeviceVersionStore | None:
    """Return a store for copies of all versions of a store on a GPU; None if that cannot be.

    A process that does not use CUDA does not begin to use it for other workers.
    """
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not is_used or not config.cuda_ipc or not may_share(config):
        return None
    index = flat_memory.find_device(uuid)
    if index is None or not flat_memory.can_share(index):
        return None
    return DeviceVersionStore(source.epoch, source.layout, index)


def mirror(source: VersionStore, target: DeviceVersionStore) -> None:
    """Copy each version to a GPU until the source is closed."""
    have: int | None = None
    leases = Leases(_HERE)
    try:
        while True:
            source.wait_for_version(_HERE, have).wait()
            lease = leases.open(source.release)
            source.acquire(_HERE, lease.ticket)
            try:
                found, image = source.image_of(lease.ticket), target.take_image()
                flat_memory.copy(found.contents, image.contents)
                have = found.version
                target.complete(image, have)
            finally:
                del lease
                leases.release_ended()
    except StaleReference:  # the source is closed
        return
    finally:
        target.close()
