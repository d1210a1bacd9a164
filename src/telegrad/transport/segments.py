"""The shared memory that an agent sends from: segments, and the blocks in them."""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telegrad.transport import memfd
from telegrad.transport.memfd import PAGE
from telegrad.wire.frames import BufferPlace

FREE, SENT, IN_USE = 0, 1, 2
SLOTS = 4096 - 1
# in `BufferPlace.slot`: others may receive the same block, so it is mapped privately
PRIVATE = 1 << 31
CLOSED_AT = SLOTS  # the last byte of the first page: 1 when the sender is done with the segment
_MIN_SEGMENT = 64 << 20

Bytes = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SharedBlock:
    offset: int
    size: int
    peer: str
    connection: object  # the connection that it is sent through; None when that has ended


class SharedSegment:
    """Memory that this agent shares with peers. Used under the lock of its arena."""

    def __init__(self, segment_id: int, size: int) -> None:
        self.segment_id = segment_id
        self.size = size
        # Whoever holds a segment may be passing its descriptor on, so it is closed with the last holder, not before:
        # its number could belong to another file by then.
        self.fd = memfd.create(f"telegrad-{segment_id}", size, self)
        self._mapping = mmap.mmap(self.fd, size)
        self.bytes: Bytes = np.frombuffer(self._mapping, np.uint8)
        self.blocks: dict[int, SharedBlock] = {}
        self._shared_slots: dict[int, int] = {}  # by offset: slots of a block that has several
        self._free_ranges = [(PAGE, size - PAGE)]
        self._populated_end = PAGE
        self._free_slots = list(range(SLOTS - 1, -1, -1))

    def __repr__(self) -> str:
        return (
            f"<SharedSegment {self.segment_id}: {self.size >> 20} MiB, {len(self.blocks)} blocks>"
        )

    def allocate(self, nbytes: int, peer: str, connection: object) -> BufferPlace | None:
        """A block at the lowest free offset, so that warm pages are used first. None: no room."""
        size = -(-nbytes // PAGE) * PAGE
        for index, (offset, room) in enumerate(self._free_ranges):
            if room >= size and self._free_slots:
                rest = [(offset + size, room - size)] if room > size else []
                self._free_ranges[index : index + 1] = rest
                slot = self._free_slots.pop()
                self.blocks[slot] = SharedBlock(offset, size, peer, connection)
                self.bytes[slot] = SENT
                return BufferPlace(nbytes, offset, self.segment_id, slot)
        return None

    def add_receiver(self, place: BufferPlace, peer: str, connection: object) -> BufferPlace | None:
        """Another slot for a block that has one, which must stay in use meanwhile. None: there is none left."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self.blocks[slot] = SharedBlock(
            place.offset, self.blocks[place.slot].size, peer, connection
        )
        self._shared_slots[place.offset] = self._shared_slots.get(place.offset, 1) + 1
        self.bytes[slot] = SENT
        return place._replace(slot=slot)

    def reclaim(self) -> None:
        """Take back the blocks that their receivers have freed."""
        for slot in [slot for slot in self.blocks if self.bytes[slot] == FREE]:
            self.release_slot(slot)

    def release_slot(self, slot: int) -> None:
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
            if merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free_ranges = merged

    def has_lost_block(self, peer: str, connection: object) -> bool:
        """Has a block of `peer` an unknown fate now that `connection` has ended, or (None) that the peer is lost?"""
        return any(
            block.peer == peer
            and (
                (self.bytes[slot] == SENT and block.connection is connection)
                or (connection is None and self.bytes[slot] != FREE)
            )
            for slot, block in self.blocks.items()
        )

    def detach(self, peer: str, connection: object) -> None:
        """`connection` has ended, or (None) all connections to `peer`: what they carried no longer keeps it."""
        for block in self.blocks.values():
            if block.peer == peer and (connection is None or block.connection is connection):
                block.connection = None

    def close_if_drained(self) -> bool:
        """Let receivers unmap the segment unless a block is on its way through an open connection."""
        if any(
            self.bytes[slot] == SENT and block.connection is not None
            for slot, block in self.blocks.items()
        ):
            return False
        self.close()
        return True

    def close(self) -> None:
        self.bytes[CLOSED_AT] = 1

    def populate(self, place: BufferPlace) -> bool:
        """Fault new pages in at once instead of one by one during the copy. False: there is no memory for them.

        Called without the lock, for as long as it may take. Two threads may fault the same pages in.
        """
        touched, end = self._populated_end, -(-(place.offset + place.nbytes) // PAGE) * PAGE
        if end > touched:
            if not memfd.populate(self._mapping, touched, end - touched):
                return False
            self._populated_end = max(self._populated_end, end)
        return True


class SegmentAllocator:
    """The shared memory that one agent sends from."""

    def __init__(self, min_bytes: int, limit: int) -> None:
        self.min_bytes = min_bytes
        self._max_bytes = limit
        self._segments: list[SharedSegment] = []
        self._draining: list[SharedSegment] = []
        self._segment_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<SegmentAllocator {self._segments}{f', {len(self._draining)} draining' if self._draining else ''}>"

    def allocate(
        self, nbytes: int, peer: str, connection: object
    ) -> tuple[SharedSegment, BufferPlace] | None:
        """Room for one buffer, or None if there is none within the limit, or no memory."""
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
    ) -> tuple[SharedSegment, BufferPlace] | None:
        with self._lock:
            for segment in self._segments:
                segment.reclaim()
                place = segment.allocate(nbytes, peer, connection)
                if place is not None:
                    return segment, place
            size = max(_MIN_SEGMENT, 1 << (nbytes + PAGE - 1).bit_length())
            if self._closed or sum(each.size for each in self._segments) + size > self._max_bytes:
                return None
            try:
                segment = SharedSegment(next(self._segment_ids), size)
            except (OSError, MemoryError, ValueError) as error:
                _log.info("no shared memory of %d bytes (%s); using the socket", size, error)
                return None
            self._segments.append(segment)
            place = segment.allocate(nbytes, peer, connection)
            return None if place is None else (segment, place)

    def allocate_for_many(self, nbytes: int) -> tuple[SharedSegment, BufferPlace] | None:
        """Room for a buffer that goes to several receivers. It stays in use until `release`."""
        found = self.allocate(nbytes, "", None)
        if found is not None:
            found[0].bytes[found[1].slot] = IN_USE
        return found

    def add_receiver(
        self, segment: SharedSegment, place: BufferPlace, peer: str, connection: object
    ) -> BufferPlace | None:
        """Let one more receiver have a block. None: the segment is no longer used."""
        with self._lock:
            return (
                segment.add_receiver(place, peer, connection) if segment in self._segments else None
            )

    def release(self, places: Sequence[BufferPlace]) -> None:
        """Return the blocks of a frame that no receiver was told of."""
        with self._lock:
            segments = {
                segment.segment_id: segment for segment in (*self._segments, *self._draining)
            }
            for place in places:
                segment, slot = segments.get(place.segment), place.slot & ~PRIVATE
                if segment is not None and slot in segment.blocks:
                    segment.release_slot(slot)

    def abandon(self, peer: str, connection: object) -> None:
        """`connection` to `peer` ended, or (None) all of them. Blocks of unknown fate are not used again."""
        with self._lock:
            for segment in list(self._segments):
                if segment.has_lost_block(peer, connection):
                    self._segments.remove(segment)
                    self._draining.append(segment)
            for segment in (*self._segments, *self._draining):
                segment.detach(peer, connection)
            self._close_drained()

    def tidy(self) -> None:
        """Retire what has drained."""
        with self._lock:
            self._close_drained()

    def trim(self) -> None:
        """Give memory that nobody uses back to the system."""
        with self._lock:
            self._close_drained()
            for segment in list(self._segments):
                segment.reclaim()
                if not segment.blocks:
                    self._segments.remove(segment)
                    segment.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for segment in (*self._segments, *self._draining):
                segment.close()
            self._segments.clear()
            self._draining.clear()

    def _close_drained(self) -> None:
        self._draining = [segment for segment in self._draining if not segment.close_if_drained()]
