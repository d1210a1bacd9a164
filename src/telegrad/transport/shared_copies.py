"""Copies of the buffers of one message for several receivers."""

from __future__ import annotations

import threading

from telegrad.transport.copy_threads import copy_buffer
from telegrad.transport.segments import SegmentAllocator, SharedSegment
from telegrad.wire.frames import BufferPlace


class SharedCopies:
    """What was copied of the buffers of one message that goes to several receivers, each from a thread of its own.

    State, under `_lock`: `_blocks`, which are complete once they are there, and `_peers`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, tuple[SegmentAllocator, SharedSegment, BufferPlace]] = {}
        # those that have received it: a second private view of a block would be the same
        self._peers: set[str] = set()

    def is_first_message_to(self, peer: str) -> bool:
        """Is this the first message to `peer`?"""
        with self._lock:
            is_first = peer not in self._peers
            self._peers.add(peer)
            return is_first

    def get_block(
        self, allocator: SegmentAllocator, index: int, buffer: memoryview
    ) -> tuple[SharedSegment, BufferPlace] | None:
        """A block with the bytes of the buffer number `index`, copied when it is first asked for."""
        with self._lock:
            if index not in self._blocks:
                found = allocator.allocate_for_many(buffer.nbytes)
                if found is None:
                    return None
                segment, place = found
                self._blocks[index] = allocator, segment, place
                copy_buffer(segment.bytes[place.offset : place.offset + place.nbytes], buffer)
            return self._blocks[index][1:]

    def close(self) -> None:
        """No more receivers will come."""
        while self._blocks:
            allocator, _, place = self._blocks.popitem()[1]
            allocator.release([place])
