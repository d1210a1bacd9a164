"""A channel between two agents of one process: frames are handed over, buffers are copied once into pooled memory.

State: each end has an inbox (a queue of frames, None for the end). The `_ChannelState` between them says whether it is
over, which it only ever becomes; nothing is put into an inbox after the end, by neither side. Its lock guards that.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
from collections.abc import Sequence

from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.transport.shared_copies import SharedCopies
from telegrad.wire.buffer_pool import BufferPool
from telegrad.wire.frames import Frame

Inbox = queue.SimpleQueue[Frame | None]
_popleft = collections.deque.popleft


class _ChannelState:
    """What the two ends share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.ends: tuple[MemoryChannel, ...] = ()


class MemoryChannel(Channel):
    kind = "memory"

    def __init__(self, inbox: Inbox, outbox: Inbox, pool: BufferPool, state: _ChannelState) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._pool = pool
        self._state = state
        self._corked: collections.deque[Frame] = collections.deque()  # added to by anybody
        self._discard: collections.deque[None] = collections.deque(maxlen=0)

    def __repr__(self) -> str:
        return f"<MemoryChannel {self._inbox.qsize()} frames waiting{' shut' if self._state.closed else ''}>"

    def send(
        self,
        kind: int,
        call: int,
        body: bytes,
        buffers: Sequence[memoryview] = (),
        function: int = 0,
        left_ms: int = 0,
        flags: int = 0,
        timeout: float | None = None,
        copies: SharedCopies | None = None,
    ) -> None:
        copies_of_buffers = [self._copy(buffer) for buffer in buffers]
        frame = Frame(kind, flags, call, function, left_ms, body, copies_of_buffers)
        with self._state.lock:
            self._flush()
            self._outbox.put(frame)
        self._notify_peer()

    def try_send(self, kind: int) -> None:
        self.send(kind, 0, b"")

    def cork(self, kind: int, call: int, body: bytes) -> None:
        self._corked.append(Frame(kind, 0, call, 0, 0, body, ()))

    def flush_nowait(self) -> bool:
        if self._corked:
            with self._state.lock:
                self._flush()
            self._notify_peer()
        return True

    def _notify_peer(self) -> None:
        on_frame = self._peer_end().on_frame
        if on_frame is not None:
            on_frame()

    def _peer_end(self) -> MemoryChannel:
        left, right = self._state.ends
        return right if left is self else left

    def _flush(self) -> None:
        if self._state.closed:
            raise ChannelClosed("the channel is shut")
        frames = map(_popleft, itertools.repeat(self._corked, len(self._corked)))
        # one call: no signal handler runs in between
        self._discard.extend(map(self._outbox.put, frames))

    def recv(self, timeout: float | None = None) -> Frame:
        try:
            frame = self._inbox.get(timeout=None if timeout is None else max(timeout, 0.0))
        except queue.Empty:
            raise TimeoutError("nothing arrived in time") from None
        if frame is None:
            self._inbox.put(None)  # every later reader must see the end too
            raise ChannelClosed("the peer closed the connection")
        self.heard = True
        return frame

    def next_frame(self) -> Frame | None:
        return None if self._inbox.empty() else self.recv(0.0)

    def has_frame(self) -> bool:
        return not self._inbox.empty()

    def shut(self) -> None:
        with self._state.lock:
            if self._state.closed:
                return
            self._state.closed = True
            self._inbox.put(None)
            self._outbox.put(None)
        for each in self._state.ends:
            if each.on_frame is not None:
                each.on_frame()

    def close(self) -> None:
        self.shut()

    def drop(self) -> None:
        return  # both ends were in this process

    def _copy(self, buffer: memoryview) -> memoryview:
        copy = self._pool.reserve(buffer.nbytes)
        copy[:] = buffer
        return copy


def pair(pool: BufferPool) -> tuple[MemoryChannel, MemoryChannel]:
    """Two channels that are each other's peer."""
    left: Inbox = queue.SimpleQueue()
    right: Inbox = queue.SimpleQueue()
    state = _ChannelState()
    near, far = MemoryChannel(left, right, pool, state), MemoryChannel(right, left, pool, state)
    state.ends = near, far
    return near, far
