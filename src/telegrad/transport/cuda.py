"""CUDA memory between the processes of one host: what is sent is copied once into memory that others may map.

torch's allocator does the allocating, in a pool of its own (`torch.cuda.MemPool`): its segments are never given back to
the driver while others have them mapped, and nothing else lies in them. A segment is known to other processes by its
handle. Each process maps a handle once, copies what it is told to copy, and keeps the mapping for the next message.
Order between processes is kept by events that are shared the same way, so no host ever waits for a device.

State: `Exports._segments` (what this process has handed out, by the driver's number for the allocation) and
`_Mappings.addresses` (what it has mapped), under their locks; of each stream, a ring of events, made once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import TelegradError

_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID: unique in the life of a process, which addresses are not
_LAZY_PEER_ACCESS = 1
_HANDLE_BYTES = 64
_SLOT, _SLOTS = 1 << 16, 256  # small snapshots need no allocation
_RING = 64  # messages that one stream may have under way before a receiver may wait for a later one, too

Address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class CudaError(TelegradError):
    """The CUDA driver refused something."""


class Place(NamedTuple):
    """Where bytes lie that another process may copy."""

    segment: bytes
    offset: int


class _Driver:
    """The few functions of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"the CUDA driver cannot be loaded: {error}") from error
        self._library.cuMemcpyDtoDAsync_v2.argtypes = (Address, Address, ctypes.c_size_t, ctypes.c_void_p)
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(Address), _Handle, ctypes.c_uint)
        self._library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), Address)
        self._library.cuIpcCloseMemHandle.argtypes = (Address,)
        self._copy = self._library.cuMemcpyDtoDAsync_v2

    def allocation(self, pointer: int) -> tuple[int, int]:
        """The allocation that an address lies in: where it begins, and its number."""
        base, size, number = Address(), ctypes.c_size_t(), ctypes.c_uint64()
        self._check(
            "cuMemGetAddressRange_v2",
            self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), Address(pointer)),
        )
        self._check(
            "cuPointerGetAttribute",
            self._library.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, Address(pointer)),
        )
        return base.value, number.value

    def handle(self, base: int) -> bytes:
        handle = _Handle()
        self._check("cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(ctypes.byref(handle), base))
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
        code = self._copy(to, source, size, stream)
        if code:
            self._check("cuMemcpyDtoDAsync", code)

    def _check(self, what: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")


class _Thread(threading.local):
    entered: frozenset[int] = frozenset()


_thread = _Thread()


@functools.cache
def driver() -> _Driver:
    return _Driver()


@functools.cache
def devices() -> tuple[str, ...]:
    """The ids of the GPUs that this process sees, by their index here."""
    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))


def enter(index: int) -> None:
    """Make sure that this thread can talk to the driver about a device, as it can once torch has used that device."""
    if index not in _thread.entered:
        with torch.cuda.device(index):
            torch.cuda.Event().record()
        _thread.entered |= {index}


class _Slot:
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
        self._pool = torch.cuda.MemPool()
        self._segments: dict[int, tuple[bytes, int]] = {}
        self._lock = threading.Lock()
        self._rings: dict[int, tuple[list[SharedEvent], Any]] = {}
        self._slab = self.empty(_SLOT * _SLOTS)
        start, place = self._slab.data_ptr(), self.place(self._slab)
        self._free = deque(
            (start + offset, Place(place.segment, place.offset + offset)) for offset in range(0, _SLOT * _SLOTS, _SLOT)
        )

    def snapshot(self, tensor: Tensor, stream: int) -> tuple[Place, object]:
        """Copy a contiguous tensor when the stream comes to it: where to, and what keeps the copy."""
        size = tensor.numel() * tensor.itemsize
        if size <= _SLOT:
            try:
                slot = _Slot(self._free)
            except IndexError:  # all are under way
                pass
            else:
                enter(self._index)
                driver().copy(slot.address, tensor.data_ptr(), size, stream)
                return slot.place, slot
        copy = self.empty(size)
        copy.view(tensor.dtype).copy_(tensor.view(-1), non_blocking=True)
        return self.place(copy), copy

    def empty(self, size: int) -> Tensor:
        """Bytes that other processes may map."""
        with self._lock, torch.cuda.use_mem_pool(self._pool, self._index):
            return torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._index}")

    def place(self, tensor: Tensor) -> Place:
        """How others find a tensor that lies in this pool."""
        enter(self._index)
        pointer = tensor.data_ptr()
        base, number = driver().allocation(pointer)
        known = self._segments.get(number)
        if known is None:
            with self._lock:
                handle = driver().handle(base)
                _mappings.own(handle, base)
                known = self._segments[number] = handle, base
        return Place(known[0], pointer - base)

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
        _mappings.own_event(index, self.handle, self.event)


class _Mappings:
    """What other processes hand out, as this one sees it. What it hands out itself needs no mapping."""

    def __init__(self) -> None:
        self.addresses: dict[bytes, int] = {}
        self._devices: dict[bytes, int] = {}
        self._events: dict[tuple[int, bytes], Any] = {}
        self._mine: set[bytes] = set()
        self._lock = threading.Lock()

    def own(self, handle: bytes, base: int) -> None:
        with self._lock:
            self.addresses[handle] = base
            self._mine.add(handle)

    def own_event(self, index: int, handle: bytes, event: torch.cuda.Event) -> None:
        self._events[index, handle] = event

    def address(self, handle: bytes, index: int) -> int:
        """Where memory of device `index` that somebody hands out lies for this process."""
        enter(index)
        address = self.addresses.get(handle)
        if address is None:
            with self._lock:
                address = self.addresses.get(handle)
                if address is None:
                    with torch.cuda.device(index):
                        address = driver().open(handle)
                    self._devices[handle] = index
                    self.addresses[handle] = address
        return address

    def event(self, handle: bytes, index: int) -> torch.cuda.Event:
        event = self._events.get((index, handle))
        if event is None:
            event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)
            self._events[index, handle] = event
        return event

    def close(self, handles: set[bytes]) -> None:
        """Whoever handed these out is gone."""
        with self._lock:
            for handle in handles - self._mine:
                base = self.addresses.pop(handle, None)
                if base is not None:
                    enter(self._devices[handle])
                    driver().close(base)


_mappings = _Mappings()
address, event, close = _mappings.address, _mappings.event, _mappings.close


_exports: dict[int, Exports] = {}
_making = threading.Lock()


def exports(index: int) -> Exports:
    """What this process hands out of one of its devices. Made once and never ended: others may have it mapped."""
    found = _exports.get(index)
    if found is None:
        with _making:
            found = _exports.get(index) or _exports.setdefault(index, Exports(index))
    return found


class _Mapped:
    """Memory of another process as numpy's protocol for CUDA describes it; lets torch build a tensor on it."""

    def __init__(self, base: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (base, False), "version": 3}


def mapped(place: Place, size: int, index: int) -> Tensor:
    """Bytes that another process handed out, not copied: it must keep them as long as this tensor is used."""
    base = address(place.segment, index)
    return torch.as_tensor(_Mapped(base + place.offset, size), device=f"cuda:{index}")
