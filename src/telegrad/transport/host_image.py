"""`HostImage`: host memory for the bytes of a tensor that is on a device, copied when it is needed.

The buffers of a message are host memory. A CUDA tensor for another host has its bytes on the
device when the message is packed, and its receiver wants them on a device, too. An image stands
for such bytes in the list of buffers. It has addresses of its own, but the system gives them memory
only if they are written to:

- The sender's image is read in parts, which are copied from the device while the part before is
  being sent (`parts`). A channel that does not know images copies everything first (`fill_images`).
- The receiver's image is written in parts, each of which is copied to the device while the next
  one arrives (`spaces`). If the device has no memory for it, it is ordinary host memory.

`DeviceMemory` makes the copies; `telegrad.cuda.staging` implements it.

State: the device memory of a receiver's image is allocated by the first thread that writes, under
`_lock`. Nothing else changes, except that `copy_from_device` ends the use of the sender's memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np

from telegrad.locks import new_lock

Parts = Generator[memoryview, None, None]
PART = 1 << 21  # bytes that are copied at a time; a multiple of what a stripe encrypts together


class DeviceMemory(ABC):
    """Memory of a device, copied in parts of `PART` bytes. Several threads may use it at once."""

    @abstractmethod
    def parts(self, start: int, end: int) -> Parts:
        """Return copies of the bytes from `start` to `end`, in order.

        Each is valid until the next one is taken. It is copied while the one before is used.
        """

    @abstractmethod
    def spaces(self, start: int, end: int) -> Parts:
        """Return host memory for the bytes from `start` to `end`, in order.

        What was written to it is copied to the device when the next one is taken. All copies have
        completed when there are no more.
        """


class _Hooks:
    allocate: Callable[[int, int], DeviceMemory] | None = None


def set_device_allocator(allocate: Callable[[int, int], DeviceMemory]) -> None:
    """Let `allocate(nbytes, device index)` make the device memory of received images.

    It raises `MemoryError` if the device is missing or has too little memory.
    """
    _Hooks.allocate = allocate


class HostImage(np.ndarray[Any, np.dtype[np.uint8]]):
    """Host memory that stands for memory of a device.

    `memoryview(image).obj` is the image, also for parts of the view.
    """

    device_memory: DeviceMemory | None  # where the bytes are; None: in this memory
    target: int | None  # the index of the device on which they should arrive
    _unallocated: bool
    _lock: threading.Lock

    def copy_from_device(self) -> None:
        """Copy the bytes of the device into this memory, if that was not done."""
        if self.device_memory is not None:
            view, start = memoryview(self), 0
            for part in self.device_memory.parts(0, self.nbytes):
                view[start : start + part.nbytes] = part
                start += part.nbytes
            self.device_memory = None

    def parts(self, start: int, end: int) -> Parts:
        """Return the bytes from `start` to `end` in parts, each valid until the next is taken."""
        if self.device_memory is None:
            yield memoryview(self)[start:end]
        else:
            yield from self.device_memory.parts(start, end)

    def spaces(self, start: int, end: int) -> Parts:
        """Return memory for the bytes from `start` to `end` in parts, to be written in order."""
        with self._lock:
            if self._unallocated:
                self._unallocated = False
                self.device_memory = self._allocate()
        if self.device_memory is None:
            yield memoryview(self)[start:end]
        else:
            yield from self.device_memory.spaces(start, end)

    def _allocate(self) -> DeviceMemory | None:
        if _Hooks.allocate is None or self.target is None:
            return None
        try:
            return _Hooks.allocate(self.nbytes, self.target)
        except MemoryError:
            return None  # who uses the tensor fails, with a better error


def image_of(device: DeviceMemory, nbytes: int, target: int | None) -> HostImage:
    """Return the image of device memory that is to be sent."""
    return _new_image(nbytes, device, target)


def image_for(nbytes: int, target: int) -> HostImage:
    """Return the image for bytes that will be received, for the device with this index."""
    return _new_image(nbytes, None, target)


def _new_image(nbytes: int, device: DeviceMemory | None, target: int | None) -> HostImage:
    image = np.empty(nbytes, np.uint8).view(HostImage)
    image.device_memory, image.target = device, target
    image._unallocated = device is None
    image._lock = new_lock()
    return image


def find_image(buffer: memoryview) -> HostImage | None:
    """Return the image of which this is a view; None if it is ordinary memory."""
    owner = buffer.obj
    return owner if type(owner) is HostImage else None


def fill_images(buffers: Iterable[memoryview]) -> None:
    """Copy the bytes of all images into their memory, so that the buffers can be read."""
    for buffer in buffers:
        if type(buffer.obj) is HostImage:
            buffer.obj.copy_from_device()
