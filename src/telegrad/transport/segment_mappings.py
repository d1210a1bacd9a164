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
from telegrad.transport.segments import FREE, PRIVATE, RETIRED_AT, SENT, SLOTS, TAKEN, Bytes
from telegrad.wire.frames import BufferPlace

_popleft = deque.popleft
_done: deque[None] = deque(maxlen=0)


class SegmentUnknown(Exception):
    """A frame names a segment that is not mapped here."""


class MappedSegment:
    """A segment of another agent, mapped here."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.private: mmap.mmap | None = None
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._touched = PAGE

    def private_view(self, place: BufferPlace) -> Bytes:
        """Memory that others have, too, until somebody writes to it."""
        if self.private is None:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            self.private = mmap.mmap(self._fd, len(self.memory), flags=flags)
        self.drop_private(place)  # pages that were written to would hide what the block has now
        memfd.populate(self.private, place.offset, place.nbytes, memfd.POPULATE_READ)
        return np.frombuffer(self.private, np.uint8, place.nbytes, place.offset)

    def drop_private(self, place: BufferPlace) -> None:
        """Give up the pages of a block that became this worker's own when they were written to."""
        assert self.private is not None
        self.private.madvise(mmap.MADV_DONTNEED, place.offset, -(-place.nbytes // PAGE) * PAGE)

    def view(self, place: BufferPlace) -> Bytes:
        end = place.offset + place.nbytes
        if end > self._touched:
            if not memfd.populate(self.memory, self._touched, end - self._touched):
                raise MemoryError(f"no memory to map {place.nbytes} bytes of a shared segment")
            self._touched = -(-end // PAGE) * PAGE
        return np.frombuffer(self.memory, np.uint8, place.nbytes, place.offset)


class SegmentMappings:
    """The segments of other agents that this one has mapped."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str, int], MappedSegment] = {}
        self._live: dict[
            tuple[str, int, int], tuple[mmap.mmap, weakref.ref[Bytes], deque[int]]
        ] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<SegmentMappings {len(self._maps)} segments, {len(self._live)} blocks in use>"

    @property
    def live(self) -> int:
        """Blocks of other agents that tensors of this one sit on."""
        self.reconcile()
        return len(self._live)

    def reconcile(self) -> None:
        """Forget blocks whose tensors are gone, and free those whose callback was interrupted by a signal handler."""
        with self._lock:
            for key, (memory, array, slot) in list(self._live.items()):
                if array() is None:
                    _free(memory, slot)
                    del self._live[key]

    def add(self, peer: str, number: int, fd: int) -> None:
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
            self._maps[peer, number] = mapped

    def locate(self, peer: str, place: BufferPlace) -> memoryview:
        """The memory of one block; it goes back to its sender when nothing refers to it any more."""
        mapped = self._maps.get((peer, place.segment))
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
        process, lock, live = os.getpid(), self._lock, self._live
        to_free = deque((slot,))

        # runs inside the garbage collector: it must not wait for a lock
        def gone(ended: weakref.ref[Bytes]) -> None:
            # a fork may drop its copy; the block still belongs to the parent
            if os.getpid() != process:
                return
            _free(memory, to_free)
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
            live[key] = memory, weakref.ref(array, gone), to_free
            memory[slot] = TAKEN
        return memoryview(array)

    def forget(self, peer: str | None = None) -> None:
        """Drop the segments of a lost `peer`, or those that their senders have retired. Tensors on them live on."""
        self.reconcile()
        with self._lock:
            for key, mapped in list(self._maps.items()):
                if key[0] == peer or (peer is None and mapped.memory[RETIRED_AT]):
                    del self._maps[key]

    def close(self) -> None:
        self.reconcile()
        with self._lock:
            self._maps.clear()


def _free(memory: mmap.mmap, slot: deque[int]) -> None:
    """Free a block once: its sender may have given it out again since.

    Whoever takes the slot out of the deque frees it, in one call, so that no signal handler runs in between.
    """
    try:
        _done.extend(map(memory.__setitem__, map(_popleft, (slot,)), (FREE,)))
    except IndexError:
        return  # another thread was faster
