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

FREE, SENT, TAKEN = 0, 1, 2
SLOTS = 4096 - 1
# in `BufferPlace.slot`: others may receive the same block, so it is mapped privately
PRIVATE = 1 << 31
RETIRED_AT = SLOTS  # the last byte of the first page: 1 when the sender is done with the segment
_SMALLEST = 64 << 20

Bytes = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SharedBlock:
    offset: int
    size: int
    peer: str
    sender: object  # the connection that it is sent through; None when that has ended


class SharedSegment:
    """Memory that this agent shares with peers. Used under the lock of its arena."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        # Whoever holds a segment may be passing its descriptor on, so it is closed with the last holder, not before:
        # its number could belong to another file by then.
        self.fd = memfd.create(f"telegrad-{number}", size, self)
        self._map = mmap.mmap(self.fd, size)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.used: dict[int, SharedBlock] = {}
        self._sharers: dict[int, int] = {}  # by offset: slots of a block that has several
        self._free = [(PAGE, size - PAGE)]
        self._touched = PAGE
        self._slots = list(range(SLOTS - 1, -1, -1))

    def __repr__(self) -> str:
        return f"<SharedSegment {self.number}: {self.size >> 20} MiB, {len(self.used)} blocks>"

    def take(self, nbytes: int, peer: str, sender: object) -> BufferPlace | None:
        """A block at the lowest free offset, so that warm pages are used first. None: no room."""
        size = -(-nbytes // PAGE) * PAGE
        for index, (offset, room) in enumerate(self._free):
            if room >= size and self._slots:
                rest = [(offset + size, room - size)] if room > size else []
                self._free[index : index + 1] = rest
                slot = self._slots.pop()
                self.used[slot] = SharedBlock(offset, size, peer, sender)
                self.bytes[slot] = SENT
                return BufferPlace(nbytes, offset, self.number, slot)
        return None

    def take_again(self, place: BufferPlace, peer: str, sender: object) -> BufferPlace | None:
        """Another slot for a block that has one, which must stay in use meanwhile. None: there is none left."""
        if not self._slots:
            return None
        slot = self._slots.pop()
        self.used[slot] = SharedBlock(place.offset, self.used[place.slot].size, peer, sender)
        self._sharers[place.offset] = self._sharers.get(place.offset, 1) + 1
        self.bytes[slot] = SENT
        return place._replace(slot=slot)

    def sweep(self) -> None:
        """Take back the blocks that their receivers have freed."""
        for slot in [slot for slot in self.used if self.bytes[slot] == FREE]:
            self.give_back(slot)

    def give_back(self, slot: int) -> None:
        block = self.used.pop(slot)
        self.bytes[slot] = FREE
        self._slots.append(slot)
        if block.offset in self._sharers:
            self._sharers[block.offset] -= 1
            if self._sharers[block.offset]:
                return
            del self._sharers[block.offset]
        self._free.append((block.offset, block.size))
        self._free.sort()
        merged = [self._free[0]]
        for offset, size in self._free[1:]:
            if merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged

    def has_unknown(self, peer: str, sender: object) -> bool:
        """Has a block of `peer` an unknown fate now that `sender` has ended, or (None) that the peer is lost?"""
        return any(
            block.peer == peer
            and (
                (self.bytes[slot] == SENT and block.sender is sender)
                or (sender is None and self.bytes[slot] != FREE)
            )
            for slot, block in self.used.items()
        )

    def forget_sender(self, peer: str, sender: object) -> None:
        """`sender` has ended, or (None) all connections to `peer`: what they carried no longer keeps the segment."""
        for block in self.used.values():
            if block.peer == peer and (sender is None or block.sender is sender):
                block.sender = None

    def retire_if_drained(self) -> bool:
        """Let receivers unmap the segment unless a block is on its way through an open connection."""
        if any(
            self.bytes[slot] == SENT and block.sender is not None
            for slot, block in self.used.items()
        ):
            return False
        self.retire()
        return True

    def retire(self) -> None:
        self.bytes[RETIRED_AT] = 1

    def warm(self, place: BufferPlace) -> bool:
        """Fault new pages in at once instead of one by one during the copy. False: there is no memory for them.

        Called without the lock, for as long as it may take. Two threads may fault the same pages in.
        """
        touched, end = self._touched, -(-(place.offset + place.nbytes) // PAGE) * PAGE
        if end > touched:
            if not memfd.populate(self._map, touched, end - touched):
                return False
            self._touched = max(self._touched, end)
        return True


class SegmentAllocator:
    """The shared memory that one agent sends from."""

    def __init__(self, floor: int, limit: int) -> None:
        self.floor = floor
        self._limit = limit
        self._segments: list[SharedSegment] = []
        self._draining: list[SharedSegment] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<SegmentAllocator {self._segments}{f', {len(self._draining)} draining' if self._draining else ''}>"

    def take(
        self, nbytes: int, peer: str, sender: object
    ) -> tuple[SharedSegment, BufferPlace] | None:
        """Room for one buffer, or None if there is none within the limit, or no memory."""
        found = self._reserve(nbytes, peer, sender)
        if found is None:
            return None
        segment, place = found
        is_warm = False
        try:
            is_warm = segment.warm(place)
        finally:
            if not is_warm:
                self.take_back([place])
        return found if is_warm else None

    def _reserve(
        self, nbytes: int, peer: str, sender: object
    ) -> tuple[SharedSegment, BufferPlace] | None:
        with self._lock:
            for segment in self._segments:
                segment.sweep()
                place = segment.take(nbytes, peer, sender)
                if place is not None:
                    return segment, place
            size = max(_SMALLEST, 1 << (nbytes + PAGE - 1).bit_length())
            if self._closed or sum(each.size for each in self._segments) + size > self._limit:
                return None
            try:
                segment = SharedSegment(next(self._numbers), size)
            except (OSError, MemoryError, ValueError) as error:
                _log.info("no shared memory of %d bytes (%s); using the socket", size, error)
                return None
            self._segments.append(segment)
            place = segment.take(nbytes, peer, sender)
            return None if place is None else (segment, place)

    def take_for_many(self, nbytes: int) -> tuple[SharedSegment, BufferPlace] | None:
        """Room for a buffer that goes to several receivers. It stays in use until `take_back`."""
        found = self.take(nbytes, "", None)
        if found is not None:
            found[0].bytes[found[1].slot] = TAKEN
        return found

    def take_again(
        self, segment: SharedSegment, place: BufferPlace, peer: str, sender: object
    ) -> BufferPlace | None:
        """Let one more receiver have a block. None: the segment is no longer used."""
        with self._lock:
            return segment.take_again(place, peer, sender) if segment in self._segments else None

    def take_back(self, places: Sequence[BufferPlace]) -> None:
        """Return the blocks of a frame that no receiver was told of."""
        with self._lock:
            segments = {segment.number: segment for segment in (*self._segments, *self._draining)}
            for place in places:
                segment, slot = segments.get(place.segment), place.slot & ~PRIVATE
                if segment is not None and slot in segment.used:
                    segment.give_back(slot)

    def abandon(self, peer: str, sender: object) -> None:
        """The connection `sender` to `peer` ended, or (None) all of them. Blocks of unknown fate are not used again."""
        with self._lock:
            for segment in list(self._segments):
                if segment.has_unknown(peer, sender):
                    self._segments.remove(segment)
                    self._draining.append(segment)
            for segment in (*self._segments, *self._draining):
                segment.forget_sender(peer, sender)
            self._retire_drained()

    def tidy(self) -> None:
        """Retire what has drained."""
        with self._lock:
            self._retire_drained()

    def trim(self) -> None:
        """Give memory that nobody uses back to the system."""
        with self._lock:
            self._retire_drained()
            for segment in list(self._segments):
                segment.sweep()
                if not segment.used:
                    self._segments.remove(segment)
                    segment.retire()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for segment in (*self._segments, *self._draining):
                segment.retire()
            self._segments.clear()
            self._draining.clear()

    def _retire_drained(self) -> None:
        self._draining = [segment for segment in self._draining if not segment.retire_if_drained()]
