"""Large buffers through shared memory: the sender copies once, the receiver uses the same pages.

How it works:

- The sender's `SegmentAllocator` owns segments (sealed memfds) and allocates a block for each large
  buffer (`segments`). It copies the buffer into the block. The frame says where the block is.
- A receiver maps a segment when it first learns of it, through a connection that passes the memfd
  (`segment_transfer`). Its tensor uses the pages of the block directly (`segment_mappings`).
- The first page of a segment has one byte for each slot. A slot is one use of a block by one
  receiver. The byte says who owns that use:

      FREE (0)     unused: the sender may allocate the slot
      SENT (1)     the sender wrote the block and names it in a frame
      IN_USE (2)   the receiver has read that frame; a tensor of it may use the block

  Only the sender changes FREE -> SENT, only the receiver SENT -> IN_USE -> FREE, the last when the
  tensor is freed. That is a single store to memory, which is safe inside the garbage collector. The
  sender sees it when it next needs memory.
- A block may be sent to several receivers (`SharedCopies`). Each has a slot of its own, and the
  block is free when all of its slots are. Such a receiver maps the segment a second time,
  privately: pages that it writes to become its own.

A block whose use is unknown (its connection ended while it was SENT, or its receiver was lost) is
never used again, and its segment becomes *draining*: no block of it is allocated any more. Other
connections may still carry frames that name its blocks, and their receivers must find it. So the
segment is *closed*, which permits receivers to unmap it, only when no block of it is SENT through
an open connection. The kernel frees the memory with the last mapping.

This module has the part of one channel: `SharedMemoryTransfer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from telegrad.transport.copy_threads import copy_buffer
from telegrad.transport.segment_mappings import SegmentMappings
from telegrad.transport.segments import PRIVATE, SegmentAllocator, SharedSegment
from telegrad.transport.shared_copies import SharedCopies
from telegrad.wire.frames import BufferLocation


class SharedMemoryTransfer:
    """Shared memory with one peer, for one channel. It has no state of its own.

    `announce(segment, deadline)` ensures that the peer has mapped a segment. It returns False if
    that failed.
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
        places: list[BufferLocation],
        timeout: float | None = None,
        copies: SharedCopies | None = None,
    ) -> list[memoryview]:
        """Copy large buffers into shared memory. Return the buffers that stay in the stream.

        `places[i]` becomes the block of `buffers[i]` as soon as that is allocated. If this method
        is interrupted, the caller passes `places` to `release`.
        """
        in_stream: list[memoryview] = []
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if copies is not None and not copies.is_first_message_to(self._peer):
            copies = None
        for index, buffer in enumerate(buffers):
            is_shared = False
            if buffer.nbytes >= self._allocator.min_bytes:
                if copies is not None:
                    is_shared = self._share_copy(buffer, places, index, deadline, copies)
                is_shared = is_shared or self._share_buffer(buffer, places, index, deadline)
            if not is_shared:
                in_stream.append(buffer)
        return in_stream

    def copy_to_shared_block(
        self, copies: SharedCopies, index: int, buffer: memoryview
    ) -> memoryview | None:
        """Copy a large buffer into a block for several receivers. Return the block's memory.

        Return None if the buffer is small or there is no room.
        """
        if buffer.nbytes < self._allocator.min_bytes:
            return None
        found = copies.get_block(self._allocator, index, buffer)
        if found is None:
            return None
        segment, place = found
        return memoryview(segment.view(place))

    def _share_copy(
        self,
        buffer: memoryview,
        places: list[BufferLocation],
        index: int,
        deadline: float,
        copies: SharedCopies,
    ) -> bool:
        """Let the peer use the block of this buffer in `copies`. Return False if it cannot."""
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
        places[index] = BufferLocation(buffer.nbytes)
        self._allocator.release([place])
        return False

    def _share_buffer(
        self, buffer: memoryview, places: list[BufferLocation], index: int, deadline: float
    ) -> bool:
        """Copy a buffer into a block for this peer alone. Return False if there is no room."""
        found = self._allocator.allocate(buffer.nbytes, self._peer, self)
        if found is None:
            return False
        segment, place = found
        places[index] = place
        if not self._announce(segment, deadline):
            places[index] = BufferLocation(buffer.nbytes)
            self._allocator.release([place])
            return False
        copy_buffer(segment.view(place), buffer)
        return True

    def release(self, places: Sequence[BufferLocation]) -> None:
        """Free the blocks of a frame that was not sent."""
        self._allocator.release(places)

    def locate(self, place: BufferLocation) -> memoryview:
        """Return the memory of a received buffer; see `SegmentMappings.locate`."""
        return self._mappings.locate(self._peer, place)

    def close(self) -> None:
        """Give up the blocks that were on their way through this channel, which is closed."""
        self._allocator.connection_closed(self._peer, self)
