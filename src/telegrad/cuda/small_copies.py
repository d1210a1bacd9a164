"""Copies of a few bytes between a GPU and the host that use only the copy engines of the GPU.

If several processes share a GPU, it runs one of them at a time, and a switch takes about 150 us on
an H200. Kernels, copies from device to device, events shared between processes, and small copies to
the device need a switch; the driver writes such small copies into the command stream. Copies to the
host, and copies of rows to the device of any length, are done by copy engines and need no switch.
Therefore a few bytes are copied to the device as two rows.

State of `SmallCopies`: `_free` holds the pinned buffers that are not in use; a thread owns a buffer
that it has popped. `_busy` holds, by stream, the buffers of enqueued copies. They return to `_free`
when the stream is found to be idle. `_lock` is held from counting the buffers of a stream until
they have been removed from `_busy`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections import deque

import torch
from torch import Tensor

from telegrad.cuda import driver
from telegrad.wire.tensors import build_empty, build_shaped, code_of

MAX_SMALL_COPY_BYTES = 1 << 16  # larger copies are faster from device to device, even with a switch
_BUFFERS = 32
_UINT8_CODE = code_of(torch.uint8)
_MEMORY_TYPE_HOST, _MEMORY_TYPE_DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
# There must be a gap between the two rows, or the driver would merge them into one.
_PITCH = MAX_SMALL_COPY_BYTES


class _PinnedBuffer:
    """Pinned memory for one copy, and the parameters of a copy from it to the device."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.copy_2d = driver.Memcpy2D(
            source_type=_MEMORY_TYPE_HOST,
            source_host=address,
            source_pitch=_PITCH,
            destination_type=_MEMORY_TYPE_DEVICE,
            height=2,
        )


class SmallCopies:
    """Copy a few bytes from and to one device."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = torch.device("cuda", index)
        self._driver = driver.cuda_driver()
        self._lock = threading.Lock()
        self._memory = torch.empty(_BUFFERS * 2 * _PITCH, dtype=torch.uint8, pin_memory=True)
        start = self._memory.data_ptr()
        self._free = deque(_PinnedBuffer(start + slot * 2 * _PITCH) for slot in range(_BUFFERS))
        self._busy: dict[int, deque[_PinnedBuffer]] = {}  # by stream

    def copy_to_host(self, tensor: Tensor, size: int, timeout: float) -> bytes | None:
        """Return the `size` bytes of a contiguous tensor.

        Return None if the stream of the tensor is still busy after `timeout` seconds, or if there
        is no free buffer.
        """
        if not driver.is_current_device(self._index):
            with torch.cuda.device(self._index):
                return self.copy_to_host(tensor, size, timeout)
        stream, give_up_at = driver.current_raw_stream(self._index), 0.0
        buffer = self._acquire_buffer(stream)
        if buffer is None:
            return None
        self._driver.copy_to_host_async(buffer.address, tensor.data_ptr(), size, stream)
        while not self._is_idle(stream):
            now = time.monotonic()
            give_up_at = give_up_at or now + timeout
            if now > give_up_at:
                self._busy_on(stream).append(buffer)  # the copy still writes to it
                return None
        data = ctypes.string_at(buffer.address, size)
        self._free.append(buffer)
        return data

    def copy_to_device(self, data: bytes, code: int, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor with these bytes; the copy is enqueued on the current stream."""
        if len(data) % 2:  # two rows need an even number of bytes
            padded = self.copy_to_device(data + b"\0", _UINT8_CODE, (len(data) + 1,))
            return build_shaped(code, shape, padded[:-1])
        if not driver.is_current_device(self._index):
            with torch.cuda.device(self._index):
                return self.copy_to_device(data, code, shape)
        stream = driver.current_raw_stream(self._index)
        buffer = self._acquire_buffer(stream)
        if buffer is None:
            host = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return build_shaped(code, shape, host.to(self._device))
        tensor = build_empty(code, shape, self._device)
        half = len(data) // 2
        ctypes.memmove(buffer.address, data, half)
        ctypes.memmove(buffer.address + _PITCH, data[half:], half)
        copy_2d = buffer.copy_2d
        copy_2d.destination_device = tensor.data_ptr()
        copy_2d.destination_pitch = half
        copy_2d.width = half
        self._driver.copy_2d_async(copy_2d, stream)
        self._busy_on(stream).append(buffer)
        return tensor

    def _busy_on(self, stream: int) -> deque[_PinnedBuffer]:
        return self._busy.setdefault(stream, deque())

    def _acquire_buffer(self, stream: int) -> _PinnedBuffer | None:
        """Return a free buffer; None if there is none and `stream` cannot free any yet."""
        for _ in range(2):
            try:
                return self._free.popleft()
            except IndexError:
                if not self._is_idle(stream):
                    return None
        return None

    def _is_idle(self, stream: int) -> bool:
        """Return whether a stream is idle; if it is, free its buffers."""
        with self._lock:
            busy = self._busy_on(stream)
            count = len(busy)
            if not self._driver.is_stream_idle(stream):
                return False
            for _ in range(count):
                self._free.append(busy.popleft())
        return True


@functools.cache
def small_copies(index: int) -> SmallCopies:
    """Return the `SmallCopies` of a device."""
    return SmallCopies(index)
