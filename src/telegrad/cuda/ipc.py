"""CUDA IPC: share device memory and events with other processes of the same host.

A process exports memory as a `MemoryLocation`: the IPC handle of an allocation and an offset in it.
The handle covers the whole allocation, which as a rule belongs to torch's allocator. A receiving
process maps each handle once, copies from the mapping and keeps it for later messages. It unmaps
allocations that were not used for a while, because the owner cannot return freed memory to the
device while another process maps it. IPC events keep the order between streams of two processes.

State: `Exports._allocations` maps the driver's buffer id to the exported allocation, and
`Exports._event_pools` holds the IPC events of each stream; entries are added under `Exports._lock`
and never removed. `_IpcMappings._mappings` holds the mapped allocations of other processes with
their use counts, changed under `_IpcMappings._lock`. `_exports` has one `Exports` per device, added
under `_exports_lock`.
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

# CU_POINTER_ATTRIBUTE_BUFFER_ID. Unlike an address, a buffer id is never reused in a process.
_POINTER_ATTRIBUTE_BUFFER_ID = 7
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_HANDLE_BYTES = 64
_SLOT_BYTES, _SLOTS = 1 << 16, 256  # a slab for small snapshots, which saves allocations
# With more messages in flight on one stream, a receiver may also wait for a later message.
_EVENTS_PER_STREAM = 64
_UNMAP_AFTER = 5.0  # seconds without use after which memory of another process is unmapped

DevicePointer = ctypes.c_uint64


class _IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class CudaError(TelegradError):
    """A call of the CUDA driver failed."""


class MemoryLocation(NamedTuple):
    """Device memory that another process may copy: an IPC handle and an offset in bytes."""

    handle: bytes
    offset: int


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver: a copy of rows, with a pitch between rows on each side."""

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
    """The functions of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"cannot load the CUDA driver library: {error}") from error
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
        """Return the id of the allocation that contains `pointer`, unique in this process."""
        buffer_id = ctypes.c_uint64()
        code = self._library.cuPointerGetAttribute(
            ctypes.byref(buffer_id), _POINTER_ATTRIBUTE_BUFFER_ID, DevicePointer(pointer)
        )
        self._check("cuPointerGetAttribute", code)
        return buffer_id.value

    def allocation_base(self, pointer: int) -> int:
        """Return the start address of the allocation that contains `pointer`."""
        base, size = DevicePointer(), ctypes.c_size_t()
        code = self._library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), DevicePointer(pointer)
        )
        self._check("cuMemGetAddressRange_v2", code)
        return base.value

    def ipc_handle(self, base: int) -> bytes:
        """Return the IPC handle of the allocation that starts at `base`."""
        handle = _IpcMemHandle()
        self._check(
            "cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(ctypes.byref(handle), base)
        )
        return bytes(handle)

    def open_ipc_handle(self, handle: bytes) -> int:
        """Map an allocation of another process and return its address here."""
        base = DevicePointer()
        structure = _IpcMemHandle.from_buffer_copy(handle)
        code = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(base), structure, _LAZY_PEER_ACCESS)
        self._check("cuIpcOpenMemHandle", code)
        return base.value

    def close_ipc_handle(self, base: int) -> None:
        """Unmap an allocation that `open_ipc_handle` mapped at `base`."""
        self._check("cuIpcCloseMemHandle", self._library.cuIpcCloseMemHandle(base))

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Enqueue a copy from device to device."""
        code = self._library.cuMemcpyDtoDAsync_v2(destination, source, size, stream)
        if code:
            self._check("cuMemcpyDtoDAsync", code)

    def copy_to_host_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Enqueue a copy from a device to pinned host memory."""
        code = self._library.cuMemcpyDtoHAsync_v2(destination, source, size, stream)
        if code:
            self._check("cuMemcpyDtoHAsync", code)

    def copy_2d_async(self, copy_2d: Memcpy2D, stream: int) -> None:
        """Enqueue a copy of rows from pinned host memory to a device."""
        code = self._library.cuMemcpy2DAsync_v2(ctypes.addressof(copy_2d), stream)
        if code:
            self._check("cuMemcpy2DAsync", code)

    def is_stream_idle(self, stream: int) -> bool:
        """Return whether all work of a stream has completed."""
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
    """The devices whose CUDA context the thread has initialized."""

    ready_devices: frozenset[int] = frozenset()


_thread = _ThreadState()


@functools.cache
def driver() -> _CudaDriver:
    """Return the CUDA driver of this process."""
    return _CudaDriver()


@functools.cache
def device_uuids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    )


def ensure_context(index: int) -> None:
    """Initialize the CUDA context of a device in this thread, so that driver calls work."""
    if index not in _thread.ready_devices:
        with torch.cuda.device(index):
            torch.cuda.Event().record()  # any operation of torch on the device does it
        _thread.ready_devices |= {index}


def is_current_device(index: int) -> bool:
    """Return whether a device is current. The driver resolves the default stream to that device."""
    ensure_context(index)
    current: int = torch._C._cuda_getDevice()
    return current == index


def current_raw_stream(index: int) -> int:
    """Return the driver's handle of the current stream of a device."""
    raw_stream: int = torch._C._cuda_getCurrentRawStream(index)
    return raw_stream


def copy_async(destination: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a copy from device to device."""
    if not is_current_device(stream.device_index):
        with torch.cuda.device(stream.device_index):
            copy_async(destination, source, size, stream)
            return
    driver().copy_async(destination, source, size, stream.cuda_stream)


class _SnapshotSlot:
    """Slot of the slab for one small snapshot. Deleting this object frees the slot."""

    __slots__ = ("_free", "address", "location")

    def __init__(self, free: deque[tuple[int, MemoryLocation]]) -> None:
        self._free = free
        self.address, self.location = free.popleft()

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._free.append((self.address, self.location))


class Exports:
    """The memory and events of one device that this process exports."""

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
        """Enqueue a copy of a contiguous tensor. Return its location and its owner."""
        size = tensor.numel() * tensor.itemsize
        if size <= _SLOT_BYTES:
            try:
                slot = _SnapshotSlot(self._free)
            except IndexError:  # all slots are in use
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
        """Return the location of a tensor. Raise `CudaError` if its memory cannot be shared."""
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
        """Return the next IPC event of a stream. Record it on that stream only."""
        pool = self._event_pools.get(stream.cuda_stream)
        if pool is None:
            with self._lock, torch.cuda.device(self._index):
                events = [IpcEvent(self._index) for _ in range(_EVENTS_PER_STREAM)]
                pool = self._event_pools.setdefault(stream.cuda_stream, (events, itertools.count()))
        events, counter = pool
        return events[next(counter) % _EVENTS_PER_STREAM]


class IpcEvent:
    """An event of this process that other processes can wait for.

    It may be recorded again on its stream while others wait for it: they then wait longer.
    """

    def __init__(self, index: int) -> None:
        self.event = torch.cuda.Event(interprocess=True)
        self.handle: bytes = self.event.ipc_handle()
        mappings.add_own_event(index, self.handle, self.event)


class _IpcMapping:
    """An allocation of another process, mapped into this one."""

    __slots__ = ("base", "index", "last_used", "use_count")

    def __init__(self, base: int, index: int) -> None:
        self.base = base
        self.index = index
        self.use_count = 0  # messages whose tensors are being copied from it
        self.last_used = 0.0  # when the last such message was done


class _IpcMappings:
    """The memory and events of other processes that this process has mapped.

    Memory and events that this process exports itself are looked up here, too, without a mapping.
    """

    def __init__(self) -> None:
        self._own_bases: dict[bytes, int] = {}
        self._mappings: dict[bytes, _IpcMapping] = {}
        self._events: dict[tuple[int, bytes], Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._mappings)

    def add_own_memory(self, handle: bytes, base: int) -> None:
        """Register memory that this process exports."""
        self._own_bases[handle] = base

    def add_own_event(self, index: int, handle: bytes, event: torch.cuda.Event) -> None:
        """Register an event that this process exports."""
        self._events[index, handle] = event

    def acquire(self, handle: bytes, index: int) -> int:
        """Return the address of exported memory of device `index`. It is valid until `release`."""
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
        """Decrease the use count of mappings from which everything was copied."""
        with self._lock:
            for handle in handles:
                mapping = self._mappings.get(handle)
                if mapping is not None:
                    mapping.use_count -= 1
                    mapping.last_used = time.monotonic()

    def event(self, handle: bytes, index: int) -> torch.cuda.Event:
        """Return the event of a handle, opened on first use."""
        event = self._events.get((index, handle))
        if event is None:
            event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)
            self._events[index, handle] = event
        return event

    def has_unused(self, seconds: float = _UNMAP_AFTER) -> bool:
        """Return whether `close_unused` would unmap something."""
        before = time.monotonic() - seconds
        return any(
            not mapping.use_count and mapping.last_used <= before
            for mapping in list(self._mappings.values())
        )

    def close_unused(self, seconds: float = _UNMAP_AFTER) -> None:
        """Unmap memory that was not used for `seconds`."""
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
    """Return the exports of a device. They live as long as the process: others may map them."""
    found = _exports.get(index)
    if found is None:
        with _exports_lock:
            found = _exports.get(index) or _exports.setdefault(index, Exports(index))
    return found
