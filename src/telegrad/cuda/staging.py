"""CUDA tensors through host memory, for peers that cannot map each other's device memory.

Between hosts, the bytes of a large tensor are copied in parts through pinned buffers, because the
GPU copies from and to pinned memory while the CPU does something else: it encrypts and sends the
part before, or receives and decrypts the next one. Each thread that sends or receives parts has two
pinned buffers for each device, a `_Ring`. The message refers to the tensor by a `HostImage`.

State: the rings belong to their threads. `_streams` has one stream for each device, in whose memory
pool tensors are received. No work runs there, so memory of this pool is idle when it is allocated.
"""

from __future__ import annotations

import functools
import threading
from pickle import PickleBuffer
from typing import Any

import torch
from torch import Tensor

from telegrad.cuda.receive import InlineReceive
from telegrad.messages.packing import message_resource
from telegrad.transport.host_image import (
    PART,
    DeviceMemory,
    Parts,
    find_image,
    image_of,
    set_device_allocator,
)
from telegrad.wire import tensors
from telegrad.wire.tensors import Reduced, build_shaped, stackable_code

_MIN_STAGED = 1 << 20  # bytes; smaller tensors are copied at once


class _Ring:
    """Two host buffers of one thread, for copies from and to one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        is_cuda = self._stream is not None
        self._buffers = [torch.empty(PART, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._events: list[Any] = [torch.cuda.Event() if is_cuda else None for _ in range(2)]

    def space(self, slot: int, size: int) -> memoryview:
        """Return the first bytes of a buffer."""
        return memoryview(self._buffers[slot][:size].numpy())

    def start_copy(self, slot: int, memory: Tensor, to_device: bool) -> None:
        """Start to copy between a buffer and device memory, after earlier copies of this ring."""
        buffer = self._buffers[slot][: memory.numel()]
        target, source = (memory, buffer) if to_device else (buffer, memory)
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._events[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """Wait until the last copy of a buffer has completed."""
        event = self._events[slot]
        if event is not None:
            event.synchronize()

    def wait_for_all(self) -> None:
        """Wait until all copies have completed."""
        if self._stream is not None:
            self._stream.synchronize()


class _ThreadRings(threading.local):
    def __init__(self) -> None:
        self.idle: dict[torch.device, list[_Ring]] = {}

    def take(self, device: torch.device) -> _Ring:
        """Return a ring that this thread does not use; a generator may be suspended in another."""
        idle = self.idle.setdefault(device, [])
        return idle.pop() if idle else _Ring(device)

    def put(self, device: torch.device, ring: _Ring) -> None:
        """Keep a ring for the next copies of this thread."""
        self.idle.setdefault(device, []).append(ring)


_rings = _ThreadRings()


class StagedMemory(DeviceMemory):
    """The bytes of a tensor. Work on them must have completed when they are copied."""

    def __init__(self, tensor: Tensor) -> None:
        """`tensor` is contiguous."""
        self.bytes = tensor.view(-1).view(torch.uint8)

    def parts(self, start: int, end: int) -> Parts:
        device = self.bytes.device
        ring = _rings.take(device)
        ranges = _ranges(start, end)
        try:
            for slot in (0, 1):
                self._start_part(ring, slot, ranges)
            for number, (first, last) in enumerate(ranges):
                slot = number % 2
                ring.wait(slot)
                yield ring.space(slot, last - first)
                # The other buffer has its part, or is being filled.
                self._start_part(ring, number + 2, ranges)
        finally:
            ring.wait_for_all()
            _rings.put(device, ring)

    def _start_part(self, ring: _Ring, number: int, ranges: list[tuple[int, int]]) -> None:
        if number < len(ranges):
            first, last = ranges[number]
            ring.start_copy(number % 2, self.bytes[first:last], to_device=False)

    def spaces(self, start: int, end: int) -> Parts:
        device = self.bytes.device
        ring = _rings.take(device)
        try:
            for number, (first, last) in enumerate(_ranges(start, end)):
                slot = number % 2
                ring.wait(slot)
                yield ring.space(slot, last - first)
                ring.start_copy(slot, self.bytes[first:last], to_device=True)
        finally:
            ring.wait_for_all()
            _rings.put(device, ring)


def _ranges(start: int, end: int) -> list[tuple[int, int]]:
    return [(first, min(first + PART, end)) for first in range(start, end, PART)]


def copy_bytes(source: Tensor, target: Tensor, device: torch.device) -> None:
    """Copy bytes between host memory and a device in parts, after the work of the current stream.

    One of the tensors is on the device. The CPU copies one part while the GPU copies the next.
    """
    torch.cuda.current_stream(device).synchronize()
    start = 0
    if source.is_cuda:
        for part in StagedMemory(source).parts(0, source.numel()):
            target[start : start + part.nbytes].copy_(torch.frombuffer(part, dtype=torch.uint8))
            start += part.nbytes
    else:
        for space in StagedMemory(target).spaces(0, target.numel()):
            torch.frombuffer(space, dtype=torch.uint8).copy_(source[start : start + space.nbytes])
            start += space.nbytes


# The sender


def reduce_through_host(
    tensor: Tensor, code: int, exclusive: bool, target: torch.device
) -> Reduced:
    """Return the constructor and arguments of a contiguous CUDA tensor for a device of a peer.

    A tensor that is not `exclusive` may be written to by other threads before it is sent. Therefore
    a snapshot of it on the device is sent.
    """
    index = target.index if target.type == "cuda" else None
    size = tensor.numel() * tensor.itemsize
    if size < _MIN_STAGED or stackable_code(tensor.dtype) is None:
        return _reduce_copied(tensor.cpu(), index)
    try:
        snapshot = tensor.detach() if exclusive else tensor.clone()
    except torch.OutOfMemoryError:
        return _reduce_copied(tensor.cpu(), index)  # slower
    torch.cuda.current_stream(tensor.device).synchronize()
    buffer = PickleBuffer(image_of(StagedMemory(snapshot), size, index))
    if index is None:
        return build_shaped, (code, tuple(tensor.shape), buffer)
    return build_staged, (code, tuple(tensor.shape), buffer, index)


def _reduce_copied(host: Tensor, index: int | None) -> Reduced:
    reduced = tensors.reduce_on_same_device(host)
    return reduced if index is None else (build_copied, (*reduced, index))


# The receiver


def build_copied(rebuild: Any, arguments: tuple[Any, ...], index: int) -> Tensor:
    """Unpickle a CUDA tensor that was sent as a tensor in host memory."""
    host: Tensor = rebuild(*arguments)
    return host.to(f"cuda:{index}")


def build_staged(code: int, shape: tuple[int, ...], data: Any, index: int) -> Tensor:
    """Unpickle a CUDA tensor that was sent in parts."""
    data = memoryview(data)
    image = find_image(data)
    if image is not None and isinstance(image.device_memory, StagedMemory):
        memory = image.device_memory.bytes  # the copies have completed
    else:
        memory = _allocate(data.nbytes, index)
        start = 0
        for space in StagedMemory(memory).spaces(0, data.nbytes):
            space[:] = data[start : start + space.nbytes]
            start += space.nbytes
    # It is not memory of the streams that use it: they keep it until they have done so.
    memory.record_stream(torch.cuda.current_stream(index))
    tensor = build_shaped(code, shape, memory)
    message_resource(("receive_inline_tensor", index), functools.partial(InlineReceive, index)).add(
        tensor
    )
    return tensor


_streams: dict[int, torch.cuda.Stream] = {}


def _allocate(nbytes: int, index: int) -> Tensor:
    """Return memory of a device that no work uses any more."""
    stream = _streams.get(index)
    if stream is None:
        stream = _streams.setdefault(index, torch.cuda.Stream(index))
    with torch.cuda.stream(stream):
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{index}")


def _allocate_staged(nbytes: int, index: int) -> StagedMemory:
    """Return memory of a device for an image that is received; see `set_device_allocator`."""
    try:
        return StagedMemory(_allocate(nbytes, index))
    except (RuntimeError, AssertionError) as error:  # no memory, no such device, no CUDA
        raise MemoryError(str(error)) from error


set_device_allocator(_allocate_staged)
