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

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.cuda.driver import copy_async, cuda_driver, ensure_context

_SLOT_BYTES, _SLOTS = 1 << 16, 256  # a slab for small snapshots, which saves allocations
# With more messages in flight on one stream, a receiver may also wait for a later message.
_EVENTS_PER_STREAM = 64
_UNMAP_AFTER = 5.0  # seconds without use after which memory of another process is unmapped


class MemoryLocation(NamedTuple):
    """Device memory that another process may copy: an IPC handle and an offset in bytes."""

    handle: bytes
    offset: int


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
        self.slab_location = self.export(self._slab)
        start = self._slab.data_ptr()
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
        buffer_id = cuda_driver().buffer_id(pointer)
        allocation = self._allocations.get(buffer_id)
        if allocation is None:
            with self._lock:
                base = cuda_driver().allocation_base(pointer)
                handle = cuda_driver().ipc_handle(base)
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
                    base = cuda_driver().open_ipc_handle(handle)
                mapping = self._mappings[handle] = _IpcMapping(base, index)
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
                    cuda_driver().close_ipc_handle(mapping.base)


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
