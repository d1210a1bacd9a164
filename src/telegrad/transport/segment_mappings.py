"""The segments of other agents that an agent has mapped."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np

from telegrad.errors import ProtocolError
from telegrad.transport import memfd
from telegrad.transport.memfd import PAGE
from telegrad.transport.segments import CLOSED_AT, FREE, IN_USE, PRIVATE, SENT, SLOTS, Bytes
from telegrad.wire.frames import BufferPlace

_popleft = deque.popleft
_discard: deque[None] = deque(maxlen=0)


class SegmentUnknown(Exception):
    """A frame names a segment that is not mapped here."""


class MappedSegment:
    """A segment of another agent, mapped here."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.private: mmap.mmap | None = None
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._populated_end = PAGE

    def private_view(self, place: BufferPlace) -> Bytes:
        """Memory that others have, too, until somebody writes to it."""
        if self.private is None:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            self.private = mmap.mmap(self._fd, len(self.memory), flags=flags)
        self.discard_private_pages(
            place
        )  # pages that were written to would hide what the block has now
        memfd.populate(self.private, place.offset, place.nbytes, memfd.POPULATE_READ)
        return np.frombuffer(self.private, np.uint8, place.nbytes, place.offset)

    def discard_private_pages(self, place: BufferPlace) -> None:
        """Give up the pages of a block that became this worker's own when they were written to."""
        assert self.private is not None
        self.private.madvise(mmap.MADV_DONTNEED, place.offset, -(-place.nbytes // PAGE) * PAGE)

    def view(self, place: BufferPlace) -> Bytes:
        end = place.offset + place.nbytes
        if end > self._populated_end:
            if not memfd.populate(self.memory, self._populated_end, end - self._populated_end):
                raise MemoryError(f"no memory to map {place.nbytes} bytes of a shared segment")
            self._populated_end = -(-end // PAGE) * PAGE
        return np.frombuffer(self.memory, np.uint8, place.nbytes, place.offset)


class SegmentMappings:
    """The segments of other agents that this one has mapped."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, int], MappedSegment] = {}
        self._in_use: dict[
            tuple[str, int, int], tuple[mmap.mmap, weakref.ref[Bytes], deque[int]]
        ] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"<SegmentMappings {len(self._segments)} segments, {len(self._in_use)} blocks in use>"
        )

    @property
    def live(self) -> int:
        """Blocks of other agents that tensors of this one sit on."""
        self.release_dead()
        return len(self._in_use)

    def release_dead(self) -> None:
        """Forget blocks whose tensors are gone, and free those whose callback was interrupted by a signal handler."""
        with self._lock:
            for key, (memory, array, slot) in list(self._in_use.items()):
                if array() is None:
                    _free_slot(memory, slot)
                    del self._in_use[key]

    def add(self, peer: str, segment_id: int, fd: int) -> None:
        """Map a segment that `peer` passed. A segment that could shrink under us is refused."""
        try:
            sealed = memfd.is_sealed(fd)
            if not sealed or os.fstat(fd).st_size < PAGE:
                raise ProtocolError(
                    "a shared-memory segment that is not sealed or has no first page"
                )
            mapped = MappedSegment(fd)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a shared-memory segment that cannot be mapped: {error}") from None
        with self._lock:
            self._segments[peer, segment_id] = mapped

    def locate(self, peer: str, place: BufferPlace) -> memoryview:
        """The memory of one block; it goes back to its sender when nothing refers to it any more."""
        mapped = self._segments.get((peer, place.segment))
        if mapped is None:
            raise SegmentUnknown(
                f"a buffer in shared-memory segment {place.segment}, which is unknown"
            )
        memory, slot = mapped.memory, place.slot & ~PRIVATE
        key = peer, place.segment, slot
        fits = place.offset >= PAGE and place.offset + place.nbytes <= len(memory) and slot < SLOTS
        if not fits or memory[slot] != SENT:
            raise ProtocolError(f"a buffer in shared memory that does not exist: {place}")
        array = mapped.private_view(place) if place.slot & PRIVATE else mapped.view(place)
        process_id, lock, live = os.getpid(), self._lock, self._in_use
        to_free = deque((slot,))

        # runs inside the garbage collector: it must not wait for a lock
        def on_array_freed(ended: weakref.ref[Bytes]) -> None:
            # a fork may drop its copy; the block still belongs to the parent
            if os.getpid() != process_id:
                return
            _free_slot(memory, to_free)
            held: list[bool] = []
            try:
                # one call: no signal handler runs in between
                held.extend(map(lock.acquire, (False,)))
                if held[0] and key in live and live[key][1] is ended:
                    del live[key]
            finally:
                if held and held[0]:
                    lock.release()

        with lock:
            live[key] = memory, weakref.ref(array, on_array_freed), to_free
            memory[slot] = IN_USE
        return memoryview(array)

    def forget(self, peer: str | None = None) -> None:
        """Drop the segments of a lost `peer`, or those that their senders have retired. Tensors on them live on."""
        self.release_dead()
        with self._lock:
            for key, mapped in list(self._segments.items()):
                if key[0] == peer or (peer is None and mapped.memory[CLOSED_AT]):
                    del self._segments[key]

    def close(self) -> None:
        self.release_dead()
        with self._lock:
            self._segments.clear()


def _free_slot(memory: mmap.mmap, slot: deque[int]) -> None:
    """Free a block once: its sender may have given it out again since.

    Whoever takes the slot out of the deque frees it, in one call, so that no signal handler runs in between.
    """
    try:
        _discard.extend(map(memory.__setitem__, map(_popleft, (slot,)), (FREE,)))
    except IndexError:
        return  # another thread was faster
