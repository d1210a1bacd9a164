"""The receiver's side of shared memory: the segments of other agents that are mapped here.

`shared_memory` describes the protocol between sender and receiver.

State: `_segments` and `_in_use`, under `SegmentMappings._lock`. A block is released when the array
on it is freed. That happens inside the garbage collector, which must not wait for the lock: if the
lock is taken, the entry in `_in_use` is removed later (`release_dead`).
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np

from telegrad.errors import ProtocolError
from telegrad.transport import memfd
from telegrad.transport.memfd import PAGE, round_to_pages
from telegrad.transport.segments import CLOSED_AT, FREE, IN_USE, PRIVATE, SENT, SLOTS, Bytes
from telegrad.wire.frames import BufferLocation

_popleft = deque.popleft
_discard: deque[None] = deque(maxlen=0)  # `extend` runs an iterator in one C call


class SegmentUnknown(Exception):
    """A frame names a segment that is not mapped here."""


class MappedSegment:
    """A segment of another agent, mapped here."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.private: mmap.mmap | None = None  # for blocks that other receivers have, too
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._populated_end = PAGE  # pages up to here were faulted in

    def view(self, place: BufferLocation) -> Bytes:
        """Return the memory of a block that no other receiver has."""
        end = place.offset + place.nbytes
        if end > self._populated_end:
            if not memfd.populate(self.memory, self._populated_end, end - self._populated_end):
                raise MemoryError(f"no memory to map {place.nbytes} bytes of a shared segment")
            self._populated_end = round_to_pages(end)
        return np.frombuffer(self.memory, np.uint8, place.nbytes, place.offset)

    def private_view(self, place: BufferLocation) -> Bytes:
        """Return the memory of a block that other receivers have, too (copy on write)."""
        if self.private is None:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            self.private = mmap.mmap(self._fd, len(self.memory), flags=flags)
        # pages that were written to during an earlier use would hide the bytes of this one
        self.discard_private_pages(place)
        memfd.populate(self.private, place.offset, place.nbytes, memfd.POPULATE_READ)
        return np.frombuffer(self.private, np.uint8, place.nbytes, place.offset)

    def discard_private_pages(self, place: BufferLocation) -> None:
        """Free the pages of a block that this process copied by writing to them."""
        assert self.private is not None
        size = round_to_pages(place.nbytes)
        self.private.madvise(mmap.MADV_DONTNEED, place.offset, size)


class SegmentMappings:
    """The segments of other agents that this agent has mapped."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, int], MappedSegment] = {}  # by peer and segment
        # by peer, segment and slot: the mapping, the array on the block, the slot for `_free_slot`
        self._in_use: dict[
            tuple[str, int, int], tuple[mmap.mmap, weakref.ref[Bytes], deque[int]]
        ] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        segments, blocks = len(self._segments), len(self._in_use)
        return f"<SegmentMappings {segments} segments, {blocks} blocks in use>"

    @property
    def blocks_in_use(self) -> int:
        """Return the number of blocks of other agents that tensors of this agent use."""
        self.release_dead()
        return len(self._in_use)

    def release_dead(self) -> None:
        """Remove the entries of arrays that were freed.

        Also release their blocks, in case a signal handler interrupted the callback that does so.
        """
        with self._lock:
            for key, (memory, array, slot) in list(self._in_use.items()):
                if array() is None:
                    _free_slot(memory, slot)
                    del self._in_use[key]

    def add(self, peer: str, segment_id: int, fd: int) -> None:
        """Map a segment that `peer` passed. Raise `ProtocolError` if that is not possible.

        A file that could shrink is refused: access to a page beyond its end would be fatal.
        """
        try:
            if not memfd.is_sealed(fd) or os.fstat(fd).st_size < PAGE:
                raise ProtocolError(
                    f"shared-memory segment {segment_id} is not sealed or has no first page"
                )
            mapped = MappedSegment(fd)
        except (OSError, ValueError) as error:
            raise ProtocolError(
                f"shared-memory segment {segment_id} cannot be mapped: {error}"
            ) from None
        with self._lock:
            self._segments[peer, segment_id] = mapped

    def locate(self, peer: str, place: BufferLocation) -> memoryview:
        """Return the memory of a received block.

        The block returns to its sender when nothing refers to this memory any more.
        """
        mapped = self._segments.get((peer, place.segment))
        if mapped is None:
            raise SegmentUnknown(
                f"a buffer is in shared-memory segment {place.segment}, which is unknown here"
            )
        memory, slot = mapped.memory, place.slot & ~PRIVATE
        key = peer, place.segment, slot
        fits = place.offset >= PAGE and place.offset + place.nbytes <= len(memory) and slot < SLOTS
        if not fits or memory[slot] != SENT:
            raise ProtocolError(f"a buffer in shared memory does not exist: {place}")
        array = mapped.private_view(place) if place.slot & PRIVATE else mapped.view(place)
        process_id, lock, in_use = os.getpid(), self._lock, self._in_use
        to_free = deque((slot,))

        # runs inside the garbage collector: it must not wait for a lock
        def on_array_freed(freed: weakref.ref[Bytes]) -> None:
            # the child of a fork may free its copy of the array; the block belongs to the parent
            if os.getpid() != process_id:
                return
            _free_slot(memory, to_free)
            acquired: list[bool] = []
            try:
                # one C call: no signal handler runs between acquiring the lock and recording it
                acquired.extend(map(lock.acquire, (False,)))
                if acquired[0] and key in in_use and in_use[key][1] is freed:
                    del in_use[key]
            finally:
                if acquired and acquired[0]:
                    lock.release()

        with lock:
            in_use[key] = memory, weakref.ref(array, on_array_freed), to_free
            memory[slot] = IN_USE
        return memoryview(array)

    def unmap(self, peer: str | None = None) -> None:
        """Unmap the segments of a lost `peer`; None: those that their senders have closed.

        A segment stays mapped while tensors use it.
        """
        self.release_dead()
        with self._lock:
            for key, mapped in list(self._segments.items()):
                if key[0] == peer or (peer is None and mapped.memory[CLOSED_AT]):
                    del self._segments[key]

    def close(self) -> None:
        """Unmap all segments that no tensor uses."""
        self.release_dead()
        with self._lock:
            self._segments.clear()


def _free_slot(memory: mmap.mmap, slot: deque[int]) -> None:
    """Free a slot once only: the sender may have allocated it again since.

    Whichever thread takes the slot from the deque frees it, in the same C call, so that no signal
    handler runs in between.
    """
    try:
        _discard.extend(map(memory.__setitem__, map(_popleft, (slot,)), (FREE,)))
    except IndexError:
        return  # another thread has freed it
