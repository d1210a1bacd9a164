"""CUDA memory between the processes of one host: what another process copies is told to it as a place in an allocation.

An allocation is known to other processes by its handle, whoever made it: torch's allocator, as a rule. Each process
maps a handle once, copies what it is told to copy, and keeps the mapping for the next message; what nobody has used for
a while is unmapped, for memory that others have mapped does not return to the device when its owner frees it. Order
between processes is kept by events that are shared the same way.

State: `Exports._segments` (what this process has handed out, by the driver's number for the allocation) and
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
_BUFFER_ID = 7
_LAZY_PEER_ACCESS = 1
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_HANDLE_BYTES = 64
_SLOT, _SLOTS = 1 << 16, 256  # small snapshots need no allocation
# messages that one stream may have under way before a receiver may wait for a later one, too
_RING = 64
_UNUSED = 5.0  # seconds after which memory of others is unmapped

Address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class CudaError(TelegradError):
    """The CUDA driver refused something."""


class Place(NamedTuple):
    """Where bytes lie that another process may copy."""

    segment: bytes
    offset: int


class Rows(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D: rows of bytes that lie apart on one side or both."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", Address),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("to_x", ctypes.c_size_t),
        ("to_y", ctypes.c_size_t),
        ("to_type", ctypes.c_uint),
        ("to_host", ctypes.c_void_p),
        ("to_device", Address),
        ("to_array", ctypes.c_void_p),
        ("to_pitch", ctypes.c_size_t),
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
            Address,
            Address,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._library.cuIpcOpenMemHandle_v2.argtypes = (
            ctypes.POINTER(Address),
            _Handle,
            ctypes.c_uint,
        )
        self._library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), Address)
        self._library.cuIpcCloseMemHandle.argtypes = (Address,)
        self._library.cuMemcpyDtoHAsync_v2.argtypes = (
            ctypes.c_void_p,
            Address,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._library.cuMemcpy2DAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.cuStreamQuery.argtypes = (ctypes.c_void_p,)

    def number(self, pointer: int) -> int:
        """The number of the allocation that an address lies in, which no other ever had or will have."""
        number = ctypes.c_uint64()
        code = self._library.cuPointerGetAttribute(
            ctypes.byref(number), _BUFFER_ID, Address(pointer)
        )
        self._check("cuPointerGetAttribute", code)
        return number.value

    def base(self, pointer: int) -> int:
        """Where the allocation begins that an address lies in."""
        base, size = Address(), ctypes.c_size_t()
        code = self._library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), Address(pointer)
        )
        self._check("cuMemGetAddressRange_v2", code)
        return base.value

    def handle(self, base: int) -> bytes:
        handle = _Handle()
        self._check(
            "cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(ctypes.byref(handle), base)
        )
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        base = Address()
        structure = _Handle.from_buffer_copy(handle)
        code = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(base), structure, _LAZY_PEER_ACCESS)
        self._check("cuIpcOpenMemHandle", code)
        return base.value

    def close(self, base: int) -> None:
        self._check("cuIpcCloseMemHandle", self._library.cuIpcCloseMemHandle(base))

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy from device to device when the stream comes to it."""
        code = self._library.cuMemcpyDtoDAsync_v2(to, source, size, stream)
        if code:
            self._check("cuMemcpyDtoDAsync", code)

    def copy_out(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy from device to page-locked host memory when the stream comes to it."""
        code = self._library.cuMemcpyDtoHAsync_v2(to, source, size, stream)
        if code:
            self._check("cuMemcpyDtoHAsync", code)

    def copy_rows(self, rows: Rows, stream: int) -> None:
        """Copy rows from page-locked host memory to a device when the stream comes to it."""
        code = self._library.cuMemcpy2DAsync_v2(ctypes.addressof(rows), stream)
        if code:
            self._check("cuMemcpy2DAsync", code)

    def is_idle(self, stream: int) -> bool:
        """Is there nothing left to do on a stream?"""
        code = self._library.cuStreamQuery(stream)
        if code not in (0, _NOT_READY):
            self._check("cuStreamQuery", code)
        return code == 0

    def _check(self, what: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")


class _ThreadDevice(threading.local):
    entered: frozenset[int] = frozenset()


_thread = _ThreadDevice()


@functools.cache
def driver() -> _CudaDriver:
    return _CudaDriver()


@functools.cache
def devices() -> tuple[str, ...]:
    """The ids of the GPUs that this process sees, by their index here."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    )


def enter(index: int) -> None:
    """Make sure that this thread can talk to the driver about a device, as it can once torch has used that device."""
    if index not in _thread.entered:
        with torch.cuda.device(index):
            torch.cuda.Event().record()
        _thread.entered |= {index}


def is_current(index: int) -> bool:
    """Is it the current device? For the driver, the default stream is that of the current one."""
    enter(index)
    current: int = torch._C._cuda_getDevice()
    return current == index


def stream(index: int) -> int:
    """What the driver calls the current stream of a device."""
    found: int = torch._C._cuda_getCurrentRawStream(index)
    return found


def copy(to: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
    """Copy from device to device when the stream comes to it."""
    if not is_current(stream.device_index):
        with torch.cuda.device(stream.device_index):
            copy(to, source, size, stream)
            return
    driver().copy(to, source, size, stream.cuda_stream)


class _SnapshotSlot:
    """A small snapshot's place in a slab that was handed out once. Free again when this object dies."""

    __slots__ = ("_free", "address", "place")

    def __init__(self, free: deque[tuple[int, Place]]) -> None:
        self._free = free
        self.address, self.place = free.popleft()

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._free.append((self.address, self.place))


class Exports:
    """Memory of one device that this process hands out."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._segments: dict[int, tuple[bytes, int]] = {}
        self._lock = threading.Lock()
        self._rings: dict[int, tuple[list[SharedEvent], Any]] = {}
        self._slab = self._empty(_SLOT * _SLOTS)
        start, self.slab = self._slab.data_ptr(), self.place(self._slab)
        self._free = deque(
            (start + offset, self.slab._replace(offset=self.slab.offset + offset))
            for offset in range(0, _SLOT * _SLOTS, _SLOT)
        )

    def snapshot(self, tensor: Tensor, stream: torch.cuda.Stream) -> tuple[Place, object]:
        """Copy a contiguous tensor when the stream comes to it: where to, and what keeps the copy."""
        size = tensor.numel() * tensor.itemsize
        if size <= _SLOT:
            try:
                slot = _SnapshotSlot(self._free)
            except IndexError:  # all are under way
                pass
            else:
                copy(slot.address, tensor.data_ptr(), size, stream)
                return slot.place, slot
        made = self._empty(size)
        made.view(tensor.dtype).copy_(tensor.view(-1), non_blocking=True)
        return self.place(made), made

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._index}")

    def place(self, tensor: Tensor) -> Place:
        """How others find a tensor. Raises `CudaError` for memory of a kind that cannot be mapped."""
        enter(self._index)
        pointer = tensor.data_ptr()
        number = driver().number(pointer)
        known = self._segments.get(number)
        if known is None:
            with self._lock:
                base = driver().base(pointer)
                handle = driver().handle(base)
                mappings.own(handle, base)
                known = self._segments[number] = handle, base
        return Place(known[0], pointer - known[1])

    def event(self, stream: torch.cuda.Stream) -> SharedEvent:
        """An event that others can wait for, to be recorded on this stream alone."""
        ring = self._rings.get(stream.cuda_stream)
        if ring is None:
            with self._lock, torch.cuda.device(self._index):
                events = [SharedEvent(self._index) for _ in range(_RING)]
                ring = self._rings.setdefault(stream.cuda_stream, (events, itertools.count()))
        events, turn = ring
        return events[next(turn) % _RING]


class SharedEvent:
    """An event of this process. Recorded again on its stream, it only makes those who wait for it wait longer."""

    def __init__(self, index: int) -> None:
        self.event = torch.cuda.Event(interprocess=True)
        self.handle: bytes = self.event.ipc_handle()
        mappings.own_event(index, self.handle, self.event)


class _IpcMapping:
    """Memory of another process, as this one sees it."""

    __slots__ = ("base", "index", "since", "users")

    def __init__(self, base: int, index: int) -> None:
        self.base = base
        self.index = index
        self.users = 0  # messages whose tensors are being copied out of it
        self.since = 0.0  # when the last of them was done


class _IpcMappings:
    """What other processes hand out, as this one sees it. What it hands out itself needs no mapping."""

    def __init__(self) -> None:
        self._mine: dict[bytes, int] = {}
        self._theirs: dict[bytes, _IpcMapping] = {}
        self._events: dict[tuple[int, bytes], Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._theirs)

    def own(self, handle: bytes, base: int) -> None:
        self._mine[handle] = base

    def own_event(self, index: int, handle: bytes, event: torch.cuda.Event) -> None:
        self._events[index, handle] = event

    def borrow(self, handle: bytes, index: int) -> int:
        """Where memory of device `index` that somebody hands out lies for this process, until it is given back."""
        enter(index)
        mine = self._mine.get(handle)
        if mine is not None:
            return mine
        with self._lock:
            mapping = self._theirs.get(handle)
            if mapping is None:
                with torch.cuda.device(index):
                    mapping = self._theirs[handle] = _IpcMapping(driver().open(handle), index)
            mapping.users += 1
            return mapping.base

    def give_back(self, handles: Iterable[bytes]) -> None:
        """What was copied out of these is here."""
        with self._lock:
            for handle in handles:
                mapping = self._theirs.get(handle)
                if mapping is not None:
                    mapping.users -= 1
                    mapping.since = time.monotonic()

    def event(self, handle: bytes, index: int) -> torch.cuda.Event:
        event = self._events.get((index, handle))
        if event is None:
            event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)
            self._events[index, handle] = event
        return event

    def has_unused(self, seconds: float = _UNUSED) -> bool:
        before = time.monotonic() - seconds
        return any(
            not mapping.users and mapping.since <= before for mapping in list(self._theirs.values())
        )

    def close_unused(self, seconds: float = _UNUSED) -> None:
        """Unmap what nobody has used for so long."""
        before = time.monotonic() - seconds
        with self._lock:
            for handle, mapping in list(self._theirs.items()):
                if not mapping.users and mapping.since <= before:
                    del self._theirs[handle]
                    enter(mapping.index)
                    driver().close(mapping.base)


mappings = _IpcMappings()


_exports: dict[int, Exports] = {}
_making = threading.Lock()


def exports(index: int) -> Exports:
    """What this process hands out of one of its devices. Made once and never ended: others may have it mapped."""
    found = _exports.get(index)
    if found is None:
        with _making:
            found = _exports.get(index) or _exports.setdefault(index, Exports(index))
    return found
