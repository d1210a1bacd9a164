"""Large buffers through shared memory: the sender copies once, the receiver's tensor sits on the very same pages.

A sender's `SegmentAllocator` owns segments (memfds). A segment's first page holds one byte per slot; the rest is
blocks:

    FREE (0)   nobody uses the block: the sender may give it out again
    SENT (1)   the sender wrote it and told the receiver about it in a frame
    TAKEN (2)  the receiver has read that frame; a tensor of its may sit on the block

Only the sender moves FREE -> SENT, only the receiver SENT -> TAKEN -> FREE, the last when the tensor dies. That is one
store to memory, safe inside the garbage collector; the sender notices when it next needs room. A receiver learns
of a segment once, over a connection of its own that passes the memfd.

One block may be sent to several receivers (`SharedCopies`). Each has a slot of its own, and the block is free when all
slots are. Such a receiver maps the segment a second time, privately: the pages that it writes to become its own.

State: the arena's segments and their free lists, under `SegmentAllocator._lock`, for which the clock waits, too: nobody
holds it while pages are faulted in, which takes seconds for gigabytes; the receiver's `SegmentMappings`, under its
lock. A block whose fate is unknown (the connection that it was sent through ended while it was SENT, or its receiver
was lost) is never used again. Its segment is *draining* from then on: no new block is taken from it. Other connections
may still carry frames that name its blocks, and their receivers must find it. So it is *retired*, which lets receivers
unmap it, only when no block of it is on its way through a connection that is open. The kernel frees it with the last
mapping.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from telegrad.transport.copy_threads import copy_buffer
from telegrad.transport.segment_mappings import MappedSegment, SegmentMappings
from telegrad.transport.segments import PRIVATE, SegmentAllocator, SharedSegment
from telegrad.transport.shared_copies import SharedCopies
from telegrad.wire.frames import BufferPlace

# Until all importers use the modules that these names moved to.
__all__ = [
    "MappedSegment",
    "SegmentAllocator",
    "SegmentMappings",
    "SharedCopies",
    "SharedMemoryTransfer",
    "SharedSegment",
]


class SharedMemoryTransfer:
    """Shared memory with one peer, as seen by one channel.

    `announce(segment, until)` makes sure that the peer has mapped a segment; False if that fails.
    """

    def __init__(
        self,
        allocator: SegmentAllocator,
        mappings: SegmentMappings,
        peer: str,
        announce: Callable[[SharedSegment, float], bool],
    ) -> None:
        self._allocator = allocator
        self._mappings = mappings
        self._peer = peer
        self._announce = announce

    def place(
        self,
        buffers: Sequence[memoryview],
        places: list[BufferPlace],
        timeout: float | None = None,
        copies: SharedCopies | None = None,
    ) -> list[memoryview]:
        """Copy large buffers into shared memory and note in `places` where; return those that stay in the stream.

        `places` is filled as the blocks are taken, so that whoever is interrupted knows what to give back.
        """
        in_stream: list[memoryview] = []
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if copies is not None and not copies.is_first_message_to(self._peer):
            copies = None
        for index, buffer in enumerate(buffers):
            if buffer.nbytes < self._allocator.min_bytes or not (
                (copies is not None and self._share_copy(buffer, places, index, deadline, copies))
                or self._share_buffer(buffer, places, index, deadline)
            ):
                in_stream.append(buffer)
        return in_stream

    def copy_to_shared_block(
        self, copies: SharedCopies, index: int, buffer: memoryview
    ) -> memoryview | None:
        """Copy a large buffer into a block for several receivers; the memory of that block."""
        found = (
            copies.get_block(self._allocator, index, buffer)
            if buffer.nbytes >= self._allocator.min_bytes
            else None
        )
        if found is None:
            return None
        segment, place = found
        return memoryview(segment.bytes[place.offset : place.offset + place.nbytes])

    def _share_copy(
        self,
        buffer: memoryview,
        places: list[BufferPlace],
        index: int,
        deadline: float,
        copies: SharedCopies,
    ) -> bool:
        found = copies.get_block(self._allocator, index, buffer)
        if found is None:
            return False
        segment, first = found
        place = self._allocator.add_receiver(segment, first, self._peer, self)
        if place is None:
            return False
        places[index] = place._replace(slot=place.slot | PRIVATE)
        if self._announce(segment, deadline):
            return True
        places[index] = BufferPlace(buffer.nbytes)
        self._allocator.release([place])
        return False

    def _share_buffer(
        self, buffer: memoryview, places: list[BufferPlace], index: int, deadline: float
    ) -> bool:
        found = self._allocator.allocate(buffer.nbytes, self._peer, self)
        if found is None:
            return False
        segment, place = found
        places[index] = place
        if not self._announce(segment, deadline):
            places[index] = BufferPlace(buffer.nbytes)
            self._allocator.release([place])
            return False
        copy_buffer(segment.bytes[place.offset : place.offset + place.nbytes], buffer)
        return True

    def release(self, places: Sequence[BufferPlace]) -> None:
        """The frame with these buffers was not sent."""
        self._allocator.release(places)

    def locate(self, place: BufferPlace) -> memoryview:
        return self._mappings.locate(self._peer, place)

    def close(self) -> None:
        """The channel is closed: blocks that were on their way through it are lost."""
        self._allocator.abandon(self._peer, self)
