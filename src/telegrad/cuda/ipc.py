"""CUDA memory between the processes of one host: what another process copies is told to it as a place in an allocation.

An allocation is known to other processes by its handle, whoever made it: torch's allocator, as a rule. Each process
maps a handle once, copies what it is told to copy, and keeps the mapping for the next message; what nobody has used for
a while is unmapped, for memory that others have mapped does not return to the device when its owner frees it. Order
between processes is kept by events that are shared the same way.

State: `Exports._allocations` (what this process has handed out, by the driver's number for the allocation) and
`_IpcMappings` (what it has mapped, and how many copies use each), under their locks; of each stream, a ring of events,
made once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import TelegradError

# CU_POINTER_ATTRIBUTE_BUFFER_ID: unique in the life of a process, which addresses are not
_POINTER_ATTRIBUTE_BUFFER_ID = 7
_LAZY_PEER_ACCESS = 1
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_HANDLE_BYTES = 64
_SLOT_BYTES, _SLOTS = 1 << 16, 256  # small snapshots need no allocation
# messages that one stream may have under way before a receiver may wait for a later one, too
_EVENTS_PER_STREAM = 64
_UNMAP_AFTER = 5.0  # seconds after which memory of others is unmapped

DevicePointer = ctypes.c_uint64


class _IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class CudaError(TelegradError):
    """The CUDA driver refused something."""


class MemoryLocation(NamedTuple):
    """Where bytes lie that another process may copy."""

    handle: bytes
    offset: int


class Memcpy2D(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D: rows of bytes that lie apart on one side or both."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", DevicePointer),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("destination_x", ctypes.c_size_t),
        ("destination_y", ctypes.c_size_t),
        ("destination_type", ctypes.c_uint),
        ("destination_host", ctypes.c_void_p),
        ("destination_device", DevicePointer),
        ("destination_array", ctypes.c_void_p),
        ("destination_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _CudaDriver:
    """The few functions of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"the CUDA driver cannot be loaded: {error}") from error
        self._library.cuMemcpyDtoDAsync_v2.argtypes = (
            DevicePointer,
            DevicePointer,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._library.cuIpcOpenMemHandle_v2.argtypes = (
            ctypes.POINTER(DevicePointer),
            _IpcMemHandle,
            ctypes.c_uint,
        )
        self._library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_IpcMemHandle), DevicePointer)
        self._library.cuIpcCloseMemHandle.argtypes = (DevicePointer,)
        self._library.cuMemcpyDtoHAsync_v2.argtypes = (
            ctypes.c_void_p,
            DevicePointer,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._library.cuMemcpy2DAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.cuStreamQuery.argtypes = (ctypes.c_void_p,)

    def buffer_id(self, pointer: int) -> int:
        """The number of the allocation that an address lies in, which no other ever had or will have."""
        buffer_id = ctypes.c_uint64()
        code = self._library.cuPointerGetAttribute(
            ctypes.byref(buffer_id), _POINTER_ATTRIBUTE_BUFFER_ID, DevicePointer(pointer)
        )
        self._check("cuPointerGetAttribute", code)
        return buffer_id.value

    def allocation_base(self, pointer: int) -> int:
        """Where the allocation begins that an address lies in."""
        base, size = DevicePointer(), ctypes.c_size_t()
        code = self._library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), DevicePointer(pointer)
        )
        self._check("cuMemGetAddressRange_v2", code)
        return base.value

    def ipc_handle(self, base: int) -> bytes:
        handle = _IpcMemHandle()
        self._check(
            "cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(ctypes.byref(handle), base)
        )
        return bytes(handle)

    def open_ipc_handle(self, handle: bytes) -> int:
        base = DevicePointer()
        structure = _IpcMemHandle.from_buffer_copy(handle)
        code = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(base), structure, _LAZY_PEER_ACCESS)
        self._check("cuIpcOpenMemHandle", code)
        return base.value

    def close_ipc_handle(self, base: int) -> None:
        self._check("cuIpcCloseMemHandle", self._library.cuIpcCloseMemHandle(base))

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Copy from device to device when the stream comes to it."""
        code = self._library.cuMemcpyDtoDAsync_v2(destination, source, size, stream)
        if code:
            self._check("cuMemcpyDtoDAsync", code)

    def copy_to_host_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Copy from device to page-locked host memory when the stream comes to it."""
        code = self._library.cuMemcpyDtoHAsync_v2(destination, source, size, stream)
        if code:
            self._check("cuMemcpyDtoHAsync", code)

    def copy_2d_async(self, copy_2d: Memcpy2D, stream: int) -> None:
        """Copy rows from page-locked host memory to a device when the stream comes to it."""
        code = self._library.cuMemcpy2DAsync_v2(ctypes.addressof(copy_2d), stream)
        if code:
            self._check("cuMemcpy2DAsync", code)

    def is_stream_idle(self, stream: int) -> bool:
        """Is there nothing left to do on a stream?"""
        code = self._library.cuStreamQuery(stream)
        if code not in (0, _NOT_READY):
            self._check("cuStreamQuery", code)
        return code == 0

    def _check(self, function: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{function}: {(text.value or b'unknown error').decode()} ({code})")


class _ThreadState(threading.local):
    ready_devices: frozenset[int] = frozenset()


_thread = _ThreadState()


@functools.cache
def driver() -> _CudaDriver:
    return _CudaDriver()


@functools.cache
def device_uuids() -> tuple[str, ...]:
    """The ids of the GPUs that this process sees, by their index here."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    )


def ensure_context(index: int) -> None:
    """Make sure that this thread can talk to the driver about a device, as it can once torch has used that device."""
    if index not in _thread.ready_devices:
        with torch.cuda.device(index):
            torch.cuda.Event().record()
        _thread.ready_devices |= {index}


def is_current_device(index: int) -> bool:
    """Is it the current device? For the driver, the default stream is that of the current one."""
    ensure_context(index)
    current: int = torch._C._cuda_getDevice()
    return current == index


def current_raw_stream(index: int) -> int:
    """What the driver calls the current stream of a device."""
    raw_stream: int = torch._C._cuda_getCurrentRawStream(index)
    return raw_stream


def copy_async(destination: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
    """Copy from device to device when the stream comes to it."""
    if not is_current_device(stream.device_index):
        with torch.cuda.device(stream.device_index):
            copy_async(destination, source, size, stream)
            return
    driver().copy_async(destination, source, size, stream.cuda_stream)


class _SnapshotSlot:
    """A small snapshot's place in a slab that was handed out once. Free again when this object dies."""

    __slots__ = ("_free", "address", "location")

    def __init__(self, free: deque[tuple[int, MemoryLocation]]) -> None:
        self._free = free
        self.address, self.location = free.popleft()

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._free.append((self.address, self.location))


class Exports:
    """Memory of one device that this process hands out."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._allocations: dict[int, tuple[bytes, int]] = {}
        self._lock = threading.Lock()
        self._event_pools: dict[int, tuple[list[IpcEvent], Any]] = {}
        self._slab = self._empty(_SLOT_BYTES * _SLOTS)
        start, self.slab_location = self._slab.data_ptr(), self.export(self._slab)
        self._free = deque(
            (start + offset, self.slab_location._replace(offset=self.slab_location.offset + offset))
            for offset in range(0, _SLOT_BYTES * _SLOTS, _SLOT_BYTES)
        )

    def snapshot(self, tensor: Tensor, stream: torch.cuda.Stream) -> tuple[MemoryLocation, object]:
        """Copy a contiguous tensor when the stream comes to it: where to, and what keeps the copy."""
        size = tensor.numel() * tensor.itemsize
        if size <= _SLOT_BYTES:
            try:
                slot = _SnapshotSlot(self._free)
            except IndexError:  # all are under way
                pass
            else:
                copy_async(slot.address, tensor.data_ptr(), size, stream)
                return slot.location, slot
        snapshot_memory = self._empty(size)
        snapshot_memory.view(tensor.dtype).copy_(tensor.view(-1), non_blocking=True)
        return self.export(snapshot_memory), snapshot_memory

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._index}")

    def export(self, tensor: Tensor) -> MemoryLocation:
        """How others find a tensor. Raises `CudaError` for memory of a kind that cannot be mapped."""
        ensure_context(self._index)
        pointer = tensor.data_ptr()
        buffer_id = driver().buffer_id(pointer)
        allocation = self._allocations.get(buffer_id)
        if allocation is None:
            with self._lock:
                base = driver().allocation_base(pointer)
                handle = driver().ipc_handle(base)
                mappings.add_own_memory(handle, base)
                allocation = self._allocations[buffer_id] = handle, base
        return MemoryLocation(allocation[0], pointer - allocation[1])

    def event(self, stream: torch.cuda.Stream) -> IpcEvent:
        """An event that others can wait for, to be recorded on this stream alone."""
        pool = self._event_pools.get(stream.cuda_stream)
        if pool is None:
            with self._lock, torch.cuda.device(self._index):
                events = [IpcEvent(self._index) for _ in range(_EVENTS_PER_STREAM)]
                pool = self._event_pools.setdefault(stream.cuda_stream, (events, itertools.count()))
        events, counter = pool
        return events[next(counter) % _EVENTS_PER_STREAM]


class IpcEvent:
    """An event of this process. Recorded again on its stream, it only makes those who wait for it wait longer."""

    def __init__(self, index: int) -> None:
        self.event = torch.cuda.Event(interprocess=True)
        self.handle: bytes = self.event.ipc_handle()
        mappings.add_own_event(index, self.handle, self.event)


class _IpcMapping:
    """Memory of another process, as this one sees it."""

    __slots__ = ("base", "index", "last_used", "use_count")

    def __init__(self, base: int, index: int) -> None:
        self.base = base
        self.index = index
        self.use_count = 0  # messages whose tensors are being copied out of it
        self.last_used = 0.0  # when the last of them was done


class _IpcMappings:
    """What other processes hand out, as this one sees it. What it hands out itself needs no mapping."""

    def __init__(self) -> None:
        self._own_bases: dict[bytes, int] = {}
        self._mappings: dict[bytes, _IpcMapping] = {}
        self._events: dict[tuple[int, bytes], Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._mappings)

    def add_own_memory(self, handle: bytes, base: int) -> None:
        self._own_bases[handle] = base

    def add_own_event(self, index: int, handle: bytes, event: torch.cuda.Event) -> None:
        self._events[index, handle] = event

    def acquire(self, handle: bytes, index: int) -> int:
        """Where memory of device `index` that somebody hands out lies for this process, until it is given back."""
        ensure_context(index)
        own_base = self._own_bases.get(handle)
        if own_base is not None:
            return own_base
        with self._lock:
            mapping = self._mappings.get(handle)
            if mapping is None:
                with torch.cuda.device(index):
                    mapping = self._mappings[handle] = _IpcMapping(
                        driver().open_ipc_handle(handle), index
                    )
            mapping.use_count += 1
            return mapping.base

    def release(self, handles: Iterable[bytes]) -> None:
        """What was copied out of these is here."""
        with self._lock:
            for handle in handles:
                mapping = self._mappings.get(handle)
                if mapping is not None:
                    mapping.use_count -= 1
                    mapping.last_used = time.monotonic()

    def event(self, handle: bytes, index: int) -> torch.cuda.Event:
        event = self._events.get((index, handle))
        if event is None:
            event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)
            self._events[index, handle] = event
        return event

    def has_unused(self, seconds: float = _UNMAP_AFTER) -> bool:
        before = time.monotonic() - seconds
        return any(
            not mapping.use_count and mapping.last_used <= before
            for mapping in list(self._mappings.values())
        )

    def close_unused(self, seconds: float = _UNMAP_AFTER) -> None:
        """Unmap what nobody has used for so long."""
        before = time.monotonic() - seconds
        with self._lock:
            for handle, mapping in list(self._mappings.items()):
                if not mapping.use_count and mapping.last_used <= before:
                    del self._mappings[handle]
                    ensure_context(mapping.index)
                    driver().close_ipc_handle(mapping.base)


mappings = _IpcMappings()


_exports: dict[int, Exports] = {}
_exports_lock = threading.Lock()


def exports(index: int) -> Exports:
    """What this process hands out of one of its devices. Made once and never ended: others may have it mapped."""
    found = _exports.get(index)
    if found is None:
        with _exports_lock:
            found = _exports.get(index) or _exports.setdefault(index, Exports(index))
    return found
