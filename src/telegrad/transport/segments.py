"""Segments of shared memory: those that this agent sends from, and those of others mapped here.

A segment is a sealed file in memory (`memfd`), which processes share by mapping it.
`SegmentAllocator` is the sender's side: segments, the blocks in them, and which blocks are free.
`SegmentMappings` is the receiver's side. `shared_memory` describes the protocol between the two.

State of the sender: the segments with their blocks and free lists, under `SegmentAllocator._lock`.
The clock's thread takes this lock, too. So no thread holds it while pages are faulted in, which
takes seconds for gigabytes.

State of the receiver: `_segments` and `_in_use`, under `SegmentMappings._lock`. A block is released
when the array on it is freed. That happens inside the garbage collector, which must not wait for
the lock: if the lock is taken, the entry in `_in_use` is removed later (`release_dead`).
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from telegrad.errors import ProtocolError
from telegrad.locks import new_lock
from telegrad.transport.memfd import (
    PAGE,
    POPULATE_READ,
    Bytes,
    create_memfd,
    has_only_file_pages,
    is_sealed,
    populate_pages,
)
from telegrad.wire.frames import BufferLocation

# The first page of a segment: one byte for each slot, then the byte at `CLOSED_AT`.
FREE, SENT, IN_USE = 0, 1, 2
SLOTS = PAGE - 1
CLOSED_AT = SLOTS  # 1 when the sender no longer uses the segment, so that receivers may unmap it
# A flag in `BufferLocation.slot`: other receivers may have the block, so it is mapped privately.
PRIVATE = 1 << 31
_MIN_SEGMENT = 64 << 20  # bytes
_popleft = deque.popleft
_discard: deque[None] = deque(maxlen=0)  # `extend` runs an iterator in one C call
_log = logging.getLogger(__name__)


def round_to_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(eq=False)
class SharedBlock:
    """One use of a block by one receiver."""

    offset: int
    size: int
    peer: str
    connection: object  # the connection that carries it; None when that has ended


class SharedSegment:
    """Memory that this agent shares with peers. Used under the lock of its allocator."""

    def __init__(self, segment_id: int, size: int) -> None:
        self.segment_id = segment_id
        self.size = size
        # The descriptor is closed when this object is freed, not before: another thread that refers
        # to the segment may be passing it to a peer, and the number may be reused after a close.
        self.fd = create_memfd(f"telegrad-{segment_id}", size, self)
        self._mapping = mmap.mmap(self.fd, size)
        self.bytes: Bytes = np.frombuffer(self._mapping, np.uint8)
        self.blocks: dict[int, SharedBlock] = {}  # by slot
        self._shared_slots: dict[int, int] = {}  # offset of a block -> how many slots, if several
        self._free_ranges = [(PAGE, size - PAGE)]  # (offset, size), sorted and merged
        self._free_slots = list(range(SLOTS - 1, -1, -1))
        self._populated_end = PAGE  # pages up to here were faulted in

    def __repr__(self) -> str:
        mebibytes = self.size >> 20
        return f"<SharedSegment {self.segment_id}: {mebibytes} MiB, {len(self.blocks)} blocks>"

    def view(self, place: BufferLocation) -> Bytes:
        """Return the memory of a block."""
        return self.bytes[place.offset : place.offset + place.nbytes]

    def allocate(self, nbytes: int, peer: str, connection: object) -> BufferLocation | None:
        """Allocate a block. Return None if there is no room.

        It has the lowest free offset, so that pages that were faulted in are used first.
        """
        size = round_to_pages(nbytes)
        for index, (offset, room) in enumerate(self._free_ranges):
            if room >= size and self._free_slots:
                rest = [(offset + size, room - size)] if room > size else []
                self._free_ranges[index : index + 1] = rest
                slot = self._free_slots.pop()
                self.blocks[slot] = SharedBlock(offset, size, peer, connection)
                self.bytes[slot] = SENT
                return BufferLocation(nbytes, offset, self.segment_id, slot)
        return None

    def add_receiver(
        self, place: BufferLocation, peer: str, connection: object
    ) -> BufferLocation | None:
        """Allocate another slot for a block that is in use. Return None if no slot is free."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        size = self.blocks[place.slot].size
        self.blocks[slot] = SharedBlock(place.offset, size, peer, connection)
        self._shared_slots[place.offset] = self._shared_slots.get(place.offset, 1) + 1
        self.bytes[slot] = SENT
        return place._replace(slot=slot)

    def reclaim(self) -> None:
        """Free the blocks that their receivers have released."""
        for slot in [slot for slot in self.blocks if self.bytes[slot] == FREE]:
            self.release_slot(slot)

    def release_slot(self, slot: int) -> None:
        """Free a slot, and its block if no other slot uses it."""
        block = self.blocks.pop(slot)
        self.bytes[slot] = FREE
        self._free_slots.append(slot)
        if block.offset in self._shared_slots:
            self._shared_slots[block.offset] -= 1
            if self._shared_slots[block.offset]:
                return
            del self._shared_slots[block.offset]
        self._free_ranges.append((block.offset, block.size))
        self._free_ranges.sort()
        merged = [self._free_ranges[0]]
        for offset, size in self._free_ranges[1:]:
            last_offset, last_size = merged[-1]
            if last_offset + last_size == offset:
                merged[-1] = (last_offset, last_size + size)
            else:
                merged.append((offset, size))
        self._free_ranges = merged

    def has_lost_block(self, peer: str, connection: object) -> bool:
        """Return whether it is unknown if `peer` uses a block after `connection` has ended.

        `connection` None: the peer is lost, and with it all blocks that it has.
        """
        for slot, block in self.blocks.items():
            if block.peer != peer:
                continue
            if self.bytes[slot] == SENT and block.connection is connection:
                return True
            if connection is None and self.bytes[slot] != FREE:
                return True
        return False

    def detach(self, peer: str, connection: object) -> None:
        """Note that `connection`, or all connections to `peer` (None), no longer carry blocks."""
        for block in self.blocks.values():
            if block.peer == peer and (connection is None or block.connection is connection):
                block.connection = None

    def close_if_drained(self) -> bool:
        """Close the segment unless an open connection carries a block. Return whether it did."""
        for slot, block in self.blocks.items():
            if self.bytes[slot] == SENT and block.connection is not None:
                return False
        self.close()
        return True

    def close(self) -> None:
        """Permit receivers to unmap the segment: no more frames will name it."""
        self.bytes[CLOSED_AT] = 1

    def populate(self, place: BufferLocation) -> bool:
        """Fault the pages of a new block in. Return False if there is no memory for them.

        That is faster than one page fault after the other during the copy. Called without the lock,
        because it may take long. Two threads may fault the same pages in.
        """
        start, end = self._populated_end, round_to_pages(place.offset + place.nbytes)
        if end > start:
            if not populate_pages(self._mapping, start, end - start):
                return False
            self._populated_end = max(self._populated_end, end)
        return True


class SegmentAllocator:
    """The shared memory that one agent sends from: up to `max_bytes`.

    Buffers of less than `min_bytes` are not worth a block; the callers check that.
    """

    def __init__(self, min_bytes: int, max_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._segments: list[SharedSegment] = []
        self._draining: list[SharedSegment] = []
        self._segment_ids = itertools.count(1)
        self._lock = new_lock()
        self._closed = False

    def __repr__(self) -> str:
        draining = f", {len(self._draining)} draining" if self._draining else ""
        return f"<SegmentAllocator {self._segments}{draining}>"

    def describe(self) -> dict[str, int]:
        """Return the number and size of segments and of blocks that receivers have."""
        with self._lock:
            segments = [*self._segments, *self._draining]
            blocks = [block for segment in segments for block in segment.blocks.values()]
        return {
            "segments": len(segments),
            "segment_bytes": sum(segment.size for segment in segments),
            "blocks_sent": len(blocks),
            "block_bytes": sum(block.size for block in blocks),
        }

    def allocate(
        self, nbytes: int, peer: str, connection: object
    ) -> tuple[SharedSegment, BufferLocation] | None:
        """Allocate a block for one buffer. Return None at the limit or if memory is short."""
        found = self._reserve(nbytes, peer, connection)
        if found is None:
            return None
        segment, place = found
        is_populated = False
        try:
            is_populated = segment.populate(place)
        finally:
            if not is_populated:
                self.release([place])
        return found if is_populated else None

    def _reserve(
        self, nbytes: int, peer: str, connection: object
    ) -> tuple[SharedSegment, BufferLocation] | None:
        """Find a block in a segment, or create a segment for it."""
        with self._lock:
            for segment in self._segments:
                segment.reclaim()
                place = segment.allocate(nbytes, peer, connection)
                if place is not None:
                    return segment, place
            size = max(_MIN_SEGMENT, 1 << (nbytes + PAGE - 1).bit_length())
            total = sum(each.size for each in self._segments)
            if self._closed or total + size > self._max_bytes:
                return None
            try:
                segment = SharedSegment(next(self._segment_ids), size)
            except (OSError, MemoryError, ValueError) as error:
                _log.info("no shared memory of %d bytes (%s); using the socket", size, error)
                return None
            self._segments.append(segment)
            place = segment.allocate(nbytes, peer, connection)
            return None if place is None else (segment, place)

    def allocate_for_many(self, nbytes: int) -> tuple[SharedSegment, BufferLocation] | None:
        """Allocate a block for several receivers. It stays in use until it is released."""
        found = self.allocate(nbytes, "", None)
        if found is not None:
            segment, place = found
            segment.bytes[place.slot] = IN_USE
        return found

    def add_receiver(
        self, segment: SharedSegment, place: BufferLocation, peer: str, connection: object
    ) -> BufferLocation | None:
        """Let one more receiver use a block. Return None if its segment is draining or full."""
        with self._lock:
            if segment not in self._segments:
                return None
            return segment.add_receiver(place, peer, connection)

    def release(self, places: Sequence[BufferLocation]) -> None:
        """Free blocks that were not sent: no receiver knows of them."""
        with self._lock:
            segments = {each.segment_id: each for each in (*self._segments, *self._draining)}
            for place in places:
                segment, slot = segments.get(place.segment), place.slot & ~PRIVATE
                if segment is not None and slot in segment.blocks:
                    segment.release_slot(slot)

    def connection_closed(self, peer: str, connection: object) -> None:
        """Give up the blocks that `connection` carried; None: all blocks of a lost `peer`.

        Segments with blocks whose use is unknown are not used again.
        """
        with self._lock:
            for segment in list(self._segments):
                if segment.has_lost_block(peer, connection):
                    self._segments.remove(segment)
                    self._draining.append(segment)
            for segment in (*self._segments, *self._draining):
                segment.detach(peer, connection)
            self._close_drained()

    def close_drained(self) -> None:
        """Close the segments that have drained."""
        with self._lock:
            self._close_drained()

    def close_unused(self) -> None:
        """Close the segments that no receiver uses, so that the kernel can free their memory."""
        with self._lock:
            self._close_drained()
            for segment in list(self._segments):
                segment.reclaim()
                if not segment.blocks:
                    self._segments.remove(segment)
                    segment.close()

    def close(self) -> None:
        """Close all segments and allocate no more."""
        with self._lock:
            self._closed = True
            for segment in (*self._segments, *self._draining):
                segment.close()
            self._segments.clear()
            self._draining.clear()

    def _close_drained(self) -> None:
        self._draining = [segment for segment in self._draining if not segment.close_if_drained()]


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
        self._lock = new_lock()

    def view(self, place: BufferLocation) -> Bytes:
        """Return the memory of a block that no other receiver has."""
        end = place.offset + place.nbytes
        if end > self._populated_end:
            if not populate_pages(self.memory, self._populated_end, end - self._populated_end):
                raise MemoryError(f"no memory to map {place.nbytes} bytes of a shared segment")
            self._populated_end = round_to_pages(end)
        return np.frombuffer(self.memory, np.uint8, place.nbytes, place.offset)

    def private_view(self, place: BufferLocation) -> Bytes:
        """Return the memory of a block that other receivers have, too (copy on write)."""
        with self._lock:
            if self.private is None:
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                self.private = mmap.mmap(self._fd, len(self.memory), flags=flags)
        array = np.frombuffer(self.private, np.uint8, place.nbytes, place.offset)
        if not has_only_file_pages(array):
            # pages that were written to during an earlier use would hide the bytes of this one
            size = round_to_pages(place.nbytes)
            self.private.madvise(mmap.MADV_DONTNEED, place.offset, size)
            populate_pages(self.private, place.offset, place.nbytes, POPULATE_READ)
        return array


class SegmentMappings:
    """The segments of other agents that this agent has mapped."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, int], MappedSegment] = {}  # by peer and segment
        # by peer, segment and slot: the mapping, the array on the block, the slot for `_free_slot`
        self._in_use: dict[
            tuple[str, int, int], tuple[mmap.mmap, weakref.ref[Bytes], deque[int]]
        ] = {}
        self._lock = new_lock()

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
            if not is_sealed(fd) or os.fstat(fd).st_size < PAGE:
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
