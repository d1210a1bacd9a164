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

import errno
import fcntl
import itertools
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telegrad.errors import ProtocolError
from telegrad.wire.frames import BufferPlace

FREE, SENT, TAKEN = 0, 1, 2
SLOTS = 4096 - 1
# in `BufferPlace.slot`: others may receive the same block, so it is mapped privately
PRIVATE = 1 << 31
_RETIRED_AT = SLOTS  # the last byte of the first page: 1 when the sender is done with the segment
_PAGE = 4096
_SMALLEST = 64 << 20
_PART = 4 << 20  # bytes that are worth a thread of their own in a copy
_MOST_COPIERS = 8
_POPULATE_STEP = 32 << 20  # bytes
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_HWPOISON = 133  # EHWPOISON on Linux
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if hasattr(fcntl, "F_SEAL_SHRINK")
    else 0
)

Bytes = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)
_popleft = deque.popleft
_done: deque[None] = deque(maxlen=0)


class SegmentUnknown(Exception):
    """A frame names a segment that is not mapped here."""


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
        self.fd = os.memfd_create(f"telegrad-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Whoever holds a segment may be passing its descriptor on, so it is closed with the last holder, not before:
        # its number could belong to another file by then.
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, size)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.used: dict[int, SharedBlock] = {}
        self._sharers: dict[int, int] = {}  # by offset: slots of a block that has several
        self._free = [(_PAGE, size - _PAGE)]
        self._touched = _PAGE
        self._slots = list(range(SLOTS - 1, -1, -1))

    def __repr__(self) -> str:
        return f"<SharedSegment {self.number}: {self.size >> 20} MiB, {len(self.used)} blocks>"

    def take(self, nbytes: int, peer: str, sender: object) -> BufferPlace | None:
        """A block at the lowest free offset, so that warm pages are used first. None: no room."""
        size = -(-nbytes // _PAGE) * _PAGE
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
        self.bytes[_RETIRED_AT] = 1

    def warm(self, place: BufferPlace) -> bool:
        """Fault new pages in at once instead of one by one during the copy. False: there is no memory for them.

        Called without the lock, for as long as it may take. Two threads may fault the same pages in.
        """
        touched, end = self._touched, -(-(place.offset + place.nbytes) // _PAGE) * _PAGE
        if end > touched:
            if not _populate(self._map, touched, end - touched):
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
            size = max(_SMALLEST, 1 << (nbytes + _PAGE - 1).bit_length())
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


class MappedSegment:
    """A segment of another agent, mapped here."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.private: mmap.mmap | None = None
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._touched = _PAGE

    def private_view(self, place: BufferPlace) -> Bytes:
        """Memory that others have, too, until somebody writes to it."""
        if self.private is None:
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            self.private = mmap.mmap(self._fd, len(self.memory), flags=flags)
        self.drop_private(place)  # pages that were written to would hide what the block has now
        _populate(self.private, place.offset, place.nbytes, _POPULATE_READ)
        return np.frombuffer(self.private, np.uint8, place.nbytes, place.offset)

    def drop_private(self, place: BufferPlace) -> None:
        """Give up the pages of a block that became this worker's own when they were written to."""
        assert self.private is not None
        self.private.madvise(mmap.MADV_DONTNEED, place.offset, -(-place.nbytes // _PAGE) * _PAGE)

    def view(self, place: BufferPlace) -> Bytes:
        end = place.offset + place.nbytes
        if end > self._touched:
            if not _populate(self.memory, self._touched, end - self._touched):
                raise MemoryError(f"no memory to map {place.nbytes} bytes of a shared segment")
            self._touched = -(-end // _PAGE) * _PAGE
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
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size < _PAGE:
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
        fits = place.offset >= _PAGE and place.offset + place.nbytes <= len(memory) and slot < SLOTS
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
                if key[0] == peer or (peer is None and mapped.memory[_RETIRED_AT]):
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


class SharedCopies:
    """What was copied of the buffers of one message that goes to several receivers, each from a thread of its own.

    State, under `_lock`: `_blocks`, which are complete once they are there, and `_peers`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, tuple[SegmentAllocator, SharedSegment, BufferPlace]] = {}
        # those that have received it: a second private view of a block would be the same
        self._peers: set[str] = set()

    def admits(self, peer: str) -> bool:
        """Is this the first message to `peer`?"""
        with self._lock:
            is_first = peer not in self._peers
            self._peers.add(peer)
            return is_first

    def block(
        self, arena: SegmentAllocator, index: int, buffer: memoryview
    ) -> tuple[SharedSegment, BufferPlace] | None:
        """A block with the bytes of the buffer number `index`, copied when it is first asked for."""
        with self._lock:
            if index not in self._blocks:
                found = arena.take_for_many(buffer.nbytes)
                if found is None:
                    return None
                segment, place = found
                self._blocks[index] = arena, segment, place
                _copy(segment.bytes[place.offset : place.offset + place.nbytes], buffer)
            return self._blocks[index][1:]

    def close(self) -> None:
        """No more receivers will come."""
        while self._blocks:
            arena, _, place = self._blocks.popitem()[1]
            arena.take_back([place])


class SharedMemoryTransfer:
    """Shared memory with one peer, as seen by one channel.

    `announce(segment, until)` makes sure that the peer has mapped a segment; False if that fails.
    """

    def __init__(
        self,
        arena: SegmentAllocator,
        mappings: SegmentMappings,
        peer: str,
        announce: Callable[[SharedSegment, float], bool],
    ) -> None:
        self._arena = arena
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
        inside: list[memoryview] = []
        until = math.inf if timeout is None else time.monotonic() + timeout
        if copies is not None and not copies.admits(self._peer):
            copies = None
        for index, buffer in enumerate(buffers):
            if buffer.nbytes < self._arena.floor or not (
                (copies is not None and self._share_again(buffer, places, index, until, copies))
                or self._share(buffer, places, index, until)
            ):
                inside.append(buffer)
        return inside

    def copy_to_shared_block(
        self, copies: SharedCopies, index: int, buffer: memoryview
    ) -> memoryview | None:
        """Copy a large buffer into a block for several receivers; the memory of that block."""
        found = (
            copies.block(self._arena, index, buffer) if buffer.nbytes >= self._arena.floor else None
        )
        if found is None:
            return None
        segment, place = found
        return memoryview(segment.bytes[place.offset : place.offset + place.nbytes])

    def _share_again(
        self,
        buffer: memoryview,
        places: list[BufferPlace],
        index: int,
        until: float,
        copies: SharedCopies,
    ) -> bool:
        found = copies.block(self._arena, index, buffer)
        if found is None:
            return False
        segment, first = found
        place = self._arena.take_again(segment, first, self._peer, self)
        if place is None:
            return False
        places[index] = place._replace(slot=place.slot | PRIVATE)
        if self._announce(segment, until):
            return True
        places[index] = BufferPlace(buffer.nbytes)
        self._arena.take_back([place])
        return False

    def _share(
        self, buffer: memoryview, places: list[BufferPlace], index: int, until: float
    ) -> bool:
        found = self._arena.take(buffer.nbytes, self._peer, self)
        if found is None:
            return False
        segment, place = found
        places[index] = place
        if not self._announce(segment, until):
            places[index] = BufferPlace(buffer.nbytes)
            self._arena.take_back([place])
            return False
        _copy(segment.bytes[place.offset : place.offset + place.nbytes], buffer)
        return True

    def take_back(self, places: Sequence[BufferPlace]) -> None:
        """The frame with these buffers was not sent."""
        self._arena.take_back(places)

    def locate(self, place: BufferPlace) -> memoryview:
        return self._mappings.locate(self._peer, place)

    def ended(self) -> None:
        """The channel is closed: blocks that were on their way through it are lost."""
        self._arena.abandon(self._peer, self)


def _copy(target: Bytes, source: memoryview) -> None:
    """Copy a buffer, a large one in parts on several cores.

    Not with torch's own threads: after each piece of work they spin for a while, on the cores that the peer needs now.
    """
    array = np.frombuffer(source, np.uint8)
    parts = min(array.nbytes // _PART, _copiers.count)
    if parts < 2:
        np.copyto(target, array)
        return
    step = -(-array.nbytes // parts)
    others = [
        _copiers.pool().submit(np.copyto, target[start : start + step], array[start : start + step])
        for start in range(step, array.nbytes, step)
    ]
    np.copyto(target[:step], array[:step])
    for other in others:
        other.result()


class _CopyThreads:
    """Threads that copy, made when they are first needed; a forked child makes its own."""

    def __init__(self) -> None:
        self.count = min(len(os.sched_getaffinity(0)) // 2, _MOST_COPIERS)
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self.count, "copier"), os.getpid()
        return self._pool


_copiers = _CopyThreads()


def _populate(mapped: mmap.mmap, offset: int, nbytes: int, how: int = _POPULATE_WRITE) -> bool:
    """Fault pages in. False: there is no memory for them; touching them would end the process.

    `madvise` holds the interpreter's lock, so no other thread runs meanwhile, not even the one that
    gives signs of life: many pages are faulted in step by step.
    """
    for start in range(offset, offset + nbytes, _POPULATE_STEP):
        try:
            mapped.madvise(how, start, min(_POPULATE_STEP, offset + nbytes - start))
        except OSError as error:
            # else an older kernel
            return error.errno not in (errno.ENOMEM, errno.EFAULT, _HWPOISON)
    return True
