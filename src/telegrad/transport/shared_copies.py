"""`SharedCopies`: the buffers of one message for several receivers, copied to shared memory once.

Each receiver may be served by a thread of its own. The first one copies a buffer; the others wait
for it and use the same block.
"""

from __future__ import annotations

import threading

from telegrad.transport.copy_threads import copy_buffer
from telegrad.transport.segments import SegmentAllocator, SharedSegment
from telegrad.wire.frames import BufferLocation


class SharedCopies:
    """The blocks that hold the buffers of one message.

    State, under `_lock`: `_blocks`, each complete once it is in the dict, and `_peers`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, tuple[SegmentAllocator, SharedSegment, BufferLocation]] = {}
        # Peers that have received the message. A peer must not receive a block twice: it maps a
        # segment privately only once, so two tensors would have the same memory.
        self._peers: set[str] = set()

    def is_first_message_to(self, peer: str) -> bool:
        """Return whether this is the first message to `peer`, and remember the peer."""
        with self._lock:
            is_first = peer not in self._peers
            self._peers.add(peer)
            return is_first

    def get_block(
        self, allocator: SegmentAllocator, index: int, buffer: memoryview
    ) -> tuple[SharedSegment, BufferLocation] | None:
        """Return a block with the bytes of the message's buffer `index`. None: there is no room.

        The first caller copies the buffer.
        """
        with self._lock:
            if index not in self._blocks:
                found = allocator.allocate_for_many(buffer.nbytes)
                if found is None:
                    return None
                segment, place = found
                self._blocks[index] = allocator, segment, place
                copy_buffer(segment.view(place), buffer)
            return self._blocks[index][1:]

    def close(self) -> None:
        """Release the blocks; receivers that have them keep them. No more receivers may follow."""
        while self._blocks:
            allocator, _, place = self._blocks.popitem()[1]
            allocator.release([place])
