"""Large buffers through shared memory: the sender copies once, the receiver uses the same pages.

How it works:

- The sender's `SegmentAllocator` owns segments (sealed memfds) and allocates a block for each large
  buffer (`segments`). It copies the buffer into the block. The frame says where the block is.
- A receiver maps a segment when it first learns of it, through a connection that passes the memfd
  (`SegmentSender`). Its tensor uses the pages of the block directly (`SegmentMappings`).
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

`SharedMemoryTransfer` is the part of one channel. `SegmentSender` passes a segment to each peer
once. `SharedCopies` has the buffers of one message for several receivers. Each receiver may be
served by a thread of its own: the first one copies a buffer, the others wait for it and use the
same block. `copy_buffer` copies on several cores, but not with torch's threads: after each
operation they spin for a while, on cores that the receiver needs now.

State: `_announced` and `_retry_at` of `SegmentSender`, changed by single operations. Two threads
may announce one segment at once; the receiver then maps it twice, which is harmless. The pool of
threads that copy is created when it is first used, and again in a forked child.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from telegrad.cores import CORES
from telegrad.errors import ProtocolError
from telegrad.locks import new_lock
from telegrad.transport.segments import PRIVATE, SegmentAllocator, SegmentMappings, SharedSegment
from telegrad.transport.sockets import AuthenticatedSocket
from telegrad.wire.frames import BufferLocation
from telegrad.wire.handshake import Incarnation

_BYTES_PER_THREAD = 4 << 20  # the least that is worth another thread
_MAX_THREADS = 8
# address, (none), purpose of the connection, deadline -> an authenticated connection
ConnectFunction = Callable[[str, None, str, float], AuthenticatedSocket]
_SEGMENT_ID = struct.Struct("<I")
_ACKNOWLEDGED = b"\x01"
_RETRY_SECONDS = 5.0  # after which a peer that could not be reached is tried again
_log = logging.getLogger(__name__)


def copy_buffer(target: npt.NDArray[np.uint8], source: memoryview) -> None:
    """Copy `source` to `target`, in parallel if it is large."""
    array = np.frombuffer(source, np.uint8)
    parts = min(array.nbytes // _BYTES_PER_THREAD, _copy_threads.count)
    if parts < 2:
        np.copyto(target, array)
        return
    step = -(-array.nbytes // parts)
    pool = _copy_threads.pool()
    copies = [
        pool.submit(np.copyto, target[start : start + step], array[start : start + step])
        for start in range(step, array.nbytes, step)
    ]
    np.copyto(target[:step], array[:step])  # the first part by this thread
    for copy in copies:
        copy.result()


class _CopyThreads:
    """The threads of this process that copy."""

    def __init__(self) -> None:
        self.count = min(CORES // 2, _MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None
        self._process_id = 0

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process_id != os.getpid():
            self._pool = ThreadPoolExecutor(self.count, "copier")
            self._process_id = os.getpid()
        return self._pool


_copy_threads = _CopyThreads()


class SharedCopies:
    """The blocks that hold the buffers of one message.

    State, under `_lock`: `_blocks`, each complete once it is in the dict, and `_peers`.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
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


class SegmentSender:
    """Pass segments of this agent to peers, and remember which peer has which."""

    def __init__(self, connect: ConnectFunction) -> None:
        self._connect = connect
        self._announced: dict[Incarnation, set[int]] = {}
        self._retry_at: dict[Incarnation, float] = {}  # peers that could not be reached

    def __repr__(self) -> str:
        return f"<SegmentSender {dict(self._announced)}>"

    def announce(
        self, incarnation: Incarnation, address: str, segment: SharedSegment, deadline: float
    ) -> bool:
        """Ensure that a peer has mapped a segment. Return False if that is not possible.

        Then its buffers go through the socket. A peer that did not answer in time is not asked
        again for a while: otherwise each of many buffers would wait for it.
        """
        announced = self._announced.setdefault(incarnation, set())
        if segment.segment_id in announced:
            return True
        now = time.monotonic()
        if now < self._retry_at.get(incarnation, 0.0):
            return False
        try:
            sock = self._connect(address, None, "segment", deadline).sock
            with sock:
                socket.send_fds(sock, [_SEGMENT_ID.pack(segment.segment_id)], [segment.fd])
                if sock.recv(1) != _ACKNOWLEDGED:
                    raise ProtocolError("the peer did not map it")
        except (OSError, ProtocolError) as error:
            _log.info(
                "shared-memory segment %d could not be passed to a peer (%s); using the socket",
                segment.segment_id,
                error,
            )
            self._retry_at[incarnation] = time.monotonic() + _RETRY_SECONDS
            return False
        announced.add(segment.segment_id)
        return True

    def forget_peer(self, incarnation: Incarnation) -> None:
        """Forget a peer that was lost."""
        self._announced.pop(incarnation, None)
        self._retry_at.pop(incarnation, None)


def receive_segment(
    sock: socket.socket, incarnation: Incarnation, mappings: SegmentMappings
) -> None:
    """Map the segment that an authenticated peer passes through `sock`, and acknowledge it."""
    with sock:
        data, fds, _, _ = socket.recv_fds(sock, _SEGMENT_ID.size, 1)
        try:
            if len(data) != _SEGMENT_ID.size or len(fds) != 1:
                raise ProtocolError("a shared-memory segment was passed without its descriptor")
            mappings.add(incarnation, _SEGMENT_ID.unpack(data)[0], fds[0])
            sock.sendall(_ACKNOWLEDGED)
        finally:
            for fd in fds:
                os.close(fd)
